"""Tasks wait for hosts that do not answer, and keep every line of their runs' progress."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Tasks from before have reached their hosts; nothing of their progress is kept twice."""
    for name in ("unreached", "progress_offset"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("tasks", column)
