"""What a node's host has and how it stands: discovery and parity, asked for and read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api import queueing, views
from reconciler.api.models import Id, Reasoned
from reconciler.api.security import Admin
from reconciler.lifecycle import host
from reconciler.model.states import NodeMode, TaskKind
from reconciler.records import nodes, queue, reports

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
        found = reports.latest_discovery(conn, node_id)
        return _report(conn, node_id, found, TaskKind.SLICE_TOPOLOGY_DISCOVER)

    return context.read(read)


@router.post("/parity", status_code=202)
def measure(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Measure whether the host is what its mode says; a slice host's pass opens its slots' gate."""
    return queueing.for_node(context, node_id, TaskKind.NODE_PARITY, body or Reasoned())


@router.get("/parity")
def parity(node_id: Id, context: Admin) -> Record:
    """The latest report (`document`, null before the first) and the latest task for one.

    It is the latest for what the node's mode asks of the host.
    """

    def read(conn: Connection) -> Record:
        mode = NodeMode(nodes.get(conn, node_id)["mode"])
        found = reports.latest_parity(conn, node_id, mode.purpose)
        return _report(conn, node_id, found, TaskKind.NODE_PARITY)

    return context.read(read)


@router.post("/drift", status_code=202)
def compare(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Compare what the host holds of slices with the records, now; the task's result names every
    difference. What nobody has and the host still holds something of goes off sale; nothing on the
    host is touched.
    """

    def sliced(conn: Connection) -> Record:
        host.require_slice_mode(conn, node_id)
        return {}

    kind = TaskKind.SLICE_DRIFT_RECONCILE
    return queueing.for_node(context, node_id, kind, body or Reasoned(), sliced)


def _report(conn: Connection, node_id: str, found: Record | None, kind: TaskKind) -> Record:
    told = {"document": None} if found is None else views.record(found)
    latest = queue.every(conn, node_id=node_id, kind=kind, limit=1)
    return told | {"task": views.record(latest[0]) if latest else None}
