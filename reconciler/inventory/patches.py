"""Changes of an object of NetBox that make it show the records. Pure.

Values that somebody else has changed since they were written forbid every change of the object.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reconciler.inventory import maas
from reconciler.inventory.expected import (
    ALLOCATION,
    DEVICE_FIELDS,
    MACHINE_FIELDS,
    SEAL,
    ExpectedMachine,
    ExpectedNode,
    is_sealed,
    seal,
)
from reconciler.inventory.netbox import Device, Machine, Tracked
from reconciler.inventory.networks import MANAGED, NAME, Parts

# Tags by slug. The first two are intent: how the machine is to be sold.
PURPOSES = {"slice": "gpuaas-profile-slice-vm", "baremetal": "gpuaas-profile-baremetal"}
BLOCKED = "gpuaas-blocked"


def purpose_of(item: Device | maas.Machine) -> str:
    """How the machine is to be sold; "" without a tag, and with both."""
    purposes = purposes_of(item)
    return purposes[0] if len(purposes) == 1 else ""


def purposes_of(item: Device | maas.Machine) -> list[str]:
    return [purpose for purpose, tag in PURPOSES.items() if item.tagged(tag)]


def device_patch(expected: ExpectedNode, device: Device) -> tuple[dict[str, Any], list[str]]:
    """The change that makes the device show the node, {} for none, and the names of values that
    were changed by others. Any such value forbids every change.
    """
    actual, target = device_values(device), {**expected.fields, BLOCKED: expected.blocked}
    changes, foreign = _changes(actual, target, device.custom_fields.get(SEAL), expected.site)
    if not changes or foreign:
        return {}, foreign
    patch: dict[str, Any] = {}
    if BLOCKED in changes:
        verb = "add_tags" if changes.pop(BLOCKED) else "remove_tags"
        patch[verb] = [{"name": BLOCKED, "slug": BLOCKED}]
    return {"custom_fields": changes, **patch}, []


def is_of_twin(device: Device, written: Collection[str] | None, site: str) -> bool:
    """Whether a service with this site's authority, but other records, wrote the device last: a
    restored copy beside its original. written: fingerprints of this service's own last writes.
    """
    sealed = device.custom_fields.get(SEAL)
    if not written or not sealed or sealed in written:
        return False
    return is_sealed(device_values(device), sealed, site)


def machine_patch(
    expected: ExpectedMachine, machine: Machine, device: Device
) -> tuple[dict[str, Any], list[str]]:
    """As `device_patch`, for the virtual machine of a slice. Cluster and site follow the device:
    NetBox refuses other values, so they are never a person's choice.
    """
    actual, target = shown_machine(machine), machine_values(expected, device)
    changes, foreign = _changes(actual, target, machine.custom_fields.get(SEAL), expected.site)
    if foreign:
        return {}, foreign
    patch = {name: value for name, value in changes.items() if name != SEAL}
    if changes:
        patch["custom_fields"] = {SEAL: changes[SEAL]}
    before, after = place_of(machine), place_of(device)
    return patch | {name: value for name, value in after.items() if before[name] != value}, []


def place_of(item: Device | Machine) -> dict[str, int | None]:
    return {
        "cluster": item.cluster.id if item.cluster else None,
        "site": item.site.id if item.site else None,
    }


def machine_document(expected: ExpectedMachine, device: Device) -> dict[str, Any]:
    """A new virtual machine."""
    values = machine_values(expected, device)
    fields = {ALLOCATION: values.pop(ALLOCATION)}
    fields[SEAL] = seal({**values, **fields}, expected.site)
    tags = [{"name": MANAGED, "slug": MANAGED}]
    cluster = {"cluster": device.cluster.id} if device.cluster else {}
    return {**values, **cluster, "tags": tags, "custom_fields": fields}


def machine_values(expected: ExpectedMachine, device: Device) -> dict[str, Any]:
    """The values of a virtual machine that are ours."""
    return {
        "name": expected.name,
        "status": expected.status,
        "device": device.id,
        ALLOCATION: expected.allocation_id,
    }


def foreign_values(parts: Parts, *, interface_only: bool = False) -> list[str]:
    """Values and objects that this service has not written, and that a deletion of the virtual
    machine, or of its interface, would destroy.
    """
    machine, interface, mac, address = parts.machine, parts.interface, parts.mac, parts.address
    foreign = list(parts.wrong)
    if machine is not None and not interface_only:
        sealed = machine.custom_fields.get(SEAL)
        if not is_sealed(shown_machine(machine), sealed, parts.slice.site):
            foreign.append("another name, status, device or allocation")
        foreign += _peoples("virtual machine", machine, MACHINE_FIELDS)
        foreign += _number("interfaces", machine.interface_count, interface)
    if interface is not None:
        vrf, enabled = interface.vrf, interface.enabled
        if (interface.name, vrf and vrf.id, enabled) != (NAME, parts.vrf and parts.vrf.id, True):
            foreign.append("another name, VRF or state of the interface")
        foreign += _peoples("interface", interface)
        foreign += _number("addresses", interface.count_ipaddresses, address)
        foreign += _number("MAC addresses", len(interface.mac_addresses or ()), mac)
    if mac is not None:
        foreign += _peoples("MAC address", mac)
    if address is not None:
        foreign += _peoples("address", address)
        if address.status is None or address.status.value != "active":
            foreign.append("another status of the address")
    return foreign


def _peoples(what: str, item: Tracked, ours: Collection[str] = ()) -> Iterator[str]:
    values = {name: getattr(item, name, None) for name in item.PEOPLES}
    fields = item.custom_fields.items()
    values |= {f"custom field {name}": value for name, value in fields if name not in ours}
    # NetBox shows an empty field as null, 0, an empty text or an empty list.
    yield from (f"{name} of the {what}" for name, value in values.items() if value)
    if sorted(tag.slug for tag in item.tags) != [MANAGED]:
        yield f"tags of the {what}"


def _number(what: str, count: int | None, ours: object) -> list[str]:
    expected = 0 if ours is None else 1
    return [] if count == expected else [f"{count} {what} and not {expected}"]


def device_values(device: Device) -> dict[str, Any]:
    names = (name for name in DEVICE_FIELDS if name != SEAL)
    values = {name: device.custom_fields.get(name) for name in names}
    return {**values, BLOCKED: device.tagged(BLOCKED)}


def shown_machine(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "status": machine.status.value,
        "device": machine.device.id if machine.device else None,
        ALLOCATION: machine.custom_fields.get(ALLOCATION),
    }


def _changes(
    actual: Mapping[str, Any], target: Mapping[str, Any], sealed: object, site: str
) -> tuple[dict[str, Any], list[str]]:
    changes = {name: value for name, value in target.items() if actual[name] != value}
    if sealed and changes and not is_sealed(actual, sealed, site):
        return {}, sorted(changes)
    if changes or sealed != seal(target, site):
        changes[SEAL] = seal(target, site)
    return changes, []
