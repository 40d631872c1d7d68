"""Following a task until it has ended."""

from __future__ import annotations

import time
from typing import Any

from reconciler.cli import show
from reconciler.cli.session import Session
from reconciler.domain.errors import Problem

Record = dict[str, Any]

# The longest kind of task, a bootstrap with a slow reboot, ends well before.
DEADLINE_S = 7200


def after(session: Session, task: Record, *, wait: bool) -> Record:
    """The task that was queued; with `wait` once it has ended well, otherwise a Problem."""
    show.line(f"task {task['id']} {task['kind']} {task['state']}")
    return follow(session, task["id"]) if wait else task


def follow(session: Session, task_id: str) -> Record:
    """Show what a task is doing, and those that follow it; the last one.

    Raises the error of the first that does not succeed.
    """
    task = _follow(session, task_id)
    while following := task["result"].get("next_task_id"):
        show.line(f"task {following} follows")
        task = _follow(session, following)
    return task


def _follow(session: Session, task_id: str) -> Record:
    began, told = time.monotonic(), ""

    def tell(task: Record) -> None:
        nonlocal told
        doing = (task.get("progress") or {}).get("task") or task.get("state_reason") or ""
        line = f"{task['state']}  {doing}".strip()
        if line != told:
            told = line
            show.line(f"  {time.monotonic() - began:6.1f} s  {line}")

    task = session.client.wait(task_id, deadline_s=DEADLINE_S, on_progress=tell)
    if task["state"] != "succeeded":
        raise failed(task)
    return task


def failed(task: Record) -> Problem:
    """Why a task that ended did not succeed."""
    error = task.get("error") or {}
    step = f" at step {error['step']!r}" if error.get("step") else ""
    return Problem(
        error.get("code") or f"task_{task['state']}",
        expected=error.get("expected") or f"task {task['id']} to succeed",
        found=f"{error.get('found') or task['state']}{step}",
        remedy=error.get("remedy") or f"read `gpuaas tasks show {task['id']}`",
    )
