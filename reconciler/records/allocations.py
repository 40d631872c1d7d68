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
_TASKS = 100
# Launches that say how long the next takes.
_NEWEST = 20


def get(conn: sa.Connection, id: str) -> Allocation:
    """The allocation with an id, its claims and the ids of its newest tasks, the oldest first."""
    allocation = rows.get(conn, Allocation, id)
    newest_first = queue.every(conn, allocation_id=id, page=Page(_TASKS))
    return replace(
        allocation,
        claims=tuple(of_allocation(conn, id)),
        task_ids=tuple(task.id for task in reversed(newest_first)),
    )


def launch_times(conn: sa.Connection, like: Allocation) -> list[float]:
    """Seconds from request to activity of the site's newest machines of the same shape and size,
    the shortest first.
    """
    columns = allocations.c
    took = columns.activated_at - columns.created_at
    query = sa.select(took).where(
        columns.activated_at.is_not(None),
        columns.capacity_shape == like.capacity_shape,
        columns.gpu_count == like.gpu_count,
    )
    newest = query.order_by(columns.activated_at.desc()).limit(_NEWEST)
    return sorted(map(float, conn.execute(newest).scalars()))


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
