"""Taking a node out of use and back: drain, maintain, resume, retire. Every one needs a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api import views
from reconciler.api.context import Context
from reconciler.api.guards import Guard, IfMatch
from reconciler.api.models import Body, Id, Reason
from reconciler.api.security import Admin
from reconciler.lifecycle import gate, host
from reconciler.model.act import Act
from reconciler.records import nodes

router = APIRouter(prefix="/admin/nodes/{node_id}", tags=["node state"])


class WhyNode(Body):
    """Whoever finds the node out of use later must be able to read why."""

    reason: Annotated[Reason, Field(min_length=1)]


@router.post("/drain")
def drain(node_id: Id, body: WhyNode, context: Admin, guard: IfMatch) -> JSONResponse:
    """Sell nothing new on it; what runs on it ends by itself."""
    return _move(context, node_id, body, guard, host.drain)


@router.post("/maintain")
def maintain(node_id: Id, body: WhyNode, context: Admin, guard: IfMatch) -> JSONResponse:
    """Out of use; refused while anything of a tenant is on it."""
    return _move(context, node_id, body, guard, host.maintain)


@router.post("/resume")
def resume(node_id: Id, body: WhyNode, context: Admin, guard: IfMatch) -> JSONResponse:
    """Back into use: slots whose gate is open are sold again."""

    def back(conn: Connection, node: str, act: Act) -> None:
        host.resume(conn, node, act)
        gate.open_gate(conn, node, act)

    return _move(context, node_id, body, guard, back)


@router.post("/retire")
def retire(node_id: Id, body: WhyNode, context: Admin, guard: IfMatch) -> JSONResponse:
    """Gone for good; from maintenance only, or when it never enrolled."""
    return _move(context, node_id, body, guard, host.retire)


def _move(
    context: Context,
    node_id: str,
    body: WhyNode,
    guard: Guard,
    to: Callable[[Connection, str, Act], Any],
) -> JSONResponse:
    act = context.act(body.reason)

    def work(conn: Connection) -> dict[str, Any]:
        guard.check(conn, "node", node_id)
        to(conn, node_id, act)
        return views.record(nodes.get(conn, node_id))

    return context.write(work, body=body)
