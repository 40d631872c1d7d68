"""Admission of requests: the size of their bodies, and how many of a caller are worked on at once.

All requests share an event loop, which reads their bodies, and some forty threads. Rates count
requests (`security.Rates`), whatever each of them costs.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reconciler.api import problems
from reconciler.api.http import body_size
from reconciler.api.security import (
    PLACE,
    PLACES,
    SESSION,
    UNKNOWN_LIMIT,
    authenticate,
    bearer,
    of_pool,
    take_place,
    unauthenticated,
)
from reconciler.db.engine import asking
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.pools import remote

# No request of this API is larger. Without a limit an unauthenticated sender could fill the memory.
BODY_LIMIT = 1 << 20
# The console reads its forms itself, and asks the API under its session.
_CONSOLE = "/console/"


class Admission:
    """ASGI middleware: limits of a body's size, and the sender's place (`security.Places`).

    strangers: whether others than local operators can send requests.
    """

    def __init__(self, app: ASGIApp, *, strangers: bool = True) -> None:
        self._app = app
        self._strangers = strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            # A stream goes on for hours after its start.
            if message["type"] == "http.response.start":
                _leave(scope)
            await send(message)

        request = Request(scope)
        try:
            await self._admit(request)
        except (Problem, SQLAlchemyError) as refused:
            await problems.respond(request, problems.of(refused))(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        finally:
            _leave(scope)

    async def _admit(self, request: Request) -> None:
        """Problem for a body that is too large, or whose sender is unknown or sends too much."""
        headers = Headers(scope=request.scope)
        size = body_size(headers)
        # A chunked body states no length, so it is refused; no supported client sends one.
        if "transfer-encoding" in headers or size > BODY_LIMIT:
            raise _TOO_LARGE
        signed_in = SESSION in request.scope or request.scope["path"].startswith(_CONSOLE)
        if signed_in or size <= UNKNOWN_LIMIT or not self._strangers:
            return
        sender = await run_in_threadpool(_sender, request)
        if sender is None:
            raise unauthenticated()
        key, holders, places = sender
        if holders:
            request.app.state.rates.take_bytes(key, size, holders)
            # It is also its later place (`security.member`, `worker`).
            await take_place(request, key, places)


def _sender(request: Request) -> tuple[str, int, int] | None:
    """The key by which the request is counted, the number of holders of its token, and their
    places. The number is 0 for an admin, who is not limited.
    """
    if caller := authenticate(request):
        return caller.owner, int(caller.role != Role.PLATFORM_ADMIN), PLACES
    with asking(request.app.state.engine) as conn:
        pool = remote.authenticate(conn, bearer(request))
    if pool is None:
        return None
    key, places = of_pool(pool)
    return key, pool.replicas, places


def _leave(scope: Scope) -> None:
    leave: Callable[[], None] | None = scope.pop(PLACE, None)
    if leave:
        leave()


_TOO_LARGE = Problem(
    "body_too_large",
    413,
    expected=f"a body of stated length, at most {BODY_LIMIT} bytes",
    found="a longer one, or one without a length",
    remedy="send less, with Content-Length",
)
