"""Queries of Open vSwitch's daemons, when a daemon fails or hangs.

Real daemons answer in the tests on the rig.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _switch

from tests.conftest import Script

pytestmark = pytest.mark.covers("HOST-6")

Serve = Callable[[socket.socket], None]
PORTS = ("Interface", "name,ofport", "")


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Serve], None]]:
    """Start the database and the switch, each of which serves a single query in this way."""
    with tempfile.TemporaryDirectory(prefix="switch") as folder, contextlib.ExitStack() as stack:
        # Paths of sockets are short.
        monkeypatch.setattr(_host, "ROOT", Path(folder))
        monkeypatch.setattr(_switch, "ANSWER_S", 0.5)
        place = _host.path(_switch.FOLDER)
        place.mkdir(parents=True)
        (place / "ovs-vswitchd.pid").write_text("7\n")

        def start(serve: Serve) -> None:
            for name in (_switch.DATABASE, "ovs-vswitchd.7.ctl"):
                (place / name).unlink(missing_ok=True)
                server = stack.enter_context(socket.socket(socket.AF_UNIX))
                server.bind(str(place / name))
                server.listen()
                threading.Thread(target=_serve, args=(server, serve), daemon=True).start()

        yield start


def _serve(server: socket.socket, serve: Serve) -> None:
    # The test may have ended.
    with contextlib.suppress(OSError), server.accept()[0] as client:
        serve(client)


def answer(document: object, *, piece: int = 1 << 20) -> Serve:
    """Answer with the document, in pieces of so many bytes."""

    def serve(client: socket.socket) -> None:
        client.recv(1 << 16)
        data = json.dumps(document).encode()
        for start in range(0, len(data), piece):
            client.sendall(data[start : start + piece])
            time.sleep(0.001)

    return serve


def test_an_answer_may_come_in_pieces(daemons: Callable[[Serve], None]) -> None:
    rows = [{"name": "gs1", "ofport": 3}, {"ofport": ["set", []], "name": "eno1"}]
    daemons(answer({"id": 0, "result": [{"rows": rows}], "error": None}, piece=7))
    assert _switch.rows(PORTS) == [[["gs1", 3], ["eno1", ["set", []]]]]
    daemons(answer({"id": 0, "result": "zone=1,limit=5\n", "error": None}, piece=7))
    assert _switch.appctl("dpctl/ct-get-limits") == "zone=1,limit=5\n"


@pytest.mark.parametrize(
    ("serve", "found"),
    [
        (answer({"id": 0, "result": None, "error": "no such zone"}), "no such zone"),
        (answer({"id": 0, "result": None, "error": {"error": "no database"}}), "no database"),
        (answer({"id": 0, "error": None}), "KeyError"),
        (answer([{}]), "no whole answer"),
        (lambda client: client.recv(1 << 16), "no whole answer"),
        (lambda client: (client.recv(1 << 16), time.sleep(1)), "timed out"),
        # It sends endlessly.
        (answer({"id": 0, "result": "x" * 9000}), "no whole answer in"),
    ],
)
def test_a_daemon_that_fails_or_hangs_is_named(
    daemons: Callable[[Serve], None], monkeypatch: pytest.MonkeyPatch, serve: Serve, found: str
) -> None:
    monkeypatch.setattr(_switch, "_LARGEST", 4096)
    monkeypatch.setattr(_switch, "_CHUNK", 1024)
    for ask in (lambda: _switch.rows(PORTS), lambda: _switch.appctl("version")):
        daemons(serve)
        with pytest.raises(Refusal) as refused:
            ask()
        # The boot of the network waits for both. After a timeout no other port is tried.
        hung = found == "timed out"
        assert refused.value.code == ("command_timeout" if hung else "command_failed")
        assert found in refused.value.found


def test_a_row_that_the_database_refuses_is_no_empty_table(
    daemons: Callable[[Serve], None],
) -> None:
    daemons(answer({"id": 0, "result": [{"error": "unknown column"}, None], "error": None}))
    with pytest.raises(Refusal, match="command_failed"):
        _switch.rows(PORTS)


class Forbidden(socket.socket):
    """A socket that a security module restricts."""

    def sendall(self, *_data: object) -> None:
        raise PermissionError(13, "Permission denied")


def test_where_the_socket_cannot_be_used_the_program_answers(
    daemons: Callable[[Serve], None], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.on("ovs-appctl", "--timeout=0.5", "version", out="3.1.0\n")
    assert _switch.appctl("version") == "3.1.0\n"
    limit = ("ovs-vsctl", "--timeout=0.5", "--format=json")
    script.on(*limit, "--columns=name,ofport", "list", "Interface", rc=1, err="no database")
    with pytest.raises(Refusal, match="no database"):
        _switch.rows(PORTS)
    serve = answer({"id": 0, "result": "from the socket", "error": None})
    daemons(serve)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Forbidden)
        assert _switch.appctl("version") == "3.1.0\n"
    daemons(serve)
    assert _switch.appctl("version") == "from the socket"
