"""What a run works on may stay in its state for as long as the run may take."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.domain.states import TaskState
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, claims, slots
from reconciler.store.tasks import GRACE_S

# After the run's task has been given up, which blocks the slots itself and says why.
_AFTER_S = 2 * GRACE_S


def follow(conn: sa.Connection, task: Record) -> None:
    """Put off the deadlines of a begun task's allocation, claims and slots behind its own.

    Eight disks are wiped one after another, and some controllers take hours over one: a limit that
    knows only of the state would block a slot whose run is doing well. Never for work that only
    waits: it would wait for ever. The task's deadline is set once for each run, so a second look at
    the same run moves nothing.
    """
    if task["state"] != TaskState.RUNNING:
        return
    until = task["deadline_at"] + _AFTER_S
    if task["allocation_id"]:
        _put_off(conn, allocations, until, allocations.c.id == task["allocation_id"])
        _put_off(conn, claims, until, claims.c.allocation_id == task["allocation_id"])
    for slot_id, fence in sorted(task["fences"].items()):
        _put_off(conn, slots, until, slots.c.id == slot_id, slots.c.fence == fence)


def _put_off(
    conn: sa.Connection, table: sa.Table, until: float, *only: sa.ColumnElement[bool]
) -> None:
    # States without a limit have no deadline, and keep none.
    later = sa.update(table).where(*only, table.c.deadline_at < until)
    conn.execute(later.values(deadline_at=until))
