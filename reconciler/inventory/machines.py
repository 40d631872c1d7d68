"""Nodes and the machines of MAAS: which is which, and what a comparison finds. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Any

from reconciler.db.schema import Node
from reconciler.inventory.compare import MOST_NAMES, NODE_ID, Findings
from reconciler.inventory.maas import Machine, Status
from reconciler.inventory.patches import BLOCKED, PURPOSES, purpose_of, purposes_of
from reconciler.inventory.ranges import Ranges, parsed
from reconciler.model.errors import Refusal
from reconciler.model.hardware import (
    TWICE,
    bound_serial,
    by_serial,
    own_serial,
    owner_of,
    serial_of,
)
from reconciler.model.states import NodeMode

# Prefix of the tag that names the hardware profile of a machine without a node.
HARDWARE = "gpuaas-hardware-"
Networks = Sequence[IPv4Network | IPv6Network]
# Fields of the hardware that no two machines share.
_IDENTITY = ("serial", "hardware_uuid")
_INTENT = "set the tag of the node's mode in MAAS, or convert the node"
# Tags that parity accepts.
_TAG, _MOST_TAGS = re.compile(r"[A-Za-z0-9_-]{1,64}"), 64
# Values of the record's `locked` beside True and False. REQUESTED: a lock without an answer.
# UNSURE: an unlock without an answer, or a lock that a person may have set, by MAAS's events.
REQUESTED, UNSURE = "asked", "unsure"
UNSURE_LOCK = (
    "an unlocked machine",
    "a lock that MAAS's events do not show to be ours: it may be a person's",
    "unlock the machine in MAAS, unless a person means the lock",
)
_SYNC = "`gpuaas maas sync` does it"
OTHER_SERIAL = (
    "find out which machine has the node's address, and correct the node or MAAS; after a repair,"
    " commission the machine in MAAS, discover the node, and `gpuaas maas unbind` it"
)


@dataclass(frozen=True)
class ExpectedNode:
    """A node. locked: whether a release in MAAS would destroy something. annotations: to show."""

    node: Node
    locked: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def purpose(self) -> str:
        return NodeMode(self.node.mode).purpose


@dataclass(frozen=True)
class NewNode:
    """A node to be added, in `enrolling`."""

    id: str
    purpose: str
    address: str
    profile: str
    machine: Machine


@dataclass
class Comparison(Findings):
    """Findings; pairs that are in order and may be written to; tags as read, by node; pairs to be
    bound; nodes to be added.
    """

    SERVICE = "maas"
    pairs: list[tuple[ExpectedNode, Machine]] = field(default_factory=list)
    tags: dict[str, list[str]] = field(default_factory=dict)
    bound: list[tuple[ExpectedNode, Machine]] = field(default_factory=list)
    added: list[NewNode] = field(default_factory=list)


def lock_comment(node_id: str) -> str:
    """Reason that our locks have in MAAS, where they are known by it."""
    return f"gpuaas.slice, node {node_id}: its release would destroy tenants' data"


def is_ours(recorded: object, shown: bool | None) -> bool:
    """Whether a lock is ours. recorded: the record's `locked`. shown: `Client.has_lock`.

    A lock that MAAS has confirmed is ours until a later request shows: a person may have taken it
    off and set another. Its own event goes with time.
    """
    return bool(shown) or (shown is None and recorded is True)


def tags_of(machine: Machine) -> list[str]:
    """Its tags, as a node keeps them; those of intent are never cut off. The tag for blocked slots
    is left out, because it only repeats the node's record.
    """
    ours = {PURPOSES[purpose] for purpose in purposes_of(machine)}
    others = {tag for tag in machine.tag_names if _TAG.fullmatch(tag)} - {*ours, BLOCKED}
    return sorted([*ours, *sorted(others)[: _MOST_TAGS - len(ours)]])


def differing(node: Node, machine: Machine) -> str:
    """Differences of the hardware from that which was bound to the node; "" for the same machine.

    A person decides about a replaced mainboard or network card: it may be another machine.
    """
    bound = dict((node.maas or {}).get("identity") or {})
    # A binding of an earlier version has the serial number as MAAS writes it.
    bound["serial"] = bound_serial(node.maas)
    actual = machine.identity
    wrong = [name for name in _IDENTITY if bound.get(name, "") != actual[name]]
    before, now = set(bound.get("macs", ())), set(actual["macs"])
    if before | now and not before & now:
        wrong.append("macs")
    return ", ".join(f"{name} {actual[name]!r:.80}, was {bound.get(name)!r:.80}" for name in wrong)


def other_serial(node: Node, machine: Machine) -> str:
    """Serial numbers of host and machine, if both are known and differ; "" otherwise."""
    reported = serial_of(node.hardware)
    if not reported or machine.serial in ("", reported):
        return ""
    return f"{reported} at the host, {machine.serial} in MAAS"


def other_address(node: Node, machine: Machine) -> str:
    """Addresses of a deployed machine without the node's; "" otherwise."""
    if machine.status != Status.DEPLOYED or not _is_address(node.address):
        return ""
    listed = node.address in machine.ip_addresses
    return "" if listed else ", ".join(machine.ip_addresses) or "none"


def compare(
    nodes: Sequence[ExpectedNode],
    machines: Mapping[str, Machine],
    networks: Networks,
    profiles: Collection[str],
    user: str,
    unread: Mapping[str, Refusal],
) -> Comparison:
    """Compare living nodes with the machines that have our tags or are bound to a node.

    unread: why machines could not be read, by system id. Nothing is judged of them.
    """
    result = Comparison()
    doubtful = _doubtful(result, machines, networks)
    bound = Counter(str(row.node.maas["system_id"]) for row in nodes if row.node.maas)
    for expected in nodes:
        system_id = str((expected.node.maas or {}).get("system_id"))
        if refusal := unread.get(system_id):
            # Its tags, as they were read last, stay.
            _unread(result, f"node {expected.node.id}", system_id, refusal)
        elif expected.node.maas:
            _bound(result, expected, machines, doubtful, bound, user)
    for system_id in sorted(unread.keys() - bound.keys()):
        subject = f"machine {system_id}"
        _unread(result, subject, "in MAAS's form", unread[system_id])
    free = [machine for key, machine in machines.items() if key not in bound]
    unbound = [row for row in nodes if not row.node.maas]
    for machine in free:
        doubt = machine.system_id in doubtful
        _free(result, machine, unbound, nodes, profiles, user, doubt)
    _drop_twice(result)
    _drop_same_serial(result, nodes)
    return result


def _drop_same_serial(result: Comparison, nodes: Sequence[ExpectedNode]) -> None:
    """Leave out nodes whose hosts report the same serial number, because a hostile host can claim
    any, but for the node whose it is by MAAS. Only the machine that has this number in MAAS keeps
    its lock.
    """
    bound = {row.node.id: bound_serial(row.node.maas) for row in nodes}
    doubtful: set[str] = set()
    for serial, same in by_serial((row.node.id, row.node.hardware) for row in nodes).items():
        if len(same) > 1:
            owner = owner_of(serial, same, bound)
            others = same.keys() - {owner}
            expected = f"the host of node {owner} only" if owner else "the host of one node"
            subject = f"serial number {serial}"
            result.note("serial_twice", subject, expected, ", ".join(sorted(others)), TWICE)
            doubtful |= others
    result.pairs = [
        (row, machine)
        for row, machine in result.pairs
        if row.node.id not in doubtful
        or (row.locked and machine.serial == serial_of(row.node.hardware))
    ]
    result.bound = [row for row in result.bound if row[0].node.id not in doubtful]


def _drop_twice(result: Comparison) -> None:
    """Leave out nodes, new or not, that several machines match."""
    claims = [(machine, {row.node.id}) for row, machine in result.bound]
    claims += [(new.machine, {new.id, new.address}) for new in result.added]
    count = Counter(key for _, keys in claims for key in keys)
    twice = {machine.system_id for machine, keys in claims if any(count[key] > 1 for key in keys)}
    for machine, keys in claims:
        if machine.system_id in twice:
            remedy = "correct names or addresses in MAAS"
            text = f"{', '.join(sorted(keys))}, like another machine"
            result.note("unsure", _name(machine), "one machine of each name", text, remedy)
    result.bound = [row for row in result.bound if row[1].system_id not in twice]
    result.added = [new for new in result.added if new.machine.system_id not in twice]


def _doubtful(result: Comparison, machines: Mapping[str, Machine], networks: Networks) -> set[str]:
    """System ids of machines to leave alone, each with its finding."""
    doubtful = set()
    expected = f"an address in {', '.join(map(str, networks[:MOST_NAMES]))}"
    owners: dict[str, list[Machine]] = {}
    ranges = Ranges(networks)
    for machine in machines.values():
        for mark in _marks(machine):
            owners.setdefault(mark, []).append(machine)
        if len(purposes_of(machine)) > 1:
            both = " and ".join(PURPOSES.values())
            remedy = "remove the one that is wrong in MAAS"
            result.note("both_tags", _name(machine), "one tag of intent", both, remedy)
            doubtful.add(machine.system_id)
        if not machine.identity["macs"] and not any(machine.identity[name] for name in _IDENTITY):
            remedy = "commission the machine in MAAS"
            text = "a serial number, a hardware UUID or a MAC address"
            result.note("no_identity", _name(machine), text, "none", remedy)
            doubtful.add(machine.system_id)
        outside = [text for text in machine.ip_addresses if ranges and not _inside(text, ranges)]
        if outside:
            result.note(
                *("address_outside", _name(machine), expected),
                *(", ".join(outside), "correct the address, or add its subnet to MAAS"),
            )
            doubtful.add(machine.system_id)
    for mark, same in owners.items():
        if len(same) > 1:
            names = ", ".join(sorted(f"{row.hostname} ({row.system_id})" for row in same))
            remedy = "find out in MAAS which of them exists, and delete the other"
            result.note("machine_twice", mark, "one machine", names, remedy)
            doubtful |= {row.system_id for row in same}
    return doubtful


def _marks(machine: Machine) -> Iterator[str]:
    identity = machine.identity
    for name in _IDENTITY:
        if identity[name]:
            yield f"{name.replace('_', ' ')} {identity[name]}"
    yield from (f"MAC address {mac}" for mac in identity["macs"])


def _unread(result: Comparison, subject: str, machine: str, refusal: Refusal) -> None:
    text = f"{refusal.code}: {refusal.found}"
    result.note("not_read", subject, f"machine {machine}", text, refusal.remedy)


def _bound(
    result: Comparison,
    expected: ExpectedNode,
    machines: Mapping[str, Machine],
    doubtful: Collection[str],
    bound: Mapping[str, int],
    user: str,
) -> None:
    node, maas = expected.node, expected.node.maas or {}
    system_id, subject = str(maas["system_id"]), f"node {node.id}"
    machine = machines.get(system_id)
    if machine is None:
        remedy = "look for it in MAAS; `gpuaas maas unbind` if the node has no machine there"
        result.note("machine_lost", subject, f"machine {system_id}", "none", remedy)
        return
    result.tags[node.id] = tags_of(machine)
    before = len(result.findings)
    if bound[system_id] > 1:
        remedy = "`gpuaas maas unbind` the wrong one"
        result.note("bound_twice", subject, f"one node of {system_id}", "several", remedy)
    if changed := differing(node, machine):
        remedy = "`gpuaas maas unbind` it, if it is the same machine with other parts"
        result.note("identity_changed", subject, "the hardware as bound", changed, remedy)
    if other := other_serial(node, machine):
        result.note("serial_differs", subject, "one serial number", other, OTHER_SERIAL)
    if machine.owner not in ("", user):
        _note_owner(result, node, machine, user)
    installed = node.machine_id and not node.tenant_machine_ids
    if (installed or expected.locked) and machine.status != Status.DEPLOYED:
        remedy = "find out who released it; MAAS may give it to anybody"
        result.note("not_deployed", subject, "status Deployed", machine.status_name, remedy)
    if addresses := other_address(node, machine):
        remedy = "correct the node (`gpuaas nodes change`), or the machine in MAAS"
        result.note("address_differs", subject, node.address, addresses, remedy)
    purposes = purposes_of(machine)
    converted = maas.get("purpose") != expected.purpose and purposes
    if purposes != [expected.purpose] and not converted:
        actual = ", ".join(purposes) or "no tag"
        result.note("intent_differs", subject, expected.purpose, actual, _INTENT)
    hopeless = system_id in doubtful and not (converted and len(purposes) > 1)
    if len(result.findings) == before and not hopeless:
        result.pairs.append((expected, machine))


def _free(
    result: Comparison,
    machine: Machine,
    unbound: Sequence[ExpectedNode],
    nodes: Sequence[ExpectedNode],
    profiles: Collection[str],
    user: str,
    doubtful: bool,
) -> None:
    """A tagged machine that is no node yet: a node with its name and address, or a new node."""
    if doubtful or not purpose_of(machine):
        return
    name, addresses = machine.hostname.lower(), machine.ip_addresses
    named = [row for row in unbound if name in (row.node.name.lower(), row.node.id)]
    at = [row for row in unbound if row.node.address in addresses]
    off = not at and not addresses and all(_may_be_off(row.node, machine) for row in named)
    if len(named) == 1 and (at == named or off):
        _match(result, named[0], machine, user)
        return
    others = [
        row
        for row in nodes
        if name == row.node.id
        or row.node.address in addresses
        or (
            machine.serial
            and machine.serial
            == own_serial(serial_of(row.node.hardware), bound_serial(row.node.maas))
        )
    ]
    taken = [row.node for row in named or at or others]
    if taken:
        text = "; ".join(f"{row.name} at {row.address}" for row in taken)
        remedy = "correct name or address, in MAAS or of the node"
        actual = f"{name} at {', '.join(addresses) or 'no address'}"
        result.note("unsure", _name(machine), f"as the node: {text}", actual, remedy)
        return
    profile = _profile(machine)
    address = [text for text in addresses if _is_address(text) and "." in text]
    for wrong, code, needed, actual, remedy in (
        (not NODE_ID.fullmatch(name), "name_invalid", "a node's id", name, "rename it in MAAS"),
        (
            *(len(address) != 1, "address_missing", "one IPv4 address"),
            *(", ".join(address) or "none", "give it a static address, or `gpuaas nodes add`"),
        ),
        (
            *(profile not in profiles, "profile_unknown", f"a tag {HARDWARE}<profile>"),
            *(profile or "none", f"set it in MAAS; profiles: {', '.join(sorted(profiles))}"),
        ),
    ):
        if wrong:
            result.note(code, _name(machine), needed, actual, remedy)
            return
    result.note("new_machine", _name(machine), f"a node {name}", "none", _SYNC, "add_node")
    result.added.append(NewNode(name, purpose_of(machine), address[0], profile, machine))


def _may_be_off(node: Node, machine: Machine) -> bool:
    """Whether a machine without addresses, on which MAAS has installed nothing, may be the node. An
    installed host is another machine, unless serial numbers show the contrary.
    """
    return not node.machine_id or bool(serial_of(node.hardware) and machine.serial)


def _match(result: Comparison, expected: ExpectedNode, machine: Machine, user: str) -> None:
    """Bind the machine with the name of a node to it, unless something else contradicts that."""
    node, purpose = expected.node, purpose_of(machine)
    if other := other_serial(node, machine):
        subject = f"node {node.id}"
        result.note("serial_differs", subject, "one serial number", other, OTHER_SERIAL)
    elif machine.owner not in ("", user):
        _note_owner(result, node, machine, user)
    elif purpose != expected.purpose:
        result.note("intent_differs", f"node {node.id}", expected.purpose, purpose, _INTENT)
    else:
        result.bound.append((expected, machine))


def _note_owner(result: Comparison, node: Node, machine: Machine, user: str) -> None:
    remedy = f"let {user} have the machine in MAAS"
    result.note("foreign_owner", f"node {node.id}", f"owner {user}", machine.owner, remedy)


def _profile(machine: Machine) -> str:
    names = [tag.removeprefix(HARDWARE) for tag in machine.tag_names if tag.startswith(HARDWARE)]
    return names[0] if len(names) == 1 else ""


def binding(machine: Machine) -> dict[str, Any]:
    """The node's record of its machine."""
    return {
        "system_id": machine.system_id,
        "identity": machine.identity,
        "purpose": purpose_of(machine),
        "locked": False,
    }


def _name(machine: Machine) -> str:
    return f"machine {machine.hostname} ({machine.system_id})"


def _inside(text: str, ranges: Ranges) -> bool:
    address = parsed(text)
    return address is not None and address in ranges


def _is_address(text: str) -> bool:
    """Whether it is an address that a single machine can own."""
    address = parsed(text)
    return address is not None and not (
        address.is_loopback or address.is_unspecified or address.is_multicast
    )
