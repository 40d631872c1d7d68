"""The queue of work on hosts: who does what, who holds it, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
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

# A run is ended by its own deadline first; its task waits this much longer for the start of the
# process, the end of what it left, and the record of its outcome.
SETTLE_S = 180
# What a run and its worker get to end in order once their deadline has passed. Too low, and a run
# that was just being ended counts as lost.
GRACE_S = 300
DEADLINE_PASSED = "deadline_passed"
ORDER = Order(tasks, ("created_at", "id"), descending=True)
_ENDS = {
    TaskState.SUCCEEDED: "succeed",
    TaskState.FAILED: "fail",
    TaskState.CANCELED: "cancel",
    TaskState.LOST: "lose",
}
_FREE = {"lease_owner": "", "lease_token": "", "lease_expires_at": None}
_NO_RUN = {"run_id": "", "run_directory": "", "progress_offset": 0}
# A host that is restarting answers within minutes; one that is gone is asked rarely.
_FIRST_PAUSE_S = 5
_LONGEST_PAUSE_S = 300


@dataclass(frozen=True)
class Enqueue:
    """One piece of work. parameters are fully resolved: the run makes no choices."""

    kind: TaskKind
    node_id: str
    subject_kind: str
    subject_id: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fences: Mapping[str, int] = field(default_factory=dict)
    allocation_id: str | None = None
    deadline_s: int = 3600
    priority: int = 0
    not_before_s: float = 0


def enqueue(conn: sa.Connection, item: Enqueue, act: Act) -> Task:
    """Queue the work; the same work that nobody has begun yet is not queued twice."""
    query = sa.select(tasks).where(
        tasks.c.node_id == item.node_id,
        tasks.c.kind == item.kind,
        tasks.c.subject_kind == item.subject_kind,
        tasks.c.subject_id == item.subject_id,
        tasks.c.state.in_(DUE),
    )
    for same in db_rows.every(conn, part(query, ORDER, None), Task):
        given = (dict(item.parameters), dict(item.fences))
        if (same.parameters, same.fences) == given:
            return same
    return add(conn, item, act)


def add(conn: sa.Connection, item: Enqueue, act: Act) -> Task:
    """Queue work on what this transaction has made: nothing of it can be queued already."""
    record = db_rows.add(
        conn,
        Task,
        {
            "id": db_rows.ordered_id(),
            "kind": item.kind.value,
            "subject_kind": item.subject_kind,
            "subject_id": item.subject_id,
            "node_id": item.node_id,
            "allocation_id": item.allocation_id,
            "state": TaskState.QUEUED.value,
            "deadline_at": journal.limit("task", TaskState.QUEUED),
            "deadline_s": item.deadline_s,
            "priority": item.priority,
            "exclusive": item.kind.exclusive,
            "parameters": dict(item.parameters),
            "fences": dict(item.fences),
            "max_attempts": item.kind.attempts,
            "not_before": clock.now() + item.not_before_s if item.not_before_s else None,
            "correlation_id": act.correlation_id,
            "requested_by": act.actor,
        },
    )
    journal.begin(conn, "task", record, act)
    return record


def run_id(task: Task) -> str:
    """The name of the run that the task has now: one for each attempt, and for each that did not
    reach its host.
    """
    again = f"-{task.unreached}" if task.unreached else ""
    return f"{task.id}-{task.attempt}{again}"


def heartbeat(conn: sa.Connection, task_id: str, token: str, *, seconds: float = 30) -> Task:
    """Hold on to the task; the answer says whether somebody asked for its end.

    Past its deadline nobody can hold on to it: the lease ends, so that the task can be given up.
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
    """A run of its own belongs to the task: whoever takes it over attaches to that run.

    deadline_s: how long the run may take; the task's own deadline follows it, once for each run.
    """
    values: dict[str, Any] = {"run_id": run_id, "run_directory": run_directory}
    if deadline_s is not None:
        new = clock.now() + deadline_s + SETTLE_S
        values["deadline_at"] = sa.case((tasks.c.run_id == run_id, tasks.c.deadline_at), else_=new)
    return _held(conn, task_id, token, values)


def progress(
    conn: sa.Connection,
    task_id: str,
    token: str,
    *lines: Mapping[str, Any],
    offset: int | None = None,
) -> Task:
    """How far it is; every line is kept as an event, the last one is the task's progress.

    offset: how much of the run's progress file these lines end; who attends next begins there.
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


def wait(
    conn: sa.Connection, task_id: str, token: str, reason: str, *, seconds: float, act: Act
) -> Task:
    """Give the task back until later; the reason is shown."""
    _held(conn, task_id, token, {})
    columns = {**_FREE, "not_before": clock.now() + seconds}
    return advance(conn, "task", task_id, "wait", act.because(reason), columns=columns)


def wait_for_host(
    conn: sa.Connection,
    task_id: str,
    token: str,
    reason: str,
    *,
    act: Act,
    error: Mapping[str, Any] | None = None,
) -> Task:
    """Give the task back because its run never reached the host: nothing was done there.

    The next run has an id of its own and is the same attempt. It comes when the host answers, or
    by itself after a while that doubles each time. error: what kept it here, if not the host.
    """
    task = _held(conn, task_id, token, {})
    pause = min(_FIRST_PAUSE_S * 2 ** min(task.unreached, 20), _LONGEST_PAUSE_S)
    columns = {
        **_FREE,
        **_NO_RUN,
        "unreached": task.unreached + 1,
        "not_before": clock.now() + pause,
        "error": dict(error or {}),
    }
    return advance(conn, "task", task_id, "wait", act.because(reason), columns=columns)


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
    """Another attempt with a run of its own; error: how this one ended."""
    task = _held(conn, task_id, token, {})
    if task.attempt >= task.max_attempts:
        raise Problem(
            "attempts_exhausted",
            409,
            expected=f"at most {task.max_attempts} attempts",
            found=f"attempt {task.attempt} has ended",
            remedy="finish the task as failed; its error says what to do",
        )
    columns = {
        **_FREE,
        **_NO_RUN,
        "attempt": task.attempt + 1,
        "unreached": 0,
        "not_before": clock.now() + seconds,
        "error": dict(error or {}),
    }
    return advance(conn, "task", task_id, "retry", act.because(reason), columns=columns)


def postpone_behind(conn: sa.Connection, task: Task, kind: TaskKind) -> None:
    """What was queued for its node after the task does not begin before it is due again."""
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
    """End the task, once, by its holder; what follows from it goes into the same transaction."""
    _held(conn, task_id, token, {})
    columns = {
        **_FREE,
        "result": dict(result or {}),
        "error": dict(error or {}),
        "finished_at": clock.now(),
    }
    return advance(conn, "task", task_id, _ENDS[state], act, columns=columns)


def cancel(conn: sa.Connection, task_id: str, act: Act) -> Task:
    """End it if nobody has begun; otherwise ask its holder to end the run.

    For those who end what the task is about as well; by itself a task is ended by tasks/cancel.py.
    """
    task = db_rows.get(conn, Task, task_id, lock=True)
    if task.state in DUE:
        columns = {"finished_at": clock.now(), "cancel_requested": True}
        return advance(conn, "task", task_id, "cancel", act, columns=columns)
    if task.state != TaskState.RUNNING or task.cancel_requested:
        return task
    return _ask_to_end(conn, act, tasks.c.id == task_id) or task


def drop(conn: sa.Connection, task: Task, act: Act, error: Mapping[str, Any]) -> Task:
    """End a task that nobody has begun, as it was read."""
    columns = {"error": dict(error), "finished_at": clock.now(), "cancel_requested": True}
    return advance(
        conn,
        "task",
        task.id,
        "cancel",
        act,
        expect_generation=task.generation,
        columns=columns,
    )


def expire(
    conn: sa.Connection, task_id: str, deadline_at: float, act: Act, error: Mapping[str, Any]
) -> Task | None:
    """A running task is past its deadline: its holder is asked to end the run, for a last while.

    None when that is not its deadline any more.
    """
    late = sa.and_(tasks.c.id == task_id, tasks.c.deadline_at == deadline_at)
    last = {"error": dict(error), "deadline_at": clock.now() + GRACE_S}
    return _ask_to_end(conn, act, late, **last)


def lose(conn: sa.Connection, task: Task, act: Act, error: Mapping[str, Any]) -> Task:
    """End a task that neither run nor holder ended, as it was read; nobody holds it any more."""
    columns = {**_FREE, "error": dict(error), "finished_at": clock.now()}
    return advance(
        conn, "task", task.id, "lose", act, expect_generation=task.generation, columns=columns
    )


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
    limit: int = 100,
    page: Page | None = None,
) -> list[Task]:
    """Newest first."""
    query = db_rows.where(
        sa.select(tasks),
        tasks,
        node_id=node_id,
        allocation_id=allocation_id,
        kind=kind,
        state=state,
    )
    return db_rows.every(conn, part(query, ORDER, page or Page(limit)), Task)


def open_of_allocation(conn: sa.Connection, allocation_id: str) -> list[Task]:
    """What has not ended yet."""
    query = sa.select(tasks).where(
        tasks.c.allocation_id == allocation_id, tasks.c.state.in_((*DUE, TaskState.RUNNING))
    )
    return db_rows.every(conn, query.order_by(tasks.c.created_at, tasks.c.id), Task)


def never_ran(task: Task) -> bool:
    """Whether no run of the task can have been on its host. One that never reached it leaves its
    task without a run; of a second attempt nothing says what the first one did.
    """
    return task.state != TaskState.RUNNING and task.attempt <= 1 and not task.run_id


def may_have_begun(conn: sa.Connection, allocation_id: str) -> bool:
    """Whether something may have been done on the host for an allocation."""
    query = sa.select(tasks).where(tasks.c.allocation_id == allocation_id)
    return not all(never_ran(task) for task in db_rows.every(conn, query, Task))


def open_of_node(conn: sa.Connection, node_id: str) -> list[Task]:
    """What has not ended yet."""
    query = sa.select(tasks).where(
        tasks.c.node_id == node_id, tasks.c.state.in_((*DUE, TaskState.RUNNING))
    )
    return db_rows.every(conn, query.order_by(tasks.c.created_at, tasks.c.id), Task)


def canceled_runs(conn: sa.Connection, runner: str) -> list[Task]:
    """Tasks of this runner whose runs somebody has asked to end."""
    query = sa.select(tasks).where(
        tasks.c.state == TaskState.RUNNING,
        tasks.c.cancel_requested,
        tasks.c.runner == runner,
        tasks.c.run_directory != "",
    )
    return db_rows.every(conn, query, Task)


def events(conn: sa.Connection, task_id: str, since: int = 0) -> list[TaskEvent]:
    """Progress in order, after the event `since`."""
    query = sa.select(task_events).where(task_events.c.task_id == task_id, task_events.c.id > since)
    return db_rows.every(conn, query.order_by(task_events.c.id), TaskEvent)


def abandon(conn: sa.Connection, owner: str) -> int:
    """What this owner held before it ended can be taken at once."""
    update = (
        sa.update(tasks)
        .where(tasks.c.state == TaskState.RUNNING, tasks.c.lease_owner == owner)
        .values(lease_expires_at=clock.now() - 1)
    )
    return conn.execute(update).rowcount


def let_go(conn: sa.Connection, task: Task) -> None:
    """Its holder cannot attend to it now: anybody may, if the lease is still this one."""
    held = sa.update(tasks).where(
        tasks.c.id == task.id,
        tasks.c.state == TaskState.RUNNING,
        tasks.c.lease_token == task.lease_token,
    )
    conn.execute(held.values(lease_expires_at=clock.now() - 1))


def holders(conn: sa.Connection, runner: str) -> list[str]:
    """Who holds the leases of tasks whose runs are in this runner's folder."""
    query = sa.select(tasks.c.lease_owner).where(
        tasks.c.state == TaskState.RUNNING, tasks.c.runner == runner, tasks.c.lease_owner != ""
    )
    return list(conn.execute(query.distinct()).scalars())


def resume(conn: sa.Connection, node_id: str) -> int:
    """The node answers again: what waits for it is due now."""
    update = (
        sa.update(tasks)
        .where(tasks.c.state == TaskState.WAITING, tasks.c.node_id == node_id)
        .values(not_before=clock.now())
    )
    return conn.execute(update).rowcount


def _ask_to_end(
    conn: sa.Connection, act: Act, which: sa.ColumnElement[bool], **values: Any
) -> Task | None:
    """None when no such task is running. Whoever has read it before decides anew (If-Match)."""
    running = sa.update(tasks).where(which, tasks.c.state == TaskState.RUNNING)
    later = {"generation": tasks.c.generation + 1, "cancel_requested": True, **values}
    row = conn.execute(running.values(later).returning(tasks)).mappings().first()
    if row is None:
        return None
    task = Task(**row)
    journal.remark(conn, "task", task, act, "cancel_requested")
    return task


def _held(conn: sa.Connection, task_id: str, token: str, values: Mapping[str, Any]) -> Task:
    """Update as the holder; whoever lost the lease, or has finished, is refused."""
    update = (
        sa.update(tasks)
        .where(
            tasks.c.id == task_id,
            tasks.c.state == TaskState.RUNNING,
            tasks.c.lease_token == token,
            tasks.c.lease_token != "",
        )
        .values(**(values or {"lease_token": token}))
        .returning(tasks)
    )
    row = conn.execute(update).mappings().first()
    if row is None:
        task = get(conn, task_id)
        raise Problem(
            "stale_lease",
            409,
            expected=f"the holder of task {task_id}",
            found=f"a lease that ended; the task is {task.state}",
            remedy="stop: another worker goes on with this task, or it has ended",
        )
    return Task(**row)


# After the run's task has been given up, which blocks the slots itself and says why.
_AFTER_S = 2 * GRACE_S


def extend_deadlines(conn: sa.Connection, task: Task) -> None:
    """Put off the deadlines of a begun task's allocation, claims and slots behind its own.

    Eight disks are wiped one after another, and some controllers take hours over one: a limit that
    knows only of the state would block a slot whose run is doing well. Never for work that only
    waits: it would wait for ever. The task's deadline is set once for each run, so a second look at
    the same run moves nothing.
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
    # States without a limit have no deadline, and keep none.
    later = sa.update(table).where(*only, table.c.deadline_at < until)
    conn.execute(later.values(deadline_at=until))


# Of each kind, so that no look reads a whole long past at once.
_AT_ONCE = 500
OPEN = (*DUE, TaskState.RUNNING)


@dataclass(frozen=True)
class Position:
    """The last change and the last line that a reader has."""

    change: int = 0
    line: int = 0


@dataclass(frozen=True)
class Followed:
    """rows: in order, each with its `type` (state, progress) and its `place`; task: as it is now.

    over: the task has ended and these are its last rows.
    """

    task: Task
    rows: list[Record]
    over: bool


def events_after(conn: sa.Connection, task_id: str, place: Position) -> Followed:
    """What came after the place. One task is written by one holder: ids are in order of time."""
    task = get(conn, task_id)
    changes = sa.select(history).where(
        history.c.entity == "task", history.c.entity_id == task_id, history.c.id > place.change
    )
    lines = sa.select(task_events).where(
        task_events.c.task_id == task_id, task_events.c.id > place.line
    )
    found = [
        {"type": kind, **row}
        for kind, query, key in (
            ("state", changes, history.c.id),
            ("progress", lines, task_events.c.id),
        )
        for row in db_rows.every(conn, query.order_by(key).limit(_AT_ONCE))
    ]
    whole = len(found) < _AT_ONCE
    # At the same instant the lines come first: the end of a task is written after them.
    found.sort(key=lambda row: (row["at"], row["type"]))
    for row in found:
        name = "change" if row["type"] == "state" else "line"
        place = replace(place, **{name: row["id"]})
        row["place"] = place
    return Followed(task, found, whole and task.state not in OPEN)
