"""What is written with every change and never changed again (triggers see to it)."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.db.schema.base import document, metadata, moment, number, sequence, stamp, text

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
