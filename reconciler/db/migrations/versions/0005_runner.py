"""A task remembers in whose folder its run is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Tasks from before belong to no runner: they end by their deadline, not by a guess."""
    op.add_column("tasks", sa.Column("runner", sa.Text(), nullable=False, server_default=""))
