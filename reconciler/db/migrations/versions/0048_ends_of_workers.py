"""Whose jobs a worker of a pool held when it ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    column = sa.Column("ended_with", sa.Text(), nullable=False, server_default="")
    op.add_column("pool_workers", column)
