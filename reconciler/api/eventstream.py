"""Server-sent events: what has happened since a place, then what happens, until it is over."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

# Proxies close what is silent; most of them wait for a minute.
_KEEP_ALIVE_S = 15.0
# How long a reader goes on whose token was revoked or has ended.
_ASK_S = 2.0


@dataclass(frozen=True)
class Event:
    """place: what a reader that was cut off sends back to go on behind this event."""

    name: str
    place: str
    document: dict[str, Any]

    def text(self) -> str:
        # JSON has no line ends of its own, so the document is one line of data.
        data = json.dumps(self.document, separators=(",", ":"))
        return f"event: {self.name}\nid: {self.place}\ndata: {data}\n\n"


@dataclass(frozen=True)
class Batch:
    """What came after a place. over: nothing will come any more."""

    events: Sequence[Event]
    over: bool


class EventStream(StreamingResponse):
    """An answer that goes on. `read` is asked again and again, outside of the event loop.

    allowed: whether the reader still may; the answer ends when not.
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
    quiet, asked = 0.0, time.monotonic()
    while True:
        if time.monotonic() - asked >= _ASK_S:
            if not await run_in_threadpool(allowed):
                return
            asked = time.monotonic()
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
