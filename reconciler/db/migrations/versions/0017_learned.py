"""Time at which a node's boot was learned, because reports that began earlier are not trusted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """The time is unknown for existing nodes, so their next report is trusted."""
    op.add_column("nodes", sa.Column("boot_learned_at", sa.Double()))
