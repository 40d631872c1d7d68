"""One id per request, from the caller or made here; every log line and record of it carries it."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reconciler import logs
from reconciler.api import metrics

log = logging.getLogger("gpuaas.api.request")

HEADER = "X-Correlation-Id"
# Larger is no request of ours; without a limit an unknown sender could fill the memory.
BODY_LIMIT = 1 << 20
# It reaches run variables and syslog lines on hosts.
_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def of(request: Request) -> str:
    """The id of this request."""
    return str(request.scope.get("correlation_id", ""))


class Correlation:
    """ASGI middleware: correlation id, one log line per request, limit of the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        scope["correlation_id"] = given if _ALLOWED.fullmatch(given) else str(uuid.uuid4())
        began, status = time.monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = scope["correlation_id"]
            await send(message)

        with logs.about(correlation=scope["correlation_id"]):
            try:
                if _too_long(headers):
                    await _refuse(scope, answer)
                else:
                    await self._app(scope, receive, answer)
            finally:
                took_s = time.monotonic() - began
                metrics.answered(scope, status, took_s)
                # The path only: a query may hold a download token.
                log.info(
                    "%s %s %d %.0f ms correlation_id=%s",
                    scope["method"],
                    scope["path"],
                    status,
                    took_s * 1000,
                    scope["correlation_id"],
                )


def _too_long(headers: Headers) -> bool:
    # A chunked body states no length; no client of ours sends one.
    length = headers.get("content-length", "")
    return "transfer-encoding" in headers or (length.isdigit() and int(length) > BODY_LIMIT)


async def _refuse(scope: Scope, send: Send) -> None:
    document = {
        "type": "urn:gpuaas:problem:body_too_large",
        "title": "Body too large",
        "status": 413,
        "detail": f"Expected a body of stated length, at most {BODY_LIMIT} bytes.",
        "code": "body_too_large",
        "expected": f"a body of stated length, at most {BODY_LIMIT} bytes",
        "found": "a longer one, or one without a length",
        "remedy": "send less, with Content-Length",
        "correlation_id": scope["correlation_id"],
    }
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/problem+json")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
