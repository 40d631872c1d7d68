"""Tokens of pools whose workers reach the service by its API only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0042"
down_revision = "0041"


def upgrade() -> None:
    op.add_column(
        "worker_pools", sa.Column("token_hash", sa.Text(), nullable=False, server_default="")
    )
    op.add_column("worker_pools", sa.Column("token_expires_at", sa.Double()))
    condition = sa.text("token_hash <> ''")
    op.create_index(
        *("uq_worker_pools_token_hash", "worker_pools", ["token_hash"]),
        unique=True,
        sqlite_where=condition,
        postgresql_where=condition,
    )
    # It reports nothing, so no other pool is placed there.
    op.execute(
        "INSERT INTO pool_hosts (id, name, boot_id, memory_bytes, memory_used_bytes, isolation,"
        " models, devices, seen_at) VALUES ('remote', 'remote', '', 0, 0, '', '[]', '[]', 0)"
    )
