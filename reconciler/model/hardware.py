"""A node's hardware: its profile, which many nodes share, and what is the node's own. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from reconciler.model.errors import Problem

# What the profile calls it, by the field of the node's record.
OWN = {"fabric_interface": "interface", "fabric_address": "site_address"}


def node_profile(profile: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The profile with the node's own values over it. The profile itself stays as it is."""
    own = {name: node[field] for field, name in OWN.items() if node.get(field)}
    return {**profile, "fabric": {**profile["fabric"], **own}} if own else profile


def limit_s(profile: Mapping[str, Any], parts: Iterable[str]) -> int:
    """Seconds that the profile allows for these parts of a run, one after another."""
    # Ansible takes a reboot's twice: for the new boot to begin, and for an answer of it.
    return sum(int(profile["deadlines"][part]) * (1 + (part == "reboot")) for part in parts)


def maas_tags(tags: list[str] | None) -> dict[str, Any]:
    """The variable of a parity run; left out of tags that nobody knows: [] is a failed check."""
    return {} if tags is None else {"slice_maas_tags": tags}


def check(profile: Mapping[str, Any], name: str) -> None:
    """Problem `mgmt_attachment_unsupported` for what a profile may say and no host can do yet.

    Taken for a tap without a word, a guest's traffic would leave by another way than was bought.
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
    """Problem `fabric_link_missing` for a profile whose fabric cards nothing could be sure of.

    For nodes that take up this profile: what gives back a node of an older one needs no link.
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


def gpu_count(document: Mapping[str, Any]) -> int:
    """How many GPUs the machine has."""
    return int((document.get("candidate_summary") or {}).get("gpu_devices") or 0)
