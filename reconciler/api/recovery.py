"""Recovery policy: which blocked slots the service recovers without a person."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.models import Answer, Reasoned, StrictFlag
from reconciler.api.security import Admin
from reconciler.lifecycle import recovery
from reconciler.model.recovery import Move, Policy

router = APIRouter(prefix="/admin/settings/recovery-policy", tags=["recovery policy"])


class PolicyBody(Reasoned):
    """The limits count recoveries that began within an hour."""

    enabled: StrictFlag
    per_node: Annotated[int, Field(ge=1, le=64)] = Policy.per_node
    per_hour: Annotated[int, Field(ge=1, le=1000)] = Policy.per_hour
    remove_leftovers: StrictFlag = Policy.remove_leftovers


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
    cases: list[BlockedAllocation]


@router.get("")
def show(context: Admin) -> RecoveryPolicy:
    """The policy, and what it does, or would do, about every allocation with blocked slots."""
    return context.read(_policy)


@router.put("", response_model=RecoveryPolicy)
def change(body: PolicyBody, context: Admin) -> JSONResponse:
    """Set the whole policy. A field that is left out gets its default."""
    act = context.act(body.reason)

    def work(conn: Connection) -> RecoveryPolicy:
        recovery.write_policy(conn, Policy(**body.model_dump(exclude={"reason"})), act)
        return _policy(conn)

    return context.write(work, body=body)


def _policy(conn: Connection) -> RecoveryPolicy:
    policy = recovery.read_policy(conn)
    return RecoveryPolicy(
        enabled=policy.enabled,
        per_node=policy.per_node,
        per_hour=policy.per_hour,
        remove_leftovers=policy.remove_leftovers,
        cases=[
            BlockedAllocation(
                allocation_id=case.allocation_id,
                node_id=case.node_id,
                slot_ids=[slot["id"] for slot in case.slots],
                move=case.move,
                why=case.why,
            )
            for case in recovery.cases(conn)
        ],
    )
