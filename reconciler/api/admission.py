"""Admission of requests: the size of their bodies, and how many of a caller are worked on at once.

All requests share an event loop, which reads their bodies, and some forty threads. Rates count
requests (`security.Rates`), and say nothing of what one of them costs.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reconciler.api import problems
from reconciler.api.security import PLACE, SESSION, authenticate, bearer, unauthenticated
from reconciler.db.engine import asking
from reconciler.model.errors import Problem
from reconciler.model.states import Role
from reconciler.pools import remote

# No request of this API is larger. Without a limit an unauthenticated sender could fill the memory.
BODY_LIMIT = 1 << 20
# A body is read before its sender is known. Reading a small one takes a few milliseconds at most.
UNKNOWN_LIMIT = 1 << 16
# Bytes of large bodies of each caller, sustained and at once. To read a MiB takes up to 0.2 s.
_BYTES_PER_S, _BYTES_BURST = 2 << 20, 16 << 20


class Admission:
    """ASGI middleware: limits of a body's size, and the sender's place (`security.Places`).

    prefix: of the routes that read a body before they know its sender. The console knows it first.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

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
        except Problem as refused:
            await problems.respond(request, refused)(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        finally:
            _leave(scope)

    async def _admit(self, request: Request) -> None:
        """Problem for a body that is too large, or whose sender is unknown or sends too much."""
        headers = Headers(scope=request.scope)
        length = headers.get("content-length", "")
        size = int(length) if length.isdigit() else 0
        # A chunked body states no length, so it is refused; no supported client sends one.
        if "transfer-encoding" in headers or size > BODY_LIMIT:
            raise _TOO_LARGE
        # The console asks the API under its session.
        known = SESSION in request.scope or not request.scope["path"].startswith(self._prefix)
        if known or size <= UNKNOWN_LIMIT:
            return
        sender = await run_in_threadpool(_sender, request)
        if sender is None:
            raise unauthenticated()
        key, holders = f"bodies of {sender[0]}", sender[1]
        if not holders:
            return
        rates, places = request.app.state.rates, request.app.state.places
        rates.take_bytes(key, size, _BYTES_PER_S * holders, _BYTES_BURST * holders)
        # Its later place (`security.member`) is this one.
        request.scope[PLACE] = await places.take(key, holders)


def _sender(request: Request) -> tuple[str, int] | None:
    """By whom the request is counted, and how many share the token: none for an admin, who is not
    limited.
    """
    if caller := authenticate(request):
        return caller.owner, int(caller.role != Role.PLATFORM_ADMIN)
    with asking(request.app.state.engine) as conn:
        pool = remote.authenticate(conn, bearer(request))
    return (f"pool:{pool.id}", pool.replicas) if pool else None


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
