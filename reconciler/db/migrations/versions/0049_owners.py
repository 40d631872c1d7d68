"""Owners of SSH keys, launches and tickets for terminals."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"


def upgrade() -> None:
    for table in ("allocations", "ssh_keys", "terminal_tickets"):
        op.add_column(table, sa.Column("owner", sa.Text(), nullable=False, server_default=""))
