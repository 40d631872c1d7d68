"""The end of a task that nobody wants any more.

One whose run may live is asked to end, and settled by its holder. One that has not begun ends here,
and its handler is told as of any other failure: nothing that waited for the task waits on.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

from reconciler.db.schema import Task
from reconciler.model.act import Act
from reconciler.model.proof import NOTHING_DONE
from reconciler.records import claims, queue
from reconciler.records.leasing import DUE
from reconciler.settings import Settings
from reconciler.work.handler import Failure, failed_work
from reconciler.work.kinds import HANDLERS

STEP = "wait for its run"


def cancel(
    conn: Connection,
    settings: Settings,
    task_id: str,
    act: Act,
    *,
    error: Mapping[str, str] | None = None,
    believed: bool = True,
) -> Task:
    """Problem `generation_conflict` when somebody takes the task meanwhile: repeat all of it.

    error: why, if not because somebody asked for it. believed: whether the record can be relied on
    when it says that no run has begun.
    """
    task = queue.get(conn, task_id)
    if task.state not in DUE:
        return queue.cancel(conn, task_id, act)
    told = dict(error or _asked_for(act))
    # As where a run is settled: first what the task was about, then the task. In another order, two
    # who end the same allocation could wait for each other.
    failure = _failure(task, told, believed=believed)
    handler = HANDLERS.get(task.kind)
    if handler is not None:
        with failed_work(conn, settings, task) as work:
            handler.fail(work, failure)
    if not failure.known:
        claims.fence_off(conn, task.fences)
    return queue.drop(conn, task, act, told)


def _failure(task: Task, error: dict[str, str], *, believed: bool) -> Failure:
    if believed and queue.never_ran(task):
        return Failure(STEP, error, dict(NOTHING_DONE), known=True)
    return Failure(STEP, error, {}, known=False)


def _asked_for(act: Act) -> dict[str, str]:
    return {
        "code": "canceled",
        "expected": "a task that is wanted until its run begins",
        "found": act.reason or "its cancellation, asked for before its run began",
        "remedy": "if it is still wanted, ask for it again; a blocked slot needs `gpuaas recover`,"
        " a machine that is not clean `gpuaas nodes clean-machine`",
    }
