"""Index for counting a site's slots without reading the table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """The index covers all columns for the ranking of nodes."""
    approved = sa.text("retired_at IS NULL")
    op.create_index(
        "ix_slots_counts",
        "node_resource_slots",
        ["node_id", "numa_node", "status"],
        sqlite_where=approved,
        postgresql_where=approved,
    )
