"""Allocations with their claims and tasks: reading."""

from __future__ import annotations

from dataclasses import replace

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Allocation, allocations
from reconciler.model.states import AllocationState
from reconciler.records import queue
from reconciler.records.claims import of_allocation

ORDER = Order(allocations, ("created_at", "id"), descending=True)


def get(conn: sa.Connection, id: str) -> Allocation:
    """The allocation with an id, its claims and the ids of its tasks, the oldest first."""
    allocation = rows.get(conn, Allocation, id)
    newest_first = queue.every(conn, allocation_id=id)
    return replace(
        allocation,
        claims=tuple(of_allocation(conn, id)),
        task_ids=tuple(task.id for task in reversed(newest_first)),
    )


def every(
    conn: sa.Connection,
    *,
    project_id: str | None = None,
    state: AllocationState | None = None,
    node_id: str | None = None,
    page: Page | None = None,
) -> list[Allocation]:
    """Allocations without claims, newest first."""
    query = rows.where(
        sa.select(allocations), allocations, project_id=project_id, state=state, node_id=node_id
    )
    return rows.every(conn, part(query, ORDER, page), Allocation)
