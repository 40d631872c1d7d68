"""A relay of the outbox, as contracts/asyncapi.yaml describes it."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import OutboxEvent, outbox


def pending_events(conn: sa.Connection, limit: int = 10_000) -> list[OutboxEvent]:
    """Unpublished events, oldest first."""
    query = sa.select(outbox).where(outbox.c.published_at.is_(None))
    return rows.every(conn, query.order_by(outbox.c.id).limit(limit), OutboxEvent)


def mark_published(conn: sa.Connection, ids: Sequence[int]) -> None:
    update = sa.update(outbox).where(outbox.c.id.in_(ids), outbox.c.published_at.is_(None))
    conn.execute(update.values(published_at=clock.now()))
