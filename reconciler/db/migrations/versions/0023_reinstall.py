"""Machine ids that a node had under a tenant with root; not empty: a reinstall is required.

Nothing shows that a machine was installed anew since its last tenant, so each that had one is
marked.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column(
        "nodes", sa.Column("tenant_machine_ids", DOCUMENT, nullable=False, server_default="[]")
    )
    nodes = sa.table(
        "nodes", sa.column("id"), sa.column("machine_id"), sa.column("tenant_machine_ids", DOCUMENT)
    )
    claims = sa.table(
        "allocation_resource_claims",
        *map(sa.column, ("node_id", "kind", "allocation_id")),
    )
    tasks = sa.table("tasks", *map(sa.column, ("allocation_id", "kind", "started_at")))
    begun = sa.exists().where(
        claims.c.node_id == nodes.c.id,
        claims.c.kind == "node_exclusive",
        tasks.c.allocation_id == claims.c.allocation_id,
        tasks.c.kind == "baremetal.provision",
        tasks.c.started_at.is_not(None),
    )
    conn = op.get_bind()
    for node_id, machine_id in conn.execute(sa.select(nodes.c.id, nodes.c.machine_id).where(begun)):
        marked = sa.update(nodes).where(nodes.c.id == node_id)
        conn.execute(marked.values(tenant_machine_ids=[machine_id]))
