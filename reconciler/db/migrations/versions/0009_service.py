"""Processes of the service say that they live, and one of them at a time leads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import documents, moments, numbers, stamps, texts

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Nobody leads until somebody campaigns."""
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
