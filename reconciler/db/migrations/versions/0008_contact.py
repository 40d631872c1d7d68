"""Waiting for unreachable hosts, and the offset of stored progress of a run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Existing tasks have reached their hosts; their progress starts at offset 0."""
    for name in ("unreached", "progress_offset"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("tasks", column)
