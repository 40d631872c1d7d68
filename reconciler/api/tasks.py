"""Tasks: state, progress, events and output; cancellation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field, WithJsonSchema, field_validator
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from reconciler.api.http import IfMatch, PageOf, Paging, encode, tagged
from reconciler.api.models import Answer, Document, Filter, Id, Moment, Reasoned, Record
from reconciler.api.security import Admin, Context
from reconciler.db import journal, locks, schema
from reconciler.lifecycle import task_failures
from reconciler.model.act import Act
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, queue
from reconciler.records.queue import Position
from reconciler.runs import collect
from reconciler.runs.scrub import scrub

router = APIRouter(prefix="/admin/tasks", tags=["tasks"])

# Enough for a person at a terminal; the run's folder has the whole log.
OUTPUT_LIMIT = 20_000
# Ends the position of the last event: a reader that sends it back has received everything.
_END = ".end"
# Proxies close idle connections, most of them after a minute.
_KEEP_ALIVE_S = 15.0
# The token is checked again at this interval: a reader with a revoked token gets events that long.
_CHECK_S = 2.0


class Task(Answer):
    """One piece of work on one node."""

    id: str
    kind: str
    subject_kind: str
    subject_id: str
    node_id: str
    allocation_id: str | None
    state: TaskState
    state_reason: str
    state_since: Moment
    deadline_at: Moment | None
    generation: int
    deadline_s: int
    priority: int
    exclusive: bool
    parameters: Document
    fences: Document
    attempt: int
    max_attempts: int
    lease_owner: str
    lease_expires_at: Moment | None
    not_before: Moment | None
    runner: str
    run_id: str
    run_directory: str
    unreached: int
    progress: Document
    progress_offset: int
    result: Document
    error: Document
    cancel_requested: bool
    correlation_id: str
    requested_by: str
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None

    @field_validator("parameters")
    @classmethod
    def _without_tenant_data(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        """A tenant's cloud-config may hold passwords, so no answer shows it."""
        return {name: value for name, value in parameters.items() if name != "tenant_data"}


def _absent(value: object) -> bool:
    return value is None


class WaitsFor(Answer):
    """The reason why a task has not begun. Only the fields that go with the code are present."""

    code: Literal[
        "host_unreachable",
        "host_certificate_expired",
        "awx_silent",
        "maas_silent",
        "ufm_silent",
        "run_folder_unwritable",
        "controller_unready",
        "later",
        "node_busy",
        "exclusive_first",
        "worker",
    ]
    detail: str
    task_id: Annotated[str | None, WithJsonSchema({"type": "string"})] = Field(
        default=None, exclude_if=_absent
    )
    attempts: Annotated[int | None, WithJsonSchema({"type": "integer"})] = Field(
        default=None, exclude_if=_absent
    )
    unreachable_since: Moment | None = Field(default=None, exclude_if=_absent)
    not_before: Moment | None = Field(default=None, exclude_if=_absent)


class ListedTask(Task):
    """A task with what it waits for."""

    waits_for: WaitsFor | None


class TaskEvent(Answer):
    """The progress of a task at a time."""

    id: int
    task_id: str
    at: Moment
    document: Document


class TaskDetail(ListedTask):
    """A task with what it waits for, its progress and the end of its run's output."""

    events: list[TaskEvent]
    output: str


class TaskOutput(Answer):
    """The end of a run's output. here: whether the run's files are on this machine."""

    task_id: str
    here: bool
    output: str


class StateEvent(Answer):
    """Event `state` of the stream: the task has changed its state."""

    at: Moment
    event: str
    source: str
    target: str
    actor: str
    reason: str


class EndEvent(Answer):
    """Event `end` of the stream: the task has ended."""

    id: str
    kind: str
    state: TaskState
    state_reason: str
    error: Document
    finished_at: Moment | None


@dataclass(frozen=True)
class Event:
    """place: the event's id. A reader sends it to resume behind this event."""

    name: str
    place: str
    document: dict[str, Any]

    def text(self) -> str:
        # JSON escapes line ends, so the document is a single line of data.
        data = json.dumps(self.document, separators=(",", ":"))
        return f"event: {self.name}\nid: {self.place}\ndata: {data}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events.

    `fastapi.sse` formats and sends events as well, but only from a generator endpoint: a refusal or
    a 204 before the first event is not possible there, and its fields have another order.
    """

    media_type = "text/event-stream"


@router.get("")
def list_tasks(
    context: Admin,
    paging: Paging,
    *,
    node_id: Filter = None,
    allocation_id: Filter = None,
    kind: TaskKind | None = None,
    state: TaskState | None = None,
) -> PageOf[ListedTask]:
    """Tasks, the newest first."""

    def items(conn: Connection, rows: Sequence[schema.Task]) -> list[ListedTask]:
        reasons = leasing.wait_reasons(conn, rows)
        return [ListedTask.of(row, waits_for=reasons.get(row.id)) for row in rows]

    read = partial(
        queue.every, node_id=node_id, allocation_id=allocation_id, kind=kind, state=state
    )
    return context.page_with(paging, queue.ORDER, read, items)


@router.get("/{task_id}", response_model=TaskDetail)
def show(task_id: Id, context: Admin) -> JSONResponse:
    """One task with its events and the end of its run's output."""

    def read(conn: Connection) -> tuple[schema.Task, Record]:
        row = queue.get(conn, task_id)
        reasons = leasing.wait_reasons(conn, [row])
        return row, {"waits_for": reasons.get(task_id), "events": queue.events(conn, task_id)}

    row, more = context.read(read)
    return tagged(TaskDetail.of(row, output=_output(row, OUTPUT_LIMIT), **more))


@router.get("/{task_id}/output")
def output(
    task_id: Id,
    context: Admin,
    limit: Annotated[
        int, Query(ge=1, le=1_000_000, description="The largest number of bytes.")
    ] = OUTPUT_LIMIT,
) -> TaskOutput:
    """The end of the output of the task's run, without secrets.

    `here` is false and the output empty when the run's files are on another machine.
    """
    task = context.read(lambda conn: queue.get(conn, task_id))
    here = bool(task.run_directory) and Path(task.run_directory).is_dir()
    return TaskOutput(task_id=task_id, here=here, output=_output(task, limit))


@router.get(
    "/{task_id}/events",
    response_class=EventStream,
    status_code=200,
    responses={204: {"description": "The task has ended and the reader has every event."}},
)
def events(
    task_id: Id,
    context: Admin,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-Id",
            pattern=r"^\d{1,18}\.\d{1,18}(\.end)?$",
            description="Continue after this event.",
        ),
    ] = None,
) -> Response:
    """Server-sent events: `state` and `progress` as they happen, then `end`.

    A reader that comes back after `end` gets 204.
    """
    start = last_event_id or "0.0"

    if start.endswith(_END):
        _news, over = _events_after(context, task_id, start)
        if over:
            return Response(status_code=204)
    # An unknown task is refused here, before the stream has begun.
    context.read(lambda conn: queue.get(conn, task_id))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return EventStream(_stream(context, task_id, start), headers=headers)


@router.post("/{task_id}/cancel", response_model=Task)
def cancel(
    task_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """Ask a running task to stop, or end one that waits.

    The subject of the task counts as failed: an allocation ends, and a slot that may hold something
    of a tenant is blocked until it is recovered. A task that has ended, or was already asked to
    stop, stays as it is.
    """

    def work(conn: Connection, act: Act) -> Task:
        guard.check(conn, "task", task_id)
        with locks.task(conn, task_id) as before:
            pass  # Locked until the transaction ends, so that the comparison below is exact.
        task = task_failures.cancel(conn, task_id, act)
        if task.generation != before.generation:
            journal.audit(conn, act, "admin.task.canceled", "task", task_id)
        return Task.of(task)

    return context.write(work, body=body)


def _output(task: schema.Task, limit: int) -> str:
    directory = task.run_directory
    return scrub(collect.output(Path(directory), limit)) if directory else ""


def _position(text: str) -> Position:
    change, _, line = text.removesuffix(_END).partition(".")
    return Position(int(change), int(line))


def _events_after(context: Context, task_id: str, place: str) -> tuple[list[Event], bool]:
    """The events after a place, and whether none will follow."""
    news = context.read(lambda conn: queue.events_after(conn, task_id, _position(place)))
    events = [_event(row) for row in news.rows]
    if news.over:
        last = events[-1].place if events else place.removesuffix(_END)
        events.append(Event("end", f"{last}{_END}", encode(EndEvent.of(news.task))))
    return events, news.over


def _event(row: Record) -> Event:
    position: Position = row["place"]
    state = row["type"] == "state"
    document: dict[str, Any] = encode(StateEvent.of(row)) if state else row["document"]
    return Event(row["type"], f"{position.change}.{position.line}", document)


async def _stream(context: Context, task_id: str, place: str) -> AsyncIterator[str]:
    """Poll for new events, in a thread outside of the event loop, while the token is valid."""
    poll_s = context.settings.poll_s
    quiet, checked_at = 0.0, time.monotonic()
    while True:
        if time.monotonic() - checked_at >= _CHECK_S:
            if not await run_in_threadpool(context.allowed):
                return
            checked_at = time.monotonic()
        news, over = await run_in_threadpool(_events_after, context, task_id, place)
        for event in news:
            place, quiet = event.place, 0.0
            yield event.text()
        if over:
            return
        if quiet >= _KEEP_ALIVE_S:
            quiet = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(poll_s)
        quiet += poll_s
