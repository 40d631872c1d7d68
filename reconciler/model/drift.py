"""What a host holds against what the records say: named differences, and nothing done about them.

Pure. A snapshot is worth nothing where an operation has begun, is under way, or has ended since the
host was asked (I14): what is not settled is neither missed nor found too much. A part that could
not be looked at says nothing either (I13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from reconciler.model.bundle import Bundle
from reconciler.model.states import HealthState, SlotState

# What `step` says in the health detail of a slot or node that was found to differ.
STEP = "drift"
IDLE = (SlotState.AVAILABLE, SlotState.DISABLED)
# Of all other states a run is at work, or the slot waits for evidence already.
JUDGED = (*IDLE, SlotState.ACTIVE)
_DISK_USED = ("disk_in_use", "os_disk")
# The length of an allocation id.
_WHOLE = 36
# The host gives at least as many digits of an id where it has not the whole one.
_LEAST_DIGITS = 12


@dataclass(frozen=True)
class ExpectedSlot:
    """An approved slot. holder: the allocation that has it, or had it last; "" for nobody."""

    id: str
    bundle: Bundle
    status: str
    holder: str
    settled: bool

    @property
    def idle(self) -> bool:
        return self.status in IDLE


@dataclass(frozen=True)
class ExpectedAllocation:
    """active: its machine should run on this host. slots: of this host, what it has or had last."""

    id: str
    active: bool
    settled: bool
    slots: tuple[str, ...] = ()

    @property
    def hexadecimal(self) -> str:
        return self.id.replace("-", "")


@dataclass(frozen=True)
class Records:
    """What is known of one node, of the allocations that the host names too."""

    slots: tuple[ExpectedSlot, ...]
    allocations: tuple[ExpectedAllocation, ...]

    @cached_property
    def slot(self) -> dict[str, ExpectedSlot]:
        return {slot.id: slot for slot in self.slots}

    @cached_property
    def allocation(self) -> dict[str, ExpectedAllocation]:
        return {one.id: one for one in self.allocations}


@dataclass(frozen=True)
class Difference:
    """slot_id "" when it concerns no slot. allocation_id: whose trace it is, as the host says, also
    when no record knows it.

    orphan: it is on the host and should not be. disk_used: the slot's disk may have been written.
    """

    code: str
    found: str
    severity: HealthState
    slot_id: str = ""
    allocation_id: str = ""
    orphan: bool = False
    disk_used: bool = False

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.value}


@dataclass(frozen=True)
class Findings:
    """skipped: slots and allocations of which nothing was concluded. unknown: parts, and why."""

    differences: tuple[Difference, ...]
    skipped: tuple[str, ...]
    unknown: Mapping[str, str]


@dataclass(frozen=True)
class Trace:
    """Something of a slice on the host. owner: its allocation as the host spells it."""

    code: str
    owner: str
    found: str
    slots: tuple[str, ...] = ()
    disk_used: bool = False


def compare(holdings: Mapping[str, Any], records: Records) -> Findings:
    """Every difference, those of slots first."""
    found = [*_losses(holdings, records), *_orphans(holdings, records), *_unfit(holdings, records)]
    settled = {slot.id for slot in records.slots if slot.settled}
    kept = [one for one in found if not one.slot_id or one.slot_id in settled]
    skipped = [slot.id for slot in records.slots if not slot.settled]
    skipped += [one.id for one in records.allocations if not one.settled]
    unknown = {name: part["detail"] for name, part in holdings.items() if not part["known"]}
    order = sorted(set(kept), key=lambda one: (not one.slot_id, one.slot_id, one.code, one.found))
    return Findings(tuple(order), tuple(sorted(skipped)), unknown)


def _losses(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    for allocation in records.allocations:
        if allocation.active and allocation.settled:
            for code, severity, found in _missing(holdings, records, allocation):
                for slot_id in allocation.slots:
                    yield Difference(code, found, severity, slot_id, allocation.id)


def _missing(
    holdings: Mapping[str, Any], records: Records, own: ExpectedAllocation
) -> Iterator[tuple[str, HealthState, str]]:
    """What a running tenant should have and has not. Its claim stays, whatever is missing (I15)."""
    running = False
    if holdings["domains"]["known"]:
        theirs = [one for one in _found(holdings, "domains") if one["allocation_id"] == own.id]
        running = any(one["active"] for one in theirs)
        if not theirs:
            yield "domain_missing", HealthState.FAILED, "its machine is not on the host"
        elif not running:
            yield "guest_stopped", HealthState.DEGRADED, f"its machine is {theirs[0]['state']}"
        else:
            given = {part for one in theirs for part in (*one["devices"], *one["disks"])}
            lacking = sorted(_parts(records, own.slots) - given)
            if lacking:
                found = f"its machine lacks {', '.join(lacking)}"
                yield "devices_missing", HealthState.FAILED, found
    # A machine that is off has no port, so its guard guards nothing.
    if running and _lacks(holdings, "ports", lambda one: _is_owner(one["owner"], own)):
        yield "port_missing", HealthState.FAILED, "its bridge port is not on the host"
    if running and _lacks(holdings, "guards", lambda one: _is_owner(one["owner"], own)):
        yield "guard_missing", HealthState.FAILED, "no flows keep its port to its own addresses"
    if _lacks(holdings, "reservations", lambda one: one["allocation_id"] == own.id):
        yield "reservation_missing", HealthState.DEGRADED, "no address is reserved for it"
    leased = {one["slot_id"]: one["allocation_id"] for one in _found(holdings, "leases")}
    if holdings["leases"]["known"] and any(leased.get(slot) != own.id for slot in own.slots):
        yield "lease_missing", HealthState.DEGRADED, "the host's ledger does not name it"


def _orphans(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    for trace in _traces(holdings, records):
        owner = _owner(trace.owner, records)
        if owner is not None and not owner.settled:
            continue
        touched = set(trace.slots)
        if owner is not None and owner.active:
            # Its own use of its own slots is what should be there.
            touched -= set(owner.slots)
            if not touched:
                continue
        elif owner is not None:
            touched |= set(owner.slots)
        # A whole id that no record knows is what an operator needs to have it removed.
        name = owner.id if owner else trace.owner if len(trace.owner) == _WHOLE else ""
        if not touched:
            yield Difference(
                trace.code, trace.found, HealthState.DEGRADED, allocation_id=name, orphan=True
            )
        for slot_id in touched:
            slot = records.slot[slot_id]
            if slot.status in JUDGED:
                yield Difference(
                    trace.code,
                    trace.found,
                    HealthState.FAILED if slot.idle else HealthState.DEGRADED,
                    slot_id,
                    name,
                    orphan=True,
                    disk_used=trace.disk_used and slot_id in trace.slots,
                )


def _traces(holdings: Mapping[str, Any], records: Records) -> Iterator[Trace]:
    for one in _found(holdings, "domains"):
        slots = _having(records, {*one["devices"], *one["disks"]})
        # A stranger's machine is nobody's business while it leaves the slots alone.
        if one["allocation_id"] or slots:
            found = f"machine {one['name']}, {one['state']}"
            yield Trace("orphan_domain", one["allocation_id"], found, slots, disk_used=True)
    for one in _found(holdings, "processes"):
        known = [d for d in _found(holdings, "domains") if d["active"]]
        # Of a machine that libvirt knows, the machine has been told already.
        if one["allocation_id"] not in {d["allocation_id"] for d in known} - {""}:
            owner = _owner(one["allocation_id"], records)
            slots = owner.slots if owner else ()
            found = "a QEMU that libvirt does not know"
            yield Trace("orphan_process", one["allocation_id"], found, slots, disk_used=True)
    yield from _ledger(holdings, records)
    for one in _found(holdings, "reservations"):
        found = f"{one['ip']} is reserved for {one['mac']}"
        slots = _addressed(records, one)
        yield Trace("orphan_reservation", one["allocation_id"], found, slots)
    reserved = {one["ip"] for one in _found(holdings, "reservations")}
    for one in _found(holdings, "addresses"):
        slots = tuple(key for key in _addressed(records, one) if records.slot[key].idle)
        if slots and one["ip"] not in reserved:
            yield Trace("orphan_address", "", f"{one['ip']} is leased to {one['mac']}", slots)
    for one in _found(holdings, "ports"):
        yield Trace("orphan_port", one["owner"], f"bridge port {one['port']}")
    for one in _found(holdings, "guards"):
        yield Trace("orphan_guard", one["owner"], f"flows with the cookie {one['cookie']}")
    for one in _found(holdings, "files"):
        yield Trace("orphan_file", one["allocation_id"], one["path"])
    for one in _found(holdings, "limits"):
        yield Trace("orphan_limit", one["allocation_id"], f"QoS row {one['row']} of the switch")


def _ledger(holdings: Mapping[str, Any], records: Records) -> Iterator[Trace]:
    by_disk = {slot.bundle.identity: slot for slot in records.slots}
    for one in _found(holdings, "leases"):
        slot = records.slot.get(one["slot_id"]) or by_disk.get(one["disk"])
        slots = (slot.id,) if slot else ()
        if one["allocation_id"]:
            found = f"the ledger's {one['slot_id']} is leased to {one['allocation_id']}"
            yield Trace("orphan_lease", one["allocation_id"], found, slots, disk_used=True)
        elif one["dirty"] and slot and slot.idle:
            found = f"the ledger says that {one['disk']} has not been wiped since it was used"
            yield Trace("disk_dirty", "", found, slots, disk_used=True)


def _unfit(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    """Devices that a guest has, or could be given, and that do not work or are used by others."""
    for one in _found(holdings, "devices"):
        slot = records.slot.get(one["slot_id"])
        if slot is not None and slot.status in JUDGED:
            yield Difference(
                "device_unfit",
                f"{one['code']}: expected {one['expected']}, found {one['found']}",
                HealthState.FAILED if slot.idle else HealthState.DEGRADED,
                slot.id,
                disk_used=slot.idle and one["code"] in _DISK_USED,
            )


def _found(holdings: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = holdings[part]["found"]
    return found


def _lacks(holdings: Mapping[str, Any], part: str, is_it: Any) -> bool:
    known = holdings[part]["known"]
    return known and not any(is_it(one) for one in _found(holdings, part))


def _owner(said: str, records: Records) -> ExpectedAllocation | None:
    """Whose it is: the host gives an id, or as much of it as a name has room for."""
    if said in records.allocation:
        return records.allocation[said]
    found = [one for one in records.allocations if _is_owner(said, one)]
    # Of two that begin alike, the one that has a right to be there.
    return min(found, key=lambda one: not one.active, default=None)


def _parts(records: Records, slot_ids: tuple[str, ...]) -> set[str]:
    bundles = [records.slot[slot_id].bundle for slot_id in slot_ids]
    return {part for bundle in bundles for part in _devices(bundle)}


def _devices(bundle: Bundle) -> set[str]:
    return {bundle.gpu_pci_address, bundle.fabric_vf_pci_address, bundle.nvme_device} - {""}


def _having(records: Records, parts: set[str]) -> tuple[str, ...]:
    return tuple(slot.id for slot in records.slots if parts & _devices(slot.bundle))


def _addressed(records: Records, one: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        slot.id
        for slot in records.slots
        if one["mac"] == slot.bundle.management_mac or one["ip"] == slot.bundle.private_ip
    )


def _is_owner(said: str, allocation: ExpectedAllocation) -> bool:
    start = said.replace("-", "")
    return len(start) >= _LEAST_DIGITS and allocation.hexadecimal.startswith(start)
