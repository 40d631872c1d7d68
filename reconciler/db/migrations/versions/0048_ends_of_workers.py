"""Columns for the end of a worker: the projects and the jobs of that moment."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    column = sa.Column("ended_with", sa.Text(), nullable=False, server_default="")
    op.add_column("pool_workers", column)
    op.add_column("orchestrator_jobs", sa.Column("taken_from", sa.Text()))
    _index("ix_orchestrator_jobs_taken", "orchestrator_jobs", "taken_from", "taken_from")
    _index("ix_pool_workers_ended", "pool_workers", "pool_id", "ended_at")


def _index(name: str, table: str, column: str, present: str) -> None:
    where = sa.text(f"{present} IS NOT NULL")
    op.create_index(name, table, [column], sqlite_where=where, postgresql_where=where)
