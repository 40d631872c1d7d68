"""Authentication and authorisation: tokens, roles, and the context of an authorised request."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Self

from fastapi import Depends, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from sqlalchemy import Connection, Engine
from starlette.requests import HTTPConnection

from reconciler.api.http import (
    PageOf,
    PageRequest,
    R,
    T,
    correlation_id,
    encode,
    etag,
    idempotency_key,
)
from reconciler.api.models import Answer, Body, Id, Reasoned, Record
from reconciler.db import idempotency
from reconciler.db.engine import asking, reading, retrying
from reconciler.db.rows import Order
from reconciler.db.schema import ApiToken, Pool
from reconciler.model.act import Act
from reconciler.model.client_limits import Buckets
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import Role
from reconciler.model.storable import STORABLE
from reconciler.records import projects, tokens
from reconciler.settings import Settings
from reconciler.trust import oidc

# Name of the console's cookie.
COOKIE = "gpuaas"
_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A token of `gpuaas`, or of the OpenID provider.",
)
# Keys of the request's scope under which the console passes its session and the secret of that. No
# header reaches a scope.
SESSION, SECRET = "gpuaas.session", "gpuaas.secret"
# The function by which a request leaves its place.
PLACE = "gpuaas.place"
_ACTOR: dict[str, str] = {
    Role.PLATFORM_ADMIN: "admin",
    Role.PROJECT_MEMBER: "member",
    Role.NODE: "node",
}

# Sustained, and at once: more than a person or a script of a person makes, and less than what keeps
# a process from others.
PER_S, BURST = 100.0, 1000
# Requests of a member that are worked on at once; others of it wait. A process has forty threads.
PLACES = 8
# The largest body that is read before its sender is known. It takes a few milliseconds.
UNKNOWN_LIMIT = 1 << 14
# Bytes of larger bodies of each caller, sustained and at once. A MiB can take 0.2 s to read.
_BYTES_PER_S, _BYTES_BURST = 1 << 20, 16 << 20
# How long one document may wait for another that is read.
_TURN_S = 0.5
# Seconds of a processor that a member's documents may take to read, for each second and at once.
READING_PER_S, READING_BURST = 0.1, 10.0
# Changes by a member, each of which leaves rows that are kept: in the audit log for ever, and under
# its idempotency key for days.
ACTS_PER_S, ACTS_BURST = 1.0, 300


@dataclass(frozen=True)
class Caller:
    """The identity that a token stands for. stored: the token was issued by this site, not by its
    OpenID provider. owner: by which everything is counted that tokens of one person share. until:
    the end of the token or session.
    """

    token_id: str
    name: str
    role: str
    projects: frozenset[str]
    stored: bool = True
    owner: str = ""
    # A session that is renewed stays the same caller.
    until: float | None = field(default=None, compare=False)

    @property
    def actor(self) -> str:
        """The name in history and audit log, with the id of a token, because names may be equal."""
        token = f"#{self.token_id}" if self.stored else ""
        return f"{_ACTOR[self.role]}:{self.name}{token}"

    def still(self, request: Request) -> bool:
        """Whether the request's token or session still stands for this caller."""
        return authenticate(request) == self

    @classmethod
    def of_token(cls, token: ApiToken) -> Self:
        """The identity of a token of this site."""
        project_ids = frozenset({token.project_id} if token.project_id else ())
        owner = token.owner or token.id
        names = (token.id, token.name, token.role, project_ids)
        return cls(*names, owner=owner, until=token.expires_at)

    @classmethod
    def of_provider(cls, identity: oidc.Identity) -> Self:
        """The identity of a person of the OpenID provider."""
        # Names of stored tokens have no colon, so the audit log cannot confuse the two.
        name = f"oidc:{identity.name}"
        role = Role.PLATFORM_ADMIN if identity.admin else Role.PROJECT_MEMBER
        names = (identity.id, name, role.value, identity.projects)
        return cls(*names, stored=False, owner=identity.id, until=identity.until)


@dataclass(frozen=True)
class Context:
    """An authorised request."""

    request: Request
    caller: Caller

    @property
    def settings(self) -> Settings:
        settings: Settings = self.request.app.state.settings
        return settings

    @property
    def engine(self) -> Engine:
        engine: Engine = self.request.app.state.engine
        return engine

    def allowed(self) -> bool:
        """Whether the token is still valid, for answers that stream."""
        return self.caller.still(self.request)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Read in one transaction, so that the answer is consistent."""
        with reading(self.engine) as conn:
            return work(conn)

    def page(
        self,
        paging: PageRequest,
        order: Order,
        rows: Callable[..., Sequence[R]],
        item: Callable[[R], T],
    ) -> PageOf[T]:
        """Read one page of a list. rows: gets the connection, and `page` by its name."""
        return self.page_with(paging, order, rows, lambda _conn, read_rows: map(item, read_rows))

    def page_with(
        self,
        paging: PageRequest,
        order: Order,
        rows: Callable[..., Sequence[R]],
        items: Callable[[Connection, Sequence[R]], Iterable[T]],
    ) -> PageOf[T]:
        """As `page`, for items that show more than their row. items: makes them in their order,
        in the same transaction.
        """
        page = paging.page(order)

        def read(conn: Connection) -> PageOf[T]:
            read_rows = rows(conn, page=page)
            return paging.answer(order, read_rows, items(conn, read_rows))

        return self.read(read)

    def write(
        self,
        work: Callable[[Connection, Act], Answer],
        *,
        body: Body | None = None,
        reason: str = "",
        status: int = 200,
        key_required: bool = False,
        secrets: frozenset[str] = frozenset(),
        counted: bool = True,
        job_of: Callable[[], str] | None = None,
    ) -> JSONResponse:
        """Do the work in one transaction, as the caller's act with the reason in the body.

        With an idempotency key it is done at most once, and a repetition gets the first answer.

        reason: the reason where the body has none.
        counted: whether it counts among the changes by a member, which have a rate of their own.
        job_of: names, after the work, the job with which the answer is deleted.
        secrets: fields of the answer that are shown once and never stored, because everybody who
        reads the database could read them in the table of remembered answers. A repetition is
        refused, as it cannot show them again.
        """
        body = body or Reasoned()
        counted = counted and self.caller.role != Role.PLATFORM_ADMIN
        if counted:
            self.request.app.state.rates.require_act(self.caller.owner)
        act = Act(
            self.caller.actor,
            getattr(body, "reason", "") or reason,
            correlation_id(self.request),
            role=self.caller.role,
            owner=self.caller.owner,
        )
        hidden: Record = {}

        def done(conn: Connection) -> idempotency.Answer:
            document = encode(work(conn, act))
            hidden.update((name, document.pop(name)) for name in secrets)
            return idempotency.Answer(status, document, job_id=job_of and job_of())

        key = idempotency_key(self.request.headers)
        if not key and not key_required:
            answer = retrying(self.engine, done)
        else:
            scope = f"{self.request.method} {self.request.url.path} {self.caller.token_id}"
            call = idempotency.Call(scope, key, _document(body))
            answer = idempotency.once(self.engine, call, done)
        # Refused and repeated requests are not counted.
        if counted and not answer.replayed:
            self.request.app.state.rates.count_act(self.caller.owner)
        headers = etag(answer.body)
        if secrets:
            headers["Cache-Control"] = "no-store"
        if answer.replayed:
            if secrets:
                raise _shown_once(answer.body)
            headers["Idempotency-Replayed"] = "true"
        return JSONResponse(answer.body | hidden, answer.status, headers=headers)


def _document(body: Body) -> Record:
    try:
        return body.model_dump(mode="json")
    except ValueError as error:  # It does not say so by its type.
        raise Problem(
            "request_invalid",
            422,
            expected=STORABLE,
            found="documents or lists that nest deeper",
            remedy="send a flatter document",
        ) from error


def _require_paid(wait_s: float, *, expected: str, found: str, remedy: str) -> None:
    if wait_s > 0:
        detail = {"retry_after_s": math.ceil(wait_s)}
        raise Problem(
            "rate_exceeded", 429, expected=expected, found=found, remedy=remedy, detail=detail
        )


class Rates(Buckets):
    """Requests of each token, at PER_S of them a second; changes by each member, at ACTS_PER_S."""

    def __init__(self) -> None:
        super().__init__()
        self._reading = threading.Lock()

    def take(self, token_id: str, holders: int = 1) -> None:
        """Count a request; Problem `rate_exceeded` for one too many, which is not counted.

        holders: so many share the token.
        """
        self.take_at(token_id, PER_S * holders, BURST * holders)

    def take_at(self, key: str, per_s: float, burst: int) -> None:
        """As `take`, for requests at another rate, sustained and at once."""
        _require_paid(
            self.wait_s(key, per_s, burst),
            expected=f"at most {per_s:.0f} requests a second of a token",
            found=f"more, after {burst} at once",
            remedy="send fewer; a stream of events needs no repeated request",
        )
        self.count(key, per_s)

    def take_bytes(self, sender: str, size: int, holders: int = 1) -> None:
        """Count a body of more than `UNKNOWN_LIMIT`, as `take`."""
        if size <= UNKNOWN_LIMIT:
            return
        key, per_s = f"bodies of {sender}", float(_BYTES_PER_S * holders)
        _require_paid(
            self.wait_s(key, per_s, _BYTES_BURST * holders, size),
            expected="at most 1 MiB a second in bodies of more than 16 KiB",
            found="more, after 16 MiB at once",
            remedy="send smaller bodies, or fewer",
        )
        self.count(key, per_s, size)

    @contextmanager
    def reading(self, owner: str) -> Iterator[None]:
        """Count the processor time of a member's document; Problem `rate_exceeded` for too much.

        One is read at a time: several would take the interpreter from all other requests, and those
        that wait take their threads.
        """
        key, turn = f"reading of {owner}", self._reading.acquire(timeout=_TURN_S)
        try:
            _require_paid(
                self.wait_s(key, READING_PER_S, READING_BURST, 0) if turn else 1,
                expected="documents that are read in a moment",
                found="many, or one that takes long",
                remedy="send smaller documents, or fewer",
            )
            began = time.thread_time()
            try:
                yield
            finally:
                self.count(key, READING_PER_S, time.thread_time() - began)
        finally:
            if turn:
                self._reading.release()

    def require_act(self, owner: str) -> None:
        """Problem `rate_exceeded` for a member who has changed too much."""
        _require_paid(
            self.wait_s(f"acts of {owner}", ACTS_PER_S, ACTS_BURST),
            expected=f"at most {ACTS_BURST} changes at once, and {ACTS_PER_S:g} a second",
            found="more",
            remedy="change less often; each change is kept in the audit log",
        )

    def count_act(self, owner: str) -> None:
        """Count a change by a member."""
        self.count(f"acts of {owner}", ACTS_PER_S)


class Places:
    """Requests of each caller that are worked on at once, so that a slow one costs its caller and
    no other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, key: str, most: int) -> tuple[Callable[[], None], bool]:
        """Wait for a place; returns the function by which the request leaves it, and whether there
        was none at first.
        """
        with self._lock:
            free = self._taken.get(key, 0) < most
            if free:
                self._taken[key] = self._taken.get(key, 0) + 1
            else:
                turn = asyncio.get_running_loop().create_future()
                self._waiting.setdefault(key, deque()).append(turn)
        if not free:
            try:
                await turn
            except asyncio.CancelledError:
                self._give_up(key, turn)
                raise
        return partial(self._leave, key), not free

    def _leave(self, key: str) -> None:
        """Give the place to the request that waits longest."""
        with self._lock:
            waiting = self._waiting.get(key)
            while waiting:
                turn = waiting.popleft()
                # The event loop of this request may have ended; then the next one gets the place.
                with suppress(RuntimeError):
                    turn.get_loop().call_soon_threadsafe(_begin, turn)
                    return
            self._waiting.pop(key, None)
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]

    def _give_up(self, key: str, turn: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(key, deque())
            given = turn not in waiting
            if not given:
                waiting.remove(turn)
        if given:
            self._leave(key)


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


async def take_place(request: Request, key: str, most: int) -> bool:
    """Take a place (`Places.take`), unless the request has one; returns whether it had to wait. The
    request leaves its place at its answer.
    """
    if PLACE in request.scope:
        return False
    places: Places = request.app.state.places
    request.scope[PLACE], waited = await places.take(key, most)
    return waited


async def _take_place(request: Request, who: Caller) -> None:
    if who.role != Role.PROJECT_MEMBER:
        return
    waited = await take_place(request, who.owner, PLACES)
    # Any number of requests may have waited when the token was revoked.
    if waited and not await run_in_threadpool(who.still, request):
        raise unauthenticated()


def of_pool(pool: Pool) -> tuple[str, int]:
    """By whom the requests of a pool's workers are counted, and how many places they have: a
    heartbeat passes beside a turn of each.
    """
    return f"pool:{pool.id}", pool.replicas + 1


def caller(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    """The holder of a valid token. Every invalid token gets the same 401."""
    secret = "" if credentials is None else credentials.credentials
    identity = authenticate(request, secret)
    if identity is None:
        raise unauthenticated()
    if identity.role != Role.PLATFORM_ADMIN:
        request.app.state.rates.take(identity.owner)
    return identity


def unauthenticated() -> Problem:
    return Problem(
        "unauthenticated",
        401,
        expected="Authorization: Bearer with a valid token",
        found="no token, or one that is unknown, expired or revoked",
        remedy="ask the operators for one, or run `gpuaas login` where the site has an OpenID"
        " provider; an operator makes one with `gpuaas token create` on the service's machine",
    )


async def admin(
    request: Request, who: Annotated[Caller, Security(caller, scopes=[Role.PLATFORM_ADMIN.value])]
) -> Context:
    """The context of a platform admin's request."""
    if who.role != Role.PLATFORM_ADMIN:
        raise _wrong_role(who, Role.PLATFORM_ADMIN)
    return Context(request, who)


_MemberOrAdmin = Annotated[
    Caller, Security(caller, scopes=[Role.PROJECT_MEMBER.value, Role.PLATFORM_ADMIN.value])
]


async def member(project_id: Id, request: Request, who: _MemberOrAdmin) -> Context:
    """The context of a request about a project, by a member of it or by an admin.

    To a member, the projects of others do not exist.
    """
    if who.role == Role.NODE:
        raise _wrong_role(who, Role.PROJECT_MEMBER)
    if who.role == Role.PROJECT_MEMBER and project_id not in who.projects:
        raise not_found("project", project_id)
    await _take_place(request, who)
    # A project that a stored token refers to exists.
    if project_id not in who.projects or not who.stored:
        await run_in_threadpool(_require_project, request, project_id)
    return Context(request, who)


async def holder(request: Request, who: _MemberOrAdmin) -> Context:
    """The context of a request by a caller that has projects: a member or an admin."""
    if who.role == Role.NODE:
        raise _wrong_role(who, Role.PROJECT_MEMBER, Role.PLATFORM_ADMIN)
    await _take_place(request, who)
    return Context(request, who)


Admin = Annotated[Context, Depends(admin)]
Member = Annotated[Context, Depends(member)]
Holder = Annotated[Context, Depends(holder)]


def provider(settings: Settings) -> oidc.Provider:
    """The site's OpenID provider as the settings describe it."""
    names = [field.name for field in fields(oidc.Provider)]
    return oidc.Provider(**{name: getattr(settings, f"oidc_{name}") for name in names})


def person(settings: Settings, claims: dict[str, Any]) -> Caller | None:
    """Whom the claims of a session stand for under the present settings."""
    if claims["iss"] != settings.oidc_issuer:
        return None
    try:
        return Caller.of_provider(oidc.identity_of(provider(settings), claims))
    except ValueError:
        return None


def _require_project(request: Request, project_id: str) -> None:
    with asking(request.app.state.engine) as conn:
        projects.get(conn, project_id)


def cookie_name(request: HTTPConnection, name: str) -> str:
    """The name with the prefix that a browser accepts only with Secure, from the host itself and
    for the whole site; plain names are for loopback.
    """
    return f"__Host-{name}" if request.url.scheme in ("https", "wss") else name


def credential(request: HTTPConnection) -> str:
    """Digest of the session or token by which a request is authenticated."""
    if SESSION in request.scope:
        given = request.scope.get(SECRET) or request.cookies.get(cookie_name(request, COOKIE), "")
        return tokens.digest(given)
    return tokens.digest(bearer(request))


def bearer(request: HTTPConnection) -> str:
    """The token in a request's header."""
    return get_authorization_scheme_param(request.headers.get("Authorization"))[1]


def authenticate(
    request: HTTPConnection, secret: str | None = None, *, patient: bool = True
) -> Caller | None:
    """The identity of a request's session or token. secret: the token, if it is known. patient:
    whether it may wait for the OpenID provider.
    """
    if session := request.scope.get(SESSION):
        identity: Caller | None = session()
        return identity
    secret = bearer(request) if secret is None else secret
    if not secret:
        return None
    settings: Settings = request.app.state.settings
    if settings.oidc_issuer and oidc.looks_like_jwt(secret):
        person = oidc.verifier(provider(settings)).identity(secret, patient=patient)
        return None if person is None else Caller.of_provider(person)
    with asking(request.app.state.engine) as conn:
        record = tokens.authenticate(conn, secret)
    return None if record is None else Caller.of_token(record)


def _shown_once(issued: Record) -> Problem:
    return Problem(
        "secret_shown_once",
        expected="a new idempotency key, because the secret of the first answer is not stored",
        found="the key of a request that was answered",
        remedy="issue another one with a new idempotency key, and revoke the first",
        detail={"issued": issued},
    )


def _wrong_role(who: Caller, *allowed: Role) -> Problem:
    needed = "that role" if len(allowed) == 1 else "one of these roles"
    return Problem(
        "role_required",
        403,
        expected=f"a token of the role {' or '.join(allowed)}",
        found=f"a token of the role {who.role}",
        remedy=f"use a token of {needed}, or ask the operators of the site",
    )
