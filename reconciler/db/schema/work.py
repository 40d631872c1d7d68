"""Tables of tasks and of their progress events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    flag,
    key,
    lifecycle,
    metadata,
    moment,
    number,
    one_of,
    reference,
    row_of,
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
    # Runner whose folder has the run's files. Only this runner can tell whether the run is alive.
    text("runner"),
    text("run_id"),
    text("run_directory"),
    # Number of runs of this attempt that ended before they reached the host. Each run has its own
    # id.
    number("unreached"),
    document("progress"),
    # Offset up to which the run's progress file is in task_events.
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


@row_of(tasks, "task")
@dataclass(frozen=True, kw_only=True)
class Task(Row):
    """A piece of work on a node."""

    id: str
    kind: str
    subject_kind: str
    subject_id: str
    node_id: str
    allocation_id: str | None
    state: str
    state_reason: str
    state_since: float
    deadline_at: float | None
    generation: int
    deadline_s: int
    priority: int
    exclusive: bool
    parameters: dict[str, Any]
    fences: dict[str, int]
    attempt: int
    max_attempts: int
    lease_owner: str
    lease_token: str
    lease_expires_at: float | None
    not_before: float | None
    runner: str
    run_id: str
    run_directory: str
    unreached: int
    progress: dict[str, Any]
    progress_offset: int
    result: dict[str, Any]
    error: dict[str, Any]
    cancel_requested: bool
    correlation_id: str
    requested_by: str
    created_at: float
    started_at: float | None
    finished_at: float | None


@row_of(task_events, "task_event")
@dataclass(frozen=True, kw_only=True)
class TaskEvent(Row):
    """A line of a run's progress."""

    id: int
    task_id: str
    at: float
    document: dict[str, Any]
