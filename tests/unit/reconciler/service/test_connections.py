"""Connections to a real uvicorn: how long one may wait, and how many there may be."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

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

pytestmark = pytest.mark.covers("CTRL-1")

_WAIT_S = 0.4
_READ = ("quick", "slow", "large", "stream")
_HEAD = b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n"
_POST = b"POST /body HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n"

Open = Callable[[], socket.socket]


class Service:
    """What the application has seen."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    async def quick(self, _: Request) -> Response:
        return PlainTextResponse("quick")

    async def slow(self, _: Request) -> Response:
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
    # Only the limit under test ends a connection.
    with listening(app, http=connections.limited(most), timeout_keep_alive=60) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


@pytest.fixture
def dial(address: tuple[str, int]) -> Iterator[Open]:
    opened: list[socket.socket] = []

    def open_one() -> socket.socket:
        opened.append(socket.create_connection(address, timeout=20))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def ended(one: socket.socket) -> bool:
    """Whether the service ends it, read to its end."""
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def until_end(one: socket.socket, name: bytes) -> None:
    """Reads to the end of the answer of the route `name`."""
    said = b""
    while not said.endswith(name):
        part = one.recv(1 << 16)
        assert part, said
        said += part


def ask(one: socket.socket, name: bytes) -> None:
    one.sendall(_HEAD % name)
    until_end(one, name)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", _POST, _POST + b"12345"])
def test_a_peer_that_stops_before_the_end_of_a_request_is_cut(
    service: Service, dial: Open, sent: bytes
) -> None:
    one = dial()
    one.sendall(sent)
    assert ended(one)
    if sent.startswith(_POST):
        assert service.gone.wait(5)


def test_single_bytes_give_no_more_time(dial: Open) -> None:
    one = dial()
    began = time.monotonic()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while time.monotonic() < began + 30 * _WAIT_S:
            one.sendall(b"G")
            time.sleep(_WAIT_S / 10)


@pytest.mark.parametrize("answer", [b"large", b"stream"])
def test_a_peer_that_reads_no_answer_is_cut(dial: Open, answer: bytes) -> None:
    one = dial()
    one.sendall(_HEAD % answer)
    time.sleep(4 * _WAIT_S)
    received = 0
    while part := one.recv(1 << 20):
        received += len(part)
    assert received < 32 * BODY_LIMIT


def test_a_peer_that_reads_slowly_gets_its_answer(dial: Open) -> None:
    one = dial()
    one.sendall(_HEAD % b"stream")
    # The kernel's buffers are full long before the end.
    for _ in range(4):
        time.sleep(_WAIT_S / 2)
        for _ in range(64):
            assert one.recv(1 << 16)
    assert ended(one)


def test_a_peer_that_asks_again_and_again_stays(dial: Open) -> None:
    one = dial()
    for _ in range(6):
        ask(one, b"quick")
        time.sleep(_WAIT_S / 2)
    assert ended(one)


def test_work_of_the_service_may_take_longer(dial: Open) -> None:
    one = dial()
    ask(one, b"slow")
    # Two requests at once: the second one begins with the answer of the first.
    one.sendall(_HEAD % b"quick" + _HEAD % b"slow")
    until_end(one, b"slow")


def test_a_terminal_may_be_quiet_for_longer(address: tuple[str, int]) -> None:
    with connect(f"ws://{address[0]}:{address[1]}/ws", proxy=None) as terminal:
        time.sleep(3 * _WAIT_S)
        terminal.send("still here")
        assert terminal.recv() == "still here"


@pytest.mark.parametrize("most", [3])
def test_of_connections_that_come_at_once_the_oldest_are_cut(
    dial: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 60)
    all_at_once = [dial() for _ in range(40)]
    last = dial()
    ask(last, b"quick")
    for one in all_at_once:
        one.settimeout(0.2)
    assert sum(not ended(one) for one in all_at_once) < 3


@pytest.mark.parametrize("most", [3])
def test_with_too_many_connections_the_one_that_waits_longest_is_cut(
    dial: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 60)
    busy, silent = dial(), dial()
    busy.sendall(_HEAD % b"slow")
    served = dial()
    ask(served, b"quick")
    late = dial()
    assert ended(silent)
    ask(late, b"quick")
    ask(served, b"quick")
    until_end(busy, b"slow")
