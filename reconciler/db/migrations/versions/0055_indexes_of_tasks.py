"""Indexes for queries of every few seconds: deadlines, and the last tasks of a node."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0055"
down_revision = "0054"


def upgrade() -> None:
    where = sa.text("deadline_at IS NOT NULL")
    for table in ("tasks", "allocations"):
        op.create_index(
            *(f"ix_{table}_deadline_at", table, ["deadline_at"]),
            sqlite_where=where,
            postgresql_where=where,
        )
    op.drop_index("ix_tasks_node_id", "tasks")
    op.create_index("ix_tasks_node_id", "tasks", ["node_id", "finished_at"])
