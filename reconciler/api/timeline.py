"""The past of a node, an allocation and a request: what changed, what runs said, who did what."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection

from reconciler.api.models import Id
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.records import allocations, nodes, timeline

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


@router.get("/correlations/{correlation_id}/timeline")
def of_correlation(correlation_id: Id, context: Admin, part: Paging) -> dict[str, Any]:
    """Newest first: all that followed from the request with this X-Correlation-Id, on allocations,
    claims, slots and tasks, what their runs said, and what audit has of it. None of it: an empty
    list, for whatever one may send as an id.
    """
    page = part.page(timeline.ORDER)
    found = context.read(lambda conn: timeline.of(conn, correlation_id=correlation_id, page=page))
    return part.told(timeline.ORDER, found)
