"""The API's own sockets."""

from __future__ import annotations

import socket

import pytest

from reconciler.service import listeners
from reconciler.settings import Settings


@pytest.mark.covers("CTRL-1")
def test_no_answer_waits_for_an_acknowledgement() -> None:
    """Nagle's algorithm would hold each answer's body back for 40 ms."""
    with (
        listeners.api_sockets(Settings(listen="127.0.0.1:0")) as (taken,),
        socket.create_connection(taken.getsockname()[:2]),
    ):
        accepted, _ = taken.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
