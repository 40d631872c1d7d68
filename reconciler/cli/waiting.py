"""Following a task until it has ended."""

from __future__ import annotations

import time
from typing import Any

from reconciler.cli import show
from reconciler.cli.session import Session
from reconciler.model.errors import Problem

Record = dict[str, Any]

# For a task that cannot begin: a host that restarts, a worker that is busy. What runs is waited for
# until its own deadline.
UNBEGUN_S = 7200
# A free worker takes a task within a second or two; longer, and none may live.
WORKER_S = 5


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
        after_s = time.monotonic() - began
        line = f"{task['state']}  {_doing(task, after_s)}".strip()
        if line != told:
            told = line
            show.line(f"  {after_s:6.1f} s  {line}")

    task = session.client.wait(task_id, unbegun_s=UNBEGUN_S, on_progress=tell)
    if task["state"] != "succeeded":
        raise failed(task)
    return task


def _doing(task: Record, after_s: float) -> str:
    waits = task.get("waits_for") or {}
    if waits and (waits["code"] != "worker" or after_s > WORKER_S):
        return f"waits for {waits['code']}: {waits.get('detail', '')}".rstrip(": ")
    return str((task.get("progress") or {}).get("task") or task.get("state_reason") or "")


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
