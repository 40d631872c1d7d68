"""Tables of state history, outbox and audit log. Triggers make history and audit append-only."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import Number, Row, Text, partial, table


@table(
    "state_history",
    "state_change",
    sa.Index("ix_state_history_entity", "entity", "entity_id"),
    sa.Index("ix_state_history_node_id", "node_id"),
    sa.Index("ix_state_history_allocation_id", "allocation_id"),
    sa.Index("ix_state_history_correlation_id", "correlation_id"),
)
class StateChange(Row):
    """A change of state."""

    id: int
    at: float
    entity: str
    entity_id: str
    source: Text
    event: str
    target: str
    generation: Number
    actor: str
    reason: Text
    evidence: dict[str, Any]
    correlation_id: Text
    node_id: Text
    allocation_id: Text


@table("outbox", "event", partial("ix_outbox_pending", "id", where="published_at IS NULL"))
class OutboxEvent(Row):
    """An event for subscribers."""

    id: int
    at: float
    topic: str
    subject_kind: str
    subject_id: str
    node_id: Text
    project_id: Text
    payload: dict[str, Any]
    correlation_id: Text
    published_at: float | None


@table(
    "audit_log",
    "audit_entry",
    sa.Index("ix_audit_log_subject_id", "subject_id"),
    sa.Index("ix_audit_log_action", "action"),
    sa.Index("ix_audit_log_correlation_id", "correlation_id"),
)
class AuditEntry(Row):
    """An administrative act."""

    id: int
    at: float
    actor: str
    role: Text
    action: str
    subject_kind: str
    subject_id: str
    project_id: Text
    reason: Text
    detail: dict[str, Any]
    correlation_id: Text


history = StateChange.TABLE
outbox = OutboxEvent.TABLE
audit_log = AuditEntry.TABLE
