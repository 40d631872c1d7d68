"""Who is calling, and what that role may do. Nobody learns of other tenants' objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from reconciler.api.context import Context
from reconciler.api.models import Id
from reconciler.db.engine import asking
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import Role
from reconciler.records import projects, tokens
from reconciler.settings import Settings
from reconciler.trust import oidc

_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A token of `gpuaas`, or of the OpenID provider.",
)
_ACTOR: dict[str, str] = {
    Role.PLATFORM_ADMIN: "admin",
    Role.PROJECT_MEMBER: "member",
    Role.NODE: "node",
}


@dataclass(frozen=True)
class Caller:
    """The token's identity. ours: the token is one of the site's, not of its OpenID provider."""

    token_id: str
    name: str
    role: str
    projects: frozenset[str]
    ours: bool = True

    @property
    def actor(self) -> str:
        """As history and audit name it."""
        return f"{_ACTOR[self.role]}:{self.name}"

    def still(self, request: Request) -> bool:
        """Whether the request's token speaks for the same caller now."""
        _, secret = get_authorization_scheme_param(request.headers.get("Authorization"))
        return _known(request, secret) == self


def caller(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    """The holder of a valid token; 401 otherwise, the same whatever is wrong with it."""
    found = None if credentials is None else _known(request, credentials.credentials)
    if found is None:
        raise Problem(
            "unauthenticated",
            401,
            expected="Authorization: Bearer with a valid token",
            found="no token, or one that is unknown, expired or revoked",
            remedy="get one with `gpuaas token create`, or from the site's OpenID provider",
        )
    return found


async def admin(
    request: Request, who: Annotated[Caller, Security(caller, scopes=[Role.PLATFORM_ADMIN.value])]
) -> Context:
    """A platform admin's request."""
    if who.role != Role.PLATFORM_ADMIN:
        raise _wrong_role(who, Role.PLATFORM_ADMIN)
    return _context(request, who)


async def member(
    project_id: Id,
    request: Request,
    who: Annotated[
        Caller,
        Security(caller, scopes=[Role.PROJECT_MEMBER.value, Role.PLATFORM_ADMIN.value]),
    ],
) -> Context:
    """A request about one project, by one of its members or by an admin."""
    if who.role == Role.NODE:
        raise _wrong_role(who, Role.PROJECT_MEMBER)
    if who.role == Role.PROJECT_MEMBER and project_id not in who.projects:
        raise not_found("project", project_id)
    # A project cannot go away while a token of ours names it.
    if project_id not in who.projects or not who.ours:
        await run_in_threadpool(_exists, request, project_id)
    return _context(request, who)


async def holder(
    who: Annotated[
        Caller,
        Security(caller, scopes=[Role.PROJECT_MEMBER.value, Role.PLATFORM_ADMIN.value]),
    ],
) -> Caller:
    """Whoever has projects: those of a member's token, all for an admin."""
    if who.role == Role.NODE:
        raise _wrong_role(who, Role.PROJECT_MEMBER, Role.PLATFORM_ADMIN)
    return who


Admin = Annotated[Context, Depends(admin)]
Member = Annotated[Context, Depends(member)]
Holder = Annotated[Caller, Depends(holder)]


def _context(request: Request, who: Caller) -> Context:
    still = partial(who.still, request)
    return Context(request, actor=who.actor, role=who.role, holder=who.token_id, allowed=still)


def _exists(request: Request, project_id: str) -> None:
    with asking(request.app.state.engine) as conn:
        projects.get(conn, project_id)


def _known(request: Request, secret: str) -> Caller | None:
    settings: Settings = request.app.state.settings
    if settings.oidc_issuer and oidc.looks_like_jwt(secret):
        identity = oidc.verifier(provider(settings)).identity(secret)
        return None if identity is None else _of_provider(identity)
    with asking(request.app.state.engine) as conn:
        record = tokens.authenticate(conn, secret)
    if record is None:
        return None
    mine = frozenset({record["project_id"]} - {None})
    return Caller(record["id"], record["name"], record["role"], mine)


def _of_provider(identity: oidc.Identity) -> Caller:
    # No token of ours has a name with a colon in it, so audit cannot take one for the other.
    name = f"oidc:{identity.name}"
    role = Role.PLATFORM_ADMIN if identity.admin else Role.PROJECT_MEMBER
    return Caller(identity.id, name, role.value, identity.projects, ours=False)


def provider(settings: Settings) -> oidc.Provider:
    return oidc.Provider(
        issuer=settings.oidc_issuer,
        audience=settings.oidc_audience,
        skew_s=settings.oidc_skew_s,
        groups_claim=settings.oidc_groups_claim,
        name_claim=settings.oidc_name_claim,
        admin_group=settings.oidc_admin_group,
        project_prefix=settings.oidc_project_prefix,
        ca_file=settings.oidc_ca_file,
    )


def _wrong_role(who: Caller, *wanted: Role) -> Problem:
    these = "that role" if len(wanted) == 1 else "one of these roles"
    return Problem(
        "role_required",
        403,
        expected=f"a token of the role {' or '.join(wanted)}",
        found=f"a token of the role {who.role}",
        remedy=f"use a token of {these}",
    )
