"""Timeline of a node, an allocation or a request: state changes, run progress and audit entries.

The state changes include those of related entities.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.rows import Key, Order, Page, Record, part
from reconciler.db.schema import audit_log, history, task_events, tasks

PROGRESS, STATE, AUDIT = "progress", "state", "audit"


def latest(conn: sa.Connection) -> tuple[int | None, int | None]:
    """Numbers of the newest state change and audit entry."""
    newest = (
        sa.select(sa.func.max(table.c.id)).scalar_subquery() for table in (history, audit_log)
    )
    state, audit = conn.execute(sa.select(*newest)).one()
    return state, audit


@dataclass(frozen=True)
class _Source:
    """A table with rows of the timeline. bodies: the whole rows. of: the condition for the rows of
    a node, an allocation or a request, by the names of `of`'s arguments.
    """

    type: str
    table: sa.Table
    bodies: sa.Select[Any]
    of: Mapping[str, Callable[[str], sa.ColumnElement[bool]]]

    def places(self, given: Mapping[str, str], page: Page | None) -> sa.Select[Any]:
        """Position and type of the source's rows on a page."""
        at, id = self.table.c.at, self.table.c.id
        query = self.bodies.with_only_columns(at, sa.literal(self.type, sa.Text).label("type"), id)
        query = query.where(*(self.of[name](value) for name, value in given.items()))
        if page is None:
            return query
        if page.after:
            query = query.where(self._behind(*page.after))
        # An index has this order, so that the page's length bounds what is read.
        query = query.order_by(at.desc(), id.desc()).limit(page.limit)
        return sa.select(query.subquery())

    def _behind(self, at: Key, type: Key, id: Key) -> sa.ColumnElement[bool]:
        columns = self.table.c
        if self.type == type:
            return sa.tuple_(columns.at, columns.id) < sa.tuple_(sa.literal(at), sa.literal(id))
        return columns.at <= at if self.type < str(type) else columns.at < at


def _equals(column: sa.ColumnElement[Any]) -> Callable[[str], sa.ColumnElement[bool]]:
    return lambda value: column == value


def _audited(kind: str) -> Callable[[str], sa.ColumnElement[bool]]:
    subject = audit_log.c.subject_kind == kind
    return lambda value: sa.and_(subject, audit_log.c.subject_id == value)


_NAMES = ("node_id", "allocation_id", "correlation_id")
_SOURCES = (
    _Source(
        STATE,
        history,
        sa.select(history),
        {name: _equals(history.c[name]) for name in _NAMES},
    ),
    _Source(
        PROGRESS,
        task_events,
        sa.select(task_events, tasks.c.kind, tasks.c.node_id, tasks.c.allocation_id).join(
            tasks, tasks.c.id == task_events.c.task_id
        ),
        {name: _equals(tasks.c[name]) for name in _NAMES},
    ),
    _Source(
        AUDIT,
        audit_log,
        sa.select(audit_log),
        {
            "node_id": _audited("node"),
            "allocation_id": _audited("allocation"),
            "correlation_id": _equals(audit_log.c.correlation_id),
        },
    ),
)

ORDER = Order(
    sa.select(history.c.at, sa.literal("", sa.Text).label("type"), history.c.id).subquery(),
    ("at", "type", "id"),
    descending=True,
)


def of(
    conn: sa.Connection,
    *,
    node_id: str | None = None,
    allocation_id: str | None = None,
    correlation_id: str | None = None,
    types: Collection[str] = (STATE, PROGRESS, AUDIT),
    page: Page | None = None,
) -> list[Record]:
    """Timeline, newest first; each row has `at`, `type`, `id`, and the fields of its type."""
    values = zip(_NAMES, (node_id, allocation_id, correlation_id), strict=True)
    given = {name: value for name, value in values if value is not None}
    sources = (source.places(given, page) for source in _SOURCES if source.type in types)
    # Positions first. Bodies are read for the rows of the page only.
    every = sa.union_all(*sources).subquery()
    order = Order(every, ORDER.columns, descending=True)
    places = rows.every(conn, part(sa.select(every), order, page))
    bodies: dict[tuple[str, int], Record] = {}
    for source in _SOURCES:
        ids = [row["id"] for row in places if row["type"] == source.type]
        for body in (
            rows.every(conn, source.bodies.where(source.table.c.id.in_(ids))) if ids else ()
        ):
            bodies[source.type, body["id"]] = body
    return [{**bodies[row["type"], row["id"]], "type": row["type"]} for row in places]
