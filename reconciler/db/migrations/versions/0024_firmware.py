"""Firmware of a node before a tenant was root on it, and its differences since.

Of machines that have or had a tenant, nothing was recorded before.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0024"
down_revision = "0023"

DOCUMENT = sa.JSON(none_as_null=True).with_variant(
    postgresql.JSONB(none_as_null=True), "postgresql"
)


def upgrade() -> None:
    op.add_column("nodes", sa.Column("firmware_before", DOCUMENT, nullable=True))
    op.add_column(
        "nodes", sa.Column("firmware_differences", DOCUMENT, nullable=False, server_default="[]")
    )
    nodes = sa.table(
        "nodes",
        sa.column("id"),
        sa.column("tenant_machine_ids", DOCUMENT),
        sa.column("firmware_before", DOCUMENT),
    )
    conn = op.get_bind()
    marks = sa.select(nodes.c.id, nodes.c.tenant_machine_ids)
    for node_id, machine_ids in conn.execute(marks).all():
        if machine_ids:
            marked = sa.update(nodes).where(nodes.c.id == node_id)
            conn.execute(marked.values(firmware_before={}))
