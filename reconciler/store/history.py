"""The past of everything that has states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.store import rows
from reconciler.store.paging import Order, Page, part
from reconciler.store.rows import Record
from reconciler.store.tables import history

ORDER = Order(history, ("id",), descending=True)


def write(
    conn: sa.Connection,
    entity: str,
    record: Mapping[str, Any],
    act: Act,
    *,
    source: str,
    event: str,
    target: str,
) -> None:
    """One row per change, with who, why and on what evidence."""
    own = str(record["id"])
    rows.tell(
        conn,
        history,
        {
            "entity": entity,
            "entity_id": own,
            "source": source,
            "event": event,
            "target": target,
            "generation": record["generation"],
            "actor": act.actor,
            "reason": act.why,
            "evidence": dict(act.evidence),
            "correlation_id": act.correlation_id,
            "node_id": own if entity.startswith("node") else record.get("node_id") or "",
            "allocation_id": own
            if entity == "allocation"
            else record.get("allocation_id") or act.evidence.get("allocation_id") or "",
        },
    )


def of(conn: sa.Connection, entity: str, key: str) -> list[Record]:
    """Oldest first."""
    query = sa.select(history).where(history.c.entity == entity, history.c.entity_id == key)
    return rows.every(conn, query.order_by(history.c.id))


def newest(conn: sa.Connection, entity: str, key: str, page: Page) -> list[Record]:
    """A page of it, newest first."""
    query = sa.select(history).where(history.c.entity == entity, history.c.entity_id == key)
    return rows.every(conn, part(query, ORDER, page))
