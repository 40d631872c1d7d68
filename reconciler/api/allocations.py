"""Allocations as operators see them, and the acts that only operators may do."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api import guards, queueing, views
from reconciler.api.guards import IfMatch
from reconciler.api.models import Filter, Id, Reasoned
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.lifecycle import recovery
from reconciler.model.states import AllocationState
from reconciler.records import allocations, queue

router = APIRouter(prefix="/admin/allocations", tags=["recovery"])

Record = dict[str, Any]


class ForceCleanup(Reasoned):
    """`true` states that an operator has seen nothing of the allocation left on its host."""

    runtime_verified_absent: Annotated[bool, Field(strict=True)]


@router.get("")
def list_allocations(
    context: Admin,
    part: Paging,
    project_id: Filter = None,
    node_id: Filter = None,
    state: AllocationState | None = None,
) -> Record:
    """All allocations."""
    page = part.page(allocations.ORDER)
    rows = context.read(
        lambda conn: allocations.every(
            conn, project_id=project_id, state=state, node_id=node_id, page=page
        )
    )
    return part.told(allocations.ORDER, rows)


@router.get("/{allocation_id}")
def show(allocation_id: Id, context: Admin) -> JSONResponse:
    """One allocation: shape, claims, tasks, and everything that happened to it, in order."""

    def read(conn: Connection) -> Record:
        return views.record(allocations.get(conn, allocation_id)) | {
            "tasks": views.items(queue.every(conn, allocation_id=allocation_id))["items"],
            "timeline": views.items(queue.timeline(conn, allocation_id=allocation_id))["items"],
        }

    return guards.tagged(context.read(read))


@router.post("/{allocation_id}/force-cleanup")
def force_cleanup(
    allocation_id: Id, body: ForceCleanup, context: Admin, guard: IfMatch
) -> JSONResponse:
    """Fail an allocation that is stuck; its slots come back by proof, not by word."""
    act = context.act(body.reason)
    absent = body.runtime_verified_absent

    def work(conn: Connection) -> Record:
        guard.check(conn, "allocation", allocation_id)
        return views.record(
            recovery.force_cleanup(conn, allocation_id, act, runtime_verified_absent=absent)
        )

    return context.write(work, body=body, key_required=True)


@router.post("/{allocation_id}/force-release")
def force_release(
    allocation_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """End a tenant's use and billing when the host does not answer; its slots stay blocked."""
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        guard.check(conn, "allocation", allocation_id)
        return views.record(recovery.force_release(conn, allocation_id, act))

    return context.write(work, body=body)


@router.post("/{allocation_id}/verify-absent", status_code=202)
def verify_absent(allocation_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Have the host say what is left of the allocation. Answers with the task."""
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        return queueing.told(conn, recovery.verify_absence(conn, allocation_id, act), act)

    return context.write(work, body=body, status=202)
