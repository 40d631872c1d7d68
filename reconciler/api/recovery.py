"""Recovery: ending stuck allocations, cases that bring back their slots, the recovery policy."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.allocations import Allocation
from reconciler.api.http import IfMatch
from reconciler.api.models import Answer, Document, Id, Integer, Moment, Reasoned, StrictFlag
from reconciler.api.security import Admin
from reconciler.api.tasks import Task
from reconciler.db import schema
from reconciler.lifecycle import recovery, recovery_cases, recovery_policy
from reconciler.model.act import Act
from reconciler.model.recovery import Move, Policy
from reconciler.model.states import AllocationState, RecoveryState, SlotState
from reconciler.records import allocations
from reconciler.records import recovery_cases as case_records

router = APIRouter(prefix="/admin/allocations/{allocation_id}", tags=["recovery"])
policy_router = APIRouter(prefix="/admin/settings/recovery-policy", tags=["recovery policy"])


class ForceCleanup(Reasoned):
    """`true` states that an operator has seen that nothing of the allocation is left on its
    host.
    """

    runtime_verified_absent: StrictFlag


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


class RecoveryStep(Answer):
    """One step of the runbook, with its evidence."""

    step: str
    at: Moment
    evidence: Document


class RecoveryWait(Answer):
    """Why a case does not continue now. remedy: what a person can do about it, "" for nothing."""

    code: str
    detail: str
    remedy: str


class RecoveryFailure(Answer):
    """Why a case has failed, and what a person does next."""

    code: str
    expected: str
    found: str
    remedy: str


class RecoveryCase(Answer):
    """One attempt to bring back the slots of an allocation; it continues without its caller.

    failed_in: the state in which it failed, null unless it did.
    """

    id: str
    allocation_id: str
    node_id: str
    state: RecoveryState
    state_reason: str
    state_since: Moment
    deadline_at: Moment | None
    step: str
    requested_by: str
    reason: str
    remove_leftovers: bool
    slot_ids: list[str]
    task_id: str | None
    task_ids: list[str]
    proof_ids: list[str]
    waits_for: RecoveryWait | None
    failure: RecoveryFailure | None
    failed_in: RecoveryState | None
    steps: list[RecoveryStep]
    correlation_id: str
    created_at: Moment
    finished_at: Moment | None

    @classmethod
    def of_case(cls, conn: Connection, case: schema.RecoveryCase) -> Self:
        """The answer for a case with its steps so far."""
        steps = case_records.steps(conn, case.id)
        return cls.of(
            case,
            step=steps[-1]["step"],
            waits_for=recovery_cases.waits_for(conn, case),
            failure=case.failure or None,
            failed_in=case_records.failed_in(conn, case),
            steps=steps,
        )


class PolicyBody(Reasoned):
    """The limits count recoveries that began within an hour, but not those of tenants' failures."""

    enabled: StrictFlag
    per_node: Annotated[Integer, Field(ge=1, le=64)] = Policy.per_node
    per_hour: Annotated[Integer, Field(ge=1, le=1000)] = Policy.per_hour
    remove_leftovers: StrictFlag = Policy.remove_leftovers
    tenant_failures: StrictFlag = Field(
        Policy.tenant_failures,
        description="Recover launches that failed by their tenant's doing, also while it is off.",
    )


class BlockedAllocation(Answer):
    """Blocked slots of one allocation, and the next move of the policy."""

    allocation_id: str
    node_id: str
    slot_ids: list[str]
    move: Move
    why: str


class RecoveryPolicy(Answer):
    """The policy, and its next move for every allocation with blocked slots."""

    enabled: bool
    per_node: int
    per_hour: int
    remove_leftovers: bool
    tenant_failures: bool
    cases: list[BlockedAllocation]


@router.post("/force-cleanup", response_model=ForcedCleanup)
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


@router.post("/force-release", response_model=Allocation)
def force_release(
    allocation_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """End a tenant's use and billing while the host does not answer. Its slots stay blocked."""

    def work(conn: Connection, act: Act) -> Allocation:
        guard.check(conn, "allocation", allocation_id)
        return Allocation.of(recovery.force_release(conn, allocation_id, act))

    return context.write(work, body=body)


@router.post("/verify-absent", status_code=202, response_model=Task)
def verify_absent(allocation_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Have the host report what is left of the allocation. Answers with the task."""
    return context.write(
        lambda conn, act: Task.of(recovery.verify_absence(conn, allocation_id, act)),
        body=body,
        status=202,
    )


@router.post("/recover", status_code=202, response_model=RecoveryCase)
def recover(
    allocation_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """Open a recovery case, which the service follows to its end: verify on the host, clean, prove.

    While a case is open, a repetition answers with that case.
    """

    def work(conn: Connection, act: Act) -> RecoveryCase:
        guard.check(conn, "allocation", allocation_id)
        return RecoveryCase.of_case(conn, recovery_cases.open_case(conn, allocation_id, act))

    return context.write(work, body=body, status=202, key_required=True)


@router.get("/recovery")
def latest_case(allocation_id: Id, context: Admin) -> RecoveryCase:
    """The newest recovery case of the allocation with its steps so far; 404 without one."""

    def read(conn: Connection) -> RecoveryCase:
        allocations.get(conn, allocation_id)
        return RecoveryCase.of_case(conn, case_records.latest(conn, allocation_id))

    return context.read(read)


@policy_router.get("")
def show(context: Admin) -> RecoveryPolicy:
    """The policy, and what it does, or would do, about every allocation with blocked slots."""
    return context.read(_policy)


@policy_router.put("", response_model=RecoveryPolicy)
def change(body: PolicyBody, context: Admin) -> JSONResponse:
    """Set the whole policy. A field that is left out gets its default."""

    def work(conn: Connection, act: Act) -> RecoveryPolicy:
        recovery_policy.write(conn, Policy(**body.model_dump(exclude={"reason"})), act)
        return _policy(conn)

    return context.write(work, body=body)


def _policy(conn: Connection) -> RecoveryPolicy:
    cases = [
        BlockedAllocation.of(case, slot_ids=[slot.id for slot in case.slots])
        for case in recovery_policy.blocked_allocations(conn)
    ]
    return RecoveryPolicy.of(recovery_policy.read(conn), cases=cases)
