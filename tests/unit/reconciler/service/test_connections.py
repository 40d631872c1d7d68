"""Connections to a real uvicorn: limits on their waiting time and number."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.sync.client import connect

from reconciler.api.admission import BODY_LIMIT
from reconciler.service import connections
from tests.unit.reconciler.api.stack import listening
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("CTRL-1")

_WAIT_S = 0.4
# Limit for a peer that must not be cut: no pause of the machine is as long. Times above and below
# it pass on the service's clock at once.
_PATIENT_S, _LONG_S, _SHORT_S = 60.0, 100.0, 30.0
_READ = ("quick", "slow", "large", "stream")
_HEAD = b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n"
_POST = b"POST /body HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n"

Open = Callable[[], socket.socket]


class Service:
    """The application, and the connections that it has seen."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        # Connections that have ended, and how far its clock is ahead.
        self.lost = 0
        self.ahead_s = 0.0

    async def quick(self, _: Request) -> Response:
        return PlainTextResponse("quick")

    async def slow(self, _: Request) -> Response:
        self.ahead_s += _LONG_S
        await asyncio.sleep(3 * _WAIT_S)
        return PlainTextResponse("slow")

    async def large(self, _: Request) -> Response:
        return PlainTextResponse("x" * (32 * BODY_LIMIT))

    async def stream(self, _: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(512):
                yield b"x" * (BODY_LIMIT // 16)

        return StreamingResponse(parts())

    async def body(self, request: Request) -> Response:
        try:
            return PlainTextResponse(await request.body())
        except ClientDisconnect:
            self.gone.set()
            return Response(status_code=400)

    async def echo(self, peer: WebSocket) -> None:
        await peer.accept()
        await peer.send_text(await peer.receive_text())
        await peer.close()


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def most() -> int:
    return 0


@pytest.fixture
def address(
    service: Service, most: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connections, "REQUEST_S", _WAIT_S)
    routes = [Route(f"/{name}", getattr(service, name)) for name in _READ]
    routes += [Route("/body", service.body, methods=["POST"]), WebSocketRoute("/ws", service.echo)]
    app = Starlette(routes=[*routes])
    limited: Any = connections.limited(most)

    class Counted(limited):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            service.lost += 1

    real = asyncio.BaseEventLoop.time
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: real(loop) + service.ahead_s)
    # Only the limit under test ends a connection.
    with listening(app, http=Counted, timeout_keep_alive=3600) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


@pytest.fixture
def dial(address: tuple[str, int]) -> Iterator[Open]:
    opened: list[socket.socket] = []

    def open_one() -> socket.socket:
        opened.append(socket.create_connection(address, timeout=20))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def patient(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", _PATIENT_S)


@pytest.fixture
def passes(service: Service, dial: Open, patient: None) -> Callable[[float], None]:
    """Time passes for the service, which has seen so before this returns."""

    def passes(seconds: float) -> None:
        other = dial()
        # An answer is here a little before the service begins to wait for the next request.
        for further in (0.0, seconds):
            service.ahead_s += further
            for _ in range(2):
                ask(other, b"quick")
        other.close()

    return passes


def ended(connection: socket.socket) -> bool:
    """Whether the service ends it, read to its end."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def until_end(connection: socket.socket, name: bytes) -> None:
    """Reads to the end of the answer of the route `name`."""
    tail = b""
    while not tail.endswith(name):
        part = connection.recv(1 << 16)
        assert part, tail
        tail = (tail + part)[-100:]


def ask(connection: socket.socket, name: bytes) -> None:
    connection.sendall(_HEAD % name)
    until_end(connection, name)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", _POST, _POST + b"12345"])
def test_a_peer_that_stops_before_the_end_of_a_request_is_cut(
    service: Service, dial: Open, sent: bytes
) -> None:
    connection = dial()
    connection.sendall(sent)
    assert ended(connection)
    if sent.startswith(_POST):
        assert service.gone.wait(60)


def test_single_bytes_give_no_more_time(dial: Open) -> None:
    connection = dial()
    began = time.monotonic()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while time.monotonic() < began + 30 * _WAIT_S:
            connection.sendall(b"G")
            time.sleep(_WAIT_S / 10)


@pytest.mark.parametrize("answer", [b"large", b"stream"])
def test_a_peer_that_reads_no_answer_is_cut(service: Service, dial: Open, answer: bytes) -> None:
    connection = dial()
    connection.sendall(_HEAD % answer)
    until(lambda: service.lost)
    received = 0
    while part := connection.recv(1 << 20):
        received += len(part)
    assert received < 32 * BODY_LIMIT


def test_a_peer_that_reads_slowly_gets_its_answer(
    dial: Open, passes: Callable[[float], None]
) -> None:
    connection = dial()
    connection.sendall(_HEAD % b"stream")
    # The kernel's buffers are full long before the end.
    for _ in range(4):
        time.sleep(0.1)
        passes(_SHORT_S)
        for _ in range(64):
            assert connection.recv(1 << 16)
    until_end(connection, b"\r\n0\r\n\r\n")


def test_a_peer_that_asks_again_and_again_stays(
    dial: Open, passes: Callable[[float], None]
) -> None:
    connection = dial()
    for _ in range(6):
        ask(connection, b"quick")
        passes(_SHORT_S)
    ask(connection, b"quick")
    passes(_LONG_S)
    assert ended(connection)


def test_work_of_the_service_may_take_longer(dial: Open, patient: None) -> None:
    connection = dial()
    ask(connection, b"slow")
    # Two requests at once: the second begins with the answer of the first.
    connection.sendall(_HEAD % b"quick" + _HEAD % b"slow")
    until_end(connection, b"slow")


def test_a_terminal_may_be_quiet_for_longer(
    address: tuple[str, int], passes: Callable[[float], None]
) -> None:
    with connect(f"ws://{address[0]}:{address[1]}/ws", proxy=None) as terminal:
        passes(_LONG_S)
        terminal.send("still here")
        assert terminal.recv() == "still here"


@pytest.mark.parametrize("most", [3])
def test_of_connections_that_come_at_once_the_oldest_are_cut(
    service: Service, dial: Open, patient: None
) -> None:
    all_at_once = [dial() for _ in range(40)]
    last = dial()
    ask(last, b"quick")
    until(lambda: service.lost >= 41 - 3)
    for connection in all_at_once:
        connection.settimeout(0.2)
    assert sum(not ended(connection) for connection in all_at_once) < 3


@pytest.mark.parametrize("most", [3])
def test_with_too_many_connections_the_one_that_waits_longest_is_cut(
    dial: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 3600.0)
    busy, silent = dial(), dial()
    busy.sendall(_HEAD % b"slow")
    served = dial()
    ask(served, b"quick")
    late = dial()
    assert ended(silent)
    ask(late, b"quick")
    ask(served, b"quick")
    until_end(busy, b"slow")
