"""Indexes for the candidate nodes of a launch, without counting all slots of the site."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_APPROVED = "retired_at IS NULL"


def upgrade() -> None:
    """Replace the common index by an index of free slots and an index of slots in use."""
    _index("ix_slots_free", f"{_APPROVED} AND status = 'available'", "node_id", "numa_node")
    _index("ix_slots_busy", f"{_APPROVED} AND status NOT IN ('available', 'disabled')", "node_id")
    op.drop_index("ix_slots_counts", "node_resource_slots")


def _index(name: str, where: str, *columns: str) -> None:
    condition = sa.text(where)
    op.create_index(
        name,
        "node_resource_slots",
        list(columns),
        sqlite_where=condition,
        postgresql_where=condition,
    )
