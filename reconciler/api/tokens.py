"""API tokens: issued, listed, revoked. The secret is in the first answer and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from sqlalchemy import Connection

from reconciler.api import secrecy, views
from reconciler.api.models import Id, Name, Reasoned
from reconciler.api.paging import Paging
from reconciler.api.security import Admin
from reconciler.model.states import Role
from reconciler.records import nodes, projects, tokens

router = APIRouter(prefix="/admin/tokens", tags=["tokens"])


class NewToken(Reasoned):
    """A member's token belongs to one project, a node's to one node, an admin's to neither."""

    role: Role
    name: Name
    project_id: Name | None = None
    node_id: Name | None = None
    ttl_s: Annotated[int, Field(ge=60, le=10 * 365 * 86_400)] | None = None

    @model_validator(mode="after")
    def _belongs(self) -> NewToken:
        if (self.role is Role.PROJECT_MEMBER) is not (self.project_id is not None):
            raise ValueError("project_id goes with the role project-member, and only with it")
        if (self.role is Role.NODE) is not (self.node_id is not None):
            raise ValueError("node_id goes with the role node, and only with it")
        return self


@router.post("", status_code=201)
def issue(body: NewToken, context: Admin) -> JSONResponse:
    """Issue a token."""
    act = context.act(body.reason)
    values = body.model_dump(exclude={"reason", "role"})

    def work(conn: Connection) -> tuple[dict[str, Any], dict[str, Any]]:
        if body.project_id:
            projects.get(conn, body.project_id)
        if body.node_id:
            nodes.get(conn, body.node_id)
        record, secret = tokens.issue(conn, act, role=body.role, **values)
        return views.record(record), {"token": secret}

    return secrecy.write(context, work, body=body)


@router.get("")
def list_tokens(context: Admin, part: Paging) -> dict[str, Any]:
    """All tokens, without their secrets."""
    page = part.page(tokens.ORDER)
    return part.told(tokens.ORDER, context.read(lambda conn: tokens.every(conn, page)))


@router.delete("/{token_id}")
def revoke(token_id: Id, context: Admin) -> JSONResponse:
    """From now on the token opens nothing."""
    act = context.act()

    def work(conn: Connection) -> dict[str, Any]:
        tokens.revoke(conn, token_id, act)
        return {"id": token_id, "revoked": True}

    return context.write(work)
