"""Tables of projects, nodes and tokens, and the logs of every change."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import (
    SEQUENCE,
    documents,
    flags,
    moments,
    numbers,
    one_of,
    optional,
    points,
    stamps,
    texts,
)

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Tables in the order in which they refer to each other."""
    _projects()
    _nodes()
    _api_tokens()
    _enrolment_tokens()
    _node_certificates()
    _idempotency_keys()
    _settings()
    _state_history()
    _outbox()
    _audit_log()


def _projects() -> None:
    op.create_table(
        "projects",
        *texts("id", "name"),
        *stamps("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("name", name="uq_projects_name"),
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        *texts("id", "name", "address"),
        *numbers("port"),
        *texts("ssh_user", "region", "pool", "profile", "mode", "mode_reason"),
        *stamps("mode_since"),
        *moments("mode_deadline_at"),
        *texts("state", "state_reason"),
        *stamps("state_since"),
        *moments("deadline_at"),
        *numbers("generation"),
        *flags("slice_scheduling"),
        *texts("health_state"),
        *documents("health_detail"),
        *texts("machine_id", "host_key", "boot_id", "install_id"),
        *flags("reboot_required"),
        *moments("last_contact_at"),
        *stamps("created_at"),
        one_of("ck_nodes_health_state", "health_state", "unknown healthy degraded failed"),
        one_of(
            "ck_nodes_mode",
            "mode",
            "baremetal converting_to_slice slice converting_to_baremetal",
        ),
        one_of(
            "ck_nodes_state",
            "state",
            "enrolling bootstrapping ready draining maintenance unreachable retired",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_nodes"),
        sa.UniqueConstraint("id", "mode", name="uq_nodes_id_mode"),
        sa.UniqueConstraint("name", name="uq_nodes_name"),
    )


def _api_tokens() -> None:
    op.create_table(
        "api_tokens",
        *texts("id", "name", "hash", "role"),
        *optional("project_id", "node_id"),
        *stamps("created_at"),
        *moments("expires_at", "revoked_at"),
        one_of("ck_api_tokens_role", "role", "platform-admin project-member node"),
        points("fk_api_tokens_node_id", "node_id", "nodes"),
        points("fk_api_tokens_project_id", "project_id", "projects"),
        sa.PrimaryKeyConstraint("id", name="pk_api_tokens"),
        sa.UniqueConstraint("hash", name="uq_api_tokens_hash"),
    )


def _enrolment_tokens() -> None:
    op.create_table(
        "enrolment_tokens",
        *texts("id", "hash", "node_id"),
        *stamps("created_at"),
        *moments("expires_at", "used_at"),
        *documents("used_by"),
        points("fk_enrolment_tokens_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_enrolment_tokens"),
        sa.UniqueConstraint("hash", name="uq_enrolment_tokens_hash"),
    )


def _node_certificates() -> None:
    op.create_table(
        "node_certificates",
        *texts("id", "node_id", "serial", "public_key", "certificate"),
        *documents("principals"),
        *moments("valid_until", "revoked_at"),
        *stamps("created_at"),
        points("fk_node_certificates_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_node_certificates"),
    )
    op.create_index("ix_node_certificates_node_id", "node_certificates", ["node_id"])


def _idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        *texts("scope", "key", "fingerprint", "holder"),
        *moments("expires_at", "completed_at"),
        *numbers("status"),
        *documents("body"),
        *stamps("created_at"),
        sa.PrimaryKeyConstraint("scope", "key", name="pk_idempotency_keys"),
    )


def _settings() -> None:
    op.create_table(
        "settings",
        *texts("name"),
        *documents("value"),
        *stamps("changed_at"),
        sa.PrimaryKeyConstraint("name", name="pk_settings"),
    )


def _state_history() -> None:
    op.create_table(
        "state_history",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *stamps("at"),
        *texts("entity", "entity_id", "source", "event", "target"),
        *numbers("generation"),
        *texts("actor", "reason"),
        *documents("evidence"),
        *texts("correlation_id", "node_id", "allocation_id"),
        sa.PrimaryKeyConstraint("id", name="pk_state_history"),
    )
    op.create_index("ix_state_history_allocation_id", "state_history", ["allocation_id"])
    op.create_index("ix_state_history_entity", "state_history", ["entity", "entity_id"])
    op.create_index("ix_state_history_node_id", "state_history", ["node_id"])


def _outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *stamps("at"),
        *texts("topic", "subject_kind", "subject_id", "node_id", "project_id"),
        *documents("payload"),
        *texts("correlation_id"),
        *moments("published_at"),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
    )
    pending = sa.text("published_at IS NULL")
    op.create_index(
        "ix_outbox_pending", "outbox", ["id"], sqlite_where=pending, postgresql_where=pending
    )


def _audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *stamps("at"),
        *texts("actor", "role", "action", "subject_kind", "subject_id", "project_id", "reason"),
        *documents("detail"),
        *texts("correlation_id"),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_index("ix_audit_log_action", "audit_log", ["action"])
    op.create_index("ix_audit_log_subject_id", "audit_log", ["subject_id"])
