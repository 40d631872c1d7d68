"""Lookup of a name with a deadline, which the system's own lookup lacks.

A name server that does not answer holds a thread for half a minute. Each lookup has a thread of its
own, for which the end of the process does not wait. All who ask for the same name meanwhile share
it, so that such a server holds one thread for each name.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from typing import Any

Rows = list[Any]
# Futures of the callers that wait, by lookup under way.
_waiting: dict[tuple[Any, ...], list[Future[Rows]]] = {}
_lock = threading.Lock()


def begin(host: Any, port: Any, family: int = 0, kind: int = 0, flags: int = 0) -> Future[Rows]:
    """The future result, or exception, of `socket.getaddrinfo`."""
    question, answer = (host, port, family, kind, flags), Future[Rows]()
    with _lock:
        if question in _waiting:
            _waiting[question].append(answer)
        else:
            # It ends under the lock, and a thread that cannot be started leaves nothing here.
            threading.Thread(target=_look_up, args=question, daemon=True).start()
            _waiting[question] = [answer]
    return answer


def look_up(host: str, port: int, timeout_s: float) -> Rows:
    """The rows of a TCP service; an OSError, which is TimeoutError after the timeout."""
    return begin(host, port, kind=socket.SOCK_STREAM).result(max(timeout_s, 0.0))


def addresses(host: str, timeout_s: float) -> list[str]:
    """The IPv4 addresses of a host, sorted; OSError or ValueError for a name without any."""
    rows = begin(host, None, socket.AF_INET, socket.SOCK_STREAM).result(timeout_s)
    return sorted({str(address[0]) for *_, address in rows})


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose end does not wait for a lookup that hangs."""

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,  # noqa: ARG002
        flags: int = 0,
    ) -> Rows:
        """As the base class has it, for TCP."""
        return await asyncio.wrap_future(begin(host, port, family, type, flags))


def _look_up(host: Any, port: Any, family: int, kind: int, flags: int) -> None:
    rows: Rows = []
    failure: Exception | None = None
    try:
        rows = socket.getaddrinfo(host, port, family, kind, 0, flags)
    except Exception as failed:
        failure = failed
    with _lock:
        answers = _waiting.pop((host, port, family, kind, flags))
    for answer in answers:
        if not answer.set_running_or_notify_cancel():
            continue
        if failure is None:
            answer.set_result(rows)
        else:
            answer.set_exception(failure)
