"""Cancellation of tasks.

A task whose run may be alive gets a cancel request, and its holder settles it. A task that has not
begun ends here. Its handler gets an ordinary failure, so that nothing keeps waiting for the task.
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
    """Cancel a task; Problem `generation_conflict` if a worker leases it meanwhile.

    After that Problem the caller repeats the whole transaction. error: the cause, if it is not a
    request. believed: whether to trust the record if it shows that no run has begun.
    """
    task = queue.get(conn, task_id)
    if task.state not in DUE:
        return queue.cancel(conn, task_id, act)
    told = dict(error or _asked_for(act))
    # Lock order as in `settle`: first the subject of the task, then the task. Any other order could
    # deadlock two transactions that end the same allocation.
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
