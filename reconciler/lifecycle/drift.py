"""Drift detection: compare a host with the expected state in the records, and act on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.schema import (
    Allocation,
    Node,
    Slot,
    Task,
    allocations,
    claims,
    nodes,
    slots,
    tasks,
)
from reconciler.lifecycle import gate, host, ingress, maintenance, power, slice_telemetry, slices
from reconciler.model import host_faults
from reconciler.model.act import Act
from reconciler.model.bundle import Bundle
from reconciler.model.drift import (
    KEPT,
    LEAST_DIGITS,
    LONGEST,
    SILENT,
    STEP,
    Difference,
    ExpectedAllocation,
    ExpectedSlot,
    Findings,
    Records,
    compare,
    powered_off,
    prefixes,
    running,
)
from reconciler.model.states import (
    ANSWERING_NODES,
    AllocationState,
    HealthState,
    NodeMode,
    NodeState,
    SlotState,
    TaskKind,
    TaskState,
)
from reconciler.records import nodes as node_records
from reconciler.records import proofs, queue, reports
from reconciler.records import slots as slot_records
from reconciler.records.queue import OPEN

# Read-only tasks. A snapshot taken during them is valid.
LOOKS = (
    TaskKind.SLICE_TOPOLOGY_DISCOVER,
    TaskKind.SLICE_ABSENCE_VERIFY,
    TaskKind.SLICE_DRIFT_RECONCILE,
    TaskKind.NODE_PARITY,
)
_AT_WORK = (SlotState.RESERVED, SlotState.PROVISIONING, SlotState.RELEASING, SlotState.CLEANUP)
_UNDER_WAY = (AllocationState.REQUESTED, AllocationState.PROVISIONING, AllocationState.RELEASING)
# Limit on allocation names from a host. No genuine host has more; the rest stay unknown.
_NAMES = 500
# Digits of an allocation id.
_DIGITS = 32
_HEXADECIMAL = frozenset("0123456789abcdef")
# Intervals between comparisons of a host whose last one failed. They double with each failure among
# its newest comparisons, up to the longest pause.
_AFTER_FAILURE, _NEWEST, _LONGEST_PAUSE_S = 4, 8, 86_400.0
# A comparison takes some seconds. A host for which it takes longer than this may hang.
SLOW_S = 120.0
# A host's clock may differ by this much from the database's.
_CLOCK_S = 60.0


def expected_state(
    conn: sa.Connection, node_id: str, holdings: Mapping[str, Any], *, since: float
) -> Records:
    """Expected state of a node: its approved slots, locked until the transaction ends, and the
    allocations that hold them or that the host names.

    since: when the snapshot of the host began. Records touched by an operation since then are not
    settled (I14).
    """
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    # Lock first, so that no launch can claim a slot between this read and its consequences.
    approved = rows.every(conn, query.order_by(slots.c.id).with_for_update(), Slot)
    busy = _busy(conn, node_id, since)
    holders = _holders(conn, [slot.id for slot in approved])
    expected = {
        slot.id: ExpectedSlot(
            slot.id,
            Bundle.of(vars(slot)),
            slot.status,
            holders.get(slot.id, ""),
            _settled(slot, "status", _AT_WORK, busy, since),
        )
        for slot in approved
    }
    named = {slot.holder for slot in expected.values()} | _live(conn, node_id)
    query = sa.select(allocations).where(allocations.c.id.in_(sorted(named)))
    records = {row.id: row for row in rows.every(conn, query, Allocation)}
    records |= {row.id: row for row in _named(conn, holdings, records)}
    rules = ingress.expected(conn, records, since)
    silent = _silent(conn, node_id, records, holders, approved)
    return Records(
        tuple(expected.values()),
        tuple(
            ExpectedAllocation(
                key,
                record.state == AllocationState.ACTIVE and record.node_id == node_id,
                _settled(record, "state", _UNDER_WAY, busy, since),
                tuple(slot.id for slot in expected.values() if slot.holder == key),
                record.stopped,
                *rules.get(key, ((), ())),
                silent=key in silent,
            )
            for key, record in sorted(records.items())
        ),
    )


def _silent(
    conn: sa.Connection,
    node_id: str,
    records: Mapping[str, Allocation],
    holders: Mapping[str, str],
    approved: Sequence[Slot],
) -> set[str]:
    """Running slices of this node whose guests no longer answer."""
    named = {
        holders.get(slot.id)
        for slot in approved
        if f"{SILENT}: " in str(slot.health_detail.get("reason"))
    }
    return {
        key
        for key, record in records.items()
        if record.state == AllocationState.ACTIVE
        and record.node_id == node_id
        and not record.stopped
        and slice_telemetry.silent(conn, key, named=key in named)
    }


def _settled(
    record: Slot | Allocation, state: str, moving: tuple[str, ...], busy: set[str], since: float
) -> bool:
    return (
        getattr(record, state) not in moving
        and getattr(record, f"{state}_since") < since
        and record.id not in busy
    )


def _busy(conn: sa.Connection, node_id: str, since: float) -> set[str]:
    """Ids of allocations and slots with a task that is running or ended since then."""
    query = sa.select(tasks).where(tasks.c.node_id == node_id, tasks.c.kind.not_in(LOOKS))
    # By an index each: a node keeps its tasks for ever.
    running = rows.every(conn, query.where(tasks.c.state == TaskState.RUNNING), Task)
    ended = rows.every(conn, query.where(tasks.c.finished_at >= since), Task)
    ids: set[str] = set()
    for task in (*running, *ended):
        given = task.parameters.get("slots") or []
        ids |= {*task.fences, *(slot["slot_id"] for slot in given)}
        ids |= {task.allocation_id} if task.allocation_id else set()
    return ids


def _holders(conn: sa.Connection, slot_ids: list[str]) -> dict[str, str]:
    """The allocation of the last claim on each slot, by slot id."""
    query = sa.select(claims.c.slot_id, claims.c.allocation_id)
    of_these = query.where(claims.c.slot_id.in_(slot_ids)).order_by(claims.c.disk_generation)
    return {row.slot_id: row.allocation_id for row in conn.execute(of_these)}


def _live(conn: sa.Connection, node_id: str) -> set[str]:
    query = sa.select(allocations.c.id).where(
        allocations.c.node_id == node_id,
        allocations.c.state.in_((*_UNDER_WAY, AllocationState.ACTIVE)),
    )
    return set(conn.execute(query).scalars())


def _named(
    conn: sa.Connection, holdings: Mapping[str, Any], records: Mapping[str, Allocation]
) -> list[Allocation]:
    """Allocations on any node that the host names and that the records do not contain."""
    prefixed = {name for key in records for name in prefixes(key.replace("-", ""))}
    names = sorted({name for name in _names(holdings) if name not in prefixed})[:_NAMES]
    if not names:
        return []
    # A query with a range of the primary key for each name, because a host may invent any names.
    ranges = [allocations.c.id.between(_dashed(name), f"{_dashed(name)}g") for name in names]
    query = sa.select(allocations).where(sa.or_(*ranges))
    return rows.every(conn, query.limit(2 * len(names)), Allocation)


def _names(holdings: Mapping[str, Any]) -> Iterator[str]:
    """Allocation ids as hexadecimal digits. Other names cannot be allocation ids."""
    for part in holdings.values():
        for entry in part["found"]:
            digits = str(entry.get("allocation_id") or entry.get("owner") or "").replace("-", "")
            if LEAST_DIGITS <= len(digits) <= _DIGITS and set(digits) <= _HEXADECIMAL:
                yield digits


def _dashed(digits: str) -> str:
    """The digits with the dashes of an allocation id."""
    parts = [digits[begin:end] for begin, end in pairwise((0, 8, 12, 16, 20, 32))]
    return "-".join(part for part in parts if part)


# Hosts whose drift is measured. The watch probes unreachable hosts, and an unprepared
# host has nothing to compare.
_COMPARED = sa.and_(nodes.c.mode == NodeMode.SLICE, nodes.c.state.in_(ANSWERING_NODES))
# Unexpected use of the disk has ended on the host, but no proof of a clean disk is newer.
UNPROVEN = "disk_unproven"


def reconcile(
    conn: sa.Connection, node_id: str, evidence: Mapping[str, Any], act: Act, *, since: float
) -> dict[str, Any]:
    """Compare a snapshot with the records and apply the findings to slots and node.

    since: when the snapshot of the host began, on the database's clock. Returns the task's result:
    differences, skipped, unknown, repairs of the host's own upkeep, and the slots that were
    blocked, shut, healed and opened.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    if node.mode != NodeMode.SLICE:
        # Holdings change during a conversion, so drift is compared in slice mode only.
        return {"differences": [], "skipped": [node_id], "unknown": {}}
    _heed_boot(conn, node, evidence["identity"], act)
    holdings = {**evidence["holdings"], "baseline": _baseline(conn, evidence, since)}
    records = expected_state(conn, node_id, holdings, since=since)
    off_act = act.because("its guest has powered itself off")
    boot_id = evidence["identity"]["boot_id"] or "unknown"
    if power.powered_off(conn, powered_off(holdings, records), off_act, boot_id=boot_id):
        records = expected_state(conn, node_id, holdings, since=since)
    if evidence["identity"]["boot_id"]:
        on_act = act.because("its machine was seen running")
        power.seen_running(conn, running(holdings, records), on_act, boot_id=boot_id)
    findings = compare(holdings, records)
    done: dict[str, list[str]] = {"blocked": [], "shut": [], "healed": [], "opened": []}
    for slot in records.slots:
        if slot.settled:
            mine = [
                difference for difference in findings.differences if difference.slot_id == slot.id
            ]
            for what in _of_slot(conn, slot, mine, findings, act, since):
                done[what].append(slot.id)
    _of_node(conn, node_id, findings, act)
    repairs = evidence.get("repairs") or {"known": True, "found": []}
    # They say nothing of slots and of the node's health.
    unknown = {**findings.unknown, **({} if repairs["known"] else {"repairs": repairs["detail"]})}
    counts = {
        "differences": len(findings.differences),
        "skipped": len(findings.skipped),
        "unknown": len(unknown),
    }
    journal.emit(
        conn,
        "node.drift",
        "node",
        node_id,
        payload=counts,
        node_id=node_id,
        correlation_id=act.correlation_id,
    )
    return {
        "differences": [difference.document() for difference in findings.differences],
        "skipped": list(findings.skipped),
        "unknown": unknown,
        "repairs": repairs["found"],
        **done,
    }


def _baseline(conn: sa.Connection, evidence: Mapping[str, Any], since: float) -> dict[str, Any]:
    """Faults that the host's upkeep reports, and that of its clock."""
    part = dict(evidence.get("baseline") or {"known": True, "detail": "", "found": []})
    if collected_at := evidence.get("collected_at"):
        now = clock.read(conn)
        at = datetime.fromisoformat(collected_at).timestamp()
        if not since - _CLOCK_S <= at <= now + _CLOCK_S:
            part["found"] = [*part["found"], host_faults.wrong_clock(at, now)]
    return part


# A task that met its node outside slice mode has compared nothing.
_HAS_COMPARED = sa.and_(
    tasks.c.kind == TaskKind.SLICE_DRIFT_RECONCILE,
    tasks.c.state == TaskState.SUCCEEDED,
    sa.func.coalesce(tasks.c.result["skipped", 0].as_string(), "") != tasks.c.node_id,
)


def latest(conn: sa.Connection, node_id: str) -> Task | None:
    """The latest finished comparison of a node; None before the first."""
    query = sa.select(tasks).where(_HAS_COMPARED, tasks.c.node_id == node_id)
    return rows.first(conn, query.order_by(tasks.c.created_at.desc()), Task)


def latest_failure(conn: sa.Connection, node_id: str) -> Task | None:
    """The latest ended comparison of a node if it failed, was lost or was canceled; else None."""
    mine = (tasks.c.node_id == node_id, tasks.c.kind == TaskKind.SLICE_DRIFT_RECONCILE)
    query = sa.select(tasks).where(*mine, tasks.c.state.not_in(OPEN))
    task = rows.first(conn, query.order_by(tasks.c.created_at.desc()), Task)
    return None if task is None or task.state == TaskState.SUCCEEDED else task


def latest_results(conn: sa.Connection) -> Iterator[Mapping[str, Any]]:
    """Result of the latest finished comparison of each slice host."""
    query = sa.select(_of_latest(tasks.c.result, _HAS_COMPARED)).where(_COMPARED)
    yield from (result for result in conn.execute(query).scalars() if result)


def _of_latest(column: sa.Column[Any], which: sa.ColumnElement[bool]) -> sa.ScalarSelect[Any]:
    """A column of a node's latest comparison that is such; NULL without one."""
    query = sa.select(column).where(_OF_NODE, which).order_by(tasks.c.created_at.desc())
    return query.limit(1).correlate(nodes).scalar_subquery()


def due(conn: sa.Connection, *, every_s: float, at_once: int) -> list[str]:
    """The slice hosts due for drift detection, least recently measured first.

    Together with the comparisons already open, at most at_once run at the same time, and one of a
    doubtful host: one that hangs has its place until the deadline of its run. So one is doubtful
    that is slow now or was lately. The next comparison comes later after each failure.
    """
    hangs = _of_newest(_LONG)
    slow = clock.now() - sa.func.coalesce(tasks.c.started_at, clock.now()) > SLOW_S
    queued = (
        sa.select(nodes.c.id, nodes.c.state, sa.or_(hangs > 0, slow).label("doubtful"))
        .join(tasks, tasks.c.node_id == nodes.c.id)
        .where(tasks.c.kind == TaskKind.SLICE_DRIFT_RECONCILE, tasks.c.state.in_(OPEN))
    )
    open_ones = {row.id: row for row in conn.execute(queued)}
    # Comparisons that wait for an unreachable host do not count against the limit.
    under_way = [bool(row.doubtful) for row in open_ones.values() if row.state in ANSWERING_NODES]
    room = at_once + 1 - len(under_way)
    query = _waiting(every_s).where(nodes.c.id.not_in(list(open_ones)))
    ids: list[str] = []
    for which, free in (
        (hangs == 0, at_once - under_way.count(False)),
        (hangs > 0, 1 - under_way.count(True)),
    ):
        limit = max(min(free, room - len(ids)), 0)
        ids += conn.execute(query.where(which).limit(limit)).scalars()
    return ids


def end_hanging(conn: sa.Connection, act: Act, *, every_s: float) -> list[str]:
    """Ask for the end of comparisons that keep those of other hosts waiting; returns their ids.

    Of the service's own that hang, the oldest may go on until its deadline. Where several hosts
    begin to hang at the same time, the others would have no place until then, and no workers.
    """
    query = sa.select(tasks.c.id, tasks.c.requested_by).where(
        tasks.c.kind == TaskKind.SLICE_DRIFT_RECONCILE,
        tasks.c.state == TaskState.RUNNING,
        clock.now() - tasks.c.started_at > SLOW_S,
        ~tasks.c.cancel_requested,
    )
    hanging = conn.execute(query.order_by(tasks.c.started_at, tasks.c.id)).all()
    # A person who asked for one waits for its end.
    ids = [row.id for row in hanging[1:] if row.requested_by == act.actor]
    waiting = _waiting(every_s).where(~_has_open(), _of_newest(_LONG) == 0)
    if not ids or conn.execute(waiting.limit(1)).first() is None:
        return []
    for task_id in ids:
        queue.cancel(conn, task_id, act)
    return ids


def _waiting(every_s: float) -> sa.Select[Any]:
    """Hosts due for drift detection, those first that wait longest."""
    failures, since = _of_newest(_FAILED), _queued_at()
    longest_s = max(_LONGEST_PAUSE_S, every_s * _AFTER_FAILURE)
    pauses = {n + 1: min(every_s * _AFTER_FAILURE * 2**n, longest_s) for n in range(_NEWEST)}
    pause = sa.case((_last_failed(), sa.case(pauses, value=failures)), else_=every_s)
    return (
        sa.select(nodes.c.id)
        .where(_COMPARED, since < clock.now() - pause)
        .order_by(since, nodes.c.id)
    )


def every_host(conn: sa.Connection) -> list[str]:
    """Every slice host that has no open comparison."""
    return list(conn.execute(sa.select(nodes.c.id).where(_COMPARED, ~_has_open())).scalars())


def overdue_nodes(conn: sa.Connection) -> float:
    """Age in seconds of the oldest latest comparison of a slice host. 0 without slice hosts.

    Only comparisons that succeeded count, because others have compared nothing.
    """
    last = _of_latest(tasks.c.finished_at, _HAS_COMPARED)
    # One from before a conversion says nothing of the slice host of today.
    since = sa.case((last > nodes.c.mode_since, last), else_=nodes.c.mode_since)
    longest = sa.select(clock.now() - sa.func.min(since)).where(_COMPARED)
    return float(conn.execute(longest).scalar() or 0)


def failing_nodes(conn: sa.Connection) -> int:
    """Number of slice hosts whose latest ended comparison failed, was lost or was canceled."""
    state = _of_latest(tasks.c.state, tasks.c.state.not_in(OPEN))
    query = sa.select(sa.func.count()).select_from(nodes)
    return conn.execute(query.where(_COMPARED, state != TaskState.SUCCEEDED)).scalar_one()


def queue_comparison(conn: sa.Connection, node_id: str, act: Act) -> Task:
    """Queue drift detection for a host, at a lower priority than requested work."""
    item = queue.Enqueue(
        kind=TaskKind.SLICE_DRIFT_RECONCILE, node_id=node_id, deadline_s=600, priority=-1
    )
    return queue.enqueue(conn, item, act)


def queue_unasked(conn: sa.Connection, node_id: str, act: Act, *, pause_s: float = 0) -> bool:
    """Queue a comparison for the word of the host itself, which may be a lie. False while one is
    open, after one that did not succeed, and within pause_s of the last: a host that hangs would
    have a place of all comparisons for ever.
    """
    columns = (tasks.c.state, tasks.c.created_at)
    mine = (tasks.c.node_id == node_id, tasks.c.kind == TaskKind.SLICE_DRIFT_RECONCILE)
    newest = sa.select(*columns).where(*mine).order_by(tasks.c.created_at.desc()).limit(1)
    last = conn.execute(newest).first()
    recent = last is not None and last.created_at > clock.read(conn) - pause_s
    if last is not None and (recent or last.state != TaskState.SUCCEEDED):
        return False
    queue_comparison(conn, node_id, act)
    return True


def forget(conn: sa.Connection, node_id: str, act: Act) -> None:
    """Clear the drift of a node that is no longer a slice host, and its starts in vain."""
    node = rows.get(conn, Node, node_id, lock=True)
    if node.health_detail.get("step") in (STEP, host.BOOT):
        node_records.set_health(
            conn, node, HealthState.UNKNOWN, {}, act.because("no slice host any more")
        )


_OF_NODE = sa.and_(tasks.c.node_id == nodes.c.id, tasks.c.kind == TaskKind.SLICE_DRIFT_RECONCILE)


def _last_failed() -> sa.ColumnElement[bool]:
    """Whether the last comparison of a node has failed or was lost."""
    return sa.func.coalesce(_of_latest(tasks.c.state, sa.true()), "").in_(_BROKEN)


_BROKEN = (TaskState.FAILED, TaskState.LOST)
_FAILED = tasks.c.state.in_(_BROKEN)
_LONG = tasks.c.finished_at - tasks.c.started_at > SLOW_S


def _of_newest(which: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    """How many of a node's newest comparisons are such."""
    newest = sa.select(which.label("such")).where(_OF_NODE).order_by(tasks.c.created_at.desc())
    rows_of = newest.limit(_NEWEST).correlate(nodes).subquery()
    return sa.select(sa.func.count()).select_from(rows_of).where(rows_of.c.such).scalar_subquery()


def _has_open() -> sa.ColumnElement[bool]:
    """Whether a comparison of a node is open."""
    return sa.select(tasks.c.id).where(_OF_NODE, tasks.c.state.in_(OPEN)).exists()


def _queued_at() -> sa.ColumnElement[Any]:
    """When drift detection was last queued for a node, or else when its mode was set."""
    last = sa.select(sa.func.max(tasks.c.created_at)).where(_OF_NODE).correlate(nodes)
    return sa.func.coalesce(last.scalar_subquery(), nodes.c.mode_since)


def _heed_boot(conn: sa.Connection, node: Node, identity: Mapping[str, Any], act: Act) -> None:
    """Close the gate when the host runs under a boot other than the proven boot (I16).

    Queue a proof while the boot is unknown, or while slices, the sale of the host or its way back
    from maintenance wait for the proof.

    Only a discovery stores the new boot id. The boot id of this snapshot may be older than the
    stored boot id, and storing it could open a gate that must stay closed (I14).
    """
    host.contacted(conn, node.id)
    host.note_boots(conn, node.id, act)
    boot_act = act.because(f"boot {identity['boot_id'] or 'unknown'}")
    if node.boot_id and identity["boot_id"] != node.boot_id:
        host.restarted(conn, node.id, boot_act, since=node.boot_id)
    under_way = {task.kind for task in queue.open_of_node(conn, node.id)}
    waits = power.awaits_proof(conn, node.id) or maintenance.awaits_proof(conn, node)
    if (waits or _unproven_since_boot(conn, node)) and not under_way & {*host.VERIFICATION}:
        host.reverify(conn, node, boot_act, after_s=host.BOOTING_S)


def _unproven_since_boot(conn: sa.Connection, node: Node) -> bool:
    """Whether a host that sold slots has not passed under its present boot, or has not been
    discovered. A failure may be of services that were still starting; after a pass, failures are
    for an operator.
    """
    if node.state != NodeState.READY:
        return False
    query = sa.select(slots.c.id).where(
        slots.c.node_id == node.id,
        slots.c.retired_at.is_(None),
        slots.c.status == SlotState.DISABLED,
        slots.c.wanted == SlotState.AVAILABLE,
    )
    # Before the reports, which are large: a host that sells all of its slots has none of these.
    if not rows.first(conn, query) or not (parity := reports.latest_parity(conn, node.id)):
        return False
    discovery = reports.latest_discovery(conn, node.id)
    if discovery is not None and discovery.boot_id != node.boot_id:
        return True
    failed = parity.failures or parity.boot_id != node.boot_id
    return bool(failed) and not reports.passed(conn, node.id, node.boot_id)


def _of_slot(
    conn: sa.Connection,
    slot: ExpectedSlot,
    differences: Sequence[Difference],
    findings: Findings,
    act: Act,
    since: float,
) -> list[str]:
    record = rows.get(conn, Slot, slot.id)
    if not differences:
        # A part that could not be measured may hide earlier findings (I13).
        clean = not findings.unknown and record.health_detail.get("step") == STEP
        if not clean or record.status == SlotState.CLEANUP_BLOCKED:
            return []
        return _heal(conn, record, act, since)
    reason = "; ".join(f"{row.code}: {row.found}" for row in differences)[:2000]
    evidence: dict[str, Any] = {
        "differences": [row.document() for row in differences[:KEPT]],
        "observed_since": clock.iso(since),
    }
    if len(differences) > KEPT:
        evidence["left_out"] = len(differences) - KEPT
    act = act.because(f"the host differs from the records: {reason}", evidence)
    if not slot.idle:
        failed = any(row.severity == HealthState.FAILED for row in differences)
        worst = HealthState.FAILED if failed else HealthState.DEGRADED
        slot_records.set_health(conn, slot.id, worst, _detail(differences, reason), act)
        return []
    if slot.holder and any(row.orphan and row.allocation_id == slot.holder for row in differences):
        error = {"code": differences[0].code, "found": reason}
        block_act = slices.about(act, slot.holder)
        slices.block(conn, record, slot.holder, block_act, step=STEP, error=error)
        return ["blocked"]
    detail = _detail(differences, reason)
    before = record.health_detail
    if (
        any(row.disk_used for row in differences)
        or before.get("disk_used")
        or before.get("clean_since")
    ):
        detail["disk_used"] = True
    slot_records.set_health(conn, slot.id, HealthState.FAILED, detail, act)
    if record.status != SlotState.AVAILABLE:
        return []
    # The differences are in the history of its health. A slot may be shut after each comparison.
    why = f"the host differs from the records: {reason[:LONGEST]}"
    gate.take_off_sale(conn, slot.id, act.because(why, {"code": differences[0].code}))
    return ["shut"]


def _heal(conn: sa.Connection, record: Slot, act: Act, since: float) -> list[str]:
    """Clear the drift of a slot without differences. A disk that was used needs a newer proof."""
    slot_id, detail = record.id, record.health_detail
    if detail.get("disk_used"):
        unproven = {
            "step": STEP,
            "code": UNPROVEN,
            "reason": f"{detail['reason']}; gone, and no proof of a clean disk is newer",
            "clean_since": since,
        }
        heal_act = act.because("the use of the disk has ended; it must be proven clean")
        slot_records.set_health(conn, slot_id, HealthState.FAILED, unproven, heal_act)
        return []
    proof = proofs.current(conn, record)
    if "clean_since" in detail and (proof is None or proof.created_at < detail["clean_since"]):
        return []
    heal_act = act.because("the host is as the records say", {"observed_since": clock.iso(since)})
    slot_records.set_health(conn, slot_id, HealthState.HEALTHY, {}, heal_act)
    may_open = record.wanted == SlotState.AVAILABLE and record.status == SlotState.DISABLED
    if not may_open or gate.gate(conn, slot_id):
        return ["healed"]
    gate.make_available(conn, slot_id, heal_act)
    return ["healed", "opened"]


def _detail(differences: Sequence[Difference], reason: str) -> dict[str, Any]:
    """Health detail with the same keys as the detail of a blocked slot."""
    detail: dict[str, Any] = {"step": STEP, "code": differences[0].code, "reason": reason}
    named = [row.allocation_id for row in differences if row.allocation_id]
    return detail | ({"allocation_id": named[0]} if named else {})


def _of_node(conn: sa.Connection, node_id: str, findings: Findings, act: Act) -> None:
    """Record differences without a slot as node health."""
    loose = [row for row in findings.differences if not row.slot_id]
    reasons = [f"{row.code}: {row.found}" for row in loose]
    reasons += [f"{name} {why}" for name, why in sorted(findings.unknown.items())]
    code = loose[0].code if loose else "unknown"
    fault = (code, "; ".join(reasons)) if reasons else None
    well = "the host is as the records say"
    node_records.note_fault(conn, node_id, STEP, fault, act, well=well)
