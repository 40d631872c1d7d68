"""What a node's host has and how it stands: discovery and parity, asked for and read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api import queueing, views
from reconciler.api.models import Id, Reasoned
from reconciler.api.security import Admin
from reconciler.domain.states import TaskKind
from reconciler.store import discoveries, nodes, tasks

router = APIRouter(prefix="/admin/nodes/{node_id}", tags=["topology"])

Record = dict[str, Any]


@router.post("/slice-topology/discovery", status_code=202)
def discover(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Look at the host again; nothing found becomes schedulable by itself."""
    return queueing.for_node(context, node_id, TaskKind.SLICE_TOPOLOGY_DISCOVER, body or Reasoned())


@router.get("/slice-topology/discovery")
def discovery(node_id: Id, context: Admin) -> Record:
    """The latest candidate topology (`document`, null before the first) and task for one."""

    def read(conn: Connection) -> Record:
        nodes.get(conn, node_id)
        found = discoveries.latest(conn, node_id)
        return _report(conn, node_id, found, TaskKind.SLICE_TOPOLOGY_DISCOVER)

    return context.read(read)


@router.post("/parity", status_code=202)
def measure(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Measure whether the host is what a slice host must be; a pass opens the slots' gate."""
    return queueing.for_node(context, node_id, TaskKind.NODE_PARITY, body or Reasoned())


@router.get("/parity")
def parity(node_id: Id, context: Admin) -> Record:
    """The latest report (`document`, null before the first) and the latest task for one."""

    def read(conn: Connection) -> Record:
        nodes.get(conn, node_id)
        found = discoveries.latest_parity(conn, node_id)
        return _report(conn, node_id, found, TaskKind.NODE_PARITY)

    return context.read(read)


def _report(conn: Connection, node_id: str, found: Record | None, kind: TaskKind) -> Record:
    told = {"document": None} if found is None else views.record(found)
    latest = tasks.every(conn, node_id=node_id, kind=kind, limit=1)
    return told | {"task": views.record(latest[0]) if latest else None}
