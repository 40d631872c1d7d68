"""Task leases: the tasks that a worker may begin, and the reasons why others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, locks, rows
from reconciler.db.journal import advance
from reconciler.db.schema import Node, Task, allocations, nodes, tasks
from reconciler.model.act import Act
from reconciler.model.states import BY_MAAS, NodeState, TaskKind, TaskState
from reconciler.records import certificates

DUE = (TaskState.QUEUED, TaskState.WAITING)
# Extra rows that are read beyond the limit. The query excludes tasks that cannot begin, so rows are
# skipped only when other workers take them or when earlier rows of this call exclude them.
_SPARE = 50
_other = tasks.alias("other")
_OF = tasks.c.allocation_id == allocations.c.id


def lease(
    conn: sa.Connection,
    owner: str,
    *,
    runner: str = "",
    seconds: float = 30,
    kinds: Sequence[TaskKind] | None = None,
    limit: int = 1,
    share: int | None = None,
) -> list[Task]:
    """Lease tasks that are due and may run now, and tasks of this runner whose lease has expired.

    runner: id of the folder with this worker's runs (runs.paths.runner_id). A worker cannot see
    whether a run of another runner is alive. So it neither attaches to such a run nor starts it a
    second time.

    Of equal priority, the project with the fewest running tasks comes first. So no project keeps
    the workers from the others, for example by machines that never answer. share: tasks of this
    runner with which a project gets no more.
    """
    query = sa.select(tasks).where(sa.or_(_may_begin(runner), _left(runner)))
    if kinds is not None:
        query = query.where(tasks.c.kind.in_(kinds))
    turn, joined = _turn(runner, share)
    order = (tasks.c.priority.desc(), turn, tasks.c.created_at, tasks.c.id)
    taken: list[Task] = []
    locked: set[str] = set()
    while len(taken) < limit:
        free = joined(query).where(tasks.c.node_id.not_in(sorted(locked))).order_by(*order)
        candidates = rows.every(conn, free.limit(limit - len(taken) + _SPARE), Task)
        before = len(locked)
        for candidate in candidates:
            if len(taken) == limit or candidate.node_id in locked:
                continue
            # The node's row is the lock for leasing tasks of this node. The same query under the
            # lock has an answer that stays true. A node that another transaction has locked is
            # skipped, because that transaction may hang.
            with locks.free_node(conn, candidate.node_id) as node:
                if node is None:
                    locked.add(candidate.node_id)
                    continue
                mine = query.where(tasks.c.id == candidate.id)
                task = rows.first(conn, mine.with_for_update(skip_locked=True, of=tasks), Task)
                if task is not None:
                    taken.append(_take(conn, task, owner, runner, seconds))
        if len(locked) == before:
            break
    return taken


def _turn(
    runner: str, share: int | None
) -> tuple[sa.ColumnElement[int], Callable[[sa.Select[Any]], sa.Select[Any]]]:
    """A task's turn among those of its project: 1 for the first of a project without a running
    task. Also the join that it needs, without projects that have their share of the runner. Tasks
    without an allocation take turns as one project.
    """
    project = sa.func.coalesce(allocations.c.project_id, "")
    busy = (
        sa.select(
            project.label("project"),
            sa.func.count().label("tasks"),
            sa.func.sum(sa.case((tasks.c.runner == runner, 1), else_=0)).label("here"),
        )
        .select_from(tasks.join(allocations, _OF, isouter=True))
        .where(tasks.c.state == TaskState.RUNNING)
        .group_by(project)
        .subquery()
    )
    number = sa.func.row_number().over(
        partition_by=project, order_by=(tasks.c.created_at, tasks.c.id)
    )

    def joined(query: sa.Select[Any]) -> sa.Select[Any]:
        query = query.join(allocations, _OF, isouter=True).join(
            busy, busy.c.project == project, isouter=True
        )
        if share is None:
            return query
        return query.where(sa.or_(begun, sa.func.coalesce(busy.c.here, 0) < share))

    # A run that lost its worker is not begun but gone on with.
    begun = tasks.c.state == TaskState.RUNNING
    turn = sa.case((begun, 0), else_=number + sa.func.coalesce(busy.c.tasks, 0))
    return turn, joined


def _may_begin(runner: str) -> sa.ColumnElement[bool]:
    on_node = sa.exists().where(_other.c.node_id == tasks.c.node_id)
    running = on_node.where(_other.c.state == TaskState.RUNNING)
    same_subject = sa.exists().where(
        _other.c.state == TaskState.RUNNING,
        _other.c.subject_kind == tasks.c.subject_kind,
        _other.c.subject_id == tasks.c.subject_id,
    )
    # An earlier exclusive task goes first, because it would otherwise wait for ever.
    ahead = on_node.where(
        _other.c.state == TaskState.QUEUED,
        _other.c.exclusive,
        sa.tuple_(_other.c.created_at, _other.c.id) < sa.tuple_(tasks.c.created_at, tasks.c.id),
        _due(_other.c),
    )
    # A machine that MAAS installs is nothing for other tasks, and need not answer.
    installed = on_node.where(
        _other.c.kind.in_(BY_MAAS), _other.c.state == TaskState.WAITING, _other.c.id != tasks.c.id
    )
    return sa.and_(
        tasks.c.state.in_(DUE),
        _due(tasks.c),
        sa.or_(tasks.c.run_id == "", tasks.c.runner == runner),
        sa.or_(tasks.c.kind.in_(BY_MAAS), ~_unreachable()),
        ~installed,
        ~same_subject,
        sa.case(
            (tasks.c.exclusive, ~running), else_=sa.and_(~running.where(_other.c.exclusive), ~ahead)
        ),
    )


def _left(runner: str) -> sa.ColumnElement[bool]:
    # A task past its deadline is given up and not taken over. Before that it gets a grace time
    # (work.loops), in which the outcome of an ended run can still be recorded.
    return sa.and_(
        tasks.c.state == TaskState.RUNNING,
        tasks.c.lease_expires_at < clock.now(),
        tasks.c.deadline_at >= clock.now(),
        tasks.c.runner == runner,
    )


def _due(columns: Any) -> sa.ColumnElement[bool]:
    return sa.or_(columns.not_before.is_(None), columns.not_before <= clock.now())


def _unreachable() -> sa.ColumnElement[bool]:
    return sa.exists().where(nodes.c.id == tasks.c.node_id, nodes.c.state == NodeState.UNREACHABLE)


def _take(conn: sa.Connection, task: Task, owner: str, runner: str, seconds: float) -> Task:
    again = task.state == TaskState.RUNNING
    reason = f"taken over by {owner}" if again else f"taken by {owner}"
    # A new lease clears the error that kept the task waiting. A takeover keeps it, because it
    # belongs to the run that goes on.
    fresh: dict[str, Any] = {} if again else {"error": {}}
    return advance(
        conn,
        Task,
        task.id,
        "lease",
        Act(owner, reason, task.correlation_id),
        columns={
            **fresh,
            "runner": runner,
            "lease_owner": owner,
            "lease_token": rows.new_id(),
            "lease_expires_at": clock.now() + seconds,
            "started_at": task.started_at if again else clock.now(),
            "deadline_at": task.deadline_at if again else clock.now() + task.deadline_s,
        },
    )


# Errors of the controller side: the services that a task needs, the run folder, our identity.
CONTROLLER_CODES = (
    *("awx_silent", "maas_silent", "ufm_silent"),
    *("run_folder_unwritable", "controller_unready"),
)


def wait_reasons(conn: sa.Connection, waiting: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """Reasons by task id, for tasks that have not begun: `code`, `detail`, and fields of the code.

    host_unreachable and host_certificate_expired (unreachable_since, attempts, not_before),
    CONTROLLER_CODES (attempts, not_before), later (not_before), node_busy and exclusive_first
    (task_id), worker.
    """
    due = [task for task in waiting if task.state in DUE]
    ids = {task.node_id for task in due}
    if not ids:
        return {}
    read = rows.every(conn, sa.select(nodes).where(nodes.c.id.in_(ids)), Node)
    hosts = {node.id: node for node in read}
    query = sa.select(tasks).where(
        tasks.c.node_id.in_(ids),
        sa.or_(
            tasks.c.state.in_((TaskState.RUNNING, TaskState.QUEUED)),
            sa.and_(tasks.c.kind.in_(BY_MAAS), tasks.c.state == TaskState.WAITING),
        ),
    )
    beside = rows.every(conn, query.order_by(tasks.c.created_at, tasks.c.id), Task)
    now = clock.read(conn)
    why = {task.id: _reason(task, hosts[task.node_id], beside, now) for task in due}
    until = certificates.ends(conn, ids)
    for task in due:
        reason, end = why[task.id], until.get(task.node_id, now + 1)
        if reason["code"] == "host_unreachable" and end <= now:
            # The host may be back already, but SSH refuses it with an expired certificate.
            problem = certificates.expired(task.node_id, end, reason["detail"])
            reason["code"] = problem.code
            reason["detail"] = f"{problem.found}; {problem.remedy}"
    return why


def _reason(task: Task, node: Node, beside: Sequence[Task], now: float) -> dict[str, Any]:
    lost = node.state == NodeState.UNREACHABLE and task.kind not in BY_MAAS
    later = task.not_before is not None and task.not_before > now
    if not lost and later and (ours := task.error.get("code")) in CONTROLLER_CODES:
        return {
            "code": ours,
            "detail": task.state_reason,
            "attempts": task.unreached,
            "not_before": task.not_before,
        }
    if lost or (task.unreached and later):
        return {
            "code": "host_unreachable",
            "detail": task.state_reason if task.unreached else node.state_reason,
            "unreachable_since": node.state_since if lost else None,
            "attempts": task.unreached,
            "not_before": None if lost else task.not_before,
        }
    if later:
        explained = task.state == TaskState.WAITING or task.attempt > 1
        detail = task.state_reason if explained else "not before a time"
        return {"code": "later", "detail": detail, "not_before": task.not_before}
    for other in beside:
        if other.node_id == task.node_id and (code := _ahead(task, other)):
            return {"code": code, "detail": f"{other.kind} {other.state}", "task_id": other.id}
    return {"code": "worker", "detail": "a worker that is free"}


def _ahead(task: Task, other: Task) -> str:
    """Code of the reason why the other task keeps this task from beginning; "" when it does not."""
    same = (task.subject_kind, task.subject_id) == (other.subject_kind, other.subject_id)
    if other.state == TaskState.WAITING:
        return "node_busy" if other.id != task.id else ""
    if other.state == TaskState.RUNNING:
        return "node_busy" if same or task.exclusive or other.exclusive else ""
    first = (other.created_at, other.id) < (task.created_at, task.id)
    return "exclusive_first" if first and other.exclusive and not task.exclusive else ""
