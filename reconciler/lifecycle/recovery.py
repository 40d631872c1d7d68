"""Recovery of blocked slots: forced clean-up and release, repair, deadlines and orphans.

A slot comes back by evidence only, never by the word of a person alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.journal import ENTITIES, Overdue, advance
from reconciler.db.rows import Record
from reconciler.db.schema import Allocation, Node, Proof, Slot, Task, allocations
from reconciler.db.schema import slots as slot_table
from reconciler.lifecycle import baremetal, gate, guest_pool, host, ingress, slices
from reconciler.lifecycle import slots as slot_life
from reconciler.lifecycle.slices import move_claims
from reconciler.model.act import Act, require_reason
from reconciler.model.bundle import run_bundle
from reconciler.model.errors import Problem
from reconciler.model.proof import NOTHING_DONE
from reconciler.model.recovery import (
    require_healthy_node,
    require_silence,
    require_slices,
    require_stuck,
)
from reconciler.model.states import (
    ENDED_ALLOCATIONS,
    UNUSED_SLOTS,
    AllocationState,
    CapacityShape,
    ProofKind,
    SlotState,
    TaskKind,
    TaskState,
)
from reconciler.records import proofs, reports
from reconciler.records import queue as task_queue
from reconciler.records.claims import fence_off, held_slots, last_holder, next_fence

FORCE_CLEANUP = "admin.allocation.force_cleanup.applied"
# Key of the recovery case that acted, in the evidence of an act and in its audit row.
CASE = "recovery_case_id"
# States without anything to recover: the slot is back, or a clean-up is under way.
SETTLED = (SlotState.AVAILABLE, SlotState.DISABLED, SlotState.CLEANUP)


def force_cleanup(
    conn: sa.Connection, allocation_id: str, act: Act, *, runtime_verified_absent: bool
) -> Record:
    """End a stuck allocation. If the operator confirms absence, its slots are cleaned up.

    Slots come back through verification and wipe. They come back at once only if the proof exists.
    """
    require_reason(act, "say why this is forced")
    with locks.allocation(conn, allocation_id) as allocation:
        held = held_slots(conn, allocation_id)
        refuse(allocation, held)
        node = rows.get(conn, Node, allocation.node_id)
        require_healthy_node(allocation.state, node.state, node.health_state)
        canceled = _cancel(conn, allocation_id, act)
        slot_act = slices.about(act, allocation_id)
        if allocation.state != AllocationState.FAILED:
            slices.fail(conn, allocation_id, slot_act, error={"code": "force_cleanup"})
        changed = [
            _recover(conn, slot, allocation_id, slot_act, runtime_verified_absent) for slot in held
        ]
        cleaning = [
            slot
            for slot, before in zip(changed, held, strict=True)
            if slot.status == SlotState.CLEANUP and before.status != SlotState.CLEANUP
        ]
        task_ids = {}
        if cleaning:
            task = queue_host_task(conn, TaskKind.SLICE_WIPE, allocation_id, cleaning, slot_act)
            task_ids = {slot.id: task.id for slot in cleaning}
        detail = {
            "runtime_verified_absent": runtime_verified_absent,
            "slots": {slot.id: slot.status for slot in changed},
            "canceled_tasks": canceled,
        }
        if CASE in act.evidence:
            detail[CASE] = act.evidence[CASE]
        journal.audit_of(conn, act, FORCE_CLEANUP, allocation, detail)
        return {
            "allocation_id": allocation_id,
            "state": AllocationState.FAILED.value,
            "runtime_verified_absent": runtime_verified_absent,
            "slots": [
                {
                    "slot_id": slot.id,
                    "slot_index": slot.slot_index,
                    "status": slot.status,
                    "task_id": task_ids.get(slot.id),
                }
                for slot in changed
            ],
            "canceled_tasks": canceled,
        }


def refuse(allocation: Allocation, held: list[Slot]) -> None:
    """Raise a Problem where a person must decide, before any task on the host."""
    releasing = any(slot.status == SlotState.RELEASING for slot in held)
    require_stuck(allocation.capacity_shape, allocation.state, releasing=releasing)


def force_release(conn: sa.Connection, allocation_id: str, act: Act) -> Allocation:
    """End the tenant's use and the billing while the host does not answer."""
    require_reason(act, "say why this is forced")
    allocation = rows.get(conn, Allocation, allocation_id, lock=True)
    node = rows.get(conn, Node, allocation.node_id, lock=True)
    unclean = node.unclean_allocation_id == allocation.id
    require_silence(allocation.state, node.state, unclean=unclean)
    act = slices.about(act, allocation_id)
    columns = {"ended_at": clock.now(), "power_action": ""}
    allocation = advance(conn, Allocation, allocation_id, "force_release", act, columns=columns)
    _cancel(conn, allocation_id, act)
    move_claims(conn, allocation_id, "finish", act)
    error = {"code": "force_release", "found": act.reason}
    for slot in held_slots(conn, allocation_id):
        if slot.status in (SlotState.ACTIVE, SlotState.RELEASING):
            slices.block(conn, slot, allocation_id, act, step="force_release", error=error)
    baremetal.left_behind(conn, allocation_id, act, step="force_release", error=error)
    ingress.end_all(conn, allocation_id, act)
    guest_pool.detach(conn, allocation_id, act)
    journal.audit_of(conn, act, "admin.allocation.force_release.applied", allocation)
    return allocation


def repair(conn: sa.Connection, slot_id: str, act: Act) -> Task:
    """Queue the clean-up of a blocked slot (verify, wipe, prove) and return its task."""
    slot = rows.get(conn, Slot, slot_id, lock=True)
    if slot.status != SlotState.CLEANUP_BLOCKED:
        raise Problem(
            "slot_not_blocked",
            expected="a slot in cleanup_blocked",
            found=str(slot.status),
            remedy="nothing to repair; disable and enable it to have its gate judged again",
        )
    host.require_slice_mode(conn, slot.node_id)
    # Back on sale under a live claim, the slot would refuse every launch placed there.
    holder = slot_life.require_claim_ended(conn, slot_id)
    journal.audit(conn, act, "admin.slot.repair", "slot", slot_id)
    act = slices.about(act, holder, act.reason or "repair")
    cleaning = [begin_cleanup(conn, slot, act)]
    return queue_host_task(conn, TaskKind.SLICE_WIPE, holder or slot_id, cleaning, act)


def verify_absence(conn: sa.Connection, allocation_id: str, act: Act) -> Task:
    """Queue the absence check for an allocation on its host."""
    held = held_slots(conn, allocation_id)
    require_slices(rows.get(conn, Allocation, allocation_id).capacity_shape)
    kind, audited = TaskKind.SLICE_ABSENCE_VERIFY, bool(act.role)
    return queue_host_task(conn, kind, allocation_id, held, act, audited=audited)


def blocked(conn: sa.Connection, node_id: str | None = None) -> list[Slot]:
    """Blocked slots. Their health detail has the keys that `slices.block` writes."""
    query = rows.where(
        sa.select(slot_table), slot_table, status=SlotState.CLEANUP_BLOCKED, node_id=node_id
    )
    return rows.every(conn, query.order_by(slot_table.c.node_id, slot_table.c.slot_index), Slot)


def expire(conn: sa.Connection, overdue: Overdue, act: Act) -> bool:
    """Apply a passed deadline. False when it is only a warning or no longer applies."""
    holder = last_holder(conn, overdue.id) if overdue.entity == "slot" else ""
    with locks.allocation(conn, holder) if holder else nullcontext():
        return _expire(conn, overdue, act, holder)


def _expire(conn: sa.Connection, overdue: Overdue, act: Act, holder: str) -> bool:
    where = ENTITIES[overdue.entity]
    record = rows.get(conn, where.kind, overdue.id, lock=True)
    if not overdue.event or getattr(record, where.state) != overdue.state:
        return False
    if getattr(record, where.deadline) != overdue.deadline_at:
        # The deadline was extended in the meantime, because a run has begun.
        return False
    error = deadline_error(overdue)
    act = act.because(f"deadline passed in {overdue.state}", {"deadline": error})
    if overdue.entity == "allocation":
        return _expire_allocation(conn, overdue.id, act, error)
    if overdue.entity == "slot":
        # A slot in provisioning or release ends with its allocation, a clean-up on its own.
        if overdue.state == SlotState.CLEANUP or not _expire_allocation(conn, holder, act, error):
            slot, act = rows.get(conn, Slot, overdue.id, lock=True), slices.about(act, holder)
            slices.block(conn, slot, holder, act, step="deadline", error=error)
    elif overdue.entity == "node":
        if any(
            (task.kind, task.state) == (TaskKind.NODE_BOOTSTRAP, TaskState.RUNNING)
            for task in task_queue.open_of_node(conn, overdue.id)
        ):
            # Its run has a deadline of its own.
            return False
        advance(conn, Node, overdue.id, overdue.event, act)
    else:
        return False
    return True


def deadline_error(overdue: Overdue) -> dict[str, str]:
    """Error document for a passed deadline."""
    return {
        "code": task_queue.DEADLINE_PASSED,
        "expected": f"{overdue.entity} {overdue.state} for a limited time",
        "found": f"still {overdue.state} after {clock.iso(overdue.deadline_at)}",
        "remedy": "read its last task (`gpuaas tasks list`); a slot that is left blocked comes back"
        " by `gpuaas recover ALLOCATION --reason WHY`",
    }


def _expire_allocation(
    conn: sa.Connection, allocation_id: str, act: Act, error: dict[str, str]
) -> bool:
    with locks.allocation(conn, allocation_id):
        _cancel(conn, allocation_id, act)
        if _expire_building(conn, allocation_id, act, error):
            return True
        return slices.release_failed(conn, allocation_id, act, step="deadline", error=error)


def _expire_building(
    conn: sa.Connection, allocation_id: str, act: Act, error: dict[str, str]
) -> bool:
    """Fail an allocation under construction. Without a started run its slots are untouched."""
    begun = task_queue.may_have_begun(conn, allocation_id)
    shape = rows.get(conn, Allocation, allocation_id).capacity_shape
    if shape == CapacityShape.BAREMETAL:
        return baremetal.provision_failed(
            conn, allocation_id, act, step="deadline", error=error, untouched=not begun
        )
    slots = [] if begun else held_slots(conn, allocation_id)
    untouched = {slot.id: NOTHING_DONE for slot in slots}
    return slices.provision_failed(
        conn, allocation_id, act, step="deadline", error=error, untouched=untouched
    )


def _cancel(conn: sa.Connection, allocation_id: str, act: Act) -> list[str]:
    open_tasks = task_queue.open_of_allocation(conn, allocation_id)
    # A clean-up under way goes on. All other tasks end.
    ended = [task.id for task in open_tasks if task.kind != TaskKind.SLICE_WIPE]
    for task_id in ended:
        task_queue.cancel(conn, task_id, act)
    return ended


def _recover(conn: sa.Connection, slot: Slot, allocation_id: str, act: Act, absent: bool) -> Slot:
    if slot.status in SETTLED:
        return slot
    if not absent:
        if slot.status != SlotState.CLEANUP_BLOCKED:
            error = {"code": "force_cleanup", "found": act.reason}
            slot = slices.block(conn, slot, allocation_id, act, step="force_cleanup", error=error)
        # From the next run on, the host refuses a run that is still alive under the old fence.
        fence_off(conn, {slot.id: slot.fence})
        return rows.get(conn, Slot, slot.id)
    proof = _proof_since_failure(conn, slot, allocation_id)
    return (
        begin_cleanup(conn, slot, act) if proof is None else gate.give_back(conn, slot, proof, act)
    )


def _proof_since_failure(conn: sa.Connection, slot: Slot, allocation_id: str) -> Proof | None:
    """The wipe proof, if absence and proof are both newer than the block."""
    if slot.status != SlotState.CLEANUP_BLOCKED:
        return None
    since = slot.status_since
    absence = reports.latest_absence(conn, allocation_id)
    proof = proofs.current(conn, slot)
    absent = absence is not None and absence.absent and (absence.observed_at or 0.0) >= since
    wiped = proof is not None and proof.kind == ProofKind.WIPE and proof.created_at >= since
    return proof if absent and wiped else None


def begin_cleanup(conn: sa.Connection, slot: Slot, act: Act) -> Slot:
    """Move the slot to `cleanup` under the next fence.

    From the first step of the clean-up on, the host refuses any run that is still alive.
    """
    return advance(conn, Slot, slot.id, "clean", act, columns={"fence": next_fence(conn, slot)})


def queue_host_task(
    conn: sa.Connection,
    kind: TaskKind,
    name: str,
    slots: list[Slot],
    act: Act,
    *,
    audited: bool = False,
) -> Task:
    """Queue a task on the host of an allocation, with slots in the form of the run contract.

    name: the allocation whose machine and traces the task is about. Without a record of it, the
    task belongs to a slot. A slot without any holder gives its own id, which names nothing on the
    host.
    """
    query = sa.select(allocations.c.id, allocations.c.node_id).where(allocations.c.id == name)
    record = rows.first(conn, query)
    parameters: dict[str, Any] = {
        "allocation": {"id": name},
        "slots": [run_bundle(vars(slot), fence=True) for slot in slots],
    }
    return task_queue.enqueue(
        conn,
        task_queue.Enqueue(
            kind=kind,
            node_id=slots[0].node_id if slots or record is None else record["node_id"],
            subject_kind="" if record else "slot",
            subject_id="" if record else slots[0].id,
            allocation_id=name if record else None,
            parameters=parameters,
            fences={slot.id: slot.fence for slot in slots},
            audited=audited,
        ),
        act,
    )


ORPHAN_STEP = "remove_orphan"
# Code of a host that refuses to clean a slot up, because another allocation has it.
LEASED = "slot_leased"


def remove_orphan(conn: sa.Connection, slot_id: str, allocation_id: str, act: Act) -> Task:
    """Queue the removal of a machine with this id from an idle slot, with wipe and verification.

    Problem `slot_in_use` while the slot is in use or waits for evidence about another allocation.
    Problem `allocation_active` before the end of the machine's allocation, and `claim_live` before
    that of the slot's last claim.
    """
    require_reason(act, gate.WHY_GIVEN_UP)
    recorded = rows.first(
        conn, sa.select(allocations.c.id).where(allocations.c.id == allocation_id)
    )
    with (
        locks.allocation(conn, allocation_id) if recorded else nullcontext() as allocation,
        locks.slot(conn, slot_id) as slot,
    ):
        return _remove_orphan(conn, slot, allocation_id, allocation, act)


def _remove_orphan(
    conn: sa.Connection, slot: Slot, allocation_id: str, allocation: Allocation | None, act: Act
) -> Task:
    if slot.status not in UNUSED_SLOTS or slot.retired_at:
        raise Problem(
            "slot_in_use",
            expected="a slot that is disabled or blocked",
            found=str(slot.status),
            remedy="disable it first; if an allocation has it, release the allocation",
        )
    if allocation is not None and allocation.state not in ENDED_ALLOCATIONS:
        raise Problem(
            "allocation_active",
            expected="an allocation that is not in the records, or has ended",
            found=f"one that is {allocation.state}",
            remedy="release it, or recover it",
        )
    # A whole machine's tenant has the disks of all slots.
    host.require_slice_mode(conn, slot.node_id)
    holder = slot_life.require_claim_ended(conn, slot.id)
    if slot.status == SlotState.CLEANUP_BLOCKED and allocation_id != holder:
        _require_orphan_block(conn, slot)
    orphan_act = act.because(act.reason, {**act.evidence, "orphan": allocation_id})
    if slot.status == SlotState.DISABLED:
        error = {"code": "orphan", "found": f"the host holds a machine of {allocation_id}"}
        slot = slices.block(conn, slot, holder, orphan_act, step=ORPHAN_STEP, error=error)
    detail = {"allocation_id": allocation_id}
    journal.audit(conn, act, "admin.slot.orphan.removed", "slot", slot.id, detail=detail)
    cleaning = [begin_cleanup(conn, slot, orphan_act)]
    return queue_host_task(conn, TaskKind.SLICE_WIPE, allocation_id, cleaning, orphan_act)


def _require_orphan_block(conn: sa.Connection, slot: Slot) -> None:
    """Refuse a blocked slot unless an orphan removal blocked it, or its host has leased it to
    another allocation since.

    A blocked slot may hold data of its last tenant, and the removal of another machine proves
    nothing about that data. A slot blocked by an orphan removal was idle before, and a host gives
    a slot only when nothing of its last tenant is left.
    """
    if slot.health_detail.get("code") == LEASED:
        return
    blocked = SlotState.CLEANUP_BLOCKED
    past = [row for row in journal.history_of(conn, "slot", slot.id) if row.target == blocked]
    first = [row for row in past if row.source != SlotState.CLEANUP]
    if first and "orphan" in first[-1].evidence:
        return
    raise Problem(
        "slot_in_use",
        expected="a slot that is disabled, or blocked by the removal of a machine like this",
        found=f"cleanup_blocked: {slot.status_reason}",
        remedy="repair the slot first; if this machine prevents that, stop the machine by hand",
    )
