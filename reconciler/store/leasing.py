"""Which work may begin now, and who takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.states import NodeState, TaskKind, TaskState
from reconciler.store import clock, rows
from reconciler.store.lifecycle import advance
from reconciler.store.rows import Record
from reconciler.store.tables import nodes, tasks

DUE = (TaskState.QUEUED, TaskState.WAITING)
# How many rows are looked at for each that is wanted: only what others take meanwhile, or what the
# rows before it shut out, is passed over. All rows that cannot begin are left out by the query.
_SPARE = 50

_other = tasks.alias("other")


def lease(
    conn: sa.Connection,
    owner: str,
    *,
    runner: str = "",
    seconds: float = 30,
    kinds: Sequence[TaskKind] | None = None,
    limit: int = 1,
) -> list[Record]:
    """Take what is due and may run now, and what a silent holder on the same runner left.

    runner: the folder that holds this worker's runs (runs.runner). Whether a run of another runner
    lives cannot be seen from here, so it is neither attached to nor started a second time.
    """
    query = sa.select(tasks).where(sa.or_(_may_begin(runner), _left(runner)))
    if kinds is not None:
        query = query.where(tasks.c.kind.in_(kinds))
    order = (tasks.c.priority.desc(), tasks.c.created_at, tasks.c.id)
    taken: list[Record] = []
    for candidate in rows.every(conn, query.order_by(*order).limit(limit + _SPARE)):
        if len(taken) == limit:
            break
        # The node's row is the lock under which tasks of one node are let in, one worker at a time:
        # asked again under it, the same question has an answer that stays true.
        rows.get(conn, nodes, candidate["node_id"], "node", lock=True)
        mine = query.where(tasks.c.id == candidate["id"])
        task = rows.first(conn, mine.with_for_update(skip_locked=True, of=tasks))
        if task is not None:
            taken.append(_take(conn, task, owner, runner, seconds))
    return taken


def _may_begin(runner: str) -> sa.ColumnElement[bool]:
    on_node = sa.exists().where(_other.c.node_id == tasks.c.node_id)
    running = on_node.where(_other.c.state == TaskState.RUNNING)
    same_subject = sa.exists().where(
        _other.c.state == TaskState.RUNNING,
        _other.c.subject_kind == tasks.c.subject_kind,
        _other.c.subject_id == tasks.c.subject_id,
    )
    # An exclusive task that came first is let in first, or it would wait for ever.
    ahead = on_node.where(
        _other.c.state == TaskState.QUEUED,
        _other.c.exclusive,
        sa.tuple_(_other.c.created_at, _other.c.id) < sa.tuple_(tasks.c.created_at, tasks.c.id),
        _due(_other.c),
    )
    return sa.and_(
        tasks.c.state.in_(DUE),
        _due(tasks.c),
        sa.or_(tasks.c.run_id == "", tasks.c.runner == runner),
        ~_unreachable(),
        ~same_subject,
        sa.case(
            (tasks.c.exclusive, ~running),
            else_=sa.and_(~running.where(_other.c.exclusive), ~ahead),
        ),
    )


def _left(runner: str) -> sa.ColumnElement[bool]:
    # Past its deadline a task is not taken over but given up; before that, it gets a last while
    # (reconciler.tasks.overdue), in which a run that ended meanwhile can still say how.
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


def _take(conn: sa.Connection, task: Record, owner: str, runner: str, seconds: float) -> Record:
    again = task["state"] == TaskState.RUNNING
    reason = f"taken over by {owner}" if again else f"taken by {owner}"
    # What kept it waiting is over; what somebody asked of a run that goes on is not.
    fresh: dict[str, Any] = {} if again else {"error": {}}
    return advance(
        conn,
        "task",
        task["id"],
        "lease",
        Act(owner, reason, task["correlation_id"]),
        columns={
            **fresh,
            "runner": runner,
            "lease_owner": owner,
            "lease_token": rows.new_id(),
            "lease_expires_at": clock.now() + seconds,
            "started_at": task["started_at"] if again else clock.now(),
            "deadline_at": task["deadline_at"] if again else clock.now() + task["deadline_s"],
        },
    )
