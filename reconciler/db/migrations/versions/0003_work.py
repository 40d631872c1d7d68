"""Tables of host reports and of tasks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reconciler.db.migrations.columns import (
    SEQUENCE,
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

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Tables in the order in which they refer to each other."""
    _topology_discoveries()
    _parity_reports()
    _absence_reports()
    _tasks()
    _task_events()


def _topology_discoveries() -> None:
    op.create_table(
        "topology_discoveries",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *texts("node_id"),
        *optional("task_id"),
        *texts("boot_id", "install_id"),
        *documents("document"),
        *moments("observed_at"),
        *stamps("created_at"),
        *flags("reboot_required"),
        points("fk_topology_discoveries_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_topology_discoveries"),
    )
    op.create_index("ix_topology_discoveries_node_id", "topology_discoveries", ["node_id"])


def _parity_reports() -> None:
    op.create_table(
        "parity_reports",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *texts("node_id"),
        *optional("task_id"),
        *texts("boot_id", "install_id"),
        *documents("document"),
        *moments("observed_at"),
        *stamps("created_at"),
        *texts("intent"),
        *numbers("failures", "warnings"),
        points("fk_parity_reports_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_parity_reports"),
    )
    op.create_index("ix_parity_reports_node_id", "parity_reports", ["node_id"])


def _absence_reports() -> None:
    op.create_table(
        "absence_reports",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *texts("node_id"),
        *optional("task_id"),
        *texts("boot_id", "install_id"),
        *documents("document"),
        *moments("observed_at"),
        *stamps("created_at"),
        *texts("allocation_id"),
        *flags("absent"),
        points("fk_absence_reports_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_absence_reports"),
    )
    op.create_index("ix_absence_reports_allocation_id", "absence_reports", ["allocation_id"])


def _tasks() -> None:
    op.create_table(
        "tasks",
        *texts("id", "kind", "subject_kind", "subject_id", "node_id"),
        *optional("allocation_id"),
        *texts("state", "state_reason"),
        *stamps("state_since"),
        *moments("deadline_at"),
        *numbers("generation", "deadline_s", "priority"),
        *flags("exclusive"),
        *documents("parameters", "fences"),
        *numbers("attempt", "max_attempts"),
        *texts("lease_owner", "lease_token"),
        *moments("lease_expires_at", "not_before"),
        *texts("run_id", "run_directory"),
        *documents("progress", "result", "error"),
        *flags("cancel_requested"),
        *texts("correlation_id", "requested_by"),
        *stamps("created_at"),
        *moments("started_at", "finished_at"),
        one_of("ck_tasks_state", "state", "queued running waiting succeeded failed canceled lost"),
        points("fk_tasks_allocation_id", "allocation_id", "allocations"),
        points("fk_tasks_node_id", "node_id", "nodes"),
        sa.PrimaryKeyConstraint("id", name="pk_tasks"),
    )
    op.create_index("ix_tasks_allocation_id", "tasks", ["allocation_id"])
    op.create_index("ix_tasks_node_id", "tasks", ["node_id"])
    op.create_index("ix_tasks_state", "tasks", ["state", "priority", "created_at"])
    unique("uq_tasks_running_exclusive", "tasks", "node_id", "state = 'running' AND exclusive")
    unique("uq_tasks_running_subject", "tasks", "subject_kind subject_id", "state = 'running'")


def _task_events() -> None:
    op.create_table(
        "task_events",
        sa.Column("id", SEQUENCE, autoincrement=True, nullable=False),
        *texts("task_id"),
        *stamps("at"),
        *documents("document"),
        points("fk_task_events_task_id", "task_id", "tasks"),
        sa.PrimaryKeyConstraint("id", name="pk_task_events"),
    )
    op.create_index("ix_task_events_task_id", "task_events", ["task_id"])
