"""MAAS: comparison with it, installation of machines, and their return."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api.http import IfMatch
from reconciler.api.models import Id, Reasoned
from reconciler.api.netbox import Finding, Reading, ReadingRequest, ask_for
from reconciler.api.nodes import Node
from reconciler.api.security import Admin, Context
from reconciler.api.tasks import Task
from reconciler.inventory import maas_sync
from reconciler.inventory.maas import maas_access
from reconciler.lifecycle import installation
from reconciler.model.act import Act
from reconciler.model.states import TaskKind

router = APIRouter(prefix="/admin", tags=["maas"])


class Deployment(Reasoned):
    """The release of the operating system, such as `noble`. Empty: that of the last deployment, or
    else MAAS's default.
    """

    series: Annotated[str, StringConstraints(pattern=r"^([a-z0-9][a-z0-9./-]{0,63})?$")] = ""


class MaasFinding(Finding):
    """A difference. action: what a sync does about it, empty if a person must act."""

    action: Literal["", "add_node", "upload"]


class MaasReading(Reading):
    """A comparison with MAAS. applied: differences with an action were resolved, and `findings` has
    the others only. request_number: of the newest request that it serves; it serves all earlier
    ones, too. counts: all findings by code; `findings` has the first 500.
    """

    findings: Annotated[list[MaasFinding], Field(max_length=500)]


@router.get("/maas")
def show(context: Admin) -> MaasReading:
    """The last comparison; 404 before the first."""
    return MaasReading.of(context.read(maas_sync.READINGS.get))


@router.post("/maas/diff", status_code=202, response_model=ReadingRequest)
def diff(context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Compare MAAS with the records soon. Locks, tags and annotations of known machines are kept
    in any case.
    """
    return ask_for(context, body, partial(maas_sync.ask, apply=False))


@router.post("/maas/sync", status_code=202, response_model=ReadingRequest)
def synchronise(context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Compare soon, add new machines as nodes, and upload the scripts that MAAS runs."""
    return ask_for(context, body, partial(maas_sync.ask, apply=True))


@router.post("/nodes/{node_id}/maas-deploy", status_code=202, response_model=Task)
def deploy(node_id: Id, context: Admin, body: Deployment | None = None) -> JSONResponse:
    """Let MAAS install the machine anew, after a release if it is deployed. What is on its system
    disk is lost. Refused while the node is in use, on sale, or not proven clean.
    """
    series = body.series if body else ""
    return _queue(context, node_id, TaskKind.NODE_DEPLOY, body, series)


@router.post("/nodes/{node_id}/maas-release", status_code=202, response_model=Task)
def release(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Return the machine to MAAS, where anybody may get it. Refused like a deployment, and for a
    node with disks without proof.
    """
    return _queue(context, node_id, TaskKind.NODE_RELEASE, body)


def _queue(
    context: Context, node_id: str, kind: TaskKind, body: Reasoned | None, series: str = ""
) -> JSONResponse:
    def work(conn: Connection, act: Act) -> Task:
        maas_access(context.settings)
        return Task.of(installation.queue(conn, node_id, kind, act, series=series))

    return context.write(work, body=body, status=202)


@router.post("/nodes/{node_id}/maas-unbind", response_model=Node)
def unbind(
    node_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """Forget which machine of MAAS the node is. A pass finds it again by name and address."""

    def work(conn: Connection, act: Act) -> Node:
        guard.check(conn, "node", node_id)
        return Node.of(maas_sync.unbind(conn, node_id, act))

    return context.write(work, body=body)
