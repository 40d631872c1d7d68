"""What goes with a machine that is given away as a whole, by its discovery. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def tenant_disks(document: Mapping[str, Any], taken_over: Collection[str]) -> list[dict[str, Any]]:
    """The disks that were taken over under their identity, and that nothing uses, by identity.

    A disk with any blocker (of the system, mounted, in an array, without identity, of a model that
    the profile excludes, with a filesystem) is the operators' and stays out. So is one that nobody
    approved by its identity (taken_over): that it carries no signature does not say that it is
    empty, and what goes along is wiped. The host checks each disk again.
    """
    found = []
    for disk in sorted(document.get("nvme") or [], key=lambda disk: str(disk.get("identity"))):
        identity = str(disk.get("identity") or "")
        eui = identity.removeprefix("eui.")
        if disk.get("blockers") or not disk.get("by_id") or identity not in taken_over:
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
