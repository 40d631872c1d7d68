"""Tables of tasks and recovery cases, and of every change: history, outbox and audit log."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    AllocationId,
    Default,
    NodeId,
    Number,
    Row,
    StateRow,
    TaskId,
    Text,
    partial,
    table,
    unique,
)
from reconciler.model.states import RecoveryState, TaskState


@table(
    "tasks",
    "task",
    unique("uq_tasks_running_subject", "subject_kind", "subject_id", where="state = 'running'"),
    unique("uq_tasks_running_exclusive", "node_id", where="state = 'running' AND exclusive"),
    sa.Index("ix_tasks_state", "state", "priority", "created_at"),
    sa.Index("ix_tasks_created_at", "created_at", "id"),
    sa.Index("ix_tasks_node_id", "node_id", "finished_at"),
    partial("ix_tasks_deadline_at", "deadline_at", where="deadline_at IS NOT NULL"),
    sa.Index("ix_tasks_latest", "kind", "node_id", "created_at"),
    sa.Index("ix_tasks_allocation_id", "allocation_id"),
    sa.Index("ix_tasks_correlation_id", "correlation_id"),
)
class Task(StateRow):
    """A piece of work on a node."""

    kind: str
    subject_kind: str
    subject_id: str
    node_id: NodeId
    allocation_id: AllocationId | None
    state: Annotated[str, TaskState]
    deadline_s: Annotated[int, Default(3600)]
    priority: Number
    exclusive: bool
    parameters: dict[str, Any]
    fences: dict[str, int]
    attempt: Annotated[int, Default(1)]
    max_attempts: Annotated[int, Default(1)]
    lease_owner: Text
    lease_token: Text
    lease_expires_at: float | None
    not_before: float | None
    # Runner whose folder has the run's files. Only this runner can tell whether the run is alive.
    runner: Text
    run_id: Text
    run_directory: Text
    # Number of runs of this attempt that ended before they reached the host. Each run has its own
    # id.
    unreached: Number
    progress: dict[str, Any]
    # Offset up to which the run's progress file is in task_events.
    progress_offset: Number
    result: dict[str, Any]
    error: dict[str, Any]
    cancel_requested: bool
    correlation_id: Text
    requested_by: Text
    created_at: float
    started_at: float | None
    finished_at: float | None


@table("task_events", "task_event", sa.Index("ix_task_events_task_id", "task_id"))
class TaskEvent(Row):
    """A line of a run's progress."""

    id: int
    task_id: TaskId
    at: float
    document: dict[str, Any]


@table(
    "recovery_cases",
    "recovery_case",
    sa.Index("ix_recovery_cases_allocation_id", "allocation_id", "created_at"),
    unique(
        "uq_recovery_cases_open",
        "allocation_id",
        where="state IN ('opened', 'verifying', 'cleaning', 'confirming')",
    ),
)
class RecoveryCase(StateRow):
    """An attempt to bring back the slots of an allocation."""

    allocation_id: AllocationId
    node_id: NodeId
    state: Annotated[str, RecoveryState]
    # The actor who requested the case; all its steps are done in this actor's name.
    requested_by: str
    role: Text
    reason: Text
    requested_at: float
    # Whether the allocation's traces on the host may be removed.
    remove_leftovers: bool
    # Slots of the allocation when the case was opened.
    slot_ids: list[Any]
    # The current or last verification task on the host.
    task_id: TaskId | None
    task_ids: list[Any]
    proof_ids: list[Any]
    # Whether the host is verified again after the clean-up.
    confirm: bool
    # {} unless the case cannot go on: code, expected, found, remedy.
    waits_for: dict[str, Any]
    # {} unless the case failed: code, expected, found, remedy.
    failure: dict[str, Any]
    correlation_id: Text
    created_at: float
    finished_at: float | None


# Triggers make history and audit append-only.
@table(
    "state_history",
    "state_change",
    sa.Index("ix_state_history_entity", "entity", "entity_id"),
    sa.Index("ix_state_history_node_id", "node_id", "at", "id"),
    sa.Index("ix_state_history_allocation_id", "allocation_id"),
    sa.Index("ix_state_history_correlation_id", "correlation_id"),
)
class StateChange(Row):
    """A change of state."""

    id: int
    at: float
    entity: str
    entity_id: str
    source: Text
    event: str
    target: str
    generation: Number
    actor: str
    reason: Text
    evidence: dict[str, Any]
    correlation_id: Text
    node_id: Text
    allocation_id: Text


@table("outbox", "event", partial("ix_outbox_pending", "id", where="published_at IS NULL"))
class OutboxEvent(Row):
    """An event for subscribers."""

    id: int
    at: float
    topic: str
    subject_kind: str
    subject_id: str
    node_id: Text
    project_id: Text
    payload: dict[str, Any]
    correlation_id: Text
    published_at: float | None


@table(
    "audit_log",
    "audit_entry",
    sa.Index("ix_audit_log_subject_id", "subject_id"),
    sa.Index("ix_audit_log_action", "action"),
    sa.Index("ix_audit_log_correlation_id", "correlation_id"),
)
class AuditEntry(Row):
    """An administrative act."""

    id: int
    at: float
    actor: str
    role: Text
    action: str
    subject_kind: str
    subject_id: str
    project_id: Text
    reason: Text
    detail: dict[str, Any]
    correlation_id: Text


tasks = Task.TABLE
task_events = TaskEvent.TABLE
recovery_cases = RecoveryCase.TABLE
history = StateChange.TABLE
outbox = OutboxEvent.TABLE
audit_log = AuditEntry.TABLE
