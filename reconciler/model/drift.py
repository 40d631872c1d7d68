"""Drift detection: named differences between a host and the records. Pure; it repairs nothing.

A slot or an allocation is settled when no operation on it has been under way since the host was
asked. An unsettled entity counts neither as missing nor as an orphan (I14). A part of the host that
could not be read leads to no difference (I13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from reconciler.model.bundle import Bundle
from reconciler.model.states import IDLE_SLOTS, HealthState, SlotState

# Value of `step` in the health detail of a slot or node with a difference.
STEP = "drift"
# In every other state a run is under way, or the slot waits for evidence already.
JUDGED = (*IDLE_SLOTS, SlotState.ACTIVE)
_DISK_USED = ("disk_in_use", "os_disk")
# States of a machine whose CPUs run; libvirt calls some of those that wait for a device blocked.
_RUNNING = ("running", "blocked")
# A guest without a sign of life for so long. Its tenant may have switched its telemetry off, so it
# is named and nothing else.
SILENT, SILENT_S = "guest_silent", 1800.0
_SILENT_GUEST = (
    f"for {SILENT_S / 60:.0f} minutes its guest has given no telemetry, sent no packet and written "
    "nothing; read the machine's console log on the host, then the tenant or an operator may run "
    "`gpuaas reset`"
)
# Differences of a slot, or of the node, and the length of a text of the host in one. An honest host
# has no more.
MOST, LONGEST = 256, 300
# Those of a slot in its history, which is kept for ever.
KEPT = 8
# The length of an allocation id.
_WHOLE = 36
# Fewest digits that the host reports of an id when it does not have the whole id.
LEAST_DIGITS = 12
# Parts of the host's baseline without which a machine can be sold; a full disk or an empty image
# is named on the node, and refuses the launch by itself. The silence of an address outside is not
# of this host: its guests' packets leave.
_LATER = frozenset(
    {
        *("host_disk_full", "image_cache", "network_settings_differ", "clock_wrong"),
        "egress_target_silent",
    }
)


@dataclass(frozen=True)
class ExpectedSlot:
    """An approved slot. holder: the allocation that has it or had it last; "" without any."""

    id: str
    bundle: Bundle
    status: str
    holder: str
    settled: bool

    @property
    def idle(self) -> bool:
        return self.status in IDLE_SLOTS


@dataclass(frozen=True)
class ExpectedAllocation:
    """active: it has a machine on this host. slots: slots of this host that it has or had. stopped:
    its project has stopped the machine. ingress: rules that its host must have. ingress_live: rules
    that it may have. silent: its guest no longer answers, as its telemetry says.
    """

    id: str
    active: bool
    settled: bool
    slots: tuple[str, ...] = ()
    stopped: bool = False
    ingress: tuple[str, ...] = ()
    ingress_live: tuple[str, ...] = ()
    silent: bool = False

    @property
    def hexadecimal(self) -> str:
        return self.id.replace("-", "")


@dataclass(frozen=True)
class Records:
    """Records of a node, including the allocations that its host names."""

    slots: tuple[ExpectedSlot, ...]
    allocations: tuple[ExpectedAllocation, ...]

    @cached_property
    def slot(self) -> dict[str, ExpectedSlot]:
        return {slot.id: slot for slot in self.slots}

    @cached_property
    def allocation(self) -> dict[str, ExpectedAllocation]:
        return {allocation.id: allocation for allocation in self.allocations}

    @cached_property
    def owner(self) -> dict[str, ExpectedAllocation]:
        """Allocation by its digits and each long prefix of them. A host may name very many."""
        owners: dict[str, ExpectedAllocation] = {}
        # If two allocation ids share the prefix, prefer the active allocation.
        for allocation in sorted(self.allocations, key=lambda row: not row.active):
            for prefix in prefixes(allocation.hexadecimal):
                owners.setdefault(prefix, allocation)
        return owners


@dataclass(frozen=True)
class Difference:
    """A difference between a host and the records.

    slot_id: "" when it concerns no slot. allocation_id: owner of the trace as the host reports it,
    even when no record has that id. orphan: the trace is on the host and should not be. disk_used:
    the slot's disk may have been written.
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
    """skipped: unsettled slots and allocations. unknown: parts that were not read, and why."""

    differences: tuple[Difference, ...]
    skipped: tuple[str, ...]
    unknown: Mapping[str, str]


@dataclass(frozen=True)
class Trace:
    """A trace of a slice on the host. owner: its allocation as the host spells it. exact: it is
    about its slots only, not about the others that its owner had.
    """

    code: str
    owner: str
    found: str
    slots: tuple[str, ...] = ()
    disk_used: bool = False
    exact: bool = False


def compare(holdings: Mapping[str, Any], records: Records) -> Findings:
    """All differences, with those of slots first."""
    drift = [*_losses(holdings, records), *_orphans(holdings, records), *_unfit(holdings, records)]
    drift += _baseline(holdings, records)
    settled = {slot.id for slot in records.slots if slot.settled}
    kept = [row for row in drift if not row.slot_id or row.slot_id in settled]
    skipped = [slot.id for slot in records.slots if not slot.settled]
    skipped += [row.id for row in records.allocations if not row.settled]
    unknown = {name: part["detail"] for name, part in holdings.items() if not part["known"]}
    order = sorted(_most(kept), key=lambda row: (not row.slot_id, row.slot_id, row.code, row.found))
    return Findings(tuple(order), tuple(sorted(skipped)), unknown)


def _most(differences: Iterable[Difference]) -> Iterator[Difference]:
    """A bounded part of the differences of each slot and of the node; those of used disks first."""
    short = {replace(row, found=row.found[:LONGEST]) for row in differences}
    left: Counter[str] = Counter()
    for row in sorted(short, key=lambda row: (not row.disk_used, row.code, row.found)):
        left[row.slot_id] += 1
        if left[row.slot_id] <= MOST:
            yield row


def powered_off(holdings: Mapping[str, Any], records: Records) -> list[str]:
    """Allocations whose guests are off by their own doing, although nothing has stopped them."""
    rows = _rows(holdings, "domains") if holdings["domains"]["known"] else []
    off = {row["allocation_id"] for row in rows if row.get("off_by_guest")}
    return [
        allocation.id
        for allocation in records.allocations
        if allocation.id in off
        and allocation.active
        and allocation.settled
        and not allocation.stopped
    ]


def running(holdings: Mapping[str, Any], records: Records) -> list[str]:
    """Allocations whose machines run.

    A start that its stop has overtaken may leave a paused machine, which does not run. A lost run
    may have asked a guest to power off, which it does soon.
    """
    rows = _rows(holdings, "domains") if holdings["domains"]["known"] else []
    on = {row["allocation_id"] for row in rows if row["state"] in _RUNNING and not row.get("stops")}
    return [
        allocation.id
        for allocation in records.allocations
        if allocation.id in on and allocation.active and allocation.settled
    ]


def _losses(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    for allocation in records.allocations:
        if allocation.active and allocation.settled:
            for code, severity, text in _missing(holdings, records, allocation):
                for slot_id in allocation.slots:
                    yield Difference(code, text, severity, slot_id, allocation.id)


def _missing(
    holdings: Mapping[str, Any], records: Records, allocation: ExpectedAllocation
) -> Iterator[tuple[str, HealthState, str]]:
    """Missing parts of a running tenant. Its claim stays regardless of missing parts (I15)."""
    running = False
    if holdings["domains"]["known"]:
        theirs = [
            row for row in _rows(holdings, "domains") if row["allocation_id"] == allocation.id
        ]
        running = any(row["active"] for row in theirs)
        if not theirs:
            yield "domain_missing", HealthState.FAILED, "its machine is not on the host"
        elif not running and not allocation.stopped:
            yield "guest_stopped", HealthState.DEGRADED, f"its machine is {theirs[0]['state']}"
        elif running:
            yield from _unwell(theirs)
            if allocation.silent and all(row["state"] in _RUNNING for row in theirs):
                yield SILENT, HealthState.DEGRADED, _SILENT_GUEST
            given = {part for row in theirs for part in (*row["devices"], *row["disks"])}
            lacking = sorted(_parts(records, allocation.slots) - given)
            if lacking:
                text = f"its machine lacks {', '.join(lacking)}"
                yield "devices_missing", HealthState.FAILED, text
    # A machine that is off has no port, so missing guard flows are no difference.
    if running and _lacks(holdings, "ports", lambda row: _is_owner(row["owner"], allocation)):
        yield "port_missing", HealthState.FAILED, "its bridge port is not on the host"
    if running and _lacks(holdings, "guards", lambda row: _is_owner(row["owner"], allocation)):
        yield "guard_missing", HealthState.FAILED, "no flows keep its port to its own addresses"
    if _lacks(holdings, "reservations", lambda row: row["allocation_id"] == allocation.id):
        yield "reservation_missing", HealthState.DEGRADED, "no address is reserved for it"
    elif running:
        yield from _unleased(holdings, allocation)
    yield from _ingress(holdings, allocation)
    leased = {row["slot_id"]: row["allocation_id"] for row in _rows(holdings, "leases")}
    if holdings["leases"]["known"] and any(
        leased.get(slot) != allocation.id for slot in allocation.slots
    ):
        yield "lease_missing", HealthState.DEGRADED, "the host's ledger does not name it"


def _unleased(
    holdings: Mapping[str, Any], allocation: ExpectedAllocation
) -> Iterator[tuple[str, HealthState, str]]:
    """A running guest without the DHCP lease of its reserved address."""
    leases = [(row["mac"], row["ip"]) for row in _rows(holdings, "addresses")]
    for row in _rows(holdings, "reservations") if holdings["addresses"]["known"] else ():
        if row["allocation_id"] == allocation.id and (row["mac"], row["ip"]) not in leases:
            yield "guest_unleased", HealthState.DEGRADED, f"it has no DHCP lease of {row['ip']}"


def _unwell(machines: list[dict[str, Any]]) -> Iterator[tuple[str, HealthState, str]]:
    """Faults of machines that have not ended."""
    for row in machines:
        if row["active"] and row["state"] != "running":
            yield "guest_unwell", HealthState.DEGRADED, f"its machine is {row['state']}"
        if row.get("limited") is False:
            yield "limit_missing", HealthState.DEGRADED, "its port lacks the profile's rate limit"


def _ingress(
    holdings: Mapping[str, Any], allocation: ExpectedAllocation
) -> Iterator[tuple[str, HealthState, str]]:
    """Rules of public ingress that a running tenant lacks, or has without a request."""
    if not holdings["ingress"]["known"]:
        return
    rows = _rows(holdings, "ingress")
    forwards = {row["rule_id"] for row in rows if row["allocation_id"] == allocation.id}
    if missing := sorted({*allocation.ingress} - forwards):
        yield "ingress_missing", HealthState.DEGRADED, f"rule {', '.join(missing)} is not in force"
    if strange := sorted(forwards - {*allocation.ingress_live}):
        text = f"rule {', '.join(strange)} is in force, and in no record"
        yield "ingress_unrecorded", HealthState.FAILED, text


def _orphans(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    for trace in _traces(holdings, records):
        owner = _owner(trace.owner, records)
        if owner is not None and not owner.settled:
            continue
        touched = set(trace.slots)
        if owner is not None and owner.active:
            # An active allocation's use of its own slots is expected.
            touched -= set(owner.slots)
            if not touched:
                continue
        elif owner is not None and not trace.exact:
            touched |= set(owner.slots)
        # A whole id without a record is kept, because an operator needs it to remove the trace.
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
    for row in _rows(holdings, "domains"):
        slots = _having(records, {*row["devices"], *row["disks"]})
        # Ignore a machine without an allocation that uses no device of a slot.
        if row["allocation_id"] or slots:
            text = f"machine {row['name']}, {row['state']}"
            yield Trace("orphan_domain", row["allocation_id"], text, slots, disk_used=True)
    running = {row["allocation_id"] for row in _rows(holdings, "domains") if row["active"]} - {""}
    for row in _rows(holdings, "processes"):
        # A machine that libvirt knows has been reported as a domain.
        if row["allocation_id"] not in running:
            owner = _owner(row["allocation_id"], records)
            slots = owner.slots if owner else ()
            text = "a QEMU that libvirt does not know"
            yield Trace("orphan_process", row["allocation_id"], text, slots, disk_used=True)
    yield from _ledger(holdings, records)
    for row in _rows(holdings, "reservations"):
        text = f"{row['ip']} is reserved for {row['mac']}"
        slots = _addressed(records, row)
        yield Trace("orphan_reservation", row["allocation_id"], text, slots)
    reserved = {row["ip"] for row in _rows(holdings, "reservations")}
    for row in _rows(holdings, "addresses"):
        slots = tuple(key for key in _addressed(records, row) if records.slot[key].idle)
        if slots and row["ip"] not in reserved:
            yield Trace("orphan_address", "", f"{row['ip']} is leased to {row['mac']}", slots)
    for row in _rows(holdings, "ports"):
        yield Trace("orphan_port", row["owner"], f"bridge port {row['port']}")
    for row in _rows(holdings, "guards"):
        yield Trace("orphan_guard", row["owner"], f"flows with the cookie {row['cookie']}")
    for row in _rows(holdings, "files"):
        yield Trace("orphan_file", row["allocation_id"], row["path"])
    for row in _rows(holdings, "limits"):
        yield Trace("orphan_limit", row["allocation_id"], f"QoS row {row['row']} of the switch")
    for row in _rows(holdings, "ingress"):
        yield Trace("orphan_ingress", row["allocation_id"], f"ingress rule {row['rule_id']}")


def _ledger(holdings: Mapping[str, Any], records: Records) -> Iterator[Trace]:
    by_disk = {slot.bundle.identity: slot for slot in records.slots}
    for row in _rows(holdings, "leases"):
        slot = records.slot.get(row["slot_id"]) or by_disk.get(row["disk"])
        slots = (slot.id,) if slot else ()
        if row["allocation_id"]:
            text = f"the ledger's {row['slot_id']} is leased to {row['allocation_id']}"
            # The ledger has an entry for each slot, also of a slot that was withdrawn since.
            owner = row["allocation_id"]
            yield Trace("orphan_lease", owner, text, slots, disk_used=True, exact=True)
        elif row["dirty"] and slot and slot.idle:
            text = f"the ledger says that {row['disk']} has not been wiped since it was used"
            yield Trace("disk_dirty", "", text, slots, disk_used=True)


def _unfit(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    """Devices of sellable or active slots that do not work or have another user."""
    for row in _rows(holdings, "devices"):
        slot = records.slot.get(row["slot_id"])
        if slot is not None and slot.status in JUDGED:
            yield Difference(
                "device_unfit",
                f"{row['code']}: expected {row['expected']}, found {row['found']}",
                HealthState.FAILED if slot.idle else HealthState.DEGRADED,
                slot.id,
                disk_used=slot.idle and row["code"] in _DISK_USED,
            )


def _baseline(holdings: Mapping[str, Any], records: Records) -> Iterator[Difference]:
    """Faults of the host itself that its upkeep could not repair. Idle slots are not sold then."""
    for row in _rows(holdings, "baseline") if "baseline" in holdings else ():
        text = f"expected {row['expected']}, found {row['found']}; {row['remedy']}"
        yield Difference(row["code"], text, HealthState.DEGRADED)
        for slot in records.slots if row["code"] not in _LATER else ():
            if slot.idle:
                yield Difference(row["code"], text, HealthState.FAILED, slot.id)


def _rows(holdings: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = holdings[part]["found"]
    return rows


def _lacks(holdings: Mapping[str, Any], part: str, is_it: Any) -> bool:
    return holdings[part]["known"] and not any(is_it(row) for row in _rows(holdings, part))


def _owner(name: str, records: Records) -> ExpectedAllocation | None:
    """Allocation of a trace. The host reports its id, or a prefix as long as the name allows."""
    return records.allocation.get(name) or records.owner.get(name.replace("-", ""))


def _parts(records: Records, slot_ids: tuple[str, ...]) -> set[str]:
    bundles = [records.slot[slot_id].bundle for slot_id in slot_ids]
    return {part for bundle in bundles for part in _devices(bundle)}


def _devices(bundle: Bundle) -> set[str]:
    return {bundle.gpu_pci_address, bundle.fabric_vf_pci_address, bundle.nvme_device} - {""}


def _having(records: Records, parts: set[str]) -> tuple[str, ...]:
    return tuple(slot.id for slot in records.slots if parts & _devices(slot.bundle))


def _addressed(records: Records, row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        slot.id
        for slot in records.slots
        if row["mac"] == slot.bundle.management_mac or row["ip"] == slot.bundle.private_ip
    )


def prefixes(digits: str) -> list[str]:
    """Each part of an allocation's digits by which a host may name it."""
    return [digits[:end] for end in range(LEAST_DIGITS, len(digits) + 1)]


def _is_owner(name: str, allocation: ExpectedAllocation) -> bool:
    start = name.replace("-", "")
    return len(start) >= LEAST_DIGITS and allocation.hexadecimal.startswith(start)
