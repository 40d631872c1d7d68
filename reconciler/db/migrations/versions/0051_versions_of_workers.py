"""The version of the program that a worker runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0051"
down_revision = "0050"


def upgrade() -> None:
    column = sa.Column("version", sa.Text(), nullable=False, server_default="")
    op.add_column("pool_workers", column)
