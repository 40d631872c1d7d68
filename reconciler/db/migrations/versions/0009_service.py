"""Tables of service processes and of their leader."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import documents, moments, numbers, stamps, texts

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Without a row, no process leads until a process campaigns."""
    op.create_table(
        "leaders",
        sa.Column("name", sa.Text(), primary_key=True),
        *numbers("epoch"),
        *texts("holder"),
        *moments("acquired_at", "expires_at"),
    )
    op.create_table(
        "service_processes",
        sa.Column("id", sa.Text(), primary_key=True),
        *documents("roles"),
        *texts("host"),
        *numbers("pid"),
        *texts("version"),
        *stamps("started_at", "seen_at"),
    )
