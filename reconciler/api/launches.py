"""Allocations as the members of a project ask for them, see them and give them back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from sqlalchemy import Connection

from reconciler.api import guards, views
from reconciler.api.guards import IfMatch
from reconciler.api.memberview import MemberAllocation, MemberAllocations, tell
from reconciler.api.models import (
    Body,
    Hostname,
    Id,
    Label,
    Name,
    PublicKey,
    Reasoned,
    Text,
    Username,
)
from reconciler.api.paging import Paging
from reconciler.api.security import Member
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import placement
from reconciler.model.errors import Problem, not_found
from reconciler.model.scheduler.explain import public
from reconciler.model.states import AllocationState, CapacityShape, Role
from reconciler.profiles import profile_skus
from reconciler.records import allocations
from reconciler.settings import Settings

router = APIRouter(prefix="/projects/{project_id}/allocations", tags=["allocations"])


class LaunchParameters(Body):
    """Limits of this launch; they can be tighter than the profile's, never wider."""

    ready_deadline_s: Annotated[int, Field(ge=1, le=86_400)] | None = None


class NewAllocation(Body):
    """What a tenant asks for. A slice names its image by id, or by name and maybe version.

    A whole machine comes with the installation that it has.
    """

    capacity_shape: CapacityShape = CapacityShape.BAREMETAL
    gpu_count: Annotated[int, Field(ge=1, le=1024)] | None = None
    username: Username
    ssh_keys: Annotated[list[PublicKey], Field(min_length=1, max_length=16)]
    hostname: Hostname
    image_id: Text = ""
    image: Name | None = None
    image_version: Label = ""
    region: Label = ""
    pool: Label = ""
    sku: Label = ""
    runtime_profile: Label = ""
    parameters: LaunchParameters = LaunchParameters()

    @model_validator(mode="after")
    def _counts_gpus(self) -> NewAllocation:
        if (self.capacity_shape is CapacityShape.GPU_SLICE) is not (self.gpu_count is not None):
            raise ValueError("gpu_count goes with capacity_shape gpu_slice, and only with it")
        return self

    @model_validator(mode="after")
    def _one_image(self) -> NewAllocation:
        named = bool(self.image_id) + (self.image is not None)
        if named != (1 if self.capacity_shape is CapacityShape.GPU_SLICE else 0):
            raise ValueError("a slice needs either image_id or image, a whole machine takes none")
        if self.username == "root":
            raise ValueError("username cannot be root")
        return self


_AS_GIVEN = {
    "capacity_shape",
    "username",
    "ssh_keys",
    "hostname",
    "image_id",
    "image_version",
    "region",
    "pool",
    "sku",
    "runtime_profile",
}


@router.post("", status_code=201, response_model=MemberAllocation)
def create(project_id: Id, body: NewAllocation, context: Member) -> JSONResponse:
    """Claim capacity and queue its provisioning, all or nothing."""
    act = context.act("launched by its project")

    def work(conn: Connection) -> MemberAllocation:
        launch = launching.Launch(
            project_id=project_id,
            image=body.image or "",
            gpu_count=body.gpu_count or 0,
            parameters=body.parameters.model_dump(exclude_none=True),
            catalogue=_catalogue(context.settings, body.capacity_shape),
            **body.model_dump(mode="json", include=_AS_GIVEN),
        )
        return tell(launching.allocate(conn, launch, act))

    for _ in range(placement.TRIES):
        try:
            return context.write(work, body=body, status=201, key_required=True)
        except placement.NoRoom as none:
            refused = context.read(partial(placement.refusal, want=none.want))
        except Problem as other:
            raise _told(other, context.role) from None
        if refused is not None:
            raise _told(refused, context.role)
    raise placement.contended()


@router.get("", response_model=MemberAllocations)
def list_allocations(
    project_id: Id, context: Member, part: Paging, state: AllocationState | None = None
) -> dict[str, Any]:
    """The project's allocations."""
    page = part.page(allocations.ORDER)
    rows = context.read(
        lambda conn: allocations.every(conn, project_id=project_id, state=state, page=page)
    )
    return part.told(allocations.ORDER, rows, tell)


@router.get("/{allocation_id}", response_model=MemberAllocation)
def show(project_id: Id, allocation_id: Id, context: Member) -> JSONResponse:
    """One allocation of the project."""
    found = tell(context.read(lambda conn: _of(conn, project_id, allocation_id)))
    return guards.tagged(found.model_dump(mode="json"))


@router.post("/{allocation_id}/release", response_model=MemberAllocation)
def release(
    project_id: Id,
    allocation_id: Id,
    context: Member,
    guard: IfMatch,
    body: Reasoned | None = None,
) -> JSONResponse:
    """Give it back; its machine ends and its disks are wiped."""
    body = body or Reasoned()
    act = context.act(body.reason or "released by its project")

    def work(conn: Connection) -> MemberAllocation:
        _of(conn, project_id, allocation_id)
        guard.check(conn, "allocation", allocation_id)
        return tell(launching.release(conn, allocation_id, act))

    return context.write(work, body=body)


def _told(refused: Problem, role: str) -> Problem:
    # Which nodes there are and why each is full is the operators' business.
    explanation = refused.detail.get("explanation")
    if isinstance(explanation, dict) and role != Role.PLATFORM_ADMIN:
        refused.detail["explanation"] = public(explanation)
    return refused


def _catalogue(settings: Settings, shape: CapacityShape) -> Mapping[str, str]:
    """What is sold, by hardware profile: slices under the profile's SKU, whole machines under the
    name of their hardware.
    """
    skus = profile_skus(settings.profiles_dir)
    return skus if shape is CapacityShape.GPU_SLICE else {name: name for name in skus}


def _of(conn: Connection, project_id: str, allocation_id: str) -> views.Record:
    allocation = allocations.get(conn, allocation_id)
    if allocation["project_id"] != project_id:
        raise not_found("allocation", allocation_id)
    return allocation
