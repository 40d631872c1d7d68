"""Inference jobs and their workers."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0037"
down_revision = "0036"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
RESULT = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def _columns(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _times(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Double()) for name in names]


def upgrade() -> None:
    op.create_table(
        "orchestrator_jobs",
        *_columns(sa.Text(), "id", "project_id", "model"),
        *_columns(DOCUMENT, "input"),
        *_columns(sa.BigInteger(), "priority"),
        *_columns(sa.Text(), "status"),
        *_columns(sa.BigInteger(), "attempts", "max_attempts", "lost", "timeout_s"),
        *_times("not_before"),
        *_columns(sa.Text(), "token", "worker"),
        *_times("lease_expires_at"),
        sa.Column("result", RESULT),
        *_columns(DOCUMENT, "error"),
        *_columns(sa.BigInteger(), "size"),
        *_columns(sa.Text(), "requested_by", "correlation_id"),
        *_columns(sa.Double(), "enqueued_at"),
        *_times("started_at"),
        *_columns(sa.Double(), "updated_at"),
        *_times("reprocessed_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orchestrator_jobs")),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_orchestrator_jobs_project_id")
        ),
        sa.CheckConstraint(
            "status IN ('pending', 'running', 'done', 'dead_letter', 'canceled')",
            name="status",
        ),
    )
    for name, columns, condition in (
        (
            "due",
            ["model", "project_id", "priority", "enqueued_at"],
            "status = 'pending' AND not_before IS NULL",
        ),
        ("delayed", ["not_before"], "status = 'pending' AND not_before IS NOT NULL"),
        ("running", ["lease_expires_at", "project_id"], "status = 'running'"),
        ("ended", ["updated_at"], "status IN ('done', 'dead_letter', 'canceled')"),
    ):
        where = sa.text(condition)
        op.create_index(
            f"ix_orchestrator_jobs_{name}",
            "orchestrator_jobs",
            columns,
            sqlite_where=where,
            postgresql_where=where,
        )
    op.create_index(
        "ix_orchestrator_jobs_project",
        "orchestrator_jobs",
        ["project_id", "enqueued_at", "id", "status", "size"],
    )
    op.create_table(
        "pool_workers",
        *_columns(sa.Text(), "id", "host"),
        *_columns(sa.BigInteger(), "pid"),
        *_columns(DOCUMENT, "models"),
        *_columns(sa.Double(), "started_at", "beat_at"),
        *_times("ended_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pool_workers")),
    )
