"""API tokens: of all holders for operators, and a caller's own. A secret is shown once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal, Self, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from sqlalchemy import Connection

from reconciler.api.http import PageOf, PageRequest, Paging
from reconciler.api.models import Answer, Filter, Id, Integer, Moment, Name, Reasoned
from reconciler.api.security import Admin, Caller, Context, Holder
from reconciler.db import schema
from reconciler.lifecycle.ssh_access import PROVIDER_S
from reconciler.model.act import Act
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import Role
from reconciler.records import nodes, projects, tokens

router = APIRouter(prefix="/tokens", tags=["tokens"])
admin_router = APIRouter(prefix="/admin/tokens", tags=["tokens"])


Lifetime = Annotated[Integer, Field(ge=60, le=10 * 365 * 86_400)]
_DEFAULT_S = 90 * 86_400


class NewToken(Reasoned):
    """A member's token belongs to one project, a node's to one node, an admin's to neither."""

    role: Role
    name: Name
    project_id: Name | None = None
    node_id: Name | None = None
    ttl_s: Lifetime | None = Field(_DEFAULT_S, description="null: it ends when it is revoked.")

    @model_validator(mode="after")
    def _names_its_owner(self) -> Self:
        if (self.role is Role.PROJECT_MEMBER) is not (self.project_id is not None):
            raise ValueError("project_id goes with the role project-member, and only with it")
        if (self.role is Role.NODE) is not (self.node_id is not None):
            raise ValueError("node_id goes with the role node, and only with it")
        return self


class Token(Answer):
    """A token without its secret."""

    id: str
    parent_id: str | None = Field(description="The token that it was made with and ends with.")
    valid: bool = Field(description="Whether neither it nor a token before it has ended.")
    name: str
    role: Role
    project_id: str | None
    node_id: str | None
    created_at: Moment
    expires_at: Moment | None
    revoked_at: Moment | None


T = TypeVar("T", bound=Token)


class HoldersToken(Token):
    """A token as operators see it. Members do not see who of them has issued it."""

    issued_by: str = Field(description="Empty for one of an earlier version.")


class IssuedToken(Token):
    """A token with its secret."""

    valid: Literal[True] = True

    token: str


class Revoked(Answer):
    """The token that was revoked."""

    id: str
    revoked: Literal[True]


@admin_router.post("", status_code=201, response_model=IssuedToken)
def issue(body: NewToken, context: Admin) -> JSONResponse:
    """Issue a token."""
    values = body.model_dump(exclude={"reason", "role"})

    def work(conn: Connection, act: Act) -> IssuedToken:
        if body.project_id:
            projects.get(conn, body.project_id)
        if body.node_id:
            nodes.get(conn, body.node_id)
        record, secret = tokens.issue(conn, act, role=body.role, **values)
        return IssuedToken.of(record, token=secret)

    return context.write(work, body=body, status=201, secrets=frozenset({"token"}))


@admin_router.get("")
def list_tokens(context: Admin, paging: Paging, project_id: Filter = None) -> PageOf[HoldersToken]:
    """All tokens, the newest first, without their secrets."""
    return _page(context, paging, partial(tokens.every, project_id=project_id), HoldersToken)


@admin_router.delete("/{token_id}", response_model=Revoked)
def revoke(token_id: Id, context: Admin) -> JSONResponse:
    """Revoke the token at once."""

    def work(conn: Connection, act: Act) -> Revoked:
        tokens.revoke(conn, token_id, act)
        return Revoked(id=token_id, revoked=True)

    return context.write(work)


class NewOwnToken(Reasoned):
    """A token with at most the caller's rights: for a project or, for an admin, for the site.

    A member with a single project need not name it.
    """

    name: Name
    project_id: Name | None = None
    ttl_s: Lifetime = _DEFAULT_S


@router.post("", status_code=201, response_model=IssuedToken)
def issue_own(body: NewOwnToken, context: Holder) -> JSONResponse:
    """Issue a token for the caller. It ends, and is revoked, with the caller's token. For a person
    of the OpenID provider it ends with their login, within twelve hours at most.
    """
    caller = context.caller
    role, project_id = _scope(caller, body.project_id)
    ttl_s, until = float(body.ttl_s), caller.until
    if not caller.stored:
        # Its groups cannot be asked for later.
        ttl_s, until = min(ttl_s, PROVIDER_S), until or 0.0

    def work(conn: Connection, act: Act) -> IssuedToken:
        record, secret = tokens.issue_own(
            conn,
            act,
            parent_id=caller.token_id if caller.stored else None,
            owner=caller.owner,
            until=until,
            role=role,
            name=body.name,
            project_id=project_id,
            ttl_s=ttl_s,
        )
        return IssuedToken.of(record, token=secret)

    reason = "made by its holder"
    return context.write(work, body=body, reason=reason, status=201, secrets=frozenset({"token"}))


@router.get("")
def list_own(context: Holder, paging: Paging) -> PageOf[Token]:
    """The caller's token and all tokens made with it; for a person of the OpenID provider, all
    tokens that they made.
    """
    read = partial(tokens.of_holder, holder=context.caller.token_id)
    return _page(context, paging, read, Token)


@router.delete("/{token_id}", response_model=Revoked)
def revoke_own(token_id: Id, context: Holder) -> JSONResponse:
    """Revoke a token among those that the list shows, and all that were made with it."""

    def work(conn: Connection, act: Act) -> Revoked:
        tokens.revoke_own(conn, token_id, act, holder=context.caller.token_id)
        return Revoked(id=token_id, revoked=True)

    return context.write(work, reason="revoked by its holder")


def _scope(caller: Caller, project_id: str | None) -> tuple[Role, str | None]:
    """Role and project of a token that the caller makes."""
    if caller.role == Role.PLATFORM_ADMIN:
        return (Role.PROJECT_MEMBER if project_id else Role.PLATFORM_ADMIN), project_id
    if project_id is None and len(caller.projects) == 1:
        (project_id,) = caller.projects
    if project_id is None:
        raise Problem(
            "token_owner_invalid",
            422,
            expected="project_id with one of your projects",
            found="none",
            remedy="`gpuaas projects list` shows them",
        )
    if project_id not in caller.projects:
        raise not_found("project", project_id)
    return Role.PROJECT_MEMBER, project_id


def _page(
    context: Context,
    paging: PageRequest,
    read: Callable[..., Sequence[schema.ApiToken]],
    kind: type[T],
) -> PageOf[T]:
    def items(conn: Connection, listed: Sequence[schema.ApiToken]) -> list[T]:
        valid = {token.id for token in tokens.valid(conn, ids=[token.id for token in listed])}
        return [kind.of(token, valid=token.id in valid) for token in listed]

    return context.page_with(paging, tokens.ORDER, read, items)
