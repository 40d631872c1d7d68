"""Recovery cases: the runbook for blocked slots, played by the leader move by move.

A person or the policy opens a case, and the case acts in that name. Each move and the change of the
case's state share a transaction, so the next leader continues after a crash between two moves. The
evidence of each step is kept in the case's history.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.journal import Overdue, advance
from reconciler.db.schema import Absence, Allocation, RecoveryCase, absences, recovery_cases
from reconciler.lifecycle import drift, recovery, recovery_evidence, recovery_policy
from reconciler.lifecycle.recovery_policy import ACTOR, BlockedAllocation
from reconciler.lifecycle.slices import BUILDING
from reconciler.model.act import Act, require_reason
from reconciler.model.errors import Problem
from reconciler.model.recovery import Move, Progress, next_move
from reconciler.model.states import OPEN_CASES, AllocationState, RecoveryState, SlotState
from reconciler.records import leasing, nodes, queue
from reconciler.records import recovery_cases as case_records
from reconciler.records.claims import held_slots, last_holder

OPENED = "admin.allocation.recovery.opened"
ADOPTED = "admin.allocation.recovery.adopted"
# Temporary refusals. The case waits and records the reason.
_PASSING = frozenset({"node_unreachable", "node_unhealthy", "allocation_releasing"})
# Columns for a change within a state, which must not extend the deadline.
_SAME_TIME = {
    "state_since": recovery_cases.c.state_since,
    "deadline_at": recovery_cases.c.deadline_at,
}
Document = dict[str, Any]
Steps = list[Document]


@dataclass(frozen=True)
class Judgement:
    """The next move of a case. hold: the reason for waiting, or {} when it can go on."""

    move: Move
    why: str
    seen: Progress
    hold: Document


def open_case(
    conn: sa.Connection, allocation_id: str, act: Act, *, remove_leftovers: bool = True
) -> RecoveryCase:
    """Return the open recovery case of an allocation, or open a new case.

    Refused where a person must decide: an active or bare-metal allocation, a release under way.
    """
    with locks.allocation(conn, allocation_id) as allocation:
        case = case_records.open_of(conn, allocation_id)
        if case is not None:
            return _adopt(conn, case, act)
        held = held_slots(conn, allocation_id)
        recovery.refuse(allocation, held)
        nodes.require_enrolled(conn, allocation.node_id)
        require_reason(act, "say why the allocation is recovered")
        steps = [
            _step("allocation", {"state": allocation.state, "error": allocation.error}),
            _step("inventory", recovery_evidence.inventory(conn, held)),
        ]
        case = journal.create(
            conn,
            RecoveryCase,
            _with_steps(act, steps),
            id=rows.ordered_id(),
            allocation_id=allocation_id,
            node_id=allocation.node_id,
            state=RecoveryState.OPENED,
            state_reason=act.why,
            requested_by=act.actor,
            role=act.role,
            reason=act.reason,
            remove_leftovers=remove_leftovers,
            slot_ids=[slot.id for slot in held],
            correlation_id=act.correlation_id,
        )
        if act.actor != ACTOR:
            journal.audit_of(conn, act, OPENED, allocation, {recovery.CASE: case.id})
        return case


def _adopt(conn: sa.Connection, case: RecoveryCase, act: Act) -> RecoveryCase:
    """Take a case over for a person, from the policy or from an older decision to keep slots."""
    case = case_records.hold(conn, case.id)
    if not act.reason.strip() or act.actor == ACTOR:
        return case
    if case.requested_by != ACTOR and not _kept(conn, case):
        return case
    allocation = rows.get(conn, Allocation, case.allocation_id)
    journal.audit_of(conn, act, ADOPTED, allocation, {recovery.CASE: case.id})
    columns = {
        "requested_by": act.actor,
        "role": act.role,
        "reason": act.reason,
        "requested_at": clock.now(),
        "correlation_id": act.correlation_id,
        "remove_leftovers": True,
        "waits_for": {},
        **_SAME_TIME,
    }
    return advance(conn, RecoveryCase, case.id, "adopt", act, columns=columns)


def open_by_policy(conn: sa.Connection, allocation_id: str) -> BlockedAllocation | None:
    """Open a case if the policy and its limits allow it. None when there is nothing to decide."""
    policy = recovery_policy.hold(conn)
    blocked = recovery_policy.blocked_allocations(conn)
    candidate = next((row for row in blocked if row.allocation_id == allocation_id), None)
    if candidate is None or not (policy.enabled or candidate.by_tenant):
        return None
    if candidate.move == Move.WAIT:
        return candidate
    # The allocation has the correlation id of the original request.
    allocation = rows.get(conn, Allocation, allocation_id)
    act = Act(ACTOR, recovery_policy.REASON + candidate.why, allocation.correlation_id)
    if candidate.move == Move.STOP:
        recovery_policy.stop(conn, allocation_id, candidate.node_id, candidate.why, act)
        return candidate
    try:
        with conn.begin_nested():
            recovery_policy.record_begun(conn, candidate, act)
            remove = policy.remove_leftovers or candidate.by_tenant
            open_case(conn, allocation_id, act, remove_leftovers=remove)
    except Problem as refusal:
        if refusal.code not in _PASSING:
            why = f"{refusal.code}: {refusal.found}"
            recovery_policy.stop(conn, allocation_id, candidate.node_id, why, act)
    return candidate


def due(conn: sa.Connection) -> list[str]:
    """Open cases that can move, or whose reason for waiting has changed. Takes no locks."""
    case_ids = []
    for case in case_records.every_open(conn):
        judged = _judge(conn, case)
        if judged.hold != case.waits_for or not (judged.hold or judged.move == Move.WAIT):
            case_ids.append(case.id)
    return case_ids


def play(conn: sa.Connection, case_id: str) -> RecoveryCase | None:
    """Do the next move of a case. None when no move is possible now."""
    with locks.allocation(conn, case_records.get(conn, case_id).allocation_id):
        case = case_records.hold(conn, case_id)
        if case.state not in OPEN_CASES:
            return None
        judged = _judge(conn, case)
        act = _act_of(case)
        if judged.hold or (judged.move == Move.WAIT and case.waits_for):
            return _wait(conn, case, judged.hold, act)
        if judged.move == Move.WAIT:
            return None
        try:
            with conn.begin_nested():
                return _MOVES[judged.move](conn, case, judged, act)
        except Problem as refusal:
            if refusal.code == "generation_conflict":
                raise
            if refusal.code in _PASSING:
                return _wait(conn, case, refusal.to_dict(), act)
            why = f"{refusal.code}: {refusal.found}"
            return _fail(conn, case, refusal.to_dict(), act.because(why))


def expire(conn: sa.Connection, overdue: Overdue, act: Act) -> bool:
    """End a case past its deadline. False when its state or deadline has changed."""
    with locks.allocation(conn, case_records.get(conn, overdue.id).allocation_id):
        case = case_records.hold(conn, overdue.id)
        if (case.state, case.deadline_at) != (overdue.state, overdue.deadline_at):
            return False
        error = recovery.deadline_error(overdue)
        remedy = case.waits_for.get("remedy") or "bring the host back first"
        error["remedy"] = f"{remedy}; then recover again"
        _fail(conn, case, error, act.because(f"deadline passed in {overdue.state}"))
        return True


def end_restored(conn: sa.Connection, act: Act) -> list[str]:
    """End every open case after a restore, because the age of its evidence is unknown."""
    ended = []
    for case in case_records.every_open(conn):
        error = {
            "code": "restored",
            "expected": "a service that was there since the case was opened",
            "found": "a backup, in which the case was open",
            "remedy": "recover again: the host is then asked anew",
        }
        _fail(conn, case, error, act)
        ended.append(str(case.id))
    return ended


def waits_for(conn: sa.Connection, case: RecoveryCase) -> Document | None:
    """Why an open case waits: `code`, `detail`, and `remedy` where a person can act."""
    hold = case.waits_for
    if case.state not in OPEN_CASES:
        return None
    if hold:
        return {"code": hold["code"], "detail": hold["found"], "remedy": hold["remedy"]}
    if case.state == RecoveryState.OPENED:
        code, detail = "leader", "the next look of the leader"
    elif case.state == RecoveryState.CLEANING:
        code, detail = "slot_cleanup", recovery_evidence.cleaning(conn, case)
    else:
        code, detail = _task_reason(conn, str(case.task_id))
    return {"code": code, "detail": detail, "remedy": ""} if detail else None


def _task_reason(conn: sa.Connection, task_id: str) -> tuple[str, str]:
    task = queue.get(conn, task_id)
    reason = leasing.wait_reasons(conn, [task]).get(task_id)
    if reason is not None:
        return str(reason["code"]), str(reason["detail"])
    return "task", f"task {task_id} is {task.state}" if task.state in queue.OPEN else ""


def _judge(conn: sa.Connection, case: RecoveryCase) -> Judgement:
    seen = _progress(conn, case)
    move, why = next_move(seen)
    # After the clean-up has begun, no state is left to keep for inspection.
    early = seen.state in (RecoveryState.OPENED, RecoveryState.VERIFYING)
    hold = _held_back(conn, case) if early and move != Move.WAIT else {}
    return Judgement(move, why, seen, hold)


def _progress(conn: sa.Connection, case: RecoveryCase) -> Progress:
    task = queue.get(conn, case.task_id) if case.task_id else None
    report = _report(conn, case)
    slots = recovery_evidence.unsold_slots(conn, case)
    return Progress(
        state=RecoveryState(case.state),
        remove_leftovers=case.remove_leftovers,
        confirm=case.confirm,
        look_open=task is not None and task.state in queue.OPEN,
        absent=None if report is None else report.absent,
        cleaning=any(slot.status == SlotState.CLEANUP for slot in slots),
        stuck=recovery_evidence.stuck(slots),
        resold=case.state == RecoveryState.CONFIRMING
        and any(
            last_holder(conn, slot.id) != case.allocation_id
            for slot in recovery_evidence.slots_of(conn, case)
        ),
    )


def _held_back(conn: sa.Connection, case: RecoveryCase) -> Document:
    """Hold of the case: a person keeps the slots, or the policy is off."""
    kept = _kept(conn, case)
    if kept:
        return {
            "code": "kept_for_inspection",
            "expected": "slots that nobody keeps as they are",
            "found": f"kept for inspection: {kept}",
            "remedy": f"`gpuaas recover {case.allocation_id} --reason WHY` recovers them all the"
            " same; so does force-cleanup with `runtime_verified_absent` true",
        }
    if case.requested_by == ACTOR and not recovery_policy.covers(conn, case.allocation_id):
        return {
            "code": "recovery_policy_off",
            "expected": "the recovery policy, which opened the case, to be on",
            "found": "it was switched off",
            "remedy": "switch it on, or recover the allocation in your own name with"
            f" `gpuaas recover {case.allocation_id} --reason WHY`",
        }
    return {}


def _kept(conn: sa.Connection, case: RecoveryCase) -> str:
    """The decision to keep the slots: any for the policy, a later decision for a person."""
    since = 0.0 if case.requested_by == ACTOR else case.requested_at
    return recovery_policy.kept(conn, case.allocation_id, since=since)


def _wait(conn: sa.Connection, case: RecoveryCase, hold: Document, act: Act) -> RecoveryCase | None:
    if case.waits_for == hold:
        return None
    why = f"waits: {hold['found']}" if hold else "goes on"
    columns = {"waits_for": hold, **_SAME_TIME}
    return advance(conn, RecoveryCase, case.id, "wait", act.because(why), columns=columns)


def _look(conn: sa.Connection, case: RecoveryCase, judged: Judgement, act: Act) -> RecoveryCase:
    """Queue the absence check. A run that may be alive is canceled and fenced off first."""
    key = case.allocation_id
    steps: Steps = []
    if case.state == RecoveryState.OPENED:
        allocation = rows.get(conn, Allocation, key)
        recovery.refuse(allocation, held_slots(conn, key))
        if allocation.state in BUILDING:
            forced = recovery.force_cleanup(conn, key, act, runtime_verified_absent=False)
            steps.append(_step("run_canceled", forced))
    task = recovery.verify_absence(conn, key, act)
    tasks = dict.fromkeys([*case.task_ids, task.id])
    columns = {"task_id": task.id, "task_ids": list(tasks), "waits_for": {}}
    return _advance(conn, case, "verify", act.because(judged.why), steps, columns)


def _clean(conn: sa.Connection, case: RecoveryCase, judged: Judgement, act: Act) -> RecoveryCase:
    """End the allocation on the host's report. Its slots go through wipe and verification."""
    key = case.allocation_id
    absent = judged.seen.absent is True
    steps = _host_steps(conn, case)
    tasks = list(case.task_ids)
    released = rows.get(conn, Allocation, key).state == AllocationState.RELEASED
    if not released:
        forced = recovery.force_cleanup(conn, key, act, runtime_verified_absent=absent)
        steps.append(_step("force_cleanup", forced))
        tasks += [slot["task_id"] for slot in forced["slots"] if slot["task_id"]]
    if released or not absent:
        # A forced release leaves the slots blocked, and so does force-cleanup without absence.
        repairs = {
            slot.id: recovery.repair(conn, slot.id, act).id
            for slot in held_slots(conn, key)
            if slot.status == SlotState.CLEANUP_BLOCKED
        }
        steps.append(_step("repair", {"tasks": repairs}))
        tasks += repairs.values()
    columns: Document = {
        "confirm": released or not absent,
        "task_ids": list(dict.fromkeys(tasks)),
        "waits_for": {},
    }
    return _advance(conn, case, "clean", act.because(judged.why), steps, columns)


def _finish(conn: sa.Connection, case: RecoveryCase, judged: Judgement, act: Act) -> RecoveryCase:
    return _end(conn, case, "recover", act.because(judged.why), _last_steps(conn, case))


def _stop(conn: sa.Connection, case: RecoveryCase, judged: Judgement, act: Act) -> RecoveryCase:
    """Fail the case without its slots, with a remedy for a person."""
    if judged.seen.absent is None and case.state != RecoveryState.CLEANING:
        steps, error = [], _unanswered(conn, case)
    elif case.state == RecoveryState.VERIFYING:
        steps = _host_steps(conn, case)
        error = {
            "code": "leftovers_kept",
            "expected": "nothing of the allocation on the host, or leave to remove it",
            "found": judged.why,
            "remedy": f"`gpuaas recover {case.allocation_id} --reason WHY` removes what is left",
        }
    elif case.state == RecoveryState.CONFIRMING and not judged.seen.stuck:
        steps = _last_steps(conn, case)
        error = {
            "code": "leftovers_remain",
            "expected": "nothing of the allocation on the host after its clean-up",
            "found": judged.why,
            "remedy": "read the checks of the case's step runtime_absence_after and mend the host;"
            " `gpuaas slots remove-orphan` removes a machine from a slot that is disabled",
        }
        # It takes slots off sale of which the host holds something.
        drift.queue_comparison(conn, case.node_id, act.because("a recovery has left something"))
    else:
        steps = _last_steps(conn, case)
        error = recovery_evidence.not_recovered(recovery_evidence.unsold_slots(conn, case))
    return _fail(conn, case, error, act.because(judged.why), steps)


def _fail(
    conn: sa.Connection, case: RecoveryCase, error: Document, act: Act, steps: Steps | None = None
) -> RecoveryCase:
    failed = _end(conn, case, "fail", act, steps or [], failure=dict(error))
    if case.requested_by == ACTOR:
        recovery_policy.stop(conn, case.allocation_id, case.node_id, act.reason, _act_of(case))
    return failed


def _end(
    conn: sa.Connection, case: RecoveryCase, event: str, act: Act, steps: Steps, **columns: Any
) -> RecoveryCase:
    columns |= {
        "finished_at": clock.now(),
        "waits_for": {},
        "proof_ids": recovery_evidence.proof_ids(conn, case),
    }
    return _advance(conn, case, event, act, steps, columns)


def _advance(
    conn: sa.Connection, case: RecoveryCase, event: str, act: Act, steps: Steps, columns: Document
) -> RecoveryCase:
    return advance(conn, RecoveryCase, case.id, event, _with_steps(act, steps), columns=columns)


def _unanswered(conn: sa.Connection, case: RecoveryCase) -> Document:
    task = queue.get(conn, str(case.task_id))
    return {
        "code": "absence_unknown",
        "expected": "the host to say what is left of the allocation",
        "found": f"the look ended as {task.state}: {task.error.get('found', '')}",
        "remedy": "bring the host back first, then recover again; unknown never frees a slot",
    }


_MOVES: dict[Move, Callable[[sa.Connection, RecoveryCase, Judgement, Act], RecoveryCase]] = {
    Move.LOOK: _look,
    Move.CLEAN: _clean,
    Move.FINISH: _finish,
    Move.STOP: _stop,
}


def _report(conn: sa.Connection, case: RecoveryCase) -> Absence | None:
    """The absence report of the case's own task. No other report counts."""
    if case.task_id is None:
        return None
    query = sa.select(absences).where(
        absences.c.task_id == case.task_id, absences.c.allocation_id == case.allocation_id
    )
    return rows.first(conn, query.order_by(absences.c.id.desc()), Absence)


def _report_steps(conn: sa.Connection, case: RecoveryCase, name: str) -> Steps:
    report = _report(conn, case)
    return [] if report is None else [_step(name, dict(report.document))]


def _host_steps(conn: sa.Connection, case: RecoveryCase) -> Steps:
    """The host's report and the proofs of the disks, before the clean-up."""
    proofs = recovery_evidence.proofs(conn, recovery_evidence.slots_of(conn, case))
    return [*_report_steps(conn, case, "runtime_absence"), _step("disk_evidence", proofs)]


def _last_steps(conn: sa.Connection, case: RecoveryCase) -> Steps:
    confirmed = case.state == RecoveryState.CONFIRMING
    before = _report_steps(conn, case, "runtime_absence_after") if confirmed else []
    last = recovery_evidence.after_cleanup(conn, case).items()
    return [*before, *(_step(name, evidence) for name, evidence in last)]


def _step(name: str, evidence: Document) -> Document:
    return {"step": name, "evidence": evidence}


def _with_steps(act: Act, steps: Steps) -> Act:
    return act.because(act.reason, {case_records.STEPS: steps} if steps else {})


def _act_of(case: RecoveryCase) -> Act:
    return Act(
        case.requested_by,
        case.reason,
        case.correlation_id,
        evidence={recovery.CASE: case.id},
        role=case.role,
    )
