"""Long results of comparisons before the newest 20 of a host become counts, as those since do."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0053"
down_revision = "0052"

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    names = ("id", "kind", "node_id", "state", "created_at")
    tasks = sa.table("tasks", *map(sa.column, names), sa.column("result", DOCUMENT))
    newest = sa.func.row_number().over(
        partition_by=tasks.c.node_id, order_by=tasks.c.created_at.desc()
    )
    size = sa.func.length(sa.cast(tasks.c.result, sa.Text))
    ranked = (
        sa.select(tasks.c.id, newest.label("rank"), size.label("size"))
        .where(tasks.c.kind == "slice.drift_reconcile", tasks.c.state == "succeeded")
        .subquery()
    )
    conn = op.get_bind()
    long = sa.select(ranked.c.id).where(ranked.c.rank > 20, ranked.c.size > 4096)
    for task_id in conn.execute(long).scalars().all():
        this = tasks.c.id == task_id
        result = conn.execute(sa.select(tasks.c.result).where(this)).scalar_one()
        counts = {name: len(part) for name, part in result.items() if isinstance(part, list | dict)}
        conn.execute(sa.update(tasks).where(this).values(result={"counts": counts}))
