"""Minimal client for JSON over HTTP, because it shares the machine with the measured server.

It keeps a single connection open and uses the standard library, because the usual clients take
longer for a request than some servers do. The product and the peer are measured by the same client.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

# A server that is busy with four clients answers well before.
_LIMIT_S = 120


class Wire:
    """Requests with the same headers to a single server."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=_LIMIT_S)
        self._headers = {"Content-Type": "application/json", **headers}

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._connection.close()

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return the status and the unparsed body of the answer."""
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {**self._headers, **(headers or {})})
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def expect(answer: tuple[int, bytes], *statuses: int) -> bytes:
    """Return the body of an answer, whose status must be among these."""
    status, body = answer
    if status not in statuses:
        raise RuntimeError(f"status {status}: {body[:500]!r}")
    return body
