"""Server-sent events of a page: its live part as HTML, whenever it has changed.

An event holds the whole part, and its id is the digest of what the part shows. A browser that comes
back with the id of the last event gets the next event when something differs from it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from reconciler.console import pages
from reconciler.console.visit import Refused, Visit
from reconciler.model.errors import Problem

# Pages that may follow a stream at the same time: of one person in all sessions, and of a process.
# A page without a stream reloads at intervals.
PER_PERSON, PER_PROCESS = 16, 256
# The session is looked up with every reading, so it is also the time until a revoked session ends.
_EVERY_S = 2.0
# Proxies close idle connections, most of them after a minute.
_KEEP_ALIVE_S = 15.0
_OVER = "event: over\ndata:\n\n"
_open: Counter[str] = Counter()


@dataclass(frozen=True)
class Part:
    """The live part of a page: its template, in which it is the block `live`, with its values.

    ended: nothing will change any more.
    """

    template: str
    values: dict[str, Any]
    ended: bool

    def place(self) -> str:
        """Digest of what the part shows."""
        text = json.dumps(self.values, sort_keys=True, default=str)
        return sha256(text.encode()).hexdigest()[:32]

    def html(self) -> str:
        """The part as the page shows it."""
        return pages.render_block(self.template, "live", **self.values, ended=self.ended)


Read = Callable[[Visit], Awaitable[Part]]


class Stream(StreamingResponse):
    """Events for one page, counted while they are sent."""

    media_type = "text/event-stream"

    def __init__(self, visit: Visit, events: AsyncIterator[str]) -> None:
        # A proxy must pass each event on at once.
        super().__init__(events, headers={"X-Accel-Buffering": "no"})
        self._person = visit.caller.owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _open[self._person] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            _open[self._person] -= 1
            if not _open[self._person]:
                del _open[self._person]

    def require_place(self) -> None:
        """Problem `rate_exceeded` when the person, or all together, have as many as they may."""
        if _open[self._person] >= PER_PERSON or _open.total() >= PER_PROCESS:
            raise Problem(
                "rate_exceeded",
                429,
                expected=f"at most {PER_PERSON} live pages of one person",
                found="one more",
                remedy="close some of them; until then this page reloads every 30 seconds",
            )


async def follow(visit: Visit, read: Read) -> Response:
    """The stream of a page. A page that does not exist is refused before it begins."""
    part = await read(visit)
    stream = Stream(visit, _events(visit, read, part))
    stream.require_place()
    return stream


def ended(request: Request) -> Response:
    """For a browser whose session has ended: it must not come back for more."""
    return Response(_farewell(request.url.path), media_type=Stream.media_type)


async def _events(visit: Visit, read: Read, part: Part) -> AsyncIterator[str]:
    place = visit.request.headers.get("Last-Event-ID", "")
    quiet = 0.0
    while True:
        if part.place() != place:
            place, quiet = part.place(), 0.0
            yield _event(place, part.html())
        if part.ended:
            yield _OVER
            return
        if quiet >= _KEEP_ALIVE_S:
            quiet = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(_EVERY_S)
        quiet += _EVERY_S
        try:
            part = await read(visit)
        except Refused as refused:
            # The service, or too many requests of this token; not the end of the session.
            if refused.status >= 500 or refused.status == 429:
                continue
            yield _farewell(visit.request.url.path)
            return


def _event(place: str, html: str) -> str:
    lines = "".join(f"data: {line}\n" for line in html.splitlines())
    return f"id: {place}\n{lines}\n"


def _farewell(path: str) -> str:
    page = path.removesuffix("/stream")
    login = f"/console/login?next={quote(page, safe='/')}"
    return (
        'data: <div class="alert warn" role="alert"><strong>Your session has ended</strong>'
        f'<p><a href="{login}">Log in again</a> to see more.</p></div>\n\n{_OVER}'
    )
