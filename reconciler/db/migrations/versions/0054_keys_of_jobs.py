"""The job that a request with an idempotency key has queued."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0054"
down_revision = "0053"


def upgrade() -> None:
    op.add_column("idempotency_keys", sa.Column("job_id", sa.Text()))
    where = sa.text("job_id IS NOT NULL")
    op.create_index(
        *("ix_idempotency_keys_job", "idempotency_keys", ["job_id"]),
        sqlite_where=where,
        postgresql_where=where,
    )
