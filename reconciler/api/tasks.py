"""Tasks: every run of a playbook, with what it is doing, what it said, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api import guards, views
from reconciler.api.eventstream import Batch, Event, EventStream
from reconciler.api.guards import IfMatch
from reconciler.api.models import Filter, Id, Reasoned
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.db import journal
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, queue
from reconciler.records.queue import Position
from reconciler.runs import collect
from reconciler.runs.scrub import scrub
from reconciler.work.cancel import cancel as cancel_task

router = APIRouter(prefix="/admin/tasks", tags=["tasks"])

# A log is for people at a terminal; the run's folder has all of it.
OUTPUT_LIMIT = 20_000
# At the end of the place of the last event: who has it has all.
_END = ".end"


@router.get("")
def list_tasks(
    context: Admin,
    part: Paging,
    *,
    node_id: Filter = None,
    allocation_id: Filter = None,
    kind: TaskKind | None = None,
    state: TaskState | None = None,
) -> dict[str, Any]:
    """Newest first."""

    page = part.page(queue.ORDER)

    def read(conn: Connection) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        rows = queue.every(
            conn, node_id=node_id, allocation_id=allocation_id, kind=kind, state=state, page=page
        )
        return rows, leasing.wait_reasons(conn, rows)

    rows, reasons = context.read(read)
    return part.told(queue.ORDER, rows, lambda row: _told(row, reasons))


@router.get("/{task_id}")
def show(task_id: Id, context: Admin) -> JSONResponse:
    """One task with its events and the end of its run's output."""

    def read(conn: Connection) -> dict[str, Any]:
        row = queue.get(conn, task_id)
        task = _told(row, leasing.wait_reasons(conn, [row]))
        return task | {"events": views.items(queue.events(conn, task_id))["items"]}

    task = context.read(read)
    return guards.tagged(task | {"output": _output(task, OUTPUT_LIMIT)})


@router.get("/{task_id}/output")
def output(
    task_id: Id,
    context: Admin,
    limit: Annotated[int, Query(ge=1, le=1_000_000, description="At most so many bytes.")] = (
        OUTPUT_LIMIT
    ),
) -> dict[str, Any]:
    """The end of what the task's run printed, without secrets. The run may be on another machine:
    then `here` is false and there is nothing to show.
    """
    task = context.read(lambda conn: queue.get(conn, task_id))
    here = bool(task["run_directory"]) and Path(task["run_directory"]).is_dir()
    return {"task_id": task_id, "here": here, "output": _output(task, limit)}


@router.get(
    "/{task_id}/events",
    response_class=EventStream,
    status_code=200,
    responses={204: {"description": "It ended, and the reader has all of it."}},
)
def events(
    task_id: Id,
    context: Admin,
    last_event_id: Annotated[
        str | None,
        Header(pattern=r"^\d{1,18}\.\d{1,18}(\.end)?$", description="Go on behind this event."),
    ] = None,
) -> Response:
    """Server-sent events: `state` and `progress` as they come, `end` with the task. A reader that
    comes back after the end gets 204.
    """
    start = last_event_id or "0.0"

    def read(place: str) -> Batch:
        news = context.read(lambda conn: queue.events_after(conn, task_id, _place(place)))
        found = [_event(row) for row in news.rows]
        if news.over:
            last = found[-1].place if found else place.removesuffix(_END)
            known = ("id", "kind", "state", "state_reason", "error", "finished_at")
            ended = views.record({name: news.task[name] for name in known})
            found.append(Event("end", f"{last}{_END}", ended))
        return Batch(found, news.over)

    if start.endswith(_END) and read(start).over:
        return Response(status_code=204)
    # Also so that a task that is not there is a plain refusal.
    context.read(lambda conn: queue.get(conn, task_id))
    return EventStream(read, start, every_s=context.settings.poll_s, allowed=context.allowed)


@router.post("/{task_id}/cancel")
def cancel(
    task_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """Ask a running task to stop; end one that waits. What that was about counts as failed: an
    allocation ends, and what may hold something of a tenant is blocked until it is recovered.
    """
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, Any]:
        guard.check(conn, "task", task_id)
        task = cancel_task(conn, context.settings, task_id, act)
        journal.audit(conn, act, "admin.task.canceled", "task", task_id)
        return views.record(task)

    return context.write(work, body=body)


def _told(row: dict[str, Any], reasons: dict[str, dict[str, Any]]) -> dict[str, Any]:
    reason = reasons.get(row["id"])
    return views.record(row) | {"waits_for": views.record(reason) if reason else None}


def _output(task: dict[str, Any], limit: int) -> str:
    directory = task["run_directory"]
    return scrub(collect.output(Path(directory), limit)) if directory else ""


def _place(text: str) -> Position:
    change, _, line = text.removesuffix(_END).partition(".")
    return Position(int(change), int(line))


def _event(row: dict[str, Any]) -> Event:
    place: Position = row["place"]
    names = ("at", "event", "source", "target", "actor", "reason")
    document = {name: row[name] for name in names} if row["type"] == "state" else row["document"]
    return Event(row["type"], f"{place.change}.{place.line}", views.record(document))
