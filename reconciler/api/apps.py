"""Applications on the allocations of a project, their members and operations."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, Field, StringConstraints
from sqlalchemy import Connection as DatabaseConnection

from reconciler.api.allocations import Connection
from reconciler.api.http import IfMatch, PageOf, Paging, tagged
from reconciler.api.models import Answer, Body, Id, Moment, Name, PublicKey, Reasoned, Record
from reconciler.api.security import Member
from reconciler.db import schema
from reconciler.db.rows import Page
from reconciler.lifecycle import app_operations, apps
from reconciler.model.act import Act
from reconciler.model.states import (
    AllocationState,
    AppSlug,
    AppStatus,
    MemberRole,
    MemberStatus,
    OperationKind,
    OperationStatus,
    Role,
)
from reconciler.settings import Settings

router = APIRouter(prefix="/projects/{project_id}/app-instances", tags=["apps"])

# No application has more members; all of them are recorded in one transaction.
_MAX_WORKERS = 64
AllocationId = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")
]


def _without_comment(key: str) -> str:
    # The service sets the comment itself: it identifies the line in authorized_keys.
    return " ".join(key.split(" ")[:2])


class NewAppInstance(Body):
    """The allocations must be active, of this project, and in no other instance.

    `managed_key` is the public key of the application's controller. Each member accepts it for
    commands only, and for a limited time.
    """

    slug: AppSlug
    name: Name
    managed_key: Annotated[PublicKey, AfterValidator(_without_comment)]
    controller_allocation_id: AllocationId
    worker_allocation_ids: Annotated[tuple[AllocationId, ...], Field(max_length=_MAX_WORKERS)] = ()


class AppInstance(Answer):
    """An application on allocations of a project."""

    id: str
    project_id: str
    slug: str
    name: str
    managed_key: str
    status: AppStatus
    status_reason: str
    status_since: Moment
    generation: Annotated[int, Field(ge=0)]
    correlation_id: str
    created_at: Moment
    ended_at: Moment | None


class AppWaitsFor(Answer):
    """The reason why an application does not run."""

    code: Literal["member_failed", "bootstrap_ssh_pending", "controller_absent"]
    detail: str


class AppInstanceDetail(AppInstance):
    """An application with what it waits for."""

    waits_for: AppWaitsFor | None


class AdapterDetail(Answer):
    """How an application's adapter reaches a member, and what the controller reports about it."""

    host: str = Field(description="The address to dial; an admin sees the transport address.")
    hostname: str = Field(description="For people; it may resolve nowhere.")
    bootstrap_ssh: Literal["absent", "ready", "expired"]
    key_expires_at: Moment | None
    phase: str
    slurmctld_state: str
    slurmd_state: str


class AppMember(Answer):
    """An allocation that works for an application."""

    id: str
    allocation_id: str
    role: MemberRole
    status: MemberStatus
    status_reason: str
    status_since: Moment
    connection: Connection | None
    adapter_detail: AdapterDetail
    created_at: Moment
    left_at: Moment | None

    @classmethod
    def of_member(cls, row: Record, settings: Settings, *, admin: bool) -> Self:
        """The answer for a row: with the tenant's address, and for an admin also the transport's.

        Of the controller's report only the named fields are shown.
        """
        connection = None
        if row["allocation_state"] == AllocationState.ACTIVE and row["connection"]:
            names = (row["allocation_id"], row["capacity_shape"], row["connection"])
            connection = Connection.of_document(*names, settings)
        address = connection.host if connection else ""
        detail = AdapterDetail(
            host=str(row["transport_address"] or "") if admin else address,
            hostname=row["hostname"],
            bootstrap_ssh=_key_state(row),
            key_expires_at=row["key_expires_at"],
            phase=str(row["detail"].get("phase", "")),
            slurmctld_state=str(row["detail"].get("slurmctld_state", "")),
            slurmd_state=str(row["detail"].get("slurmd_state", "")),
        )
        return cls.of(row, connection=connection, adapter_detail=detail)


class AppMachine(Answer):
    """A machine of the project, and whether a new application can use it."""

    allocation_id: str
    hostname: str
    state: AllocationState
    code: str = Field(description="Of the refusal of an application on it; empty if it is usable.")
    reason: str = Field(description="Of the refusal, with its remedy.")

    @classmethod
    def of_machine(cls, row: Record) -> Self:
        """The answer for a row, with the refusal that an application on it would get."""
        problem = apps.refusal(row["id"], row["state"], row["app"])
        return cls.of(
            row,
            allocation_id=row["id"],
            code=problem.code if problem else "",
            reason=f"{problem.found}: {problem.remedy}" if problem else "",
        )


class AppOperation(Answer):
    """One piece of work on a member."""

    id: str
    member_id: str
    kind: OperationKind
    status: OperationStatus
    failure_code: str = Field(description="Empty unless it failed.")
    task_id: str | None
    correlation_id: str
    created_at: Moment
    finished_at: Moment | None

    @classmethod
    def of_operation(cls, row: schema.AppOperation) -> Self:
        """The answer for a row. Only the code of a failure: its text can name host addresses."""
        return cls.of(row, failure_code=str(row.failure.get("code", "")))


class AppOperations(Answer):
    """The operations that were queued."""

    operations: list[AppOperation]


@router.post("", status_code=201, response_model=AppInstance)
def create(project_id: Id, body: NewAppInstance, context: Member) -> JSONResponse:
    """Record an instance over existing allocations; each member gets the managed key."""
    wish = apps.NewApp(
        project_id=project_id,
        slug=body.slug.value,
        name=body.name,
        managed_key=body.managed_key,
        controller_id=body.controller_allocation_id,
        worker_ids=body.worker_allocation_ids,
    )
    return context.write(
        lambda conn, act: AppInstance.of(apps.create(conn, wish, act)),
        body=body,
        reason="deployed by its project",
        status=201,
        key_required=True,
    )


@router.get("")
def list_instances(project_id: Id, context: Member, paging: Paging) -> PageOf[AppInstance]:
    """The project's instances, the newest first."""
    rows = partial(apps.every, project_id=project_id)
    return context.page(paging, apps.INSTANCES, rows, AppInstance.of)


@router.get("/machines")
def machines(project_id: Id, context: Member, paging: Paging) -> PageOf[AppMachine]:
    """The project's machines that have not ended, and why an application cannot use each."""
    rows = partial(apps.machines, project_id=project_id)
    return context.page(paging, apps.MACHINES, rows, AppMachine.of_machine)


@router.get("/{app_instance_id}", response_model=AppInstanceDetail)
def show(project_id: Id, app_instance_id: Id, context: Member) -> JSONResponse:
    """One instance, and what it waits for."""

    def read(conn: DatabaseConnection) -> AppInstanceDetail:
        row = apps.get(conn, project_id, app_instance_id)
        reason = apps.waits_for(row, apps.members(conn, app_instance_id))
        return AppInstanceDetail.of(row, waits_for=reason)

    return tagged(context.read(read))


@router.get("/{app_instance_id}/members")
def members(
    project_id: Id, app_instance_id: Id, context: Member, paging: Paging
) -> PageOf[AppMember]:
    """Its allocations, the controller's first. SSH dials `connection.host`, never a hostname."""

    def rows(conn: DatabaseConnection, page: Page) -> list[Record]:
        apps.get(conn, project_id, app_instance_id)
        return apps.members(conn, app_instance_id, page)

    admin = context.caller.role == Role.PLATFORM_ADMIN
    item = partial(AppMember.of_member, settings=context.settings, admin=admin)
    return context.page(paging, apps.MEMBERS, rows, item)


@router.get("/{app_instance_id}/member-operations")
def operations(
    project_id: Id, app_instance_id: Id, context: Member, paging: Paging
) -> PageOf[AppOperation]:
    """The work on its members and how it ended."""

    def rows(conn: DatabaseConnection, page: Page) -> list[schema.AppOperation]:
        apps.get(conn, project_id, app_instance_id)
        return app_operations.every(conn, app_instance_id, page)

    return context.page(paging, app_operations.OPERATIONS, rows, AppOperation.of_operation)


@router.post(
    "/{app_instance_id}/bootstrap-ssh/reconcile", status_code=202, response_model=AppOperations
)
def reconcile(
    project_id: Id, app_instance_id: Id, context: Member, body: Reasoned | None = None
) -> JSONResponse:
    """Install the managed key on every member again, with a later expiry. Answers with the
    operations.
    """

    def work(conn: DatabaseConnection, act: Act) -> AppOperations:
        rows = apps.reconcile(conn, project_id, app_instance_id, act)
        return AppOperations(operations=[AppOperation.of_operation(row) for row in rows])

    reason = "requested by its project"
    return context.write(work, body=body, reason=reason, status=202, key_required=True)


@router.post("/{app_instance_id}/stop", response_model=AppInstance)
def stop(
    project_id: Id,
    app_instance_id: Id,
    context: Member,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """End the instance and remove its keys. Its allocations stay."""

    def work(conn: DatabaseConnection, act: Act) -> AppInstance:
        apps.get(conn, project_id, app_instance_id)
        guard.check(conn, "app_instance", app_instance_id)
        return AppInstance.of(apps.stop(conn, project_id, app_instance_id, act))

    return context.write(work, body=body, reason="stopped by its project")


def _key_state(row: Record) -> Literal["absent", "ready", "expired"]:
    if row["key_good"]:
        return "ready"
    return "absent" if row["key_expires_at"] is None else "expired"
