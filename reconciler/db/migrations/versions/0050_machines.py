"""Column for the machine of a slice, until now in the result of its provisioning."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0050"
down_revision = "0049"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column(
        "allocations", sa.Column("machine", DOCUMENT, nullable=False, server_default="{}")
    )
    allocations = sa.table("allocations", sa.column("id"), sa.column("machine", DOCUMENT))
    tasks = sa.table(
        "tasks", *map(sa.column, ("allocation_id", "kind", "state")), sa.column("result", DOCUMENT)
    )
    conn = op.get_bind()
    built = sa.select(tasks.c.allocation_id, tasks.c.result).where(
        tasks.c.kind == "slice.vm_provision", tasks.c.state == "succeeded"
    )
    for allocation_id, result in conn.execute(built).all():
        if machine := (result or {}).get("machine"):
            update = sa.update(allocations).where(allocations.c.id == allocation_id)
            conn.execute(update.values(machine=machine))
