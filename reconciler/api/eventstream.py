"""Server-sent events of a long-running operation, with resumption after a lost connection.

`fastapi.sse` formats and sends events as well, but only from a generator endpoint: a refusal or a
204 before the first event is not possible there, and its fields have another order.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

# Proxies close idle connections, most of them after a minute.
_KEEP_ALIVE_S = 15.0
# The token is checked again at this interval: a reader with a revoked token gets events that long.
_ASK_S = 2.0


@dataclass(frozen=True)
class Event:
    """place: the event's id. A reader sends it to resume behind this event."""

    name: str
    place: str
    document: dict[str, Any]

    def text(self) -> str:
        # JSON escapes line ends, so the document is a single line of data.
        data = json.dumps(self.document, separators=(",", ":"))
        return f"event: {self.name}\nid: {self.place}\ndata: {data}\n\n"


@dataclass(frozen=True)
class Batch:
    """Events after a place. over: no event will follow."""

    events: Sequence[Event]
    over: bool


class EventStream(StreamingResponse):
    """A response that polls `read` for new events, in a thread outside of the event loop.

    allowed: whether the reader's token is still valid; the response ends when it is not.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        read: Callable[[str], Batch],
        place: str,
        *,
        every_s: float,
        allowed: Callable[[], bool],
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_lines(read, place, every_s, allowed), headers=headers)


async def _lines(
    read: Callable[[str], Batch], place: str, every_s: float, allowed: Callable[[], bool]
) -> AsyncIterator[str]:
    quiet, checked_at = 0.0, time.monotonic()
    while True:
        if time.monotonic() - checked_at >= _ASK_S:
            if not await run_in_threadpool(allowed):
                return
            checked_at = time.monotonic()
        batch = await run_in_threadpool(read, place)
        for event in batch.events:
            place, quiet = event.place, 0.0
            yield event.text()
        if batch.over:
            return
        if quiet >= _KEEP_ALIVE_S:
            quiet = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(every_s)
        quiet += every_s
