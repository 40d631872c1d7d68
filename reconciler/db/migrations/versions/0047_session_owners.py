"""Owners of sessions through the gateway."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    op.add_column("ssh_sessions", sa.Column("owner", sa.Text(), nullable=False, server_default=""))
    op.execute("UPDATE ssh_sessions SET owner = actor")
