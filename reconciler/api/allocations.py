"""Allocations for operators: reading and recovery."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import Connection

from reconciler.api.http import IfMatch, PageOf, Paging, tagged
from reconciler.api.models import Answer, Document, Filter, Id, Moment, Reasoned, StrictFlag
from reconciler.api.security import Admin
from reconciler.api.tasks import Task, audited
from reconciler.api.timeline import ProgressStep, StateStep
from reconciler.db.rows import Page
from reconciler.lifecycle import recovery
from reconciler.model.act import Act
from reconciler.model.states import (
    AllocationState,
    CapacityShape,
    ClaimKind,
    ClaimState,
    SlotState,
)
from reconciler.records import allocations, queue, timeline

router = APIRouter(prefix="/admin/allocations", tags=["recovery"])

# The newest entries of a timeline are shown with an allocation; the rest is in its own list.
_TIMELINE_LIMIT = 200


class ForceCleanup(Reasoned):
    """`true` states that an operator has seen that nothing of the allocation is left on its
    host.
    """

    runtime_verified_absent: StrictFlag


class Allocation(Answer):
    """What a tenant requested, as operators see it."""

    id: str
    project_id: str
    node_id: str | None
    capacity_shape: CapacityShape
    sku: str
    region: str
    pool: str
    gpu_count: int
    name: str
    hostname: str
    username: str
    ssh_keys: list[str]
    image_id: str | None
    runtime_profile: str
    parameters: Document
    state: AllocationState
    state_reason: str
    state_since: Moment
    deadline_at: Moment | None
    generation: int
    connection: Document
    error: Document
    requested_by: str
    correlation_id: str
    created_at: Moment
    activated_at: Moment | None
    ended_at: Moment | None


class Claim(Answer):
    """What an allocation holds, as it was when it was claimed."""

    id: str
    allocation_id: str
    kind: ClaimKind
    node_id: str
    slot_id: str | None
    position: int
    slot_index: int
    gpu_pci_address: str
    nvme_device: str
    nvme_identity: str
    nvme_serial: str
    nvme_eui: str
    nvme_size_bytes: int
    management_mac: str
    private_ip: str
    fabric_vf_pci_address: str
    numa_node: int
    fence: int
    disk_generation: int
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


class CleanedSlot(Answer):
    """A slot of the allocation after the cleanup began."""

    slot_id: str
    slot_index: int
    status: SlotState
    task_id: str | None


class ForcedCleanup(Answer):
    """The allocation, its slots, and the tasks that were canceled."""

    allocation_id: str
    state: AllocationState
    runtime_verified_absent: bool
    slots: list[CleanedSlot]
    canceled_tasks: list[str]


@router.get("")
def list_allocations(
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


@router.get("/{allocation_id}", response_model=AllocationDetail)
def show(allocation_id: Id, context: Admin) -> JSONResponse:
    """One allocation with its claims, tasks and the newest entries of its timeline, the oldest
    first.
    """

    def read(conn: Connection) -> AllocationDetail:
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


@router.post("/{allocation_id}/force-cleanup", response_model=ForcedCleanup)
def force_cleanup(
    allocation_id: Id, body: ForceCleanup, context: Admin, guard: IfMatch
) -> JSONResponse:
    """End an allocation that is stuck. Its slots come back only by proof."""
    absent = body.runtime_verified_absent

    def work(conn: Connection, act: Act) -> ForcedCleanup:
        guard.check(conn, "allocation", allocation_id)
        return ForcedCleanup.of(
            recovery.force_cleanup(conn, allocation_id, act, runtime_verified_absent=absent)
        )

    return context.write(work, body=body, key_required=True)


@router.post("/{allocation_id}/force-release", response_model=Allocation)
def force_release(
    allocation_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """End a tenant's use and billing while the host does not answer. Its slots stay blocked."""

    def work(conn: Connection, act: Act) -> Allocation:
        guard.check(conn, "allocation", allocation_id)
        return Allocation.of(recovery.force_release(conn, allocation_id, act))

    return context.write(work, body=body)


@router.post("/{allocation_id}/verify-absent", status_code=202, response_model=Task)
def verify_absent(allocation_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Have the host report what is left of the allocation. Answers with the task."""

    def work(conn: Connection, act: Act) -> Task:
        return audited(conn, recovery.verify_absence(conn, allocation_id, act), act)

    return context.write(work, body=body, status=202)
