"""The recovery policy: whether blocked slots are recovered without a person, and what it does."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.models import Reasoned
from reconciler.api.security import Admin
from reconciler.lifecycle import recovery
from reconciler.model.recovery import Policy

router = APIRouter(prefix="/admin/settings/recovery-policy", tags=["recovery policy"])

Record = dict[str, Any]


class PolicyBody(Reasoned):
    """Limits count recoveries begun within an hour."""

    enabled: Annotated[bool, Field(strict=True)]
    per_node: Annotated[int, Field(ge=1, le=64)] = Policy.per_node
    per_hour: Annotated[int, Field(ge=1, le=1000)] = Policy.per_hour
    remove_leftovers: Annotated[bool, Field(strict=True)] = Policy.remove_leftovers


@router.get("")
def show(context: Admin) -> Record:
    """The policy, and what it does about every allocation with blocked slots, or would do."""
    return context.read(_told)


@router.put("")
def change(body: PolicyBody, context: Admin) -> JSONResponse:
    """Set all of it; what is left out gets its default."""
    act = context.act(body.reason)

    def work(conn: Connection) -> Record:
        recovery.write_policy(conn, Policy(**body.model_dump(exclude={"reason"})), act)
        return _told(conn)

    return context.write(work, body=body)


def _told(conn: Connection) -> Record:
    now = recovery.read_policy(conn)
    return {
        "enabled": now.enabled,
        "per_node": now.per_node,
        "per_hour": now.per_hour,
        "remove_leftovers": now.remove_leftovers,
        "cases": [
            {
                "allocation_id": case.allocation_id,
                "node_id": case.node_id,
                "slot_ids": [slot["id"] for slot in case.slots],
                "move": case.move,
                "why": case.why,
            }
            for case in recovery.cases(conn)
        ],
    }
