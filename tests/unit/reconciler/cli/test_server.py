"""The processes of `gpuaas serve` and `gpuaas worker`: their parts start, and all of them end."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from reconciler import logs
from reconciler.db import leader
from reconciler.db.engine import reading
from reconciler.service import connections, process
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.cli.conftest import Gpuaas


@pytest.fixture
def story(new: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Events in order; the environment configures the service, as in real life."""
    events: list[str] = []

    class Worker:
        def __init__(self, settings: Any, _engine: Any) -> None:
            events.append(f"worker of {settings.state_dir.name}")

        def looking(self) -> bool:
            return True

        def start(self) -> None:
            events.append("start")

        def stop(self) -> None:
            events.append("stop")

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        assert not isinstance(server.config.http, str)
        assert server.config.http.__module__ == connections.__name__
        places = " ".join(item.getsockname()[0] for item in sockets)
        events.append(f"serve {places} {server.config.access_log}")
        events.append(f"ready {new.client().get('http://test/readyz').status_code}")
        # As uvicorn does at its end when a signal made it stop.
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(process, "Worker", Worker)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(logs, "configure", lambda _settings: None)
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    monkeypatch.setenv("GPUAAS_LISTEN", "127.0.0.1:0")
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield events
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_worker_and_api(new: Stack, gpuaas: Gpuaas, story: list[str]) -> None:
    gpuaas("serve")
    folder = new.settings.state_dir.name
    events = [f"worker of {folder}", "start", "serve 127.0.0.1 False", "ready 200", "stop"]
    assert (gpuaas.status, story) == (0, events)
    assert not {"worker", "heartbeat", "loops"} & {thread.name for thread in threading.enumerate()}


def test_the_log_says_where_it_listens_and_where_others_find_it(
    gpuaas: Gpuaas,
    story: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="gpuaas")
    gpuaas("serve", "--api-only")
    assert re.search(r"API on http://127\.0\.0\.1:[1-9][0-9]*$", caplog.text, re.M), story
    caplog.clear()
    monkeypatch.setenv("GPUAAS_PUBLIC_URL", "https://gpuaas.example")
    gpuaas("serve", "--api-only")
    both = r"API on http://127\.0\.0\.1:[1-9][0-9]*, for others at https://gpuaas\.example$"
    assert re.search(both, caplog.text, re.M)


def test_api_alone(gpuaas: Gpuaas, story: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpuaas("serve", "--api-only")
    assert story == ["serve 127.0.0.1 False", "ready 200"]
    monkeypatch.setenv("GPUAAS_LISTEN", "8099")
    gpuaas("serve", "--api-only")
    assert (gpuaas.status, "listen_invalid" in gpuaas.err) == (1, True)


@pytest.mark.parametrize("words", [("serve",), ("serve", "--api-only")])
def test_nothing_begins_where_the_port_is_taken(
    new: Stack,
    gpuaas: Gpuaas,
    story: list[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    """A second service would lead, and its worker take tasks, until it found that out."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("GPUAAS_LISTEN", f"127.0.0.1:{other.getsockname()[1]}")
        gpuaas(*words)
    assert (gpuaas.status, "listen_unavailable" in gpuaas.err, story) == (1, True, [])
    with reading(new.engine) as conn:
        assert leader.read(conn, leader.LOOPS) is None
        assert leader.live_roles(conn) == {}
    monkeypatch.setenv("GPUAAS_LISTEN", "no.such.name.invalid:80")
    gpuaas(*words)
    assert (gpuaas.status, "listen_unavailable" in gpuaas.err, story) == (1, True, [])


@pytest.mark.parametrize(
    ("places", "served"),
    [
        (["192.0.2.1", "127.0.0.1"], True),
        (["127.0.0.1", "192.0.2.1"], True),
        (["192.0.2.1"], False),
    ],
)
def test_of_a_name_those_addresses_are_served_that_this_machine_has(
    gpuaas: Gpuaas,
    story: list[str],
    monkeypatch: pytest.MonkeyPatch,
    places: list[str],
    served: bool,
) -> None:
    """Like `localhost` with ::1 where IPv6 is off; 192.0.2.1 is an address for examples."""

    def named(*_name: object, **_kinds: object) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0)) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", named)
    gpuaas("serve", "--api-only")
    if served:
        assert (gpuaas.status, story) == (0, ["serve 127.0.0.1 False", "ready 200"])
    else:
        assert (gpuaas.status, "listen_unavailable" in gpuaas.err, story) == (1, True, [])


@pytest.mark.covers("CTRL-10")
def test_operators_are_served_on_loopback_or_not_at_all(
    gpuaas: Gpuaas, story: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything else has begun; service/test_operators.py has the listener itself."""
    monkeypatch.setenv("GPUAAS_OPERATOR_LISTEN", "0.0.0.0:8008")
    gpuaas("serve")
    assert (gpuaas.status, "operator_listen_invalid" in gpuaas.err, story) == (1, True, [])


def test_worker_alone(new: Stack, gpuaas: Gpuaas, story: list[str], monkeypatch: Any) -> None:
    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:  # waits for the end of the process
                signal.raise_signal(signal.SIGTERM)
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Event", Event)
    gpuaas("worker")
    events = [f"worker of {new.settings.state_dir.name}", "start", "stop"]
    assert (gpuaas.status, story) == (0, events)
    monkeypatch.setenv("GPUAAS_WORKERS", "0")
    gpuaas("worker")
    assert (gpuaas.status, "workers_missing" in gpuaas.err) == (1, True)
