"""The newest report of each kind: what a host showed last, as the gate reads it."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.store import rows
from reconciler.store.rows import Record
from reconciler.store.tables import discoveries, parities


def latest(conn: sa.Connection, node_id: str) -> Record | None:
    """The node's newest discovery."""
    query = sa.select(discoveries).where(discoveries.c.node_id == node_id)
    return rows.first(conn, query.order_by(discoveries.c.id.desc()))


def latest_parity(conn: sa.Connection, node_id: str, intent: str = "slice") -> Record | None:
    """The node's newest parity report for an intent."""
    query = sa.select(parities).where(parities.c.node_id == node_id, parities.c.intent == intent)
    return rows.first(conn, query.order_by(parities.c.id.desc()))
