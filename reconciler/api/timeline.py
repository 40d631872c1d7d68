"""The past of a node and of an allocation: what changed, what its runs said, who did what."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection

from reconciler.api.models import Id
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.store import allocations, nodes, timeline

router = APIRouter(prefix="/admin", tags=["timeline"])


@router.get("/nodes/{node_id}/timeline")
def of_node(node_id: Id, context: Admin, part: Paging) -> dict[str, Any]:
    """Newest first, with everything that happened on the node."""

    def read(conn: Connection) -> list[dict[str, Any]]:
        nodes.get(conn, node_id)
        return timeline.of(conn, node_id=node_id, page=part.page(timeline.ORDER))

    return part.told(timeline.ORDER, context.read(read))


@router.get("/allocations/{allocation_id}/timeline")
def of_allocation(allocation_id: Id, context: Admin, part: Paging) -> dict[str, Any]:
    """Newest first: the allocation, its claims and slots, its tasks and what their runs said."""

    def read(conn: Connection) -> list[dict[str, Any]]:
        allocations.get(conn, allocation_id)
        return timeline.of(conn, allocation_id=allocation_id, page=part.page(timeline.ORDER))

    return part.told(timeline.ORDER, context.read(read))
