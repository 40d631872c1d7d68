"""Queueing one task for a request; the answer is the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import Connection

from reconciler.api import views
from reconciler.api.context import Context
from reconciler.db import journal
from reconciler.model.act import Act
from reconciler.model.states import TaskKind
from reconciler.records import nodes, queue

Record = dict[str, Any]


def for_node(
    context: Context,
    node_id: str,
    kind: TaskKind,
    body: BaseModel,
    parameters: Callable[[Connection], Record] = lambda _conn: {},
) -> JSONResponse:
    """202 with a task whose subject is the node itself; refused before its host has enrolled."""
    act = context.act(getattr(body, "reason", ""))

    def work(conn: Connection) -> Record:
        nodes.require_enrolled(conn, node_id)
        item = queue.Enqueue(
            kind=kind,
            node_id=node_id,
            subject_kind="node",
            subject_id=node_id,
            parameters=parameters(conn),
        )
        return told(conn, queue.enqueue(conn, item, act), act)

    return context.write(work, body=body, status=202)


def told(conn: Connection, task: Record, act: Act) -> Record:
    """The task as the answer, with an audit row: asking for work on a host is an admin's act."""
    detail = {"kind": task["kind"], "task_id": task["id"]}
    journal.audit(
        conn, act, "admin.task.queued", task["subject_kind"], task["subject_id"], detail=detail
    )
    return views.record(task)
