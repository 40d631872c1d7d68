"""Deadlines of unstable states: handling of records that are overdue.

Every unstable state has a deadline, and passing it is an event with a reason.
A running task is given up in two steps. First its run is canceled: by the holder of the lease and,
if the run's folder is on this machine, also directly. If the task still does not end and its lease
has expired, the task is lost. The effect of its run on the host is then unknown: its slots are
blocked and fenced off, and no later report of that run counts (I13).
"""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import Connection, Engine

from reconciler.db import clock, journal
from reconciler.db.engine import reading, transaction
from reconciler.db.journal import Overdue
from reconciler.db.leader import Deposed
from reconciler.db.schema import Task
from reconciler.lifecycle import recovery, recovery_cases
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.records import claims, queue
from reconciler.runs import collect
from reconciler.runs.paths import runner_id
from reconciler.settings import Settings
from reconciler.work.cancel import cancel
from reconciler.work.handler import Failure, failed_work
from reconciler.work.kinds import HANDLERS

log = logging.getLogger("gpuaas.overdue")


def end_overdue(engine: Engine, settings: Settings) -> None:
    """Handle every passed deadline; a failure is tried again at the next pass."""
    with reading(engine) as conn:
        # Warnings have no event and change nothing; they are only shown on request.
        late = [item for item in journal.overdue(conn) if item.event]
    for item in late:
        act = Act("reconciler", f"still {item.state} past its deadline")
        try:
            if item.entity == "task" and item.event == "lose":
                _end_task(engine, settings, item, act)
                continue
            if item.entity == "task" and item.event == "cancel":
                _cancel_task(engine, settings, item)
                continue
            expire = recovery_cases.expire if item.entity == "recovery_case" else recovery.expire
            with transaction(engine) as conn:
                expire(conn, item, act)
        except Problem as problem:
            log.info("overdue %s %s moved on: %s", item.entity, item.id, problem.code)
        except Deposed:
            raise
        except Exception:
            # A failing record must not block the others.
            log.exception("overdue %s %s is left as it is", item.entity, item.id)


def _end_task(engine: Engine, settings: Settings, item: Overdue, act: Act) -> None:
    error = recovery.deadline_error(item)
    with transaction(engine) as conn:
        task = queue.get(conn, item.id)
        if task.deadline_at != item.deadline_at:
            return  # Another worker, or the end of the task, was quicker.
        if task.error.get("code") == queue.DEADLINE_PASSED:
            # The lease ends soon after the deadline, because no heartbeat extends it then.
            if (task.lease_expires_at or 0.0) < clock.read(conn):
                lose(conn, settings, task, act.because(f"{act.reason}: no end of its run"))
            return
        asked = queue.expire(conn, item.id, item.deadline_at, act, error)
    if asked and asked.run_directory and asked.runner == runner_id(settings.state_dir):
        # Works for unattended runs too, because the run itself checks for its cancellation.
        collect.cancel(Path(asked.run_directory))


def _cancel_task(engine: Engine, settings: Settings, item: Overdue) -> None:
    """Cancel a task that no worker leased in time, so that its subject stops waiting for it."""
    with transaction(engine) as conn:
        if queue.get(conn, item.id).deadline_at != item.deadline_at:
            return
        error = recovery.deadline_error(item)
        act = Act("reconciler", f"deadline passed in {item.state}", evidence={"deadline": error})
        cancel(conn, settings, item.id, act, error=error)


def lose(conn: Connection, settings: Settings, task: Task, act: Act) -> None:
    """Give up a task whose run has an unknown effect: block, fence off, free nothing."""
    handler = HANDLERS.get(task.kind)
    with failed_work(conn, settings, task) as work:
        if handler is not None:
            handler.fail(work, Failure("deadline", task.error, {}, known=False))
        fenced = claims.fence_off(conn, task.fences)
        queue.lose(conn, task, act.because(act.reason, {"fenced_slots": fenced}), task.error)
