"""Counts of a project's jobs, an index of them without what changes, digests of models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0046"
down_revision = "0045"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    digests = sa.Column("digests", DOCUMENT, nullable=False, server_default="{}")
    op.add_column("worker_pools", digests)
    op.create_table(
        "job_counts",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "project_id")),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("open_jobs", "done", "dead_letter", "canceled", "size")
        ),
        sa.Column("spent", sa.Double(), nullable=False),
        sa.Column("spent_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_counts")),
    )
    op.create_index("ix_job_counts_project_id", "job_counts", ["project_id"])
    # The id of the project is that of its first row.
    op.execute(
        "INSERT INTO job_counts (id, project_id, open_jobs, done, dead_letter, canceled, size,"
        " spent) SELECT project_id, project_id,"
        " sum(CASE WHEN status IN ('pending', 'running') THEN 1 ELSE 0 END),"
        " sum(CASE WHEN status = 'done' THEN 1 ELSE 0 END),"
        " sum(CASE WHEN status = 'dead_letter' THEN 1 ELSE 0 END),"
        " sum(CASE WHEN status = 'canceled' THEN 1 ELSE 0 END), sum(size), 0"
        " FROM orchestrator_jobs GROUP BY project_id"
    )
    op.drop_index("ix_orchestrator_jobs_project", "orchestrator_jobs")
    mine = ["project_id", "enqueued_at", "id"]
    op.create_index("ix_orchestrator_jobs_project", "orchestrator_jobs", mine)
    for name, columns, condition in (
        ("dead", mine, "status = 'dead_letter'"),
        ("reprocessed", ["project_id", "reprocessed_at"], "reprocessed_at IS NOT NULL"),
    ):
        where = sa.text(condition)
        op.create_index(
            *(f"ix_orchestrator_jobs_{name}", "orchestrator_jobs", columns),
            sqlite_where=where,
            postgresql_where=where,
        )
