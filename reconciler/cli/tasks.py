"""`gpuaas tasks`: list, show, follow and cancel tasks; and waiting for a task to end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli import output
from reconciler.cli.options import Reason
from reconciler.cli.session import client
from reconciler.model.errors import Problem

if TYPE_CHECKING:
    from reconciler.client import Event

Record = dict[str, Any]

# For a task that cannot begin, because its host restarts or its worker is busy. A running task is
# waited for until its own deadline.
UNBEGUN_S = 7200
# A free worker takes a task within a second or two. After this time the wait is reported.
WORKER_S = 5

app = typer.Typer(no_args_is_help=True, help="Tasks: each is a run of a playbook.")

Task = Annotated[str, typer.Argument(help="The task's id.")]


@app.command("list")
def list_tasks(
    node: Annotated[str, typer.Option(help="Only tasks of this node.")] = "",
    allocation: Annotated[str, typer.Option(help="Only tasks of this allocation.")] = "",
    state: Annotated[
        str, typer.Option(help="Only this state, such as queued, waiting, running or failed.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 30,
) -> None:
    """List the newest tasks."""
    filters = {"node_id": node, "allocation_id": allocation, "state": state}
    page = client().get("/admin/tasks", limit=limit, **filters)
    tasks = page["items"]
    for row in tasks:
        row["why"] = (row["waits_for"] or row["error"]).get("code", "")
    output.rows(tasks, "id", "kind", "state", "node_id", "attempt", "created_at", "why")
    output.more(page, limit)


@app.command("show")
def show_task(task: Task) -> None:
    """Show a task and the end of its run's output."""
    document = client().get(f"/admin/tasks/{task}")
    if output.in_json(document):
        return
    text = document.pop("output", "")
    events = document.pop("events", [])
    output.record(document)
    for event in events:
        output.line(f"{event['at']}  {event['document']}")
    sys.stdout.write(output.clean(text))


@app.command()
def cancel(task: Task, reason: Reason = "") -> None:
    """End a waiting task, or ask a running task to stop."""
    document = client().post(f"/admin/tasks/{task}/cancel", {"reason": reason})
    output.record(document)
    if document["state"] not in ("canceled", "running"):
        output.line(f"nothing to cancel: it had {document['state']}")


@app.command()
def watch(task: Task) -> None:
    """Wait for a task, and show its current step meanwhile."""
    output.record(wait_for(task)["result"])


@app.command()
def follow(task: Task) -> None:
    """Print all events of a task, past and new, until it has ended."""
    for event in client().events(f"/admin/tasks/{task}/events"):
        if output.is_json():
            sys.stdout.write(json.dumps({"event": event.name, **event.document}) + "\n")
            sys.stdout.flush()
        elif event.name != "end":
            output.line(_event_line(event))
        if event.name == "end":
            if event.document["state"] != "succeeded":
                raise failed(event.document)
            return


@app.command("output")
def task_output(
    task: Task,
    limit: Annotated[int, typer.Option(help="At most this many bytes from its end.")] = 20_000,
) -> None:
    """Print the output of the task's run, with secrets removed."""
    document = client().get(f"/admin/tasks/{task}/output", limit=limit)
    if output.in_json(document):
        return
    if not document["here"]:
        output.line("nothing to show: no run has begun, or its files are on another machine")
    sys.stdout.write(output.clean(document["output"]))


def queue(path: str, body: Record | None = None, *, wait: bool) -> Record | None:
    """Queue the task of a request and return it once it has succeeded, or raise its Problem.

    Without `wait`: print the queued task and return None.
    """
    task: Record = client().post(path, body)
    output.line(f"task {task['id']} {task['kind']} {task['state']}")
    if wait:
        return wait_for(task["id"])
    output.record(task)
    return None


def run(path: str, body: Record | None = None, *, wait: bool) -> Record | None:
    """The same, and print the result of the task."""
    task = queue(path, body, wait=wait)
    if task:
        output.record(task["result"])
    return task


def wait_for(task_id: str) -> Record:
    """Wait for a task and its successors, showing their steps; returns the last task.

    Raises the error of the first task that does not succeed.
    """
    task = _wait(task_id)
    while successor := task["result"].get("next_task_id"):
        output.line(f"task {successor} follows")
        task = _wait(successor)
    return task


def failed(task: Record) -> Problem:
    """The error of a task that has ended without success."""
    error = task.get("error") or {}
    step = f" at step {error['step']!r}" if error.get("step") else ""
    return Problem(
        error.get("code") or f"task_{task['state']}",
        expected=error.get("expected") or f"task {task['id']} to succeed",
        found=f"{error.get('found') or task['state']}{step}",
        remedy=error.get("remedy") or f"read `gpuaas tasks show {task['id']}`",
    )


def wait_text(row: Mapping[str, Any]) -> str:
    """What a task or a recovery case waits for, "" if it does not wait."""
    wait = row.get("waits_for") or {}
    return f"waits for {wait['code']}: {wait.get('detail', '')}".rstrip(": ") if wait else ""


def _wait(task_id: str) -> Record:
    began, last_line = time.monotonic(), ""

    def report(task: Record) -> None:
        nonlocal last_line
        after_s = time.monotonic() - began
        line = f"{task['state']}  {_current_step(task, after_s)}".strip()
        if line != last_line:
            last_line = line
            output.line(f"  {after_s:6.1f} s  {line}")

    with output.waiting(f"task {task_id}", f"gpuaas tasks watch {task_id}"):
        task = client().wait(task_id, unbegun_s=UNBEGUN_S, on_progress=report)
    if task["state"] != "succeeded":
        raise failed(task)
    return task


def _current_step(task: Record, after_s: float) -> str:
    waits = task.get("waits_for") or {}
    if waits and (waits["code"] != "worker" or after_s > WORKER_S):
        return wait_text(task)
    return str((task.get("progress") or {}).get("task") or task.get("state_reason") or "")


def _event_line(event: Event) -> str:
    document = event.document
    if event.name == "state":
        reason = f": {document['reason']}" if document["reason"] else ""
        return f"{document['at']}  {document['target']}{reason}"
    code = f"  {document['code']}" if document.get("code") else ""
    step = f"{document.get('event', ''):<8} {document.get('task', '')}"
    return f"{document.get('at', '')}    {step}{code}"
