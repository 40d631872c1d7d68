"""Allocations: launching, reading and releasing by project members, reading by operators.

Members never see the host of an allocation, neither its name nor its devices.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Annotated, Any, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field, model_validator
from sqlalchemy import Connection as DatabaseConnection

from reconciler.api import problems
from reconciler.api.catalog import AnswerCache
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
    StrictFlag,
    Text,
    Username,
)
from reconciler.api.security import Admin, Context, Member
from reconciler.api.tasks import Task
from reconciler.api.timeline import ProgressStep, StateStep
from reconciler.db import journal, rows, schema
from reconciler.db.rows import Page
from reconciler.lifecycle import guest_pool, placement, power
from reconciler.lifecycle import launch as launching
from reconciler.model import cloud_config
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.scheduler.explain import public
from reconciler.model.states import (
    AllocationState,
    CapacityShape,
    ClaimKind,
    ClaimState,
    PowerAction,
    Role,
    TaskState,
)
from reconciler.profiles import profile_offers, profile_skus, ready_minimum_s, sku_prices
from reconciler.records import allocations, leasing, queue, timeline
from reconciler.settings import Settings
from reconciler.trust.ca import Trust, gateway_hosts

router = APIRouter(prefix="/projects/{project_id}/allocations", tags=["allocations"])
admin_router = APIRouter(prefix="/admin/allocations", tags=["recovery"])

# The newest entries of a timeline are shown with an allocation; the rest is in its own list.
_TIMELINE_LIMIT = 200
_TELLING = 3


class LaunchParameters(Body):
    """Limits of this launch; they can be tighter than the profile's, never wider.

    A member's `ready_deadline_s` is not below the profile's `deadlines.ready_minimum`, whose
    default is its `deadlines.ready`.
    """

    ready_deadline_s: Annotated[Integer, Field(ge=1, le=86_400)] | None = None


# Users and groups of every Debian and Ubuntu, and our own: no account of such a name can be made.
_TAKEN = re.compile(
    "root|daemon|bin|sys|sync|games|man|lp|mail|news|uucp|proxy|www-data|backup|list|irc|gnats"
    "|nobody|nogroup|adm|tty|disk|fax|voice|cdrom|floppy|tape|sudo|audio|dip|operator|src|shadow"
    "|utmp|video|sasl|plugdev|staff|users|input|sgx|kvm|render|crontab|netdev|messagebus|sshd|ssh"
    "|_ssh|_apt|syslog|lxd|polkitd|systemd-.*|gpuaas.*"
)


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
    terminal: StrictFlag = Field(
        default=False,
        description="Let a slice accept the gateway's own certificates, for terminals.",
    )
    user_data: Annotated[str, Field(max_length=1 << 18)] = Field(
        default="",
        description="Cloud-config of the tenant for a slice, at most 16 KiB. It is applied after"
        f" ours; it may hold {', '.join(cloud_config.KEYS)}.",
    )
    worker_pool: Label = Field(
        default="",
        description="Id or name of a pool of the project with the target allocation, whose workers"
        " the machine runs. The image of a slice must declare `worker-kit`; the installation of a"
        " whole machine must have the program.",
    )

    @model_validator(mode="after")
    def _fits_its_shape(self) -> Self:
        is_slice = self.capacity_shape is CapacityShape.GPU_SLICE
        if is_slice is not (self.gpu_count is not None):
            raise ValueError("gpu_count goes with capacity_shape gpu_slice, and only with it")
        if bool(self.image_id) + (self.image is not None) != is_slice:
            raise ValueError("a slice needs either image_id or image, a whole machine takes none")
        if _TAKEN.fullmatch(self.username):
            raise ValueError(f"{self.username} is a user or group of every system; take another")
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
    "worker_pool",
}


class Connection(Answer):
    """The address for the tenant: the SSH gateway, behind which the machine is `slice`. With the
    lines of `known_hosts` in the client's file:
    `ssh -o HostKeyAlias=<allocation> -J <allocation>@<host>:<port> <username>@slice`.

    While no gateway is configured, a whole machine has its own address, and a slice none.
    """

    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    username: str
    known_hosts: str = Field(
        description="Lines of a known_hosts file: the gateway's authority, and the keys of the"
        " machine under the allocation's id (`HostKeyAlias`). Empty where they are not known."
    )

    @classmethod
    def of_allocation(cls, allocation: schema.Allocation, settings: Settings) -> Self | None:
        """The address of an active allocation."""
        document = allocation.connection
        if allocation.state != AllocationState.ACTIVE or not document:
            return None
        return cls.of_document(allocation.id, allocation.capacity_shape, document, settings)

    @classmethod
    def of_document(cls, id: str, shape: str, document: Record, settings: Settings) -> Self:
        """The address of an active allocation by the document that its run reported."""
        address = cls(
            host=str(document.get("host", "")),
            port=int(document.get("port", 22)),
            username=str(document.get("username", "")),
            known_hosts="",
        )
        whole = shape != CapacityShape.GPU_SLICE
        # Of a machine that was launched before, no key is known.
        if not settings.member_address or (whole and not document.get("host_keys")):
            return address
        # The gateway of today, which need not be that of the launch.
        host, port = settings.gateway
        keys = (f"{id} {key}\n" for key in document.get("host_keys", ()))
        lines = gateway_hosts(Trust(settings.state_dir / "trust"), host, port) + "".join(keys)
        return address.model_copy(update={"host": host, "port": port, "known_hosts": lines})


class PowerRequest(Reasoned):
    """Power action on a slice. Its slots, its disk and its addresses stay."""

    action: PowerAction


class Machine(Answer):
    """What a slice keeps from its launch, whatever its hardware profile says later."""

    vcpus: int
    memory_mib: int
    firmware: str


class _AllocationFields(Answer):
    """Fields that members and operators see alike."""

    id: str
    project_id: str
    capacity_shape: CapacityShape
    sku: str
    region: str
    gpu_count: int
    machine: Annotated[Machine | None, BeforeValidator(lambda value: value or None)] = Field(
        description="Null for a whole machine, and for a slice before its work has begun."
    )
    hostname: str
    username: str
    ssh_keys: list[str]
    image_id: str | None
    state: AllocationState
    state_since: Moment
    stopped: bool = Field(description="Whether its project has stopped its machine.")
    power_action: str = Field(description="The power action under way; empty without one.")
    generation: int
    activated_at: Moment | None
    ended_at: Moment | None


class MemberAllocation(_AllocationFields):
    """An allocation as the members of its project see it."""

    deadline_at: Moment | None = Field(
        description="When the present state ends at the latest; a command waits until then."
    )
    connection: Connection | None
    terminal: bool = Field(description="Whether it was launched to accept terminals.")
    telemetry_url: str = Field(description="Dashboard of a whole machine; empty for a slice.")
    error_code: str
    created_at: Moment | None

    @classmethod
    def of_allocation(cls, allocation: schema.Allocation, settings: Settings) -> Self:
        """The answer for the record of an allocation."""
        connection = Connection.of_allocation(allocation, settings)
        return cls.of(
            allocation,
            # Only the code: error texts can contain device names of the host.
            error_code=str(allocation.error.get("code", "")),
            connection=connection,
            terminal=bool(allocation.parameters.get("terminal")),
            # A dashboard of a slice's host would show other tenants.
            telemetry_url=str(allocation.connection.get("telemetry_url", ""))
            if connection and allocation.capacity_shape == CapacityShape.BAREMETAL
            else "",
        )


class TenantStep(Answer):
    """A change of the allocation's state, as its tenant sees it."""

    at: Moment
    state: AllocationState
    meaning: str


class TenantWait(Answer):
    """Why the allocation's work has not begun, without its machine."""

    code: str
    detail: str


class LaunchTimes(Answer):
    """How long the newest launches of the same shape and size took, in seconds."""

    launches: int
    half_within_s: int
    nine_of_ten_within_s: int

    @classmethod
    def of_times(cls, times: list[float]) -> Self | None:
        """None for fewer than three, which say nothing about the next."""
        if len(times) < _TELLING:
            return None
        half, most = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.9))
        return cls(launches=len(times), half_within_s=round(half), nine_of_ten_within_s=round(most))


class TenantTimeline(Answer):
    """States of an allocation, the oldest first, and what its open work waits for."""

    steps: list[TenantStep]
    waits_for: TenantWait | None
    step: str = Field(description="The step that its run is at; empty without a run.")
    step_since: Moment | None
    earlier: LaunchTimes | None = Field(
        description="Until it is active: the times of earlier launches, where there are enough."
    )


_LAUNCHING = (AllocationState.REQUESTED, AllocationState.PROVISIONING)
# Reasons in a member's words. The reasons for operators name machines and other tenants' work.
_WAITS = {
    "host_unreachable": "its machine does not answer; the operators are informed",
    "host_certificate_expired": "its machine is being certified again by the operators",
    "later": "the service tries again shortly",
    "node_busy": "other work on its machine comes first",
    "exclusive_first": "other work on its machine comes first",
    "worker": "the service starts it as soon as a worker is free",
}


class Allocation(_AllocationFields):
    """What a tenant requested, as operators see it."""

    node_id: str | None
    pool: str
    name: str
    runtime_profile: str
    parameters: Document
    started_boot_id: str
    refused_packets: dict[str, int] = Field(
        description="Packets that the slice's guard refused, by kind, as its host counted them."
    )
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
    if body.capacity_shape is not CapacityShape.GPU_SLICE:
        present = "a whole machine is delivered with its present installation"
        problems.require_default(body, "user_data", present)
        problems.require_default(body, "terminal", present)
    user_data = _cloud_config(context, body.user_data)
    # Before the transaction, because a name server may be slow.
    api = guest_pool.api_addresses(context.settings) if body.worker_pool else []

    def work(conn: DatabaseConnection, act: Act) -> MemberAllocation:
        offers = profile_offers(context.settings.profiles_dir)
        launch = launching.Launch(
            project_id=project_id,
            image=body.image or "",
            gpu_count=body.gpu_count or 0,
            parameters=body.parameters.model_dump(exclude_none=True)
            | ({"terminal": True} if body.terminal else {}),
            catalogue=profile_skus(context.settings.profiles_dir, body.capacity_shape),
            prices=sku_prices(context.settings.profiles_dir),
            currency=context.settings.currency,
            offers=offers if body.capacity_shape is CapacityShape.GPU_SLICE else {},
            user_data=user_data,
            api=api,
            **body.model_dump(mode="json", include=_PASSED_ON),
        )
        allocation = launching.allocate(conn, launch, act)
        return MemberAllocation.of_allocation(allocation, context.settings)

    reason = "launched by its project"
    for earlier_tries in range(placement.TRIES):
        try:
            # The project's limits bound what is left.
            return context.write(
                work, body=body, reason=reason, status=201, key_required=True, counted=False
            )
        except placement.NoRoom as no_room:
            # The reasons are those of every slot of the site, so a caller gets them one at a time.
            cache: AnswerCache = context.request.app.state.availability
            with cache.turn(context.caller.owner) as free:
                # Without an explanation a launch is tried once more: it may have lost a race.
                if not free and earlier_tries:
                    raise
                read = partial(placement.refusal, want=no_room.want)
                refusal = context.read(read) if free else None
        except Problem as problem:
            raise _redact(problem, context.caller.role) from None
        if refusal is not None:
            raise _redact(refusal, context.caller.role)
    raise placement.contended()


def _cloud_config(context: Context, text: str) -> dict[str, Any]:
    """The tenant's own cloud-config. The reading of a member's is counted."""
    if not text or context.caller.role == Role.PLATFORM_ADMIN:
        return cloud_config.parse(text)
    with context.request.app.state.rates.reading(context.caller.owner):
        return cloud_config.parse(text)


@router.get("", response_model=MemberAllocations)
def list_allocations(
    project_id: Id, context: Member, paging: Paging, state: AllocationState | None = None
) -> PageOf[MemberAllocation]:
    """The project's allocations, the newest first."""
    rows = partial(allocations.every, project_id=project_id, state=state)
    item = partial(MemberAllocation.of_allocation, settings=context.settings)
    return context.page(paging, allocations.ORDER, rows, item)


@router.get("/{allocation_id}", response_model=MemberAllocation)
def show(project_id: Id, allocation_id: Id, context: Member) -> JSONResponse:
    """One allocation of the project."""
    row = context.read(
        lambda conn: rows.of_project(conn, schema.Allocation, project_id, allocation_id)
    )
    return tagged(MemberAllocation.of_allocation(row, context.settings))


@router.get("/{allocation_id}/timeline", name="timeline")
def tenant_timeline(project_id: Id, allocation_id: Id, context: Member) -> TenantTimeline:
    """The allocation's states so far, and the reason why its open work has not begun."""

    def read(conn: DatabaseConnection) -> TenantTimeline:
        allocation = rows.of_project(conn, schema.Allocation, project_id, allocation_id)
        changes = journal.history_of(conn, "allocation", allocation_id)
        work = queue.every(conn, allocation_id=allocation_id, page=Page(_TIMELINE_LIMIT))
        waits = leasing.wait_reasons(conn, work)
        code = next((reason["code"] for reason in waits.values()), "")
        detail = _WAITS.get(code, "the service cannot start it now; the operators are informed")
        running = [task for task in work if task.state == TaskState.RUNNING]
        return TenantTimeline(
            steps=[
                TenantStep(at=change.at, state=state, meaning=state.meaning)
                for change in changes
                for state in (AllocationState(change.target),)
            ],
            waits_for=TenantWait(code=code, detail=detail) if code else None,
            step=_step(running[0].progress.get("step")) if running else "",
            step_since=queue.step_since(conn, running[0]) if running else None,
            earlier=LaunchTimes.of_times(allocations.launch_times(conn, allocation))
            if allocation.state in _LAUNCHING
            else None,
        )

    return context.read(read)


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
        rows.of_project(conn, schema.Allocation, project_id, allocation_id)
        guard.check(conn, "allocation", allocation_id)
        released = launching.release(conn, allocation_id, act)
        return MemberAllocation.of_allocation(released, context.settings)

    return context.write(work, body=body, reason="released by its project")


@router.post("/{allocation_id}/power", status_code=202, response_model=MemberAllocation)
def change_power(
    project_id: Id, allocation_id: Id, body: PowerRequest, context: Member, guard: IfMatch
) -> JSONResponse:
    """Start, stop, restart or reset the machine of a slice. `power_action` is empty afterwards."""

    def work(conn: DatabaseConnection, act: Act) -> MemberAllocation:
        rows.of_project(conn, schema.Allocation, project_id, allocation_id)
        guard.check(conn, "allocation", allocation_id)
        changed = power.request(conn, allocation_id, body.action, act)
        return MemberAllocation.of_allocation(changed, context.settings)

    reason = f"{body.action.value} asked for by its project"
    return context.write(work, body=body, reason=reason, status=202)


@admin_router.get("", name="list_allocations")
def list_all(
    context: Admin,
    paging: Paging,
    project_id: Filter = None,
    node_id: Filter = None,
    state: AllocationState | None = None,
) -> PageOf[Allocation]:
    """All allocations, the newest first."""
    rows = partial(allocations.every, project_id=project_id, state=state, node_id=node_id)
    return context.page(paging, allocations.ORDER, rows, Allocation.of)


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
            tasks=queue.every(conn, allocation_id=allocation_id, page=Page(_TIMELINE_LIMIT)),
            timeline=steps[::-1],
        )

    return tagged(context.read(read))


def _step(name: object) -> str:
    """The name of a run's step. A host writes the progress, so anything else is not passed on."""
    return name if isinstance(name, str) and re.fullmatch(r"[a-z_]{1,40}", name) else ""


def _require_time_to_boot(settings: Settings, body: NewAllocation) -> None:
    """Problem `ready_deadline_too_short` for a deadline that a healthy guest may miss.

    A slice that is not reachable in time leaves its slots blocked until an operator acts.
    """
    deadline_s = body.parameters.ready_deadline_s
    least = ready_minimum_s(settings.profiles_dir, body.sku)
    if deadline_s is not None and deadline_s < least:
        raise Problem(
            "ready_deadline_too_short",
            422,
            expected=f"parameters.ready_deadline_s of at least {least}",
            found=str(deadline_s),
            remedy="leave it out, and the limit of the hardware profile applies",
        )


def _redact(problem: Problem, role: str) -> Problem:
    # Only operators may see which nodes exist and why each of them is full.
    if role == Role.PLATFORM_ADMIN:
        return problem
    problem.detail.pop("nodes", None)
    explanation = problem.detail.get("explanation")
    if isinstance(explanation, dict):
        problem.detail["explanation"] = public(explanation)
    return problem
