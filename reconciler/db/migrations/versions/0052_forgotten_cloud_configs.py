"""Removal of tenants' cloud-configs, which may hold passwords, from ended tasks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0052"
down_revision = "0051"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    tasks = sa.table(
        "tasks", *map(sa.column, ("id", "kind", "finished_at")), sa.column("parameters", DOCUMENT)
    )
    conn = op.get_bind()
    # Those of a launch that has not ended are still to be given to its guest.
    ended = sa.select(tasks.c.id).where(
        tasks.c.kind == "slice.vm_provision", tasks.c.finished_at.is_not(None)
    )
    for task_id in conn.execute(ended).scalars().all():
        this = tasks.c.id == task_id
        parameters = conn.execute(sa.select(tasks.c.parameters).where(this)).scalar_one()
        if "tenant_data" in parameters:
            rest = {name: value for name, value in parameters.items() if name != "tenant_data"}
            conn.execute(sa.update(tasks).where(this).values(parameters=rest))
