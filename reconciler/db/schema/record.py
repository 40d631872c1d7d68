"""Tables of state history, outbox and audit log. Triggers make history and audit append-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    metadata,
    moment,
    number,
    row_of,
    sequence,
    stamp,
    text,
)

history = sa.Table(
    "state_history",
    metadata,
    sequence(),
    stamp("at"),
    text("entity", None),
    text("entity_id", None),
    text("source"),
    text("event", None),
    text("target", None),
    number("generation"),
    text("actor", None),
    text("reason"),
    document("evidence"),
    text("correlation_id"),
    text("node_id"),
    text("allocation_id"),
    sa.Index("ix_state_history_entity", "entity", "entity_id"),
    sa.Index("ix_state_history_node_id", "node_id"),
    sa.Index("ix_state_history_allocation_id", "allocation_id"),
    sa.Index("ix_state_history_correlation_id", "correlation_id"),
)

outbox = sa.Table(
    "outbox",
    metadata,
    sequence(),
    stamp("at"),
    text("topic", None),
    text("subject_kind", None),
    text("subject_id", None),
    text("node_id"),
    text("project_id"),
    document("payload"),
    text("correlation_id"),
    moment("published_at"),
    sa.Index(
        "ix_outbox_pending",
        "id",
        sqlite_where=sa.text("published_at IS NULL"),
        postgresql_where=sa.text("published_at IS NULL"),
    ),
)

audit_log = sa.Table(
    "audit_log",
    metadata,
    sequence(),
    stamp("at"),
    text("actor", None),
    text("role"),
    text("action", None),
    text("subject_kind", None),
    text("subject_id", None),
    text("project_id"),
    text("reason"),
    document("detail"),
    text("correlation_id"),
    sa.Index("ix_audit_log_subject_id", "subject_id"),
    sa.Index("ix_audit_log_action", "action"),
    sa.Index("ix_audit_log_correlation_id", "correlation_id"),
)


@row_of(history, "state_change")
@dataclass(frozen=True, kw_only=True)
class StateChange(Row):
    """A change of state."""

    id: int
    at: float
    entity: str
    entity_id: str
    source: str
    event: str
    target: str
    generation: int
    actor: str
    reason: str
    evidence: dict[str, Any]
    correlation_id: str
    node_id: str
    allocation_id: str


@row_of(audit_log, "audit_entry")
@dataclass(frozen=True, kw_only=True)
class AuditEntry(Row):
    """An administrative act."""

    id: int
    at: float
    actor: str
    role: str
    action: str
    subject_kind: str
    subject_id: str
    project_id: str
    reason: str
    detail: dict[str, Any]
    correlation_id: str


@row_of(outbox, "event")
@dataclass(frozen=True, kw_only=True)
class OutboxEvent(Row):
    """An event for subscribers."""

    id: int
    at: float
    topic: str
    subject_kind: str
    subject_id: str
    node_id: str
    project_id: str
    payload: dict[str, Any]
    correlation_id: str
    published_at: float | None
