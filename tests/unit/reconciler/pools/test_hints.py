"""Redis streams as hints: they wake workers; whatever happens to them, no job is lost."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from reconciler.db.engine import transaction
from reconciler.model.jobs import LOST_LIMIT, Outcome
from reconciler.pools import hints, workers
from reconciler.pools.hints import DEAD, GROUP, STREAM, Hints
from reconciler.pools.queue import DatabaseQueue
from reconciler.settings import Settings
from reconciler.work import loops
from tests.redis_server import RedisServer
from tests.unit.reconciler.pools.conftest import Workers
from tests.unit.reconciler.pools.test_leases import ERROR, Queue
from tests.unit.reconciler.service.service import until
from tests.unit.reconciler.silent_names import NAME, silent_name

pytestmark = pytest.mark.covers("ORCH-2")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine keeps Redis from answering for longer than workers wait for it."""
    monkeypatch.setattr(hints, "_TIMEOUT_S", 20.0)
    monkeypatch.setattr(hints, "_LIMIT_S", 30.0)


@pytest.fixture(params=["redis-server", "valkey-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path, patient: None) -> Iterator[RedisServer]:
    """Redis, and Valkey where the distribution has it."""
    server = RedisServer(tmp_path, program=request.param)
    server.start()
    yield server
    server.close()
    hints.of.cache_clear()


@pytest.fixture
def streams(server: RedisServer) -> Hints:
    return Hints(server.url)


def quickest(act: Callable[[], object]) -> float:
    """Seconds of the quickest of three, because a busy machine stops for a moment."""

    def seconds() -> float:
        began = time.monotonic()
        act()
        return time.monotonic() - began

    return min(seconds() for _ in range(3))


def test_streams_have_the_names_that_other_programs_read() -> None:
    names = [STREAM, GROUP, DEAD]
    stream = "stream:orchestrator:inference_jobs"
    assert names == [stream, "cg:inference", f"{stream}:dlq"]


def test_a_hint_wakes_a_process_that_would_look_in_ten_minutes(
    workers: Workers, server: RedisServer
) -> None:
    workers.environment |= {"GPUAAS_REDIS_URL": server.url, "GPUAAS_POLL_S": "600"}
    workers.start()
    workers.served("m")
    for _ in range(2):
        (id,) = workers.submit(1)
        hints.Hints(server.url).announce([id])
        until(lambda id=id: workers.queue.read(id).status == "done")
        until(lambda: server.client.xlen(STREAM) == 0)


def test_a_hint_wakes_a_worker_and_leaves_nothing(server: RedisServer, streams: Hints) -> None:
    assert streams.wait(0.01)  # makes the group

    def woken() -> None:
        timer = threading.Timer(0.1, streams.announce, [["a", "b"]])
        timer.start()
        assert streams.wait(60)
        timer.join()  # On a busy machine it may come after the end of the wait.

    assert quickest(woken) < 9, "it was not the end of the wait that woke it"
    streams.announce(["c"])
    streams.wait(1)
    assert streams.lengths() == {STREAM: 0, DEAD: 0}
    assert server.client.xpending(STREAM, GROUP)["pending"] == 0


def test_hints_of_a_dead_worker_wake_another(
    server: RedisServer, streams: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.wait(0.01)
    streams.announce(["a"])
    server.client.xreadgroup(GROUP, "dead", {STREAM: ">"})
    monkeypatch.setattr(hints, "_IDLE_MS", 0)
    streams.wait(0.01)
    assert streams.lengths()[STREAM] == 0


def test_workers_that_come_and_go_leave_nothing_in_redis(
    queue: Queue, server: RedisServer, streams: Hints
) -> None:
    for _ in range(3):
        database = DatabaseQueue(queue.engine, ["m"], hints=streams, poll_s=0.01)
        database.serve({})
        streams.announce(["a"])
        database.wait(threading.Event())
        database.leave()
    (group,) = server.client.xinfo_groups(STREAM)
    assert group["consumers"] == 1


@pytest.mark.covers("I19")
def test_a_flushed_redis_is_used_again_at_once(server: RedisServer, streams: Hints) -> None:
    streams.wait(0.01)
    server.client.flushall()
    assert streams.wait(0.01)
    streams.announce(["a"])
    assert streams.wait(60)
    assert streams.lengths()[STREAM] == 0


@pytest.mark.covers("I19")
def test_a_redis_that_is_away_or_hangs_delays_nobody(
    server: RedisServer, streams: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.kill()
    began = time.monotonic()
    streams.announce(["a"])
    streams.bury({"a": "timed_out"})
    assert not streams.wait(60)
    assert streams.lengths() == {}
    assert time.monotonic() - began < 10
    server.start()
    monkeypatch.setattr(streams, "_away_until", 0.0)
    streams.bury({"a": "timed_out"})
    assert letters(server) == [{"job": "a", "code": "timed_out"}]


@pytest.mark.covers("I19")
def test_a_silent_redis_holds_a_single_request(patient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        streams = Hints(f"redis://127.0.0.1:{server.getsockname()[1]}")
        calls = [lambda: streams.announce(["a"])] * 20
        calls += [lambda: streams.bury({"a": "timed_out"}), lambda: streams.lengths() and None]
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        threads[0].start()
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1), "it waits for an answer"
            for thread in threads[1:]:
                thread.start()
            for thread in threads[1:]:
                thread.join(60)
            assert [thread.is_alive() for thread in threads] == [True] + [False] * 21
        threads[0].join(60)
        assert not threads[0].is_alive()


@pytest.mark.covers("I19")
def test_a_name_of_redis_that_hangs_holds_nobody() -> None:
    streams = Hints(f"redis://{NAME}:1")
    with silent_name() as lookups:
        streams.announce(["a"])
        assert streams.check() == f"TimeoutError: no answer to the lookup of {NAME}"
        assert (lookups.begun, lookups.ended) == (1, False)


def letters(server: RedisServer) -> list[dict[str, str]]:
    return [fields for _, fields in server.client.xrange(DEAD)]


def test_dead_letters_of_workers_with_the_database_are_named(
    queue: Queue, server: RedisServer, tmp_path: Path
) -> None:
    """Of an outcome, a lease that expires, the end of a pool's worker, and the leader."""
    failed, expired, ended, swept = queue.add(4)
    settings = Settings(state_dir=tmp_path, redis_url=server.url)
    streams = hints.of(server.url)
    database = DatabaseQueue(queue.engine, ["m"], hints=streams)
    database.serve({})
    (call,) = database.turn((), (), 1).calls
    database.turn([(call, Outcome(error=ERROR, permanent=True))], (), 0)
    assert letters(server) == [{"job": failed, "code": "function_failed"}]
    queue.change(expired, ended, swept, lost=LOST_LIMIT - 1)
    queue.claim()
    queue.change(expired, lease_expires_at=1.0)
    database.tend()
    queue.claim()
    with transaction(queue.engine) as conn:
        workers.end(conn, queue.worker, "its host is lost")
    loops.tend_leases(queue.engine, settings)
    queue.claim()
    queue.change(swept, lease_expires_at=1.0)
    loops.tend_leases(queue.engine, settings)
    lost = [{"job": id, "code": "worker_lost"} for id in (expired, ended, swept)]
    assert letters(server)[1:] == lost


def test_a_hint_that_another_worker_takes_delays_a_job_by_a_poll_at_most(
    queue: Queue, server: RedisServer
) -> None:
    database = DatabaseQueue(queue.engine, ["m"], hints=hints.of(server.url), poll_s=0.1)
    database.serve({})
    streams = Hints(server.url)
    streams.wait(0.01)
    streams.announce(queue.add(1))
    streams.wait(1)
    waited = quickest(lambda: database.wait(threading.Event()))
    assert waited < 5, "not for the ten seconds that Redis may be asked here"
    assert not database.is_idle()


def test_hints_that_bring_no_job_let_no_worker_spin(
    queue: Queue, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Redis has half of that time for its answer.
    database = DatabaseQueue(queue.engine, ["m"], hints=hints.of(server.url), poll_s=60)
    database.serve({})
    stopping, streams = threading.Event(), Hints(server.url)

    def wait() -> None:
        streams.announce(["of another model"])
        database.wait(stopping)
        assert not database.turn((), (), 1).calls
        assert database.is_idle()

    began = time.monotonic()
    for _ in range(32):
        wait()
    assert time.monotonic() - began > 1, "every second one is a pause, soon of a tenth of a second"
    # Leftover hints do not keep workers from hearing of new hints.
    streams.announce(map(str, range(3 * hints.STALE)))
    waits = 0
    while streams.lengths()[STREAM] >= hints.STALE:
        wait()
        waits += 1
        assert waits < 40, "old hints are read a few at a time"
    # After a hint that has brought a job, the next one wakes the worker at once.
    server.client.delete(STREAM)
    database.wait(stopping)

    def woken() -> None:
        streams.announce(queue.add(1))
        database.wait(stopping)
        assert database.turn((), (), 1).calls

    woken()
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "wait", lambda _: pytest.fail("it pauses"))
        woken()


@pytest.mark.parametrize("hinted", [True, False])
def test_a_worker_that_has_jobs_asks_again_soon(
    queue: Queue, server: RedisServer, monkeypatch: pytest.MonkeyPatch, hinted: bool
) -> None:
    """Also when the hint that wakes it is of a job that it has had already."""
    streams = Hints(server.url) if hinted else None
    database = DatabaseQueue(queue.engine, ["m"], hints=streams, poll_s=60)
    database.serve({})
    stopping, pauses = threading.Event(), list[float]()
    monkeypatch.setattr(stopping, "wait", pauses.append)

    def wait() -> None:
        if streams:
            streams.announce(["of a job that it has had"])
        database.wait(stopping)

    while sum(pauses) < 1:
        wait()
    jobs = queue.add(1)
    assert [call.id for call in database.turn((), (), 1).calls] == jobs
    pauses.clear()
    while not pauses:
        wait()
    assert pauses[0] < 0.1


def test_hints_of_jobs_that_it_has_had_are_dropped_without_a_pause(
    queue: Queue, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, stopping = Hints(server.url), threading.Event()
    database = DatabaseQueue(queue.engine, ["m"], hints=streams, poll_s=60)
    database.serve({})
    database.wait(stopping)
    streams.announce(queue.add(hints.STALE))
    assert database.turn((), (), hints.STALE).calls
    monkeypatch.setattr(stopping, "wait", lambda _: pytest.fail("it pauses"))
    # With two waits, or more of a Redis that is slow to answer.
    while streams.lengths()[STREAM]:
        database.wait(stopping)


def test_an_idle_worker_without_hints_asks_ten_times_a_second(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = DatabaseQueue(queue.engine, ["m"], poll_s=0.5)
    stopping, pauses = threading.Event(), list[float]()
    monkeypatch.setattr(stopping, "wait", pauses.append)
    for _ in range(20):
        database.wait(stopping)
    assert max(pauses) == 0.1


@contextmanager
def impostor(path: Path, act: Callable[[socket.socket], object]) -> Iterator[Hints]:
    """The hints of a server that answers each request in another way than Redis."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while self.request.recv(1 << 16):
                    act(self.request)

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Hints(f"unix://{path}")
        server.shutdown()


def drip(connection: socket.socket) -> None:
    connection.sendall(b"$1000\r\n")
    for _ in range(200):
        connection.sendall(b"x")
        time.sleep(0.1)


@pytest.mark.covers("I19")
@pytest.mark.parametrize(
    "act",
    [
        lambda _connection: time.sleep(20),
        drip,
        lambda connection: connection.sendall(b"*1\r\n:7\r\n"),
        lambda connection: connection.sendall(b"-NOGROUP of this name\r\n"),
        lambda connection: connection.sendall(b"+\xff\xfe\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda connection: connection.close(),
    ],
    ids=["hangs", "drips", "number", "no-group", "bytes", "http", "closes"],
)
def test_a_redis_that_hangs_or_answers_nonsense_costs_a_moment(
    act: Callable[[socket.socket], object], tmp_path: Path
) -> None:
    with impostor(tmp_path / "redis.sock", act) as streams:
        for use in (
            lambda: streams.announce(["a"]),
            lambda: streams.bury({"a": "timed_out"}),
            lambda: streams.wait(60),
            streams.lengths,
        ):
            began, streams._away_until = time.monotonic(), 0.0
            assert not use()
            assert time.monotonic() - began < 15


def test_a_redis_that_does_not_wait_lets_no_worker_spin(
    server: RedisServer, streams: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert streams.wait(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(streams._redis, "xreadgroup", lambda *_, **__: [])
        assert not streams.wait(60)
    # An entry that no program of ours wrote.
    server.client.xadd(STREAM, {b"\xff": b"\xfe"})
    assert streams.wait(60)
    assert streams.lengths()[STREAM] == 0


@pytest.mark.usefixtures("patient")
def test_a_redis_without_xautoclaim_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = RedisServer(tmp_path, "--rename-command", "XAUTOCLAIM", "")
    old.start()
    streams = Hints(old.url)
    with caplog.at_level(logging.WARNING, "gpuaas.jobs"):
        for name in ("a", "b"):
            assert streams.wait(0.01)
            streams.announce([name])
    assert streams.wait(60)
    assert caplog.text.count("XAUTOCLAIM not available") == 1
    old.close()


@pytest.mark.covers("CTRL-12")
def test_the_runbook_s_pause_of_the_group_pauses_nothing(
    server: RedisServer, streams: Hints
) -> None:
    """`XGROUP SETID … 0` gives old hints again, and `SETID … >` is an error."""
    streams.wait(0.01)
    streams.announce(["a"])
    entries = server.client.xreadgroup(GROUP, "reader", {STREAM: ">"})
    server.client.xack(STREAM, GROUP, entries[0][1][0][0])
    server.client.xgroup_setid(STREAM, GROUP, "0")
    again = server.client.xreadgroup(GROUP, "reader", {STREAM: ">"})
    assert [fields for _, fields in again[0][1]] == [{"job": "a"}], "it was acknowledged"
    with pytest.raises(redis.ResponseError, match="Invalid stream ID"):
        server.client.xgroup_setid(STREAM, GROUP, ">")
