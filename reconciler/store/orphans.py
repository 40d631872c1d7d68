"""What a host holds of an allocation that no record knows, as after a restore from a backup.

It is never removed by itself: the records may be what is wrong. A person names the slot and the
allocation, and answers for it.
"""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.domain.act import Act, require_reason
from reconciler.domain.errors import Problem
from reconciler.domain.states import AllocationState, SlotState
from reconciler.store import audit, cleanup, history, order, outcomes, rows, writeoff
from reconciler.store.claims import last_holder
from reconciler.store.rows import Record
from reconciler.store.tables import allocations

STEP = "remove_orphan"
_ENDED = (AllocationState.RELEASED, AllocationState.FAILED)


def remove(conn: sa.Connection, slot_id: str, allocation_id: str, act: Act) -> Record:
    """Clean one idle slot of a machine with this id: remove it, wipe, verify. The task.

    Problem `slot_in_use` while somebody has the slot, or while it waits for evidence about another
    allocation, `allocation_active` when the machine is that of one which has not ended.
    """
    require_reason(act, writeoff.WHY)
    known = rows.first(conn, sa.select(allocations).where(allocations.c.id == allocation_id))
    if known is not None:
        known = order.hold_allocation(conn, allocation_id)
    slot = order.hold_slot(conn, slot_id)
    if slot["status"] not in (SlotState.DISABLED, SlotState.CLEANUP_BLOCKED) or slot["retired_at"]:
        raise Problem(
            "slot_in_use",
            409,
            expected="a slot that is disabled or blocked",
            found=str(slot["status"]),
            remedy="disable it first; what a known tenant has is released",
        )
    if known is not None and known["state"] not in _ENDED:
        raise Problem(
            "allocation_active",
            409,
            expected="an allocation that is not in the records, or has ended",
            found=f"one that is {known['state']}",
            remedy="release it, or recover it",
        )
    holder = last_holder(conn, slot_id)
    if slot["status"] == SlotState.CLEANUP_BLOCKED and allocation_id != holder:
        _require_ours(conn, slot)
    own = act.because(act.reason, {**act.evidence, "orphan": allocation_id})
    if slot["status"] == SlotState.DISABLED:
        error = {"code": "orphan", "found": f"the host holds a machine of {allocation_id}"}
        slot = outcomes.block(conn, slot, holder, own, step=STEP, error=error)
    detail = {"allocation_id": allocation_id}
    audit.write(conn, act, "admin.slot.orphan.removed", "slot", slot_id, detail=detail)
    return cleanup.wipe(conn, allocation_id, [cleanup.begin(conn, slot, own)], own)


def _require_ours(conn: sa.Connection, slot: Record) -> None:
    """A slot that is blocked may hold what its last tenant left, of which the removal of another
    machine proves nothing. It does not where such a removal blocked it: it was idle before.
    """
    blocked = SlotState.CLEANUP_BLOCKED
    past = [row for row in history.of(conn, "slot", slot["id"]) if row["target"] == blocked]
    first = [row for row in past if row["source"] != SlotState.CLEANUP]
    if first and "orphan" in first[-1]["evidence"]:
        return
    raise Problem(
        "slot_in_use",
        409,
        expected="a slot that is disabled, or blocked by the removal of a machine like this",
        found=f"cleanup_blocked: {slot['status_reason']}",
        remedy="repair the slot first; if this machine keeps that from its end, stop it by hand",
    )
