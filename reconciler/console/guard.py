"""Protection of the console's pages: refusal of cross-origin requests, and security headers."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reconciler.model.errors import Problem

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# xterm.js writes style elements. What others have written is in HTML of its pages only as text.
TERMINAL_POLICY = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # Older browsers know only this word for frame-ancestors.
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Protected:
    """ASGI middleware that adds the headers to every answer. Pages are never stored by a cache."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, answer)


def require_same_origin(method: str, headers: Headers, scheme: str) -> None:
    """Problem `origin_refused` for a request that another site made the browser send.

    SameSite cookies are not enough: another port of the same host counts as the same site. A
    program that sends neither header has no browser's cookie, so it is refused only with a cookie.
    """
    if method in _SAFE:
        return
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is not None:
        allowed = site in ("same-origin", "none")
    elif origin is not None:
        host = headers.get("Host", "")
        # A page with TLS sends plain requests where a proxy ends it, but never the other way round.
        allowed = origin in (f"https://{host}", f"{scheme}://{host}")
    else:
        allowed = "Cookie" not in headers
    if not allowed:
        raise _refused(
            f"a request of {origin or 'an unknown page'} ({site or 'no Sec-Fetch-Site'})"
        )


def _refused(found: str) -> Problem:
    return Problem(
        "origin_refused",
        403,
        expected="a request of the console's own page",
        found=found,
        remedy="open the console in this browser and use its form",
    )


def require_own_page(headers: Headers) -> None:
    """Problem `origin_refused` for a stream that another page opens with this browser's cookie.

    The page could not read the stream, but would use up the streams that a session may open.
    Browsers do not send the header to an address of another machine without TLS.
    """
    if of_another_page(headers):
        raise _refused(f"a request of another page ({headers['Sec-Fetch-Site']})")


def of_another_page(headers: Headers) -> bool:
    """Whether a page that is not the console's had the browser send the request."""
    return headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none")
