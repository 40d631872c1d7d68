"""Messages of SSH that mean an unreachable host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reconciler.runs import ssh
from reconciler.runs.collect import Outcome, is_untouched
from reconciler.runs.spec import NodeAccess
from reconciler.runs.ssh import SshAccess, is_unreachable

FRONT = "unreachable: Failed to connect to the host via ssh: "
ENDED = Outcome("failed", None, unreachable=True, touched=False)


@pytest.mark.parametrize(
    "text",
    [
        "ssh: connect to host 10.0.0.1 port 22: Connection refused",
        "ssh: connect to host fd00::1 port 22: No route to host",
        "ssh: connect to host n1 port 2222: Connection timed out",
        "ssh: connect to host 10.0.0.1 port 22: Network is unreachable",
        "Connection timed out during banner exchange Connection to 10.0.0.1 port 22 timed out",
        "kex_exchange_identification: read: Connection reset by peer"
        " Connection reset by 127.0.0.1 port 2222",
        "kex_exchange_identification: Connection closed by remote host"
        " Connection closed by 127.0.0.1 port 2222",
    ],
)
def test_silence(text: str) -> None:
    assert is_unreachable(FRONT + text)
    assert is_untouched(replace(ENDED, problem=FRONT + text))
    for change in ({"touched": True}, {"unreachable": False}):
        assert not is_untouched(replace(ENDED, problem=FRONT + text, **change))


@pytest.mark.parametrize(
    "text",
    [
        "Certificate invalid: name is not a listed principal Host key verification failed.",
        # One address of two refused, the other answered with a key that is not ours.
        "ssh: connect to host ::1 port 22: Connection refused Host key verification failed.",
        "root@10.0.0.1: Permission denied (publickey).",
        "Unable to negotiate with 10.0.0.1 port 22: no matching host key type found.",
        # Something had been sent to the host when these came.
        "Timeout, server 10.0.0.1 not responding.",
        "client_loop: send disconnect: Broken pipe",
        "Connection to 10.0.0.1 closed by remote host.",
        "Connection reset by peer",
        "ssh: Could not resolve hostname n1: Name or service not known",
        "",
    ],
)
def test_not_silence(text: str) -> None:
    assert not is_unreachable(FRONT + text)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_real_ssh_says_it_so(tmp_path: Path, listening: socket.socket) -> None:
    access = SshAccess(tmp_path / "key", tmp_path / "cert", tmp_path / "hosts")
    port = listening.getsockname()[1]
    node = NodeAccess("n1", "127.0.0.1", port)
    listening.settimeout(20)

    def hang_up() -> None:
        listening.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    closed = ssh.probe(access, node)
    thread.join()
    assert is_unreachable(closed), closed
    listening.close()
    refused = ssh.probe(access, node)
    assert refused.endswith("Connection refused") and is_unreachable(refused)
