"""The API's own sockets."""

from __future__ import annotations

import socket

import pytest

from reconciler.service import listener
from reconciler.settings import Settings


@pytest.mark.covers("CTRL-1")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_no_answer_waits_for_an_acknowledgement(host: str) -> None:
    """Nagle's algorithm would hold each answer's body back for 40 ms."""
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with (
        listener.api(Settings(listen=f"{host}:0")) as (taken,),
        socket.create_connection(taken.getsockname()[:2]),
    ):
        accepted, _ = taken.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
