"""A name whose name server does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAME = "silent.example"


class Lookups:
    """Lookups of the name: how many began, and whether a lookup has ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = False


@contextmanager
def silent_name() -> Iterator[Lookups]:
    """Let lookups of the name hang until the end, and for no longer than lookups of a real name."""
    lookups, answer, look_up = Lookups(), threading.Event(), socket.getaddrinfo

    def hang(host: Any, *arguments: Any, **named: Any) -> Any:
        if host not in (NAME, NAME.encode()):
            return look_up(host, *arguments, **named)
        lookups.begun += 1
        answer.wait(30)
        lookups.ended = True
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", hang)
        try:
            yield lookups
        finally:
            answer.set()
