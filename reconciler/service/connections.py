"""HTTP connections: how long one may take for a request, and how many are open at once.

uvicorn limits the pause between two requests only. A client that connects and sends nothing, stops
within a head or a body, or does not read an answer would keep its connection for good. The
connection has a file descriptor, which the service's runs and database need as well.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# From a connection, or from an answer, to the end of the next request; also for the rest of an
# answer that was handed to the kernel.
REQUEST_S = 60.0


def limited(limit: int = 0) -> type[H11Protocol]:
    """The protocol of a single server.

    limit: how many may be open, by default half of the files that this process may have. With more,
    the one that has waited longest for its request is closed.
    """
    most = limit or max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1)
    # By the time since which they wait.
    waiting: dict[Limited, asyncio.TimerHandle] = {}

    class Limited(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()
            if len(self.connections) > most:
                # At once, because all that come in the same moment would choose the same one.
                oldest = next(iter(waiting))
                oldest._stop_waiting()
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            # After an error the peer may still not read that answer.
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR):
                self._stop_waiting()

        def pause_writing(self) -> None:
            # The peer takes no more of an answer.
            super().pause_writing()
            self._wait()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()

        def handle_websocket_upgrade(self, event: h11.Request) -> None:
            self._stop_waiting()
            super().handle_websocket_upgrade(event)

        def on_response_complete(self) -> None:
            self._wait()
            # It begins the next request if that is here already.
            super().on_response_complete()

        def _wait(self) -> None:
            self._stop_waiting()
            # An abort also ends a connection whose peer reads no answer.
            waiting[self] = self.loop.call_later(REQUEST_S, self.transport.abort)

        def _stop_waiting(self) -> None:
            if timer := waiting.pop(self, None):
                timer.cancel()

    return Limited
