"""Task queue: enqueueing, leases, outcomes and events of tasks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import rows as db_rows
from reconciler.db.journal import advance
from reconciler.db.rows import Order, Page, Record, part
from reconciler.db.schema import (
    Task,
    TaskEvent,
    allocations,
    claims,
    history,
    slots,
    task_events,
    tasks,
)
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind, TaskState
from reconciler.records.leasing import DUE

# Seconds from the run's own deadline, which ends it first, to its task's deadline. They cover the
# start of the process, the end of its remaining processes, and the record of the outcome.
SETTLE_S = 180
# Seconds for a run and its worker to end in order after the task's deadline. With a lower value, a
# run that is just ending counts as lost.
GRACE_S = 300
# Least seconds by which a deadline is extended, so that not every look at the run changes it.
_EXTEND_S = 30
DEADLINE_PASSED = "deadline_passed"
ORDER = Order(tasks, ("created_at", "id"), descending=True)
OPEN = (*DUE, TaskState.RUNNING)
_ENDS = {
    TaskState.SUCCEEDED: "succeed",
    TaskState.FAILED: "fail",
    TaskState.CANCELED: "cancel",
    TaskState.LOST: "lose",
}
_FREE = {"lease_owner": "", "lease_token": "", "lease_expires_at": None}
# Pauses between attempts to reach a host. A rebooting host answers within minutes; a host that
# stays unreachable is tried rarely.
_FIRST_PAUSE_S = 5
_LONGEST_PAUSE_S = 300
# Characters of an old result that stays as it is. That of an honest host has fewer.
_LONGEST_OLD = 4096
# The same of a new result, which records of tasks keep for ever.
_LONGEST_RESULT = 256 * 1024


@dataclass(frozen=True)
class Enqueue:
    """A request for a task. parameters: fully resolved, because the run makes no choices.

    subject_kind, subject_id: by default the allocation of the task, or else its node. audited:
    queueing it is an admin's act that no other audit row names.
    """

    kind: TaskKind
    node_id: str
    subject_kind: str = ""
    subject_id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fences: Mapping[str, int] = field(default_factory=dict)
    allocation_id: str | None = None
    deadline_s: int = 3600
    priority: int = 0
    not_before_s: float = 0
    audited: bool = False

    @property
    def subject(self) -> tuple[str, str]:
        if self.subject_kind:
            return self.subject_kind, self.subject_id
        return ("allocation", self.allocation_id) if self.allocation_id else ("node", self.node_id)


def then(kinds: Sequence[TaskKind]) -> dict[str, Any]:
    """Task parameters that name the following steps, each queued when its predecessor succeeds."""
    return {"then": [kind.value for kind in kinds]}


def enqueue(conn: sa.Connection, item: Enqueue, act: Act) -> Task:
    """Queue a task; return the existing task if the same work is queued or waiting."""
    query = sa.select(tasks).where(
        tasks.c.node_id == item.node_id,
        tasks.c.kind == item.kind,
        sa.tuple_(tasks.c.subject_kind, tasks.c.subject_id) == item.subject,
        tasks.c.state.in_(DUE),
    )
    for same in db_rows.every(conn, part(query, ORDER, None), Task):
        given = (dict(item.parameters), dict(item.fences))
        if (same.parameters, same.fences) == given:
            return same
    return add(conn, item, act)


def add(conn: sa.Connection, item: Enqueue, act: Act) -> Task:
    """Queue a task without a search for duplicates, for subjects that this transaction created."""
    subject_kind, subject_id = item.subject
    record = journal.create(
        conn,
        Task,
        act,
        id=db_rows.ordered_id(),
        kind=item.kind.value,
        subject_kind=subject_kind,
        subject_id=subject_id,
        node_id=item.node_id,
        allocation_id=item.allocation_id,
        state=TaskState.QUEUED,
        deadline_s=item.deadline_s,
        priority=item.priority,
        exclusive=item.kind.exclusive,
        parameters=dict(item.parameters),
        fences=dict(item.fences),
        max_attempts=item.kind.attempts,
        not_before=clock.now() + item.not_before_s if item.not_before_s else None,
        correlation_id=act.correlation_id,
        requested_by=act.actor,
    )
    if item.audited:
        detail = {"kind": record.kind, "task_id": record.id}
        journal.audit(conn, act, "admin.task.queued", *item.subject, detail=detail)
    return record


def run_id(task: Task) -> str:
    """Id of the task's current run. Each attempt, and each run that did not reach the host, has its
    own id.
    """
    again = f"-{task.unreached}" if task.unreached else ""
    return f"{task.id}-{task.attempt}{again}"


def heartbeat(conn: sa.Connection, task_id: str, token: str, *, seconds: float = 30) -> Task:
    """Renew the lease of a task; the returned row shows whether its cancellation was requested.

    Past the deadline of the task the lease is not renewed, so that the task can be given up.
    """
    over = tasks.c.deadline_at < clock.now()
    until = sa.case((over, tasks.c.lease_expires_at), else_=clock.now() + seconds)
    return _held(conn, task_id, token, {"lease_expires_at": until})


def started(
    conn: sa.Connection,
    task_id: str,
    token: str,
    *,
    run_id: str,
    run_directory: str,
    deadline_s: int | None = None,
) -> Task:
    """Record the run of the task, so that a worker that takes the task over attaches to that run.

    deadline_s: time limit of the run. It sets the task's own deadline, once for each run.
    """
    values: dict[str, Any] = {"run_id": run_id, "run_directory": run_directory}
    if deadline_s is not None:
        new = clock.now() + deadline_s + SETTLE_S
        values["deadline_at"] = sa.case((tasks.c.run_id == run_id, tasks.c.deadline_at), else_=new)
    return _held(conn, task_id, token, values)


def begins_later(conn: sa.Connection, task_id: str, token: str, *, deadline_s: int) -> None:
    """Count the time of the task's run from now on, because its job waits in AWX's queue.

    Nothing changes once the end of the task was requested.
    """
    new = clock.now() + deadline_s + SETTLE_S
    update = (
        sa.update(tasks)
        .where(
            *_of_holder(task_id, token),
            tasks.c.cancel_requested.is_(False),
            tasks.c.deadline_at < new - _EXTEND_S,
        )
        .values(deadline_at=new)
        .returning(tasks)
    )
    row = conn.execute(update).mappings().first()
    if row is not None:
        extend_deadlines(conn, Task(**row))


def progress(
    conn: sa.Connection,
    task_id: str,
    token: str,
    *lines: Mapping[str, Any],
    offset: int | None = None,
) -> Task:
    """Record progress. Every line is stored as an event; the last line is the task's progress.

    offset: position in the run's progress file behind these lines, where the next reader begins.
    """
    last = dict(lines[-1])
    values = {"progress": last} if offset is None else {"progress": last, "progress_offset": offset}
    task = _held(conn, task_id, token, values)
    rows_of = [{"task_id": task_id, "document": dict(line)} for line in lines]
    conn.execute(sa.insert(task_events), rows_of)
    journal.emit(
        conn,
        "task.progress",
        "task",
        task_id,
        payload={"id": task_id, "kind": task.kind, "progress": last},
        node_id=task.node_id,
        correlation_id=task.correlation_id,
    )
    return task


def step_since(conn: sa.Connection, task: Task) -> float | None:
    """When the run of a task began its present step, by the newest lines of its progress."""
    query = sa.select(task_events.c.at, task_events.c.document).where(
        task_events.c.task_id == task.id
    )
    since = None
    for at, document in conn.execute(query.order_by(task_events.c.id.desc()).limit(200)):
        if document.get("step") != task.progress.get("step"):
            break
        since = float(at)
    return since


def wait_for_host(
    conn: sa.Connection,
    task_id: str,
    token: str,
    reason: str,
    *,
    act: Act,
    error: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> Task:
    """Give the task back because its run never reached the host, so that nothing was done there.

    The next run has its own id and belongs to the same attempt. It starts when the host answers, or
    after a pause that doubles each time. error: the cause, if it is not the host. seconds: the
    pause of a task that was answered, and waits for MAAS.
    """
    task = _held(conn, task_id, token, {})
    unreached = 0
    if seconds is None:
        seconds = min(_FIRST_PAUSE_S * 2 ** min(task.unreached, 20), _LONGEST_PAUSE_S)
        unreached = task.unreached + 1
    columns = _later(seconds, error) | {"unreached": unreached}
    return advance(conn, Task, task_id, "wait", act.because(reason), columns=columns)


def retry(
    conn: sa.Connection,
    task_id: str,
    token: str,
    reason: str,
    *,
    seconds: float,
    act: Act,
    error: Mapping[str, Any] | None = None,
) -> Task:
    """Queue another attempt, which has its own run. error: the error of this attempt."""
    task = _held(conn, task_id, token, {})
    if task.attempt >= task.max_attempts:
        raise Problem(
            "attempts_exhausted",
            expected=f"at most {task.max_attempts} attempts",
            found=f"attempt {task.attempt} has ended",
            remedy="finish the task as failed; its error says what to do",
        )
    columns = _later(seconds, error) | {"attempt": task.attempt + 1, "unreached": 0}
    return advance(conn, Task, task_id, "retry", act.because(reason), columns=columns)


def _later(seconds: float, error: Mapping[str, Any] | None) -> dict[str, Any]:
    """Columns of a task that has no run, and is due after a pause."""
    no_run = {"run_id": "", "run_directory": "", "progress_offset": 0}
    return {**_FREE, **no_run, "not_before": clock.now() + seconds, "error": dict(error or {})}


def postpone_behind(conn: sa.Connection, task: Task, kind: TaskKind) -> None:
    """Postpone later tasks of a kind on the same node until this task is due again."""
    mine = tasks.alias("mine")
    due = sa.select(mine.c.not_before).where(mine.c.id == task.id).scalar_subquery()
    conn.execute(
        sa.update(tasks)
        .where(
            tasks.c.node_id == task.node_id,
            tasks.c.kind == kind,
            tasks.c.state.in_(DUE),
            tasks.c.created_at >= task.created_at,
        )
        .values(not_before=due)
    )


def finish(
    conn: sa.Connection,
    task_id: str,
    token: str,
    state: TaskState,
    act: Act,
    *,
    result: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> Task:
    """End the task by its lease holder. Consequences of the end belong in the same transaction."""
    _held(conn, task_id, token, {})
    columns = {
        **_FREE,
        "result": dict(result or {}),
        "error": dict(error or {}),
        "finished_at": clock.now(),
    }
    return advance(conn, Task, task_id, _ENDS[state], act, columns=columns)


def cancel(conn: sa.Connection, task_id: str, act: Act) -> Task:
    """Cancel a task that has not begun; otherwise ask its lease holder to end the run.

    For callers that also end the subject of the task. `lifecycle.task_failures` ends both.
    """
    task = db_rows.get(conn, Task, task_id, lock=True)
    if task.state in DUE:
        columns = {"finished_at": clock.now(), "cancel_requested": True}
        return advance(conn, Task, task_id, "cancel", act, columns=columns)
    if task.state != TaskState.RUNNING or task.cancel_requested:
        return task
    return _ask_to_end(conn, act, tasks.c.id == task_id) or task


def drop(conn: sa.Connection, task: Task, act: Act, error: Mapping[str, Any]) -> Task:
    """Cancel a task that has not begun, if it is unchanged since it was read."""
    columns = {"error": dict(error), "finished_at": clock.now(), "cancel_requested": True}
    return advance(
        conn, Task, task.id, "cancel", act, expect_generation=task.generation, columns=columns
    )


def expire(
    conn: sa.Connection, task_id: str, deadline_at: float, act: Act, error: Mapping[str, Any]
) -> Task | None:
    """Ask the lease holder of an overdue task to end its run within GRACE_S seconds.

    None when the deadline of the task has changed.
    """
    late = sa.and_(tasks.c.id == task_id, tasks.c.deadline_at == deadline_at)
    last = {"error": dict(error), "deadline_at": clock.now() + GRACE_S}
    return _ask_to_end(conn, act, late, **last)


def lose(conn: sa.Connection, task: Task, act: Act, error: Mapping[str, Any]) -> None:
    """End a task that its run and lease holder did not end, if it is unchanged since the read."""
    columns = {**_FREE, "error": dict(error), "finished_at": clock.now()}
    advance(conn, Task, task.id, "lose", act, expect_generation=task.generation, columns=columns)


def forget_tenant_data(conn: sa.Connection, task: Task) -> None:
    """Remove its tenant's cloud-config from a task that ends. It may hold passwords, and records of
    tasks are kept for ever.
    """
    rest = {name: value for name, value in task.parameters.items() if name != "tenant_data"}
    if rest != task.parameters:
        conn.execute(sa.update(tasks).where(tasks.c.id == task.id).values(parameters=rest))


def shorten_result(conn: sa.Connection, kind: str, node_id: str, *, newest: int) -> None:
    """Replace the result of the node's succeeded task before so many newer ones by counts. A
    hostile host fills results, and records of tasks are kept for ever.
    """
    query = sa.select(tasks).where(
        tasks.c.kind == kind, tasks.c.node_id == node_id, tasks.c.state == TaskState.SUCCEEDED
    )
    old = db_rows.first(conn, query.order_by(tasks.c.created_at.desc()).offset(newest), Task)
    if old is not None:
        result = shortened(old.result, _LONGEST_OLD)
        if result != old.result:
            conn.execute(sa.update(tasks).where(tasks.c.id == old.id).values(result=result))


def shortened(result: dict[str, Any], most: int = _LONGEST_RESULT) -> dict[str, Any]:
    """The result, with counts instead of its lists and documents if it has more characters."""
    if len(json.dumps(result)) <= most:
        return result
    large = {name: len(part) for name, part in result.items() if isinstance(part, list | dict)}
    rest = {name: part for name, part in result.items() if name not in large}
    return {**rest, "counts": large}


def shorten_error(conn: sa.Connection, task_id: str) -> None:
    """Drop the evidence of a failed task's error."""
    error = get(conn, task_id).error
    length = len(json.dumps(error["evidence"]))
    left_out = {"left_out": f"{length} bytes of an old failure"}
    change = sa.update(tasks).where(tasks.c.id == task_id)
    conn.execute(change.values(error={**error, "evidence": left_out}))


def get(conn: sa.Connection, id: str) -> Task:
    """The task with an id."""
    return db_rows.get(conn, Task, id)


def every(
    conn: sa.Connection,
    *,
    node_id: str | None = None,
    allocation_id: str | None = None,
    kind: TaskKind | None = None,
    state: TaskState | None = None,
    page: Page | None = None,
) -> list[Task]:
    """Tasks, or a page of them, newest first."""
    query = db_rows.where(
        sa.select(tasks),
        tasks,
        node_id=node_id,
        allocation_id=allocation_id,
        kind=kind,
        state=state,
    )
    return db_rows.every(conn, part(query, ORDER, page), Task)


def latest_error(conn: sa.Connection, node_id: str, codes: Collection[str]) -> str:
    """Which of these errors a task of the node had since its last success; "" for none."""
    code = tasks.c.error["code"].as_string()
    ended = sa.select(code).where(tasks.c.node_id == node_id, tasks.c.finished_at.is_not(None))
    telling = ended.where(sa.or_(tasks.c.state == TaskState.SUCCEEDED, code.in_(codes)))
    return conn.execute(telling.order_by(tasks.c.finished_at.desc()).limit(1)).scalar() or ""


@dataclass(frozen=True)
class Past:
    """Summary of all tasks of an allocation. Its project can make any number of them.

    begun: one was started. repeated: one had several attempts. finished_at: the last end, 0.0
    without any.
    """

    begun: bool
    repeated: bool
    finished_at: float


def past(conn: sa.Connection, allocation_id: str) -> Past:
    columns = (tasks.c.started_at, tasks.c.attempt, tasks.c.finished_at)
    newest = sa.select(*map(sa.func.max, columns)).where(tasks.c.allocation_id == allocation_id)
    started_at, attempt, finished_at = conn.execute(newest).one()
    return Past(started_at is not None, (attempt or 0) > 1, finished_at or 0.0)


def open_of_allocation(conn: sa.Connection, allocation_id: str) -> list[Task]:
    """Tasks of an allocation that have not ended."""
    return _open(conn, tasks.c.allocation_id == allocation_id)


def never_ran(task: Task) -> bool:
    """Whether no run of the task can have been on its host. A run that never reached the host
    leaves its task without a run. A second attempt returns False, because nothing shows whether the
    first attempt reached the host.
    """
    return task.state != TaskState.RUNNING and task.attempt <= 1 and not task.run_id


def may_have_begun(conn: sa.Connection, allocation_id: str) -> bool:
    """Whether a run may have changed the host for an allocation."""
    query = sa.select(tasks).where(tasks.c.allocation_id == allocation_id)
    return not all(never_ran(task) for task in db_rows.every(conn, query, Task))


def open_of_node(conn: sa.Connection, node_id: str) -> list[Task]:
    """Tasks of a node that have not ended."""
    return _open(conn, tasks.c.node_id == node_id)


def _open(conn: sa.Connection, which: sa.ColumnElement[bool]) -> list[Task]:
    query = sa.select(tasks).where(which, tasks.c.state.in_(OPEN))
    return db_rows.every(conn, query.order_by(tasks.c.created_at, tasks.c.id), Task)


def canceled_runs(conn: sa.Connection, runner: str) -> list[Task]:
    """Running tasks of this runner whose cancellation was requested."""
    query = sa.select(tasks).where(
        tasks.c.state == TaskState.RUNNING,
        tasks.c.cancel_requested,
        tasks.c.runner == runner,
        tasks.c.run_directory != "",
    )
    return db_rows.every(conn, query, Task)


def events(conn: sa.Connection, task_id: str) -> list[TaskEvent]:
    """Progress events of a task, in order."""
    query = sa.select(task_events).where(task_events.c.task_id == task_id)
    return db_rows.every(conn, query.order_by(task_events.c.id), TaskEvent)


def abandon(conn: sa.Connection, owner: str) -> int:
    """End all leases of this owner, so that other workers can take its tasks at once."""
    return _end_leases(conn, tasks.c.lease_owner == owner)


def let_go(conn: sa.Connection, task: Task) -> None:
    """End the lease, if it is still the same, because its holder cannot attend to the task now."""
    _end_leases(conn, tasks.c.id == task.id, tasks.c.lease_token == task.lease_token)


def _end_leases(conn: sa.Connection, *which: sa.ColumnElement[bool]) -> int:
    held = sa.update(tasks).where(tasks.c.state == TaskState.RUNNING, *which)
    return conn.execute(held.values(lease_expires_at=clock.now() - 1)).rowcount


def holders(conn: sa.Connection, runner: str) -> list[str]:
    """Lease owners of running tasks whose runs are in this runner's folder."""
    query = sa.select(tasks.c.lease_owner).where(
        tasks.c.state == TaskState.RUNNING, tasks.c.runner == runner, tasks.c.lease_owner != ""
    )
    return list(conn.execute(query.distinct()).scalars())


def resume(conn: sa.Connection, node_id: str) -> int:
    """Make waiting tasks of a node due, because its host answers again."""
    update = (
        sa.update(tasks)
        .where(tasks.c.state == TaskState.WAITING, tasks.c.node_id == node_id)
        .values(not_before=clock.now())
    )
    return conn.execute(update).rowcount


def _ask_to_end(
    conn: sa.Connection, act: Act, which: sa.ColumnElement[bool], **values: Any
) -> Task | None:
    """Request the end of a running task; None when no such task is running.

    The new generation makes clients that read the task before decide anew (If-Match).
    """
    running = sa.update(tasks).where(which, tasks.c.state == TaskState.RUNNING)
    later = {"generation": tasks.c.generation + 1, "cancel_requested": True, **values}
    row = conn.execute(running.values(later).returning(tasks)).mappings().first()
    if row is None:
        return None
    task = Task(**row)
    journal.remark(conn, "task", task, act, "cancel_requested")
    return task


def _of_holder(task_id: str, token: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions for the running task that the holder of this lease has."""
    return (
        tasks.c.id == task_id,
        tasks.c.state == TaskState.RUNNING,
        tasks.c.lease_token == token,
        tasks.c.lease_token != "",
    )


def _held(conn: sa.Connection, task_id: str, token: str, values: Mapping[str, Any]) -> Task:
    """Update as the lease holder; Problem `stale_lease` after the end of the lease or the task."""
    update = (
        sa.update(tasks)
        .where(*_of_holder(task_id, token))
        .values(**(values or {"lease_token": token}))
        .returning(tasks)
    )
    row = conn.execute(update).mappings().first()
    if row is None:
        task = get(conn, task_id)
        raise Problem(
            "stale_lease",
            expected=f"the holder of task {task_id}",
            found=f"a lease that ended; the task is {task.state}",
            remedy="stop: another worker goes on with this task, or it has ended",
        )
    return Task(**row)


# Delay behind the task's deadline. By then the task has been given up, which blocks the slots with
# its own reason.
_AFTER_S = 2 * GRACE_S


def extend_deadlines(conn: sa.Connection, task: Task) -> None:
    """Extend the deadlines of a running task's allocation, claims and slots beyond its own.

    Eight disks are wiped in sequence, and some controllers take hours for each. A limit by state
    alone would block a slot whose run is healthy. Deadlines of waiting tasks are not extended,
    because such tasks could wait for ever. A second call for the same deadline of the task changes
    nothing.
    """
    if task.state != TaskState.RUNNING:
        return
    until = (task.deadline_at or 0.0) + _AFTER_S
    if task.allocation_id:
        _extend(conn, allocations, until, allocations.c.id == task.allocation_id)
        _extend(conn, claims, until, claims.c.allocation_id == task.allocation_id)
    for slot_id, fence in sorted(task.fences.items()):
        _extend(conn, slots, until, slots.c.id == slot_id, slots.c.fence == fence)


def _extend(
    conn: sa.Connection, table: sa.Table, until: float, *only: sa.ColumnElement[bool]
) -> None:
    # The condition is never true of a state without a limit, which has no deadline.
    later = sa.update(table).where(*only, table.c.deadline_at < until)
    conn.execute(later.values(deadline_at=until))


# Most rows of each kind in a read, so that a long history is not read at once.
_AT_ONCE = 500


@dataclass(frozen=True)
class Position:
    """Position of a reader: ids of the last state change and the last progress line."""

    change: int = 0
    line: int = 0


@dataclass(frozen=True)
class Followed:
    """Events of a task after a position.

    rows: in order, each with its `type` (state, progress) and its `place`. task: its current row.
    over: the task has ended and these are its last rows.
    """

    task: Task
    rows: list[Record]
    over: bool


def events_after(conn: sa.Connection, task_id: str, place: Position) -> Followed:
    """Events after the position. A task has a single writer, so its ids are in order of time."""
    task = get(conn, task_id)
    changes = sa.select(history).where(
        history.c.entity == "task", history.c.entity_id == task_id, history.c.id > place.change
    )
    lines = sa.select(task_events).where(
        task_events.c.task_id == task_id, task_events.c.id > place.line
    )
    events = [
        {"type": kind, **row}
        for kind, query, key in (
            ("state", changes, history.c.id),
            ("progress", lines, task_events.c.id),
        )
        for row in db_rows.every(conn, query.order_by(key).limit(_AT_ONCE))
    ]
    whole = len(events) < _AT_ONCE
    # At the same time the progress lines come first, because the end of a task is written last.
    events.sort(key=lambda row: (row["at"], row["type"]))
    for row in events:
        name = "change" if row["type"] == "state" else "line"
        place = replace(place, **{name: row["id"]})
        row["place"] = place
    return Followed(task, events, whole and task.state not in OPEN)
