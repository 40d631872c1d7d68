"""Interface, MAC address and address of a slice in NetBox: which are there, and what is missing.

Pure. They never change while a slice lives, so they are only created. A value that differs from the
records was changed by somebody else and is reported. NetBox deletes them with their virtual
machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reconciler.inventory.expected import ExpectedMachine
from reconciler.inventory.netbox import IpAddress, MacAddress, Machine, VmInterface, Vrf

MANAGED = "gpuaas-managed"
INTERFACE_TYPE = "virtualization.vminterface"
# The only interface of a slice that NetBox shows. The guest names its interfaces itself.
NAME = "net0"
_TAGS = [{"name": MANAGED, "slug": MANAGED}]


@dataclass(frozen=True)
class Network:
    """Our objects in NetBox: networks of nodes, and parts of virtual machines."""

    vrfs: Sequence[Vrf] = ()
    interfaces: Sequence[VmInterface] = ()
    macs: Sequence[MacAddress] = ()
    addresses: Sequence[IpAddress] = ()


@dataclass
class Parts:
    """The parts of a slice, as far as NetBox has them. machine: None until it is created."""

    slice: ExpectedMachine
    machine: Machine | None
    vrf: Vrf | None = None
    interface: VmInterface | None = None
    mac: MacAddress | None = None
    address: IpAddress | None = None
    wrong: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        parts = {"interface": self.interface, "MAC address": self.mac, "address": self.address}
        names = [name for name, part in parts.items() if part is None]
        if self.mac and self.interface and self.interface.primary_mac_address is None:
            names.append("primary MAC address")
        if self.address and self.machine and self.machine.primary_ip4 is None:
            names.append("primary IPv4")
        return names


def vrf_name(node_id: str) -> str:
    """Every host has the same network for its slices, so each node has a VRF of its own."""
    return f"gpuaas-{node_id}"


def parts_of(
    slices: Iterable[tuple[ExpectedMachine, Machine | None]], network: Network
) -> list[Parts]:
    """The parts of each slice."""
    vrfs = _by(network.vrfs, lambda vrf: vrf.name)
    interfaces = _by(network.interfaces, lambda row: row.virtual_machine.id)
    macs = _by(_assigned(network.macs), lambda row: row.assigned_object_id)
    addresses = _by(_assigned(network.addresses), lambda row: row.assigned_object_id)
    result = []
    for slice_, machine in slices:
        parts = Parts(slice_, machine)
        result.append(parts)
        parts.vrf = _only(parts, "VRF", vrfs.get(vrf_name(slice_.node_id), []))
        if machine is not None:
            parts.interface = _only(parts, "interface", interfaces.get(machine.id, []))
        if parts.interface is not None:
            key = parts.interface.id
            parts.mac = _only(parts, "MAC address", macs.get(key, []))
            parts.address = _only(parts, "address", addresses.get(key, []))
        parts.wrong += _differences(parts)
    return result


def _differences(parts: Parts) -> list[str]:
    """Values that somebody else has changed."""
    wrong, slice_ = [], parts.slice
    interface, mac, address, vrf = parts.interface, parts.mac, parts.address, parts.vrf
    if mac is not None and mac.mac_address.lower() != slice_.mac:
        wrong.append(f"MAC address {mac.mac_address}")
    if address is not None and address.address.partition("/")[0] != slice_.address:
        wrong.append(f"address {address.address}")
    if address is not None and (address.vrf.id if address.vrf else None) != _id(vrf):
        wrong.append("an address in another VRF")
    first = interface.primary_mac_address if interface else None
    if first is not None and first.id != _id(mac):
        wrong.append(f"another primary MAC address ({first.id})")
    primary = parts.machine.primary_ip4 if parts.machine else None
    if primary is not None and primary.id != _id(address):
        wrong.append(f"another primary IPv4 ({primary.id})")
    return wrong


def reread(parts: Parts) -> Parts:
    """Parts that were read again, with their differences computed again."""
    return replace(parts, wrong=_differences(parts))


def vrf_document(node_id: str) -> dict[str, Any]:
    return {"name": vrf_name(node_id), "enforce_unique": True, "tags": _TAGS}


def interface_document(parts: Parts) -> dict[str, Any]:
    owner = {"virtual_machine": _id(parts.machine), "name": NAME}
    return {**owner, "vrf": _id(parts.vrf), "tags": _TAGS}


def mac_document(parts: Parts) -> dict[str, Any]:
    return {"mac_address": parts.slice.mac, **_assignment(parts)}


def address_document(parts: Parts) -> dict[str, Any]:
    # /32: the network around the address belongs to the host.
    address = {"address": f"{parts.slice.address}/32", "vrf": _id(parts.vrf)}
    return {**address, **_assignment(parts)}


def _assignment(parts: Parts) -> dict[str, Any]:
    key = _id(parts.interface)
    owner = {"assigned_object_type": INTERFACE_TYPE, "assigned_object_id": key}
    return {**owner, "tags": _TAGS}


def _id(item: Machine | Vrf | VmInterface | MacAddress | IpAddress | None) -> int | None:
    return item.id if item else None


def _assigned(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if row.assigned_object_type == INTERFACE_TYPE]


def _by(rows: Iterable[Any], key: Any) -> Mapping[Any, list[Any]]:
    result: dict[Any, list[Any]] = {}
    for row in rows:
        result.setdefault(key(row), []).append(row)
    return result


def _only(parts: Parts, name: str, rows: Sequence[Any]) -> Any:
    if len(rows) > 1:
        parts.wrong.append(f"{len(rows)} times {name}")
    return rows[0] if rows else None
