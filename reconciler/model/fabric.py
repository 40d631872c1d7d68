"""Isolation of tenants on the fabric, and its numbers, as a hardware profile chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from reconciler.model.errors import Problem

ETHERNET, INFINIBAND = "ethernet", "infiniband"


class Isolation(StrEnum):
    """What keeps the fabric functions of different tenants apart."""

    VLAN = "vlan"
    PARTITION = "partition"
    SINGLE_TENANT = "single_tenant"


def isolation(profile: Mapping[str, Any]) -> Isolation:
    """Isolation of a profile's fabric; without a word of the profile its link decides."""
    fabric = profile["fabric"]
    usual = Isolation.VLAN if fabric.get("link") == ETHERNET else Isolation.PARTITION
    return Isolation(fabric.get("isolation") or usual)


def numbers(profile: Mapping[str, Any]) -> range:
    """VLANs or partition keys for tenants; Problem `fabric_numbers_missing` without any.

    The first VLAN is that of functions without a tenant.
    """
    kind = isolation(profile)
    field = {Isolation.VLAN: "vlans", Isolation.PARTITION: "partitions"}.get(kind)
    if field is None:
        return range(0)
    first, last = profile["fabric"].get(field) or (0, -1)
    tenants = range(first + (kind is Isolation.VLAN), last + 1)
    if not tenants:
        raise Problem(
            "fabric_numbers_missing",
            422,
            expected=f"fabric.{field}, the first and the last number for tenants, or"
            " fabric.isolation single_tenant",
            found=f"{profile['fabric'].get(field) or 'none'} in the hardware profile",
            remedy="name numbers that nothing else uses on this fabric",
        )
    return tenants
