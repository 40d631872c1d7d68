"""A node's hardware: its profile, which many nodes share, and what is the node's own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reconciler.domain.errors import Problem

# What the profile calls it, by the field of the node's record.
OWN = {"fabric_interface": "interface", "fabric_address": "site_address"}


def of_node(profile: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
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
