"""Sessions of the console: their start, the cookie, logout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Engine
from starlette.datastructures import State
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from reconciler.api.http import correlation_id
from reconciler.api.security import COOKIE, Caller, cookie_name, person, provider
from reconciler.db.engine import asking, retrying
from reconciler.lifecycle import ssh_access
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.records import console_sessions, tokens
from reconciler.settings import Settings
from reconciler.trust import oidc

Identity = Callable[[], Caller | None]


def secret_of(request: HTTPConnection) -> str:
    """The secret in the request's cookie; "" without a cookie."""
    return request.cookies.get(cookie_name(request, COOKIE), "")


def of_socket(socket: HTTPConnection) -> Identity | None:
    """Identity behind the session of a WebSocket, read anew each time; None without a cookie."""
    secret = secret_of(socket)
    return partial(identity, socket.app.state, secret) if secret else None


def identity(state: State, secret: str) -> Caller | None:
    """The caller of a session; None when the session or its token has ended."""
    if not secret:
        return None
    with asking(state.engine) as conn:
        token = console_sessions.token_of(conn, secret)
        claims = None if token else console_sessions.claims_of(conn, secret)
    if token is not None:
        return Caller.of_token(token)
    return None if claims is None else person(state.settings, claims)


def asks(request: Request, engine: Engine) -> bool:
    """Whether the groups of the request's person should be asked for again."""
    with asking(engine) as conn:
        return console_sessions.asks(conn, secret_of(request))


def start_by_provider(request: Request, state: State, login: str, claims: oidc.Claims) -> str:
    """Start a session for a person of the provider, or renew that of the request.

    Returns its secret. login: secret of the login, which starts no second session. Tokens and keys
    that the person made for a project end when the person is no member of it any more.
    """
    settings: Settings = state.settings
    site = provider(settings)
    kept = {name: claims[name] for name in ("iss", "sub", site.name_claim) if name in claims}
    kept[site.groups_claim] = oidc.groups_of(site, claims)
    caller = Caller.of_provider(oidc.identity_of(site, kept))
    if caller.role != Role.PLATFORM_ADMIN:
        why = "the provider names no group for it"
        act = Act(caller.actor, why, correlation_id(request), role=caller.role)
        lost = partial(ssh_access.end_lost, owner=caller.owner, projects=caller.projects, act=act)
        retrying(state.engine, lost)
    current = secret_of(request)
    renew = partial(console_sessions.renew, secret=current, login=login, claims=kept)
    if retrying(state.engine, renew):
        return current
    return _start(request, state.engine, caller, login=login, claims=kept)


def start(request: Request, engine: Engine, token: str) -> str:
    """Start a session for a token and return its secret. Every unusable token is refused alike."""
    with asking(engine) as conn:
        record = tokens.authenticate(conn, token.strip())
    if record is None or record.role == Role.NODE:
        raise Problem(
            "unauthenticated",
            401,
            expected="a valid token of a person, as `gpuaas token create` prints it",
            found="one that is unknown, expired, revoked, or of a node",
            remedy="get a token from your operator, or make one with `gpuaas token create`",
        )
    return _start(request, engine, Caller.of_token(record), token_id=record.id)


def _start(request: Request, engine: Engine, caller: Caller, **holder: Any) -> str:
    act = Act(caller.actor, "logged in", correlation_id(request), role=caller.role)
    started = partial(
        console_sessions.start,
        act=act,
        address=request.client.host if request.client else "",
        agent=request.headers.get("User-Agent", ""),
        **holder,
    )
    return retrying(engine, started)


def end(request: Request, engine: Engine, caller: Caller) -> None:
    """End the request's session."""
    act = Act(caller.actor, "logged out", correlation_id(request), role=caller.role)
    retrying(engine, partial(console_sessions.end, secret=secret_of(request), act=act))


def end_persons(request: Request, state: State) -> None:
    """End the request's session if it is that of a person of the provider."""
    with asking(state.engine) as conn:
        claims = console_sessions.claims_of(conn, secret_of(request))
    caller = person(state.settings, claims) if claims else None
    if caller is not None:
        end(request, state.engine, caller)


def set_cookie(request: Request, response: Response, secret: str) -> None:
    """Give the browser the session's secret; "" takes it away."""
    keep(request, response, COOKIE, secret, console_sessions.LIFETIME_S)


def keep(request: Request, response: Response, name: str, value: str, lifetime_s: float) -> None:
    """Set a cookie that only this host gets, and no script; "" takes it away."""
    response.set_cookie(
        cookie_name(request, name),
        value,
        max_age=int(lifetime_s) if value else 0,
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="lax",
    )
