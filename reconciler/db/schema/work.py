"""Tasks: one piece of work on one node each."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.db.schema.base import (
    document,
    flag,
    key,
    lifecycle,
    metadata,
    moment,
    number,
    one_of,
    reference,
    sequence,
    stamp,
    text,
    unique,
)
from reconciler.model.states import TaskState

tasks = sa.Table(
    "tasks",
    metadata,
    key(),
    text("kind", None),
    text("subject_kind", None),
    text("subject_id", None),
    reference("node_id", "nodes"),
    reference("allocation_id", "allocations", required=False),
    *lifecycle(),
    number("deadline_s", 3600),
    number("priority"),
    flag("exclusive"),
    document("parameters"),
    document("fences"),
    number("attempt", 1),
    number("max_attempts", 1),
    text("lease_owner"),
    text("lease_token"),
    moment("lease_expires_at"),
    moment("not_before"),
    # Whose folder the run's files are in; only that one can tell whether it lives.
    text("runner"),
    text("run_id"),
    text("run_directory"),
    # Runs of this attempt that ended before they reached the host: each run has an id of its own.
    number("unreached"),
    document("progress"),
    # How much of the run's progress file is in task_events.
    number("progress_offset"),
    document("result"),
    document("error"),
    flag("cancel_requested"),
    text("correlation_id"),
    text("requested_by"),
    stamp(),
    moment("started_at"),
    moment("finished_at"),
    one_of("state", TaskState),
    unique("uq_tasks_running_subject", "subject_kind", "subject_id", where="state = 'running'"),
    unique("uq_tasks_running_exclusive", "node_id", where="state = 'running' AND exclusive"),
    sa.Index("ix_tasks_state", "state", "priority", "created_at"),
    sa.Index("ix_tasks_node_id", "node_id"),
    sa.Index("ix_tasks_latest", "kind", "node_id", "created_at"),
    sa.Index("ix_tasks_allocation_id", "allocation_id"),
    sa.Index("ix_tasks_correlation_id", "correlation_id"),
)

task_events = sa.Table(
    "task_events",
    metadata,
    sequence(),
    reference("task_id", "tasks"),
    stamp("at"),
    document("document"),
    sa.Index("ix_task_events_task_id", "task_id"),
)
