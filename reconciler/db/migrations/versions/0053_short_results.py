"""Counts in place of the long results of reports before the newest 20 of a host."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0053"
down_revision = "0052"

KINDS = ("slice.topology_discover", "node.parity", "slice.drift_reconcile")
LONG = 4096
DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    names = ("id", "kind", "node_id", "state", "created_at")
    tasks = sa.table("tasks", *map(sa.column, names), sa.column("result", DOCUMENT))
    newest = sa.func.row_number().over(
        partition_by=(tasks.c.kind, tasks.c.node_id), order_by=tasks.c.created_at.desc()
    )
    conn = op.get_bind()
    # Without unpacking each of them; those that PostgreSQL has packed well may stay.
    stored = sa.func.pg_column_size if conn.dialect.name == "postgresql" else sa.func.length
    size = stored(tasks.c.result)
    ranked = (
        sa.select(tasks.c.id, newest.label("rank"), size.label("size"))
        .where(tasks.c.kind.in_(KINDS), tasks.c.state == "succeeded")
        .subquery()
    )
    long = sa.select(ranked.c.id).where(ranked.c.rank > 20, ranked.c.size > LONG // 8)
    for task_id in conn.execute(long).scalars().all():
        this = tasks.c.id == task_id
        result = conn.execute(sa.select(tasks.c.result).where(this)).scalar_one()
        if len(json.dumps(result)) <= LONG:
            continue
        counts = {name: len(part) for name, part in result.items() if isinstance(part, list | dict)}
        conn.execute(sa.update(tasks).where(this).values(result={"counts": counts}))
