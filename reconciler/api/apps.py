"""Applications on the allocations of a project, and the keys by which they reach their members."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api import appview, guards
from reconciler.api.guards import IfMatch
from reconciler.api.models import Body, Id, Name, PublicKey, Reasoned
from reconciler.api.paging import Paging
from reconciler.api.security import Member
from reconciler.lifecycle import app_operations, apps
from reconciler.model.states import AppSlug, Role

router = APIRouter(prefix="/projects/{project_id}/app-instances", tags=["apps"])

Record = dict[str, Any]
# More members than any instance has; all of them are recorded in one transaction.
_MOST_WORKERS = 64
AllocationId = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")
]


def _bare(key: str) -> str:
    # The comment is ours: by it the line is found again.
    return " ".join(key.split(" ")[:2])


class NewAppInstance(Body):
    """Active allocations of the project that are in no other instance.

    `managed_key`: public key of whoever runs the application's controller. It is put on each
    member for commands only, and with an end.
    """

    slug: AppSlug
    name: Name
    managed_key: Annotated[PublicKey, AfterValidator(_bare)]
    controller_allocation_id: AllocationId
    worker_allocation_ids: Annotated[tuple[AllocationId, ...], Field(max_length=_MOST_WORKERS)] = ()


@router.post("", status_code=201)
def create(project_id: Id, body: NewAppInstance, context: Member) -> JSONResponse:
    """Record an instance over allocations that are there; each member gets the managed key."""
    act = context.act("deployed by its project")
    wish = apps.NewApp(
        project_id=project_id,
        slug=body.slug.value,
        name=body.name,
        managed_key=body.managed_key,
        controller_id=body.controller_allocation_id,
        worker_ids=body.worker_allocation_ids,
    )
    return context.write(
        lambda conn: appview.instance(apps.create(conn, wish, act)),
        body=body,
        status=201,
        key_required=True,
    )


@router.get("")
def list_instances(project_id: Id, context: Member, part: Paging) -> Record:
    """The project's instances."""
    page = part.page(apps.INSTANCES)
    rows = context.read(lambda conn: apps.every(conn, project_id, page))
    return part.told(apps.INSTANCES, rows, appview.instance)


@router.get("/{app_instance_id}")
def show(project_id: Id, app_instance_id: Id, context: Member) -> JSONResponse:
    """One instance, and what keeps it from running."""

    def read(conn: Connection) -> Record:
        found = apps.get(conn, project_id, app_instance_id)
        return appview.instance_detail(found, apps.members(conn, app_instance_id))

    return guards.tagged(context.read(read))


@router.get("/{app_instance_id}/members")
def members(project_id: Id, app_instance_id: Id, context: Member, part: Paging) -> Record:
    """Its allocations, the controller's first. SSH dials `connection.host`, never a hostname."""
    page = part.page(apps.MEMBERS)

    def read(conn: Connection) -> list[Record]:
        apps.get(conn, project_id, app_instance_id)
        return apps.members(conn, app_instance_id, page)

    tell = partial(appview.member, admin=context.role == Role.PLATFORM_ADMIN)
    return part.told(apps.MEMBERS, context.read(read), tell)


@router.get("/{app_instance_id}/member-operations")
def operations(project_id: Id, app_instance_id: Id, context: Member, part: Paging) -> Record:
    """What was done with its members, and how it ended."""
    page = part.page(app_operations.OPERATIONS)

    def read(conn: Connection) -> list[Record]:
        apps.get(conn, project_id, app_instance_id)
        return app_operations.every(conn, app_instance_id, page)

    return part.told(app_operations.OPERATIONS, context.read(read), appview.operation)


@router.post("/{app_instance_id}/bootstrap-ssh/reconcile", status_code=202)
def reconcile(
    project_id: Id, app_instance_id: Id, context: Member, body: Reasoned | None = None
) -> JSONResponse:
    """Put the managed key on every member again, with a later end. Answers with the operations."""
    body = body or Reasoned()
    act = context.act(body.reason or "asked for by its project")

    def work(conn: Connection) -> Record:
        found = apps.reconcile(conn, project_id, app_instance_id, act)
        return {"operations": [appview.operation(row) for row in found]}

    return context.write(work, body=body, status=202, key_required=True)


@router.post("/{app_instance_id}/stop")
def stop(
    project_id: Id,
    app_instance_id: Id,
    context: Member,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """End the instance and take its keys away; its allocations stay."""
    body = body or Reasoned()
    act = context.act(body.reason or "stopped by its project")

    def work(conn: Connection) -> Record:
        apps.get(conn, project_id, app_instance_id)
        guard.check(conn, "app_instance", app_instance_id)
        return appview.instance(apps.stop(conn, project_id, app_instance_id, act))

    return context.write(work, body=body)
