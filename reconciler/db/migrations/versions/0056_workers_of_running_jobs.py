"""The worker in the index of running jobs, so that a claim counts without reading inputs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0056"
down_revision = "0055"


def upgrade() -> None:
    index, table, where = "ix_orchestrator_jobs_running", "orchestrator_jobs", "status = 'running'"
    op.drop_index(index, table)
    op.create_index(
        *(index, table, ["lease_expires_at", "project_id", "worker"]),
        sqlite_where=sa.text(where),
        postgresql_where=sa.text(where),
    )
