"""Runner of a task: the worker folder that has the files of its run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Existing tasks belong to no runner, so they end by their deadline and not by a guess."""
    op.add_column("tasks", sa.Column("runner", sa.Text(), nullable=False, server_default=""))
