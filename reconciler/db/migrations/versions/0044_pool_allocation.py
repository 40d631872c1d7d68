"""Pools whose workers run in a slice: the allocation, and the host of their records."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"


def upgrade() -> None:
    # Alembic adds no constraint to a table of SQLite, which takes this one with its column.
    op.execute(
        "ALTER TABLE worker_pools ADD COLUMN allocation_id TEXT"
        " CONSTRAINT fk_worker_pools_allocation_id REFERENCES allocations (id)"
    )
    condition = sa.text("allocation_id IS NOT NULL")
    op.create_index(
        *("uq_worker_pools_allocation_id", "worker_pools", ["allocation_id"]),
        unique=True,
        sqlite_where=condition,
        postgresql_where=condition,
    )
    # As the host `remote`, it reports nothing, so no other pool is placed there.
    op.execute(
        "INSERT INTO pool_hosts (id, name, boot_id, memory_bytes, memory_used_bytes, isolation,"
        " models, devices, seen_at)"
        " VALUES ('allocation', 'allocation', '', 0, 0, '', '[]', '[]', 0)"
    )
