"""Services that answer nothing, too much or too slowly, or send our token elsewhere."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from reconciler.inventory import maas, netbox
from reconciler.runs.awx import client as awx
from reconciler.runs.spec import LauncherAway, RunError
from reconciler.work import ufm
from tests.unit.reconciler.service.service import until
from tests.unit.reconciler.silent_names import NAME, silent_name

pytestmark = pytest.mark.covers("ECO-2", "ECO-3", "ECO-4", "CTRL-14")

DEADLINE_S = 60.0
# Canary: no refusal may contain it.
TOKEN = "consumer91:c4e7:canary-do-not-print"
Speaker = Callable[[socket.socket], object]


@contextmanager
def listening(speak: Speaker) -> Iterator[tuple[int, list[bytes]]]:
    """A port, and the first bytes sent to it. speak: the answer to each connection."""
    requests: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        # The client hangs up on an answer that it refuses.
        with connection, ExitStack() as quietly:
            quietly.push(lambda kind, *_: kind is not None and issubclass(kind, OSError))
            requests.append(connection.recv(65536))
            speak(connection)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1], requests
        finally:
            server.shutdown(socket.SHUT_RDWR)


def netbox_asks(url: str, token: Path) -> None:
    with netbox.Client(netbox.NetboxAccess(url, token)) as client:
        list(client.every(netbox.Device))


def maas_asks(url: str, token: Path) -> None:
    with maas.Client(maas.MaasAccess(url, token)) as client:
        client.machines("tag")


def ufm_asks(url: str, token: Path) -> None:
    with ufm.Client(ufm.UfmAccess(url, token)) as client:
        client.partitions()


def awx_asks(url: str, token: Path) -> None:
    with awx.Client(awx.AwxAccess(url, token)) as client:
        list(client.every("/job_templates/"))


CLIENTS = [netbox_asks, maas_asks, ufm_asks, awx_asks]
KINDS = (netbox.Client, maas.Client, ufm.Client, awx.Client)


@pytest.fixture(params=CLIENTS, ids=lambda ask: ask.__name__)
def ask(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """A request to a service."""
    for kind in KINDS:
        monkeypatch.setattr(kind, "DEADLINE_S", DEADLINE_S)
        monkeypatch.setattr(kind, "LARGEST", 1_000_000)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    return lambda url: request.param(url, token)


def slowly(content: bytes, pause_s: float = 0.05) -> Speaker:
    def speak(connection: socket.socket) -> None:
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(pause_s)

    return speak


def endlessly(head: bytes, part: bytes, pause_s: float = 0.0) -> Speaker:
    def speak(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(part)
            time.sleep(pause_s)

    return speak


def once(content: bytes) -> Speaker:
    return lambda connection: connection.sendall(content)


OK = b"HTTP/1.1 200 OK\r\nAPI-Version: 4.6\r\nContent-Type: application/json\r\n"
BOMB = gzip.compress(b" " * 50_000_000)
SILENCES: dict[str, Speaker] = {
    "no byte": lambda connection: connection.recv(1),
    "hangs up": lambda _: None,
    "headers byte by byte": slowly(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 1000),
    "headers without end": endlessly(OK, b"X-A: b\r\n" * 100),
    "only informational answers": endlessly(b"", b"HTTP/1.1 102 Processing\r\n\r\n", 0.02),
    "body byte by byte": slowly(OK + b"Content-Length: 9999\r\n\r\n" + b" " * 9999, 0.02),
    "body without end": endlessly(OK + b"\r\n", b" " * 100_000),
    "chunks without end": endlessly(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    ),
    "a body that inflates": once(
        OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB
    ),
    "a body cut short": once(OK + b"Content-Length: 500\r\n\r\n{"),
    "no gzip": once(OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
    "another protocol": once(b"SSH-2.0-OpenSSH_9.2p1\r\n"),
    "a page": once(OK + b"Content-Length: 14\r\n\r\n<html>Sign in "),
    "too deep": once(OK + b"\r\n" + b"[" * 200_000),
    "a long number": once(OK + b"\r\n" + b"9" * 200_000),
    "gateway timeout": once(b"HTTP/1.1 504 Gateway Time-out\r\nContent-Length: 0\r\n\r\n"),
    "later": once(b"HTTP/1.1 429 Later\r\nRetry-After: 99999\r\nContent-Length: 0\r\n\r\n"),
    "a number": once(OK + b"Content-Length: 1\r\n\r\n7"),
}


# Only the deadline ends them.
SLOW = ("no byte", "headers byte by byte", "only informational answers", "body byte by byte")


@pytest.mark.parametrize("silence", SILENCES)
def test_a_service_without_a_reliable_answer_is_silent_in_time(
    ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    for kind in KINDS if silence in SLOW else ():
        monkeypatch.setattr(kind, "DEADLINE_S", 1.0)
    began = time.monotonic()
    with listening(SILENCES[silence]) as (port, requests), pytest.raises(LauncherAway) as away:
        ask(f"http://127.0.0.1:{port}")
    # Each answer would last for minutes; the machine that plays this may be slow.
    assert time.monotonic() - began < DEADLINE_S / 2
    until(lambda: requests)
    assert len(requests) == 1, "nothing is asked again"
    parts: dict[str, Any] = away.value.to_dict()
    assert parts["code"].endswith(("_silent", "netbox_too_large")) and all(parts.values())
    assert "canary" not in str(parts)


def test_a_name_with_many_silent_addresses_is_silent_in_time(
    ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        monkeypatch.setattr(kind, "DEADLINE_S", 1.0)
    resolve, name = socket.getaddrinfo, "netbox.example"

    def many(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        rows = resolve("127.0.0.1" if host == name else host, port, *rest, **more)
        return rows * 100 if host == name else rows

    monkeypatch.setattr(socket, "getaddrinfo", many)
    began = time.monotonic()
    with socket.socket() as server, ExitStack() as clients:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        # A full queue: Linux answers no more connections.
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        with pytest.raises(LauncherAway, match="Timeout"):
            ask(f"http://{name}:{server.getsockname()[1]}")
    # Each address alone would have the second.
    assert time.monotonic() - began < DEADLINE_S / 2


def test_an_answer_that_inflates_takes_no_memory(ask: Callable[[str], None]) -> None:
    """A limit on the size would be looked at too late: each encoding makes a thousand of a byte."""
    twice = gzip.compress(BOMB)
    head = b"Content-Encoding: gzip, gzip\r\nContent-Length: %d\r\n\r\n" % len(twice)
    tracemalloc.start()
    try:
        away = pytest.raises(LauncherAway, match="gzip, gzip")
        with listening(once(OK + head + twice)) as (port, requests), away:
            ask(f"http://127.0.0.1:{port}")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert b"\r\naccept-encoding: identity\r\n" in requests[0].lower()


def test_a_token_that_an_answer_repeats_is_in_no_refusal(ask: Callable[[str], None]) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n"

    def echo(connection: socket.socket) -> None:
        connection.sendall(head + b" ".join(requests[0].split(b"\r\n")[::-1]))

    with listening(echo) as (port, requests), pytest.raises(RunError) as refusal:
        ask(f"http://127.0.0.1:{port}")
    assert refusal.value.code.endswith("_refused")
    assert "canary" not in str(refusal.value.to_dict())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_the_token_nowhere(ask: Callable[[str], None], status: int) -> None:
    with listening(once(OK + b"Content-Length: 2\r\n\r\n{}")) as (elsewhere, stolen):
        location = f"Location: http://127.0.0.1:{elsewhere}/\r\nContent-Length: 0\r\n\r\n"
        answer = f"HTTP/1.1 {status} Elsewhere\r\n{location}".encode()
        with listening(once(answer)) as (port, _), pytest.raises(RunError) as refusal:
            ask(f"http://127.0.0.1:{port}")
    assert not stolen
    assert refusal.value.code.endswith("_redirected")
    assert f"HTTP {status}, a redirect to http://127.0.0.1:{elsewhere}/" in refusal.value.found
    assert "_URL" in refusal.value.remedy


@pytest.mark.parametrize("place", ["mailto:a@b", "http://a:b/", f"/{TOKEN}"])
def test_a_redirect_to_no_address_is_refused_by_name(
    ask: Callable[[str], None], place: str
) -> None:
    answer = f"HTTP/1.1 302 Elsewhere\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()
    with listening(once(answer)) as (port, _), pytest.raises(RunError) as refusal:
        ask(f"http://127.0.0.1:{port}")
    assert refusal.value.code.endswith(("_silent", "_redirected"))
    assert "canary" not in str(refusal.value.to_dict())


def test_a_name_server_that_hangs_is_a_silent_service(
    ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup ends at the deadline of the request, and nothing was sent."""
    for kind in KINDS:
        monkeypatch.setattr(kind, "REQUEST_S", 0.2)
    with silent_name() as lookups:
        for _ in range(2):
            with pytest.raises(LauncherAway, match=r"_silent.*the lookup of silent\.example"):
                ask(f"https://{NAME}")
        assert (lookups.begun, lookups.ended) == (1, False)
