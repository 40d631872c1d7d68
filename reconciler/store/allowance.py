"""What a run works on may stay in its state for as long as the run may take."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.store import clock
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, claims, slots
from reconciler.store.tasks import GRACE_S, SETTLE_S

# After the run's task has been given up, which blocks the slots itself and says why.
_AFTER_S = SETTLE_S + 2 * GRACE_S


def allow(conn: sa.Connection, task: Record, seconds: int) -> None:
    """Put off the deadlines of the task's allocation, claims and slots behind its run's.

    Eight disks are wiped one after another, and some controllers take hours over one: a limit that
    knows only of the state would block a slot whose run is doing well.
    """
    until = clock.now() + seconds + _AFTER_S
    if task["allocation_id"]:
        _put_off(conn, allocations, until, allocations.c.id == task["allocation_id"])
        _put_off(conn, claims, until, claims.c.allocation_id == task["allocation_id"])
    for slot_id, fence in sorted(task["fences"].items()):
        _put_off(conn, slots, until, slots.c.id == slot_id, slots.c.fence == fence)


def _put_off(conn: sa.Connection, table: sa.Table, until: Any, *only: Any) -> None:
    # States without a limit have no deadline, and keep none.
    conn.execute(
        sa.update(table).where(*only, table.c.deadline_at < until).values(deadline_at=until)
    )
