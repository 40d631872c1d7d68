"""Events to be told to others, written with the change that they tell of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.store import clock, rows
from reconciler.store.rows import Record
from reconciler.store.tables import outbox


def add(
    conn: sa.Connection,
    topic: str,
    subject_kind: str,
    subject_id: str,
    *,
    payload: Mapping[str, Any],
    node_id: str = "",
    project_id: str = "",
    correlation_id: str = "",
) -> None:
    """Say it when, and only when, this transaction commits."""
    rows.tell(
        conn,
        outbox,
        {
            "topic": topic,
            "subject_kind": subject_kind,
            "subject_id": subject_id,
            "node_id": node_id,
            "project_id": project_id,
            "payload": dict(payload),
            "correlation_id": correlation_id,
        },
    )


def pending(conn: sa.Connection, limit: int = 100) -> list[Record]:
    """What no relay has taken yet, oldest first."""
    query = sa.select(outbox).where(outbox.c.published_at.is_(None))
    return rows.every(conn, query.order_by(outbox.c.id).limit(limit))


def published(conn: sa.Connection, ids: Sequence[int]) -> None:
    """The relay has delivered these. Delivered twice is possible, never is not."""
    conn.execute(
        sa.update(outbox)
        .where(outbox.c.id.in_(ids), outbox.c.published_at.is_(None))
        .values(published_at=clock.now())
    )
