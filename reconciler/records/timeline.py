"""Timeline of a node, an allocation or a request: state changes, run progress and audit entries.

The state changes include those of related entities.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.rows import Order, Page, Record, part
from reconciler.db.schema import audit_log, history, task_events, tasks

PROGRESS, STATE, AUDIT = "progress", "state", "audit"


def latest(conn: sa.Connection) -> tuple[int | None, int | None]:
    """Numbers of the newest state change and audit entry."""
    newest = (
        sa.select(sa.func.max(table.c.id)).scalar_subquery() for table in (history, audit_log)
    )
    state, audit = conn.execute(sa.select(*newest)).one()
    return state, audit


def _light(
    kind: str, table: sa.Table, node: object, allocation: object, request: object
) -> sa.Select[Any]:
    return sa.select(
        table.c.at,
        sa.literal(kind, sa.Text).label("type"),
        table.c.id,
        sa.type_coerce(node, sa.Text).label("node_id"),
        sa.type_coerce(allocation, sa.Text).label("allocation_id"),
        sa.type_coerce(request, sa.Text).label("correlation_id"),
    )


_BY_SUBJECT = {
    kind: sa.case((audit_log.c.subject_kind == kind, audit_log.c.subject_id), else_="")
    for kind in ("node", "allocation")
}
# Only the columns for filters and order. Bodies are read for the rows of a page.
_ALL = sa.union_all(
    _light(STATE, history, history.c.node_id, history.c.allocation_id, history.c.correlation_id),
    _light(
        PROGRESS, task_events, tasks.c.node_id, tasks.c.allocation_id, tasks.c.correlation_id
    ).join(tasks, tasks.c.id == task_events.c.task_id),
    _light(
        AUDIT, audit_log, _BY_SUBJECT["node"], _BY_SUBJECT["allocation"], audit_log.c.correlation_id
    ),
).subquery("timeline")

_BODIES: dict[str, tuple[sa.Table, sa.Select[Any]]] = {
    STATE: (history, sa.select(history)),
    PROGRESS: (
        task_events,
        sa.select(task_events, tasks.c.kind, tasks.c.node_id, tasks.c.allocation_id).join(
            tasks, tasks.c.id == task_events.c.task_id
        ),
    ),
    AUDIT: (audit_log, sa.select(audit_log)),
}

ORDER = Order(_ALL, ("at", "type", "id"), descending=True)


def of(
    conn: sa.Connection,
    *,
    node_id: str | None = None,
    allocation_id: str | None = None,
    correlation_id: str | None = None,
    types: Collection[str] | None = None,
    page: Page | None = None,
) -> list[Record]:
    """Timeline, newest first; each row has `at`, `type`, `id`, and the fields of its type.

    types: some of STATE, PROGRESS and AUDIT; all by default.
    """
    page_query = sa.select(_ALL)
    if types is not None:
        page_query = page_query.where(_ALL.c.type.in_(types))
    for name, value in (
        ("node_id", node_id),
        ("allocation_id", allocation_id),
        ("correlation_id", correlation_id),
    ):
        if value is not None:
            page_query = page_query.where(_ALL.c[name] == value)
    places = rows.every(conn, part(page_query, ORDER, page))
    bodies: dict[tuple[str, int], Record] = {}
    for kind, (table, query) in _BODIES.items():
        ids = [row["id"] for row in places if row["type"] == kind]
        for body in rows.every(conn, query.where(table.c.id.in_(ids))):
            bodies[kind, body["id"]] = body
    return [{**bodies[row["type"], row["id"]], "type": row["type"]} for row in places]
