"""Comparison of NetBox with the records: differences with their reasons, and what a sync writes.

Pure. A device with contradictory tags or identity is never written.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Network,
    IPv6Network,
    ip_address,
    ip_interface,
)
from typing import Any, ClassVar

from reconciler.inventory.expected import (
    ALLOCATION,
    DEVICE_FIELDS,
    MACHINE_FIELDS,
    SEAL,
    ExpectedMachine,
    ExpectedNode,
    is_retired,
)
from reconciler.inventory.netbox import Address, Device, Machine, VmInterface
from reconciler.inventory.networks import MANAGED, Network, Parts, parts_of, vrf_name
from reconciler.inventory.patches import (
    BLOCKED,
    PURPOSES,
    device_patch,
    device_values,
    foreign_values,
    is_of_twin,
    machine_patch,
    machine_values,
    place_of,
    purpose_of,
    shown_machine,
)
from reconciler.inventory.ranges import Ranges, parsed
from reconciler.model.hardware import (
    TWICE,
    bound_serial,
    by_serial,
    own_serial,
    owner_of,
    serial_number,
    serial_of,
)
from reconciler.model.states import LIVE_ALLOCATIONS, AllocationState
from reconciler.model.storable import shown

Networks = Mapping[int, Sequence[IPv4Network | IPv6Network]]
SiteRanges = Mapping[int, Ranges]
NODE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Names in a finding; more would be cut off.
MOST_NAMES = 20
_SYNC = "`gpuaas netbox sync` writes it"
_HAND_OVER = f"put the old value back, or empty {SEAL} to have the values of the records written"

TWINS = (
    "end one of the two services, such as a copy that was restored beside its original; then empty"
    f" {SEAL} of these devices in NetBox"
)


@dataclass(frozen=True)
class Finding:
    """A difference. action: how a sync resolves it; "" if only a person can."""

    code: str
    subject: str
    expected: str
    found: str
    remedy: str
    action: str = ""


@dataclass(frozen=True)
class NewNode:
    """A node to be added, in `enrolling`."""

    id: str
    purpose: str
    address: str
    region: str
    profile: str
    device: Device


@dataclass(frozen=True)
class Inventory:
    """NetBox's side: devices with our tags or with the names of our nodes, our virtual machines,
    and networks by the number of their site. slice_network: None if it could not be read.
    """

    devices: Sequence[Device]
    machines: Sequence[Machine]
    networks: Networks = field(default_factory=dict)
    slice_network: Network | None = None
    # Fingerprints (SEAL) that this service has written last, by device id.
    written: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class Findings:
    """Findings of a comparison. SERVICE: the first word of their codes."""

    SERVICE: ClassVar[str]
    findings: list[Finding] = field(default_factory=list)

    def note(
        self,
        code: str,
        subject: str,
        expected: object,
        found: object,
        remedy: str,
        action: str = "",
    ) -> None:
        texts = (shown(subject), shown(expected), shown(found), shown(remedy))
        self.findings.append(Finding(f"{self.SERVICE}_{code}", *texts, action))


@dataclass
class Comparison(Findings):
    """Comparison with NetBox: findings, and the changes of a sync for those with an action."""

    SERVICE = "netbox"
    new_nodes: list[NewNode] = field(default_factory=list)
    devices: list[tuple[ExpectedNode, Device]] = field(default_factory=list)
    created: list[tuple[ExpectedMachine, Device]] = field(default_factory=list)
    changed: list[tuple[ExpectedMachine, Machine, Device]] = field(default_factory=list)
    deleted: list[Parts] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)
    # Parts whose interface is deleted, while their virtual machine stays.
    ended: list[Parts] = field(default_factory=list)
    # Fingerprint (SEAL) of each device, by device id.
    seals: dict[int, Any] = field(default_factory=dict)
    # Those that this service has written last, from `Inventory`.
    written: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Devices that another service with the same records wrote last.
    twins: list[str] = field(default_factory=list)
    # Facts about its device that each node keeps (see `_facts`), by node id.
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


def compare(
    nodes: Sequence[ExpectedNode],
    machines: Sequence[ExpectedMachine],
    netbox: Inventory,
    profiles: Collection[str],
) -> Comparison:
    """All differences of both sides. profiles: names of the site's hardware profiles."""
    result = Comparison()
    result.seals = {device.id: device.custom_fields.get(SEAL) for device in netbox.devices}
    result.written = netbox.written
    ranges = {site: Ranges(networks) for site, networks in netbox.networks.items()}
    writable = _has_fields(result, netbox.devices, DEVICE_FIELDS)
    pairs = _pair(result, nodes, netbox.devices)
    contradictory = set(_contradictory(result, netbox.devices))
    recorded = _recorded_serials(nodes, pairs)
    contradictory |= set(_other_serials(result, nodes, pairs, recorded))
    for expected in nodes:
        device = pairs.get(expected.node.id)
        if device is not None and device.id not in contradictory:
            _intent(result, expected, device, ranges)
            if writable:
                _device(result, expected, device)
    paired = {device.id for device in pairs.values()}
    addresses = {expected.node.address for expected in nodes}
    living = (row.node for row in nodes if not is_retired(row.node))
    serials = {own_serial(serial_of(node.hardware), recorded[node.id]) for node in living}
    candidates = [
        _new_node(result, device, ranges, profiles, addresses, serials)
        for device in netbox.devices
        if device.id not in paired | contradictory and purpose_of(device)
    ]
    _add(result, [new for new in candidates if new is not None], netbox.devices)
    usable = {id: device for id, device in pairs.items() if device.id not in contradictory}
    result.facts = {id: _facts(device) for id, device in usable.items() if " " not in id}
    if _has_fields(result, netbox.machines, MACHINE_FIELDS):
        slices, released = _machines(result, machines, netbox.machines, usable)
        # If the networks cannot be read, a machine with interfaces is not deleted, because their
        # number differs from the expected 0.
        for parts in parts_of(released, netbox.slice_network or Network()):
            _stale(result, parts)
        if netbox.slice_network is not None:
            _networks(result, slices, netbox.slice_network)
            _left(result, nodes, netbox.slice_network)
    return result


def _left(result: Comparison, nodes: Sequence[ExpectedNode], network: Network) -> None:
    """Report unused VRFs of retired nodes. A person deletes them: NetBox would silently take the
    VRF from an interface of the site, and a conditional delete does not cover that.
    """
    retired = {vrf_name(row.node.id): row.node for row in nodes if is_retired(row.node)}
    used = {row.vrf.id for row in network.addresses if row.vrf}
    for vrf in network.vrfs:
        if vrf.name in retired and vrf.id not in used:
            remedy = "delete the VRF in NetBox, unless something of the site's is in it"
            result.note("vrf_left", f"VRF {vrf.name}", "none of a retired node", "one", remedy)


def _has_fields(
    result: Comparison, objects: Sequence[Device] | Sequence[Machine], names: Mapping[str, str]
) -> bool:
    """Whether the custom fields exist. NetBox shows all of them in each object, even if empty."""
    missing = sorted(names.keys() - objects[0].custom_fields.keys()) if objects else []
    if missing:
        result.note(
            *("field_missing", f"custom fields of a {type(objects[0]).__name__.lower()}"),
            *(", ".join(names), f"no {', '.join(missing)}"),
            "import the custom fields of docs/netbox.md into NetBox; until then nothing is written",
        )
    return not missing


def _pair(
    result: Comparison, nodes: Sequence[ExpectedNode], devices: Sequence[Device]
) -> dict[str, Device]:
    """The device of each node: by the id that was written into it, else by name."""
    by_id: dict[object, list[Device]] = {}
    by_name: dict[object, list[Device]] = {}
    ids = {expected.node.id for expected in nodes}
    for device in devices:
        node_id = device.custom_fields.get("gpuaas_node_id")
        if isinstance(node_id, str) and node_id in ids:
            by_id.setdefault(node_id, []).append(device)
        else:
            by_name.setdefault(device.name, []).append(device)
    pairs = {}
    for expected in nodes:
        node = expected.node
        candidates = by_id.get(node.id) or by_name.get(node.name) or by_name.get(node.id) or []
        if len(candidates) == 1:
            pairs[node.id] = candidates[0]
        elif candidates:
            names = ", ".join(device_name(device) for device in candidates)
            remedy = "rename or untag the others in NetBox, and empty gpuaas_node_id of a copy"
            result.note("device_twice", f"node {node.id}", "one device", names, remedy)
            # None of them is a new machine.
            for device in candidates:
                pairs[f"{node.id} {device.id}"] = device
        elif not is_retired(node):
            result.note(
                *(
                    "missing",
                    f"node {node.id}",
                    f"a device {node.name} with one of our tags",
                    "none",
                ),
                "add the device to NetBox, or retire the node",
            )
    return pairs


def _contradictory(result: Comparison, devices: Sequence[Device]) -> Iterator[int]:
    of_serial: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        of_serial[_serial(device)].append(device_name(device))
    addresses = Counter(_ip(device.oob_ip) for device in devices if _ip(device.oob_ip))
    # A BMC must not have the primary address of a machine.
    addresses.update({_address(device) for device in devices} & addresses.keys())
    for device in devices:
        subject = f"device {device_name(device)}"
        tags = [tag for tag in PURPOSES.values() if device.tagged(tag)]
        if len(tags) != 1:
            code = "tags_contradict" if tags else "tag_missing"
            result.note(
                *(code, subject, f"one of the tags {', '.join(PURPOSES.values())}"),
                " and ".join(tags) or "neither",
                "set the tag of the intended use in NetBox, and no other",
            )
            yield device.id
        if addresses[bmc := _ip(device.oob_ip)] > 1:
            # No node gets this address: a command to the wrong BMC stops another machine.
            remedy = "correct the out-of-band addresses in NetBox"
            text = f"the out-of-band address {bmc} at one device, and at no machine"
            result.note("bmc_twice", subject, text, "several", remedy)
            yield device.id
        serial = _serial(device)
        if serial and len(of_serial[serial]) > 1:
            result.note(
                *("serial_twice", subject, f"serial number {serial} at one device"),
                ", ".join(of_serial[serial][:MOST_NAMES]),
                "correct the serial numbers in NetBox",
            )
            yield device.id


def _recorded_serials(nodes: Sequence[ExpectedNode], pairs: Mapping[str, Device]) -> dict[str, str]:
    """Serial numbers of the nodes' devices. Where NetBox has none, that of MAAS counts."""
    return {
        row.node.id: (_serial(pairs[row.node.id]) if row.node.id in pairs else "")
        or bound_serial(row.node.maas)
        for row in nodes
    }


def _other_serials(
    result: Comparison,
    nodes: Sequence[ExpectedNode],
    pairs: Mapping[str, Device],
    recorded: Mapping[str, str],
) -> Iterator[int]:
    """Devices whose serial number differs from that of their node's host, or whose host shares its
    serial number with another host and may not be its owner. recorded: `_recorded_serials`.
    """
    living = [
        row.node for row in nodes if serial_of(row.node.hardware) and not is_retired(row.node)
    ]
    serials = by_serial((node.id, node.hardware) for node in living)
    for node in living:
        reported, device = serial_of(node.hardware), pairs.get(node.id)
        same = serials[reported]
        if len(same) > 1 and owner_of(reported, same, recorded) != node.id:
            result.note(
                *("serial_twice", f"node {node.id}", f"serial number {reported} at one host"),
                *(", ".join(same), TWICE),
            )
        elif device is not None and _serial(device) not in ("", reported):
            result.note(
                *("serial_differs", f"node {node.id}", f"serial number {reported}, as its host"),
                f"{_serial(device)} at device {device_name(device)}",
                "find out which machine has the node's address, and correct the node or NetBox",
            )
        else:
            continue
        if device is not None:
            yield device.id


def _intent(result: Comparison, expected: ExpectedNode, device: Device, ranges: SiteRanges) -> None:
    """Intent that differs from the node. A person decides: a conversion erases disks."""
    node = expected.node
    if is_retired(node):
        return
    subject = f"node {node.id}"
    for name, intended, actual in (
        ("use", purpose_of(device), expected.purpose),
        ("name", device.name or "", node.name),
        ("region", device.site.slug, node.region),
        ("profile", _profile(device), node.profile),
    ):
        if intended and actual and intended != actual:
            result.note(
                *("intent_differs", subject, f"{name} {intended}, as in NetBox", actual),
                "convert or change the node (`gpuaas nodes convert|change`), or correct NetBox",
            )
    address, current = _address(device), parsed(node.address)
    if address and current and current != ip_address(address):
        result.note(
            *("address_differs", subject, f"{address}, the primary IPv4 in NetBox", node.address),
            "change the node's address (`gpuaas nodes change`), or correct NetBox",
        )
    _outside(result, device, ranges)


def _device(result: Comparison, expected: ExpectedNode, device: Device) -> None:
    patch, foreign = device_patch(expected, device)
    subject = f"device {device_name(device)}"
    if is_of_twin(device, result.written.get(str(device.id)), expected.site):
        result.twins.append(device_name(device))
        text = "those of another service with this site's authority, or older ones"
        result.note("other_service", subject, "the values that were written last", text, TWINS)
    elif foreign:
        result.note(*foreign_edit(subject, foreign, device_values(device), expected.fields))
    elif patch:
        fields = patch["custom_fields"]
        names = [name for name in fields if name != SEAL] or [SEAL]
        if BLOCKED not in names and patch.keys() & {"add_tags", "remove_tags"}:
            names.append(BLOCKED)
        actual = {**device_values(device), SEAL: device.custom_fields.get(SEAL)}
        target = {**expected.fields, BLOCKED: expected.blocked, SEAL: fields[SEAL]}
        result.note(
            *("outdated", subject, _listed(names, target), _listed(names, actual)),
            *(_SYNC, "write"),
        )
        result.devices.append((expected, device))


def foreign_edit(
    subject: str, names: Sequence[str], actual: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[str, str, str, str, str]:
    """The parts of a finding about values that somebody else has changed."""
    wrong = f"{_listed(names, actual)}, which was not written by this service"
    return "foreign_edit", subject, _listed(names, target), wrong, _HAND_OVER


def _new_node(
    result: Comparison,
    device: Device,
    ranges: SiteRanges,
    profiles: Collection[str],
    addresses: Collection[str],
    serials: Collection[str],
) -> NewNode | None:
    """The node of a tagged device that has none; None if something about it is in doubt."""
    name, address, profile = device.name or "", _address(device), _profile(device)
    subject, before = f"device {device_name(device)}", len(result.findings)
    remedy = "correct the device in NetBox"
    if written := device.custom_fields.get("gpuaas_node_id"):
        result.note(
            *("node_unknown", subject, "no gpuaas_node_id, or that of a node", written),
            "leave it if another service has the machine; else empty the gpuaas fields in NetBox",
        )
    if not NODE_ID.fullmatch(name):
        result.note("name_invalid", subject, "a name of a-z, 0-9 and -", name or "none", remedy)
    if not _REGION.fullmatch(device.site.slug):
        result.note(
            "site_invalid", subject, "a site with a slug of at most 64", device.site.slug, remedy
        )
    if not address:
        actual = device.primary_ip4.address if device.primary_ip4 else "none"
        result.note("address_missing", subject, "a machine's primary IPv4", actual, remedy)
    elif address in addresses:
        result.note("address_taken", subject, "an address that no node has", address, remedy)
    if _serial(device) and _serial(device) in serials:
        parts = ("a serial number that the host of no node has", device.serial)
        result.note("serial_taken", subject, *parts, "name the device as its node")
    if profile not in profiles:
        result.note(
            *("profile_unknown", subject, f"one of the profiles {', '.join(sorted(profiles))}"),
            profile or "none",
            "set gpuaas.hardware_profile in the device's local config context",
        )
    if _outside(result, device, ranges) or len(result.findings) > before:
        return None
    return NewNode(name, purpose_of(device), address, device.site.slug, profile, device)


def _add(result: Comparison, candidates: Sequence[NewNode], devices: Sequence[Device]) -> None:
    """Nodes to be added: none for a device whose name or address another device has, too."""
    count = Counter(key for device in devices for key in (device.name, _address(device)))
    for new in candidates:
        subject = f"device {device_name(new.device)}"
        if max(count[new.id], count[new.address]) > 1:
            expected = f"one device with the name {new.id}, and one with {new.address}"
            result.note("new_twice", subject, expected, "several", "correct them in NetBox")
            continue
        remedy = "`gpuaas netbox sync` adds it in the state enrolling"
        result.note("new_device", subject, f"a node {new.id}", "none", remedy, "add_node")
        result.new_nodes.append(new)


def _outside(result: Comparison, device: Device, ranges: SiteRanges) -> bool:
    """Whether the address is outside the networks of the device's site. A site without networks is
    not judged.
    """
    text, near = _address(device), ranges.get(device.site.id)
    if not text or not near or ip_address(text) in near:
        return False
    result.note(
        *("address_outside", f"device {device_name(device)}"),
        f"an address in the networks of the site {device.site.slug}:"
        f" {', '.join(map(str, near.networks[:MOST_NAMES]))}",
        *(text, "correct the primary IPv4 address, or add the network to the site"),
    )
    return True


def _machines(
    result: Comparison,
    expected: Sequence[ExpectedMachine],
    machines: Sequence[Machine],
    devices: Mapping[str, Device],
) -> tuple[list[tuple[ExpectedMachine, Machine | None]], list[tuple[ExpectedMachine, Machine]]]:
    """Compare virtual machines; returns the slices that NetBox shows, or will show, and the
    released ones that it still shows.
    """
    slices: list[tuple[ExpectedMachine, Machine | None]] = []
    released: list[tuple[ExpectedMachine, Machine]] = []
    of_allocation: dict[object, list[Machine]] = {}
    for machine in machines:
        if not machine.tagged(MANAGED):
            continue
        key = machine.custom_fields.get(ALLOCATION)
        of_allocation.setdefault(key if isinstance(key, str) else None, []).append(machine)
    for slice_ in expected:
        existing = of_allocation.pop(slice_.allocation_id, [])
        device = devices.get(slice_.node_id)
        if len(existing) > 1:
            names = ", ".join(f"{machine.name} ({machine.id})" for machine in existing)
            remedy = "delete the copies in NetBox"
            result.note("machine_twice", slice_.name, "one virtual machine", names, remedy)
        elif existing and slice_.state == AllocationState.RELEASED:
            released.append((slice_, existing[0]))
        elif existing and device:
            if _machine(result, slice_, existing[0], device):
                slices.append((slice_, existing[0]))
        elif not existing and device and slice_.state in LIVE_ALLOCATIONS:
            text = f"a virtual machine on {device_name(device)}, {slice_.status}"
            result.note("machine_missing", slice_.name, text, "none", _SYNC, "create")
            result.created.append((slice_, device))
            slices.append((slice_, None))
    for machine in (row for rows in of_allocation.values() for row in rows):
        result.note(
            *("machine_unknown", f"virtual machine {machine.name}"),
            f"an allocation of this site in {ALLOCATION}",
            machine.custom_fields.get(ALLOCATION) or "none",
            f"leave it if another service has the slice; else delete it, or remove {MANAGED}",
        )
    return slices, released


def _networks(
    result: Comparison, slices: Sequence[tuple[ExpectedMachine, Machine | None]], network: Network
) -> None:
    for parts in parts_of(slices, network):
        slice_ = parts.slice
        if not slice_.holds:
            if slice_.state not in LIVE_ALLOCATIONS and parts.interface is not None:
                _stale_network(result, parts, parts.interface)
            continue
        text = f"{slice_.mac}, {slice_.address} in the VRF {vrf_name(slice_.node_id)}"
        if parts.wrong:
            remedy = "put the old values back, or delete the interface in NetBox"
            result.note("network_differs", slice_.name, text, ", ".join(parts.wrong), remedy)
            continue
        if parts.missing and parts.machine is not None:
            actual = f"no {', no '.join(parts.missing)}"
            result.note("network_missing", slice_.name, text, actual, _SYNC, "create")
        if parts.missing:
            result.parts.append(parts)


def _machine(
    result: Comparison, expected: ExpectedMachine, machine: Machine, device: Device
) -> bool:
    """Compare a virtual machine; returns whether it is as this service has written it."""
    patch, foreign = machine_patch(expected, machine, device)
    actual, target = shown_machine(machine), machine_values(expected, device)
    if foreign:
        result.note(*foreign_edit(expected.name, foreign, actual, target))
    elif patch:
        actual, target = actual | place_of(machine), target | place_of(device)
        names = [name for name in target if actual[name] != target[name]]
        result.note(
            *("outdated", expected.name, _listed(names, target), _listed(names, actual)),
            *(_SYNC, "write"),
        )
        result.changed.append((expected, machine, device))
    return not foreign


def _stale(result: Comparison, parts: Parts) -> None:
    slice_ = parts.slice
    text = f"no virtual machine: allocation {slice_.allocation_id} is released"
    if foreign := foreign_values(parts):
        result.note(*kept(slice_.name, text, foreign))
    else:
        remedy = "`gpuaas netbox sync` deletes it"
        result.note("stale_machine", slice_.name, text, "one", remedy, "delete")
        result.deleted.append(parts)


def _stale_network(result: Comparison, parts: Parts, interface: VmInterface) -> None:
    """The interface of a failed slice that holds no slot: the slot's next slice gets the same
    addresses.
    """
    text = "no interface: it holds no slot"
    if foreign := foreign_values(parts, interface_only=True):
        result.note(*kept(parts.slice.name, text, foreign))
    else:
        result.note("stale_network", parts.slice.name, text, interface.name, _SYNC, "delete")
        result.ended.append(parts)


def kept(subject: str, expected: str, foreign: Sequence[str]) -> tuple[str, str, str, str, str]:
    """The parts of a finding about an object that is not deleted, because people added to it."""
    remedy = "take it away, or delete the object in NetBox"
    return "foreign_edit", subject, expected, f"of somebody else: {', '.join(foreign)}", remedy


def device_name(device: Device) -> str:
    return shown(device.name or f"number {device.id}")


def _listed(names: Sequence[str], values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {values.get(name)!r:.60}" for name in names)


def _facts(device: Device) -> dict[str, Any]:
    """Facts that the node record keeps, for people at the rack or at its BMC."""
    return {
        "device_id": device.id,
        "asset_tag": device.asset_tag or "",
        "bmc_address": _ip(device.oob_ip),
    }


def _serial(device: Device) -> str:
    return serial_number(device.serial)


def _profile(device: Device) -> str:
    context = (device.local_context_data or {}).get("gpuaas")
    profile = context.get("hardware_profile") if isinstance(context, dict) else None
    return profile if isinstance(profile, str) else ""


def _address(device: Device) -> str:
    """The machine's primary IPv4 address; "" without one."""
    address = _ip(device.primary_ip4)
    return address if address and ip_address(address).version == 4 else ""


def _ip(row: Address | None) -> str:
    """The address; "" for none, and for loopback, unspecified and multicast addresses."""
    try:
        address = ip_interface(row.address).ip if row else None
    except ValueError:
        return ""
    if address is None or address.is_loopback or address.is_unspecified or address.is_multicast:
        return ""
    return str(address)
