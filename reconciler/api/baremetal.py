"""Whole machines after their tenants: what an admin does when something was left."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api import queueing, views
from reconciler.api.guards import IfMatch
from reconciler.api.models import Id, Reasoned
from reconciler.api.security import Admin
from reconciler.lifecycle import baremetal

router = APIRouter(prefix="/admin/nodes/{node_id}", tags=["bare metal"])


class Cleaning(Reasoned):
    """With `without_dead_disks`, disks that the latest discovery lacks are not waited for."""

    without_dead_disks: Annotated[bool, Field(strict=True)] = False


@router.post("/clean-machine", status_code=202)
def clean_machine(node_id: Id, context: Admin, body: Cleaning | None = None) -> JSONResponse:
    """Remove what the last tenant left, wipe its disks and prove it. Answers with the task."""
    body = body or Cleaning()
    act = context.act(body.reason)

    def work(conn: Connection) -> views.Record:
        without = body.without_dead_disks
        task = baremetal.clean(conn, node_id, act, without_dead_disks=without)
        return queueing.told(conn, task, act)

    return context.write(work, body=body, status=202)


@router.post("/accept-drift")
def accept_drift(node_id: Id, body: Reasoned, context: Admin, guard: IfMatch) -> JSONResponse:
    """Let the machine be given away with the differences that its last tenant left."""
    act = context.act(body.reason)

    def work(conn: Connection) -> views.Record:
        guard.check(conn, "node", node_id)
        return views.record(baremetal.accept_drift(conn, node_id, act))

    return context.write(work, body=body)
