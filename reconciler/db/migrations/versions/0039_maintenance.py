"""Maintenance of jobs, and counters of what happens to them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db import clock

revision = "0039"
down_revision = "0038"

_COUNTS = ("reclaimed", "reclaimer_errors", "job_retries", "worker_pool_evictions")


def upgrade() -> None:
    control = op.create_table(
        "orchestrator_control",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "mode")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("reason", "changed_by")),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double()),
        sa.Column("canceled_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orchestrator_control")),
        sa.CheckConstraint("mode IN ('normal', 'drain', 'drained')", name="mode"),
    )
    totals = op.create_table(
        "orchestrator_totals",
        sa.Column("id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orchestrator_totals")),
    )
    # Claims lock the row, so it exists from the beginning.
    row = {"id": "jobs", "mode": "normal", "reason": "", "changed_by": ""}
    op.execute(sa.insert(control).values(**row, since=clock.now()))
    op.bulk_insert(totals, [{"id": "jobs", **dict.fromkeys(_COUNTS, 0)}])
