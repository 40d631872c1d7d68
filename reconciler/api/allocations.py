"""Allocations: launching, reading and releasing by project members, reading by operators.

Members never see the host of an allocation, neither its name nor its devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from sqlalchemy import Connection as DatabaseConnection

from reconciler.api import problems
from reconciler.api.http import IfMatch, PageOf, Paging, tagged
from reconciler.api.models import (
    Answer,
    Body,
    Devices,
    Document,
    Filter,
    Hostname,
    Id,
    Integer,
    Label,
    Moment,
    Name,
    PublicKey,
    Reasoned,
    Record,
    Text,
    Username,
)
from reconciler.api.security import Admin, Member
from reconciler.api.tasks import Task
from reconciler.api.timeline import ProgressStep, StateStep
from reconciler.db import schema
from reconciler.db.rows import Page
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import placement
from reconciler.model.act import Act
from reconciler.model.errors import Problem, not_found
from reconciler.model.scheduler.explain import public
from reconciler.model.states import AllocationState, CapacityShape, ClaimKind, ClaimState, Role
from reconciler.profiles import profile_skus, ready_minimum_s
from reconciler.records import allocations, queue, timeline
from reconciler.settings import Settings

router = APIRouter(prefix="/projects/{project_id}/allocations", tags=["allocations"])
admin_router = APIRouter(prefix="/admin/allocations", tags=["recovery"])

# The newest entries of a timeline are shown with an allocation; the rest is in its own list.
_TIMELINE_LIMIT = 200


class LaunchParameters(Body):
    """Limits of this launch; they can be tighter than the profile's, never wider.

    A member's `ready_deadline_s` is not below the profile's `deadlines.ready_minimum`, whose
    default is its `deadlines.ready`.
    """

    ready_deadline_s: Annotated[Integer, Field(ge=1, le=86_400)] | None = None


class NewAllocation(Body):
    """What a tenant requests. A slice names its image by id, or by name with an optional version.

    A whole machine is delivered with its present installation.
    """

    capacity_shape: CapacityShape = CapacityShape.BAREMETAL
    gpu_count: Annotated[Integer, Field(ge=1, le=1024)] | None = None
    username: Username
    ssh_keys: Annotated[list[PublicKey], Field(min_length=1, max_length=16)]
    hostname: Hostname
    image_id: Text = ""
    image: Name | None = None
    image_version: Label = ""
    region: Label = ""
    pool: Label = ""
    sku: Label = ""
    runtime_profile: Label = Field(
        default="",
        description="Has no effect, so a value is refused with `field_without_effect`.",
        json_schema_extra={"deprecated": True},
    )
    parameters: LaunchParameters = LaunchParameters()

    @model_validator(mode="after")
    def _counts_gpus(self) -> Self:
        if (self.capacity_shape is CapacityShape.GPU_SLICE) is not (self.gpu_count is not None):
            raise ValueError("gpu_count goes with capacity_shape gpu_slice, and only with it")
        return self

    @model_validator(mode="after")
    def _names_one_image(self) -> Self:
        names = bool(self.image_id) + (self.image is not None)
        if names != (1 if self.capacity_shape is CapacityShape.GPU_SLICE else 0):
            raise ValueError("a slice needs either image_id or image, a whole machine takes none")
        if self.username == "root":
            raise ValueError("username cannot be root")
        return self


_PASSED_ON = {
    "capacity_shape",
    "username",
    "ssh_keys",
    "hostname",
    "image_id",
    "image_version",
    "region",
    "pool",
    "sku",
}


class Connection(Answer):
    """The address for the tenant. host is empty while no gateway is configured."""

    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    username: str

    @classmethod
    def of_document(cls, document: Record) -> Self:
        """The address in the document that a run reported."""
        return cls(
            host=str(document.get("host", "")),
            port=int(document.get("port", 22)),
            username=str(document.get("username", "")),
        )


class _AllocationFields(Answer):
    """Fields that members and operators see alike."""

    id: str
    project_id: str
    capacity_shape: CapacityShape
    sku: str
    region: str
    gpu_count: int
    hostname: str
    username: str
    ssh_keys: list[str]
    image_id: str | None
    state: AllocationState
    state_since: Moment
    generation: int
    activated_at: Moment | None
    ended_at: Moment | None


class MemberAllocation(_AllocationFields):
    """An allocation as the members of its project see it."""

    deadline_at: Moment | None = Field(
        description="When the present state ends at the latest; a command waits until then."
    )
    connection: Connection | None
    telemetry_url: str = Field(description="Dashboard of a whole machine; empty for a slice.")
    error_code: str
    created_at: Moment | None

    @classmethod
    def of_allocation(cls, allocation: schema.Allocation) -> Self:
        """The answer for the record of an allocation."""
        reachable = allocation.state == AllocationState.ACTIVE
        connection = allocation.connection if reachable else {}
        return cls.of(
            allocation,
            # Only the code: error texts can contain device names of the host.
            error_code=str(allocation.error.get("code", "")),
            connection=Connection.of_document(connection) if connection else None,
            telemetry_url=str(connection.get("telemetry_url", "")),
        )


class Allocation(_AllocationFields):
    """What a tenant requested, as operators see it."""

    node_id: str | None
    pool: str
    name: str
    runtime_profile: str
    parameters: Document
    state_reason: str
    deadline_at: Moment | None
    connection: Document
    error: Document
    requested_by: str
    correlation_id: str
    created_at: Moment


class Claim(Devices):
    """What an allocation holds, as it was when it was claimed."""

    id: str
    allocation_id: str
    kind: ClaimKind
    node_id: str
    slot_id: str | None
    position: int
    disks: list[Document]
    state: ClaimState
    state_reason: str
    state_since: Moment
    deadline_at: Moment | None
    generation: int
    live_mode: str | None
    created_at: Moment
    ended_at: Moment | None


class AllocationDetail(Allocation):
    """An allocation with its claims, tasks and timeline, the oldest entry first."""

    claims: list[Claim]
    task_ids: list[str]
    tasks: list[Task]
    timeline: list[StateStep | ProgressStep]


class MemberAllocations(PageOf[MemberAllocation]):
    """One page of a project's allocations."""


@router.post("", status_code=201, response_model=MemberAllocation)
def create(project_id: Id, body: NewAllocation, context: Member) -> JSONResponse:
    """Claim capacity and queue its provisioning, all or nothing."""
    profiles = "hardware profiles define no runtime profiles"
    problems.require_default(body, "runtime_profile", profiles)
    if context.caller.role != Role.PLATFORM_ADMIN:
        _require_time_to_boot(context.settings, body)

    def work(conn: DatabaseConnection, act: Act) -> MemberAllocation:
        launch = launching.Launch(
            project_id=project_id,
            image=body.image or "",
            gpu_count=body.gpu_count or 0,
            parameters=body.parameters.model_dump(exclude_none=True),
            catalogue=_catalogue(context.settings, body.capacity_shape),
            **body.model_dump(mode="json", include=_PASSED_ON),
        )
        return MemberAllocation.of_allocation(launching.allocate(conn, launch, act))

    reason = "launched by its project"
    for _ in range(placement.TRIES):
        try:
            return context.write(work, body=body, reason=reason, status=201, key_required=True)
        except placement.NoRoom as no_room:
            refusal = context.read(partial(placement.refusal, want=no_room.want))
        except Problem as problem:
            raise _redact(problem, context.caller.role) from None
        if refusal is not None:
            raise _redact(refusal, context.caller.role)
    raise placement.contended()


@router.get("", response_model=MemberAllocations)
def list_allocations(
    project_id: Id, context: Member, paging: Paging, state: AllocationState | None = None
) -> PageOf[MemberAllocation]:
    """The project's allocations, the newest first."""
    page = paging.page(allocations.ORDER)
    rows = context.read(
        lambda conn: allocations.every(conn, project_id=project_id, state=state, page=page)
    )
    return paging.answer(allocations.ORDER, rows, MemberAllocation.of_allocation)


@router.get("/{allocation_id}", response_model=MemberAllocation)
def show(project_id: Id, allocation_id: Id, context: Member) -> JSONResponse:
    """One allocation of the project."""
    row = context.read(lambda conn: _allocation_of(conn, project_id, allocation_id))
    return tagged(MemberAllocation.of_allocation(row))


@router.post("/{allocation_id}/release", response_model=MemberAllocation)
def release(
    project_id: Id,
    allocation_id: Id,
    context: Member,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """Release the allocation. Its machine ends and its disks are wiped."""

    def work(conn: DatabaseConnection, act: Act) -> MemberAllocation:
        _allocation_of(conn, project_id, allocation_id)
        guard.check(conn, "allocation", allocation_id)
        return MemberAllocation.of_allocation(launching.release(conn, allocation_id, act))

    return context.write(work, body=body, reason="released by its project")


@admin_router.get("", name="list_allocations")
def list_all(
    context: Admin,
    paging: Paging,
    project_id: Filter = None,
    node_id: Filter = None,
    state: AllocationState | None = None,
) -> PageOf[Allocation]:
    """All allocations, the newest first."""
    page = paging.page(allocations.ORDER)
    rows = context.read(
        lambda conn: allocations.every(
            conn, project_id=project_id, state=state, node_id=node_id, page=page
        )
    )
    return paging.answer(allocations.ORDER, rows, Allocation.of)


@admin_router.get("/{allocation_id}", name="show", response_model=AllocationDetail)
def show_all(allocation_id: Id, context: Admin) -> JSONResponse:
    """One allocation with its claims, tasks and the newest entries of its timeline, the oldest
    first.
    """

    def read(conn: DatabaseConnection) -> AllocationDetail:
        steps = timeline.of(
            conn,
            allocation_id=allocation_id,
            types=(timeline.STATE, timeline.PROGRESS),
            page=Page(_TIMELINE_LIMIT),
        )
        return AllocationDetail.of(
            allocations.get(conn, allocation_id),
            tasks=queue.every(conn, allocation_id=allocation_id),
            timeline=steps[::-1],
        )

    return tagged(context.read(read))


def _require_time_to_boot(settings: Settings, body: NewAllocation) -> None:
    """Problem `ready_deadline_too_short` for a deadline that a healthy guest may miss.

    A slice that is not reachable in time leaves its slots blocked until an operator acts.
    """
    wanted = body.parameters.ready_deadline_s
    least = ready_minimum_s(settings.profiles_dir, body.sku)
    if wanted is not None and wanted < least:
        raise Problem(
            "ready_deadline_too_short",
            422,
            expected=f"parameters.ready_deadline_s of at least {least}",
            found=str(wanted),
            remedy="leave it out, and the limit of the hardware profile applies",
        )


def _redact(problem: Problem, role: str) -> Problem:
    # Only operators may see which nodes exist and why each of them is full.
    explanation = problem.detail.get("explanation")
    if isinstance(explanation, dict) and role != Role.PLATFORM_ADMIN:
        problem.detail["explanation"] = public(explanation)
    return problem


def _catalogue(settings: Settings, shape: CapacityShape) -> Mapping[str, str]:
    """Offers by hardware profile: slices under the profile's SKU, whole machines under the
    name of their hardware.
    """
    skus = profile_skus(settings.profiles_dir)
    return skus if shape is CapacityShape.GPU_SLICE else {name: name for name in skus}


def _allocation_of(
    conn: DatabaseConnection, project_id: str, allocation_id: str
) -> schema.Allocation:
    allocation = allocations.get(conn, allocation_id)
    if allocation.project_id != project_id:
        raise not_found("allocation", allocation_id)
    return allocation
