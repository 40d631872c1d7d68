"""Who used which power, and why. Rows are added, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.store import rows
from reconciler.store.paging import Order, Page, part
from reconciler.store.rows import Record
from reconciler.store.tables import audit_log

ORDER = Order(audit_log, ("id",), descending=True)


def write(
    conn: sa.Connection,
    act: Act,
    action: str,
    subject_kind: str,
    subject_id: str,
    *,
    detail: Mapping[str, Any] | None = None,
    project_id: str = "",
) -> None:
    """In the same transaction as what it tells of."""
    rows.tell(
        conn,
        audit_log,
        {
            "actor": act.actor,
            "role": act.role,
            "action": action,
            "subject_kind": subject_kind,
            "subject_id": subject_id,
            "project_id": project_id,
            "reason": act.why,
            "detail": dict(detail or {}),
            "correlation_id": act.correlation_id,
        },
    )


def every(
    conn: sa.Connection,
    *,
    action: str | None = None,
    subject_id: str | None = None,
    correlation_id: str | None = None,
    page: Page | None = None,
) -> list[Record]:
    """Newest first."""
    query = rows.where(
        sa.select(audit_log),
        audit_log,
        action=action,
        subject_id=subject_id,
        correlation_id=correlation_id,
    )
    return rows.every(conn, part(query, ORDER, page))
