"""Hardware of a node: the shared profile, with the values of the node itself. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from reconciler.model.errors import Problem

# Field of the node's record to key of the profile's `fabric` section.
NODE_FIELDS = {"fabric_interface": "interface", "fabric_address": "site_address"}


def node_profile(profile: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of the profile with the node's own values over it."""
    values = {name: node[field] for field, name in NODE_FIELDS.items() if node.get(field)}
    return {**profile, "fabric": {**profile["fabric"], **values}} if values else profile


def limit_s(profile: Mapping[str, Any], parts: Iterable[str]) -> int:
    """Seconds that the profile allows for these consecutive parts of a run."""
    # Ansible applies the reboot limit twice: until the new boot begins, and until it answers.
    return sum(int(profile["deadlines"][part]) * (1 + (part == "reboot")) for part in parts)


def maas_tags(tags: list[str] | None) -> dict[str, Any]:
    """Variable of a parity run. Omitted for unknown tags, because [] would fail the check."""
    return {} if tags is None else {"slice_maas_tags": tags}


def check(profile: Mapping[str, Any], name: str) -> None:
    """Problem `mgmt_attachment_unsupported` for a valid attachment that no host supports yet.

    Silently using a tap instead would send a guest's traffic by another path than was bought.
    """
    attachment = (profile.get("vm") or {}).get("mgmt_attachment", "tap")
    if attachment != "tap":
        raise Problem(
            "mgmt_attachment_unsupported",
            422,
            expected="vm.mgmt_attachment tap",
            found=f"{attachment} in the hardware profile {name}",
            remedy="set it to tap: the card's embedded switch mode is not supported yet",
        )


def check_link(profile: Mapping[str, Any], name: str) -> None:
    """Problem `fabric_link_missing` for a profile with fabric cards of an unknown link type.

    Only for nodes that adopt this profile: giving back a node with an older profile needs no link.
    """
    fabric = profile.get("fabric") or {}
    if fabric.get("pf_ids") and not fabric.get("link"):
        raise Problem(
            "fabric_link_missing",
            422,
            expected="fabric.link infiniband or ethernet beside fabric.pf_ids",
            found=f"no fabric.link in the hardware profile {name}",
            remedy="say in the profile what the fabric speaks: a vendor gives one id to both",
        )


def tenant_disks(document: Mapping[str, Any], taken_over: Collection[str]) -> list[dict[str, Any]]:
    """Unused disks that were taken over by identity, in the order of their identity.

    A disk with any blocker stays with the operators: an OS disk, mounted, in an array, without an
    identity, of a model that the profile excludes, or with a filesystem. So does a disk that was
    not approved by its identity (taken_over). A disk without a signature need not be empty, and
    every disk in this list is wiped. The host checks each disk again.
    """
    disks = []
    for disk in sorted(document.get("nvme") or [], key=lambda disk: str(disk.get("identity"))):
        identity = str(disk.get("identity") or "")
        eui = identity.removeprefix("eui.")
        if disk.get("blockers") or not disk.get("by_id") or identity not in taken_over:
            continue
        disks.append(
            {
                "slot_id": f"disk-{eui}",
                "nvme_device": str(disk["by_id"]),
                "nvme_serial": str(disk["serial"]),
                "nvme_eui": eui,
                "nvme_size_bytes": int(disk["size_bytes"]),
            }
        )
    return disks


def gpu_count(document: Mapping[str, Any]) -> int:
    """Number of GPUs in the machine."""
    return int((document.get("candidate_summary") or {}).get("gpu_devices") or 0)
