"""Recovery cases: the runbook for blocked slots, as the leader follows it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import (
    documents,
    flags,
    moments,
    numbers,
    one_of,
    optional,
    points,
    stamps,
    texts,
    unique,
)

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """At most one open case for each allocation."""
    op.create_table(
        "recovery_cases",
        *texts("id", "allocation_id", "node_id", "state", "state_reason"),
        *stamps("state_since"),
        *moments("deadline_at"),
        *numbers("generation"),
        *texts("requested_by", "role", "reason"),
        *stamps("requested_at"),
        *flags("remove_leftovers"),
        *documents("slot_ids"),
        *optional("task_id"),
        *documents("task_ids", "proof_ids"),
        *flags("confirm"),
        *documents("waits_for", "failure"),
        *texts("correlation_id"),
        *stamps("created_at"),
        *moments("finished_at"),
        one_of(
            "ck_recovery_cases_state",
            "state",
            "opened verifying cleaning confirming recovered failed",
        ),
        points("fk_recovery_cases_allocation_id", "allocation_id", "allocations"),
        points("fk_recovery_cases_node_id", "node_id", "nodes"),
        points("fk_recovery_cases_task_id", "task_id", "tasks"),
        sa.PrimaryKeyConstraint("id", name="pk_recovery_cases"),
    )
    op.create_index(
        "ix_recovery_cases_allocation_id", "recovery_cases", ["allocation_id", "created_at"]
    )
    unique(
        "uq_recovery_cases_open",
        "recovery_cases",
        "allocation_id",
        "state IN ('opened', 'verifying', 'cleaning', 'confirming')",
    )
