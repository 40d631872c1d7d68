"""What goes with a machine that is given away as a whole, by its discovery. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tenant_disks(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The disks that nothing uses and nothing is written on, by identity.

    A disk with any blocker (of the system, mounted, in an array, without identity, of a model that
    the profile excludes, with a filesystem) is the operators' and stays out. All others go along,
    for a tenant with root could write on them anyway: what goes along is wiped at the end. The host
    checks each disk again.
    """
    found = []
    for disk in sorted(document.get("nvme") or [], key=lambda disk: str(disk.get("identity"))):
        eui = str(disk.get("identity") or "").removeprefix("eui.")
        if disk.get("blockers") or not eui or not disk.get("by_id"):
            continue
        found.append(
            {
                "slot_id": f"disk-{eui}",
                "nvme_device": str(disk["by_id"]),
                "nvme_serial": str(disk["serial"]),
                "nvme_eui": eui,
                "nvme_size_bytes": int(disk["size_bytes"]),
            }
        )
    return found


def gpus(document: Mapping[str, Any]) -> int:
    """How many GPUs the machine has."""
    return int((document.get("candidate_summary") or {}).get("gpu_devices") or 0)
