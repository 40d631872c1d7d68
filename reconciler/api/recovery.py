"""Recovery cases: opening one for an allocation with blocked slots, and following it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sqlalchemy import Connection

from reconciler.api.guards import IfMatch
from reconciler.api.models import Id, Reasoned
from reconciler.api.security import Admin
from reconciler.db import clock
from reconciler.lifecycle import recovery_cases
from reconciler.model.states import RecoveryState
from reconciler.records import allocations
from reconciler.records import recovery_cases as case_records

router = APIRouter(prefix="/admin/allocations/{allocation_id}", tags=["recovery"])

_CLOSED = ConfigDict(
    from_attributes=True, extra="ignore", json_schema_extra={"additionalProperties": False}
)


def _text(at: Any) -> Any:
    return clock.iso(at) if isinstance(at, float) else at


_MOMENT = Field(json_schema_extra={"format": "date-time"})
Moment = Annotated[str, BeforeValidator(_text), _MOMENT]
MaybeMoment = Annotated[str | None, BeforeValidator(_text), _MOMENT]


class RecoveryStep(BaseModel):
    """One step of the runbook, with what it showed."""

    model_config = _CLOSED

    step: str
    at: Moment
    evidence: dict[str, Any]


class RecoveryWait(BaseModel):
    """Why a case does not go on now. remedy: what a person can do about it, "" for nothing."""

    model_config = _CLOSED

    code: str
    detail: str
    remedy: str


class RecoveryFailure(BaseModel):
    """Why a case has failed, and what a person does next."""

    model_config = _CLOSED

    code: str
    expected: str
    found: str
    remedy: str


class RecoveryCase(BaseModel):
    """One attempt to bring back the slots of an allocation; it goes on without its caller."""

    model_config = _CLOSED

    id: str
    allocation_id: str
    node_id: str
    state: RecoveryState
    state_reason: str
    state_since: Moment
    deadline_at: MaybeMoment
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
    steps: list[RecoveryStep]
    correlation_id: str
    created_at: Moment
    finished_at: MaybeMoment

    @classmethod
    def of(cls, conn: Connection, case: Any) -> RecoveryCase:
        """The document of a case as it is now."""
        steps = case_records.steps(conn, case["id"])
        waits_for = recovery_cases.waits_for(conn, case)
        return cls(
            id=case["id"],
            allocation_id=case["allocation_id"],
            node_id=case["node_id"],
            state=case["state"],
            state_reason=case["state_reason"],
            state_since=case["state_since"],
            deadline_at=case["deadline_at"],
            step=steps[-1]["step"],
            requested_by=case["requested_by"],
            reason=case["reason"],
            remove_leftovers=case["remove_leftovers"],
            slot_ids=case["slot_ids"],
            task_id=case["task_id"],
            task_ids=case["task_ids"],
            proof_ids=case["proof_ids"],
            waits_for=RecoveryWait.model_validate(waits_for) if waits_for else None,
            failure=RecoveryFailure.model_validate(case["failure"]) if case["failure"] else None,
            steps=[RecoveryStep.model_validate(step) for step in steps],
            correlation_id=case["correlation_id"],
            created_at=case["created_at"],
            finished_at=case["finished_at"],
        )


@router.post("/recover", status_code=202, response_model=RecoveryCase)
def recover(
    allocation_id: Id, context: Admin, guard: IfMatch, body: Reasoned | None = None
) -> JSONResponse:
    """Open a recovery case, which the service follows by itself to its end: verify on the host,
    clean, prove. While a case is open, asking again answers with that case.
    """
    body = body or Reasoned()
    act = context.act(body.reason)

    def work(conn: Connection) -> RecoveryCase:
        guard.check(conn, "allocation", allocation_id)
        return RecoveryCase.of(conn, recovery_cases.open_case(conn, allocation_id, act))

    return context.write(work, body=body, status=202, key_required=True)


@router.get("/recovery", response_model=RecoveryCase)
def latest_case(allocation_id: Id, context: Admin) -> RecoveryCase:
    """The newest recovery case of the allocation with its steps so far; 404 when there is none."""

    def read(conn: Connection) -> RecoveryCase:
        allocations.get(conn, allocation_id)
        return RecoveryCase.of(conn, case_records.latest(conn, allocation_id))

    return context.read(read)
