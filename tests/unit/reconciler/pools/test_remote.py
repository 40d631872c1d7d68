"""Workers without the database: processes that reach a real service by its API only."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import reading, transaction
from reconciler.db.migrations import program_version
from reconciler.db.schema import PoolWorker, pool_workers
from reconciler.db.schema import jobs as table
from reconciler.pools import pools, remote
from reconciler.pools.api_queue import ApiQueue
from reconciler.pools.child import Runner
from reconciler.pools.queue import Away, Dismissed
from reconciler.pools.worker import Worker
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.pools.conftest import FUNCTIONS, Workers, pieces
from tests.unit.reconciler.pools.test_faults import expire
from tests.unit.reconciler.service.service import Service, pauses, serving, until

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-2")

POOL = pools.NewPool("r", ["m"], replicas=2, project_id="p1", target="remote")


def issue(workers: Workers, name: str = "r") -> None:
    """Give the machines of a pool a new token."""
    with transaction(workers.queue.engine) as conn:
        _, secret = remote.issue(conn, name, ADMIN, 3600)
    workers.log.with_name("token").write_text(secret)


@pytest.fixture
def service(workers: Workers, tmp_path: Path) -> Iterator[Service]:
    """A service with a remote pool. Workers that are started get its token and no database."""
    with serving(tmp_path, **workers.environment) as service:
        service.start()
        with transaction(workers.queue.engine) as conn:
            pools.start(conn, POOL, ADMIN, most=1)
        issue(workers)
        workers.environment["GPUAAS_DATABASE_URL"] = "sqlite:////nowhere/at-all.db"
        until(service.alive)
        yield service


def start(workers: Workers, service: Service, **options: str) -> int:
    words = ("--api", service.url, "--pool-token", str(workers.log.with_name("token")))
    return workers.start(*words, **options)


@pytest.mark.covers("I19")
@pytest.mark.parametrize(("jobs", "kills", "first"), pieces(5_000, 100, number=5))
def test_every_job_ends_once_although_workers_and_the_api_are_killed(
    workers: Workers, service: Service, jobs: int, kills: int, first: int
) -> None:
    workers.submit(jobs, seconds=0.01)
    others = workers.submit(1, "p2")
    running = [start(workers, service) for _ in range(2)]
    for number, pause in enumerate(pauses(kills, 0.1, 0.5, first=first), first):
        time.sleep(pause)
        if number % 2:
            service.kill()
            service.start()
        else:
            victim = running.pop(0)
            expire(workers, victim, partial(workers.kill, victim))
            silence(workers, victim)
            running.append(start(workers, service))
    until(lambda: workers.queue.open() == 1, 300 if jobs > 300 else 60)
    assert workers.queue.read(others[0], "p2").status == "pending", "of another project"
    with reading(workers.queue.engine) as conn:
        ended = conn.execute(sa.select(table).where(table.c.project_id == "p1")).all()
    assert Counter(job.status for job in ended) == {"done": jobs}
    assert {job.attempts for job in ended} == {1}, "each end counts once"
    assert all(job.result == {"twice": job.input["number"] * 2} for job in ended)
    ran = Counter(workers.ran())
    assert sorted(ran) == list(range(jobs))
    assert sum(ran.values()) - jobs <= sum(job.lost for job in ended), "no more than were lost"


def silence(workers: Workers, pid: int) -> None:
    """A worker's seat comes free as if 30 seconds had passed."""
    row = PoolWorker.TABLE
    with transaction(workers.queue.engine) as conn:
        conn.execute(sa.update(row).where(row.c.pid == pid).values(beat_at=1.0))


def test_a_pool_from_its_token_to_its_end(workers: Workers, service: Service) -> None:
    for _ in range(3):
        worker = start(workers, service)
        workers.wait(*workers.submit(1), "done")
        os.kill(worker, signal.SIGTERM)
        workers.ended(worker)  # It leaves its seat, of which there are two.
    worker = start(workers, service)
    workers.wait(*workers.submit(1), "done")
    with reading(workers.queue.engine) as conn:
        versions = sa.select(pool_workers.c.version).where(pool_workers.c.pool_id != "").distinct()
        assert conn.execute(versions).scalars().all() == [program_version()]
    issue(workers)
    workers.wait(*workers.submit(1), "done")  # It reads the token that has replaced its own.
    called = len(workers.ran())
    (id,) = workers.submit(1, seconds=1)
    until(lambda: len(workers.ran()) > called)
    with transaction(workers.queue.engine) as conn:
        pools.stop(conn, "r", ADMIN)
    workers.ended(worker)
    assert workers.wait(id, "done").attempts == 1, "what runs may end"
    until(lambda: states(workers) == {"stopped"})
    assert "ERROR" not in workers.log.read_text()
    workers.ended(start(workers, service))
    assert "unauthenticated" in workers.log.read_text()
    with transaction(workers.queue.engine) as conn:
        pools.start(conn, POOL, ADMIN, most=1)
    issue(workers)
    worker = start(workers, service)
    (id,) = workers.submit(1, seconds=600)
    until(lambda: workers.queue.read(id).status == "running")
    with transaction(workers.queue.engine) as conn:
        pools.evict(conn, "r", ADMIN)
    job = workers.wait(id, "pending")
    assert (job.attempts, job.lost, job.token) == (0, 1, "")
    until(lambda: states(workers) == {"stopped", "evicted"})
    os.kill(worker, signal.SIGKILL)  # It would wait for another token.


def states(workers: Workers) -> set[str]:
    with reading(workers.queue.engine) as conn:
        return {pool.state for pool in pools.every(conn)}


def test_a_worker_that_was_given_up_for_its_silence_registers_again(
    workers: Workers, service: Service
) -> None:
    """As after a pause of its machine, or a jump of the database's clock."""
    start(workers, service)
    workers.wait(*workers.submit(1), "done")
    give_up(workers)
    workers.wait(*workers.submit(1), "done")
    (held,) = workers.submit(1, seconds=600)
    until(lambda: len(workers.ran()) == 3)
    give_up(workers)
    call = {"file": str(workers.note), "number": 9}
    workers.queue.change(held, input=call)
    job = workers.wait(held, "done")
    assert (job.result, job.lost, job.attempts) == ({"twice": 18}, 1, 1)
    row = PoolWorker.TABLE
    with reading(workers.queue.engine) as conn:
        rows = conn.execute(sa.select(row.c.pid, row.c.ending).where(row.c.pool_id != "")).all()
    assert Counter(rows) == {(workers.pids[0], "silent"): 2, (workers.pids[0], ""): 1}


def give_up(workers: Workers) -> None:
    """The leader records the pool's worker as ended, as after ten minutes of silence."""
    row = PoolWorker.TABLE
    mine = sa.and_(row.c.pool_id != "", row.c.ended_at.is_(None))
    with transaction(workers.queue.engine) as conn:
        conn.execute(sa.update(row).where(mine).values(beat_at=1.0))
        remote.tend(conn)


def refusal(code: str) -> dict[str, str]:
    return {"code": code, "expected": "a", "found": "b", "remedy": "c"}


@contextmanager
def scripted(answers: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """The address of a service that answers with documents, or bytes as they are, by path, and the
    requests that it gets. A function of the request's credential may make an answer. An iterator
    gives a whole answer, headers included, in pieces.
    """
    requests: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            act = self.path.rpartition("/")[2]
            requests.append((act, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer = answers[act]
            if callable(answer):
                answer = answer(self.headers["Authorization"])
            if isinstance(answer, Iterator):
                with suppress(ConnectionError):
                    self.wfile.writelines(answer)
                return
            status, content = answer if isinstance(answer, tuple) else (200, answer)
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            raw = isinstance(content, bytes)
            self.wfile.write(content if raw else json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>login</html>",
        b"[]",
        b"[" * 100_000,
        b'{"a": "' + b"x" * (1 << 20) + b'"}',
        (302, {"worker_id": "w"}),
        (404, {"code": "NotFound", "message": "no such route"}),
        (503, {"code": "database_unavailable"}),
        {"worker_id": "w", "lease_s": [], "beat_s": 1},
    ],
)
def test_a_strange_answer_is_no_answer(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr("reconciler.pools.api_queue.ANSWER_BYTES", 1 << 19)
    with scripted({"register": answer}) as (url, _):
        queue = ApiQueue(url, lambda: "secret", ["m"], threading.Event())
        with pytest.raises(Away):
            queue.serve({})


@pytest.mark.parametrize(
    ("first", "piece"),
    [(b"HTTP/1.0 200 OK\r\n", b"A: b\r\n"), (b"HTTP/1.0 200 OK\r\n\r\n", b" ")],
    ids=["headers", "body"],
)
def test_a_slow_answer_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, first: bytes, piece: bytes
) -> None:
    monkeypatch.setattr("reconciler.pools.api_queue._TIMEOUT_S", 0.5)
    left = [piece] * 400

    def slow() -> Iterator[bytes]:
        yield first
        while left:
            time.sleep(0.05)
            yield left.pop()

    with scripted({"register": slow()}) as (url, _):
        queue = ApiQueue(url, lambda: "secret", ["m"], threading.Event())
        with pytest.raises(Away):
            queue.serve({})
        assert left


def test_a_job_is_given_up_when_its_lease_ends_without_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service answers a claim and then nothing; the call that hangs is ended."""
    note = tmp_path / "ran"
    job = {"id": "j", "token": "t", "model": "m", "timeout_s": 600}
    job["input"] = {"file": str(note), "number": 1, "seconds": 600}
    answers: dict[str, Any] = {
        "register": {"worker_id": "w", "lease_s": 600.0, "beat_s": 0.1},
        "due": {"due": True, "serving": True},
        "turn": {"jobs": [job], "counted": 0, "serving": True},
        "renew": {"held": ["j"], "serving": True},
        "leave": {},
    }
    # Ahead of the real time, so that no pause of the machine is as long as the lease.
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr("reconciler.pools.worker.time", clock)
    stopping = threading.Event()
    with scripted(answers) as (url, requests):
        queue = ApiQueue(url, lambda: "secret", ["m"], stopping)
        runner = Runner({"m": f"{FUNCTIONS}:double"}, 256)
        worker = Worker(queue, runner, stopping)

        def renewals() -> int:
            return [act for act, _ in requests].count("renew")

        def watch() -> None:
            try:
                until(note.exists)
                # Renewed for longer than the lease, it goes on.
                for _ in range(3):
                    ahead[0] += 400
                    until(lambda: worker._leased_until > clock.monotonic() + 300)
                assert len(runner) == 1
                for act in ("renew", "due", "turn"):
                    answers[act] = (503, {})
                refused = renewals() + 2
                until(lambda: renewals() > refused)
                assert len(runner) == 1, "not before the end of the lease"
                ahead[0] += 700
                until(lambda: not len(runner))
            finally:
                stopping.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        worker.run()
        watcher.join()
    assert not [body for act, body in requests if act == "turn" and body["ended"]]


def test_a_worker_that_is_always_unknown_does_not_register_without_a_pause() -> None:
    """Nor does it when it ends anyway."""
    answers: dict[str, Any] = {
        "register": {"worker_id": "w", "lease_s": 30.0, "beat_s": 10.0},
        **dict.fromkeys(("due", "turn", "renew", "leave"), (404, refusal("worker_not_found"))),
    }
    pauses: list[float | None] = []

    class Stopping(threading.Event):
        """Set by the fourth pause. None takes its time."""

        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            if len(pauses) == 4:
                self.set()
            return self.is_set()

    stopping = Stopping()
    with scripted(answers) as (url, requests):
        queue = ApiQueue(url, lambda: "secret", ["m"], stopping)
        ender = threading.Timer(60, stopping.set)
        ender.start()
        Worker(queue, Runner({"m": f"{FUNCTIONS}:double"}, 256), stopping).run()
        ender.cancel()
        before = len(requests)
        with pytest.raises(Dismissed):
            queue.leave()
    registered = [act for act, _ in requests].count("register")
    assert pauses == [1.0] * 4
    assert 2 < registered < 7
    # It first gives back jobs that its last claim may have brought, and this fails.
    assert [act for act, _ in requests[before:]] == ["turn"]


def test_a_worker_comes_back_once_there_is_a_seat_and_while_its_pool_serves() -> None:
    answers: dict[str, Any] = {
        "register": {"worker_id": "w", "lease_s": 30.0, "beat_s": 10.0},
        "renew": (404, refusal("worker_not_found")),
    }
    with scripted(answers) as (url, _):
        queue = ApiQueue(url, lambda: "secret", ["m"], threading.Event())
        queue.serve({})
        answers["register"] = (409, refusal("pool_full"))
        with pytest.raises(Away):
            queue.renew([])
        answers["register"] = (409, refusal("pool_ended"))
        with pytest.raises(Dismissed):
            queue.renew([])


def test_a_claim_without_an_answer_is_repeated_under_its_token() -> None:
    answers: dict[str, Any] = {
        "register": {"worker_id": "w", "lease_s": 30, "beat_s": 10},
        "turn": (503, {}),
    }
    with scripted(answers) as (url, requests):
        queue = ApiQueue(url, lambda: "secret", ["m"], threading.Event())
        queue.serve({})
        for _ in range(2):
            with pytest.raises(Away):
                queue.turn((), (), 1)
        answers["turn"] = {"jobs": [], "counted": 0, "serving": True}
        for _ in range(2):
            queue.turn((), (), 1)
    first, *repeated, fresh = [body["claim"]["token"] for act, body in requests if act == "turn"]
    assert repeated == [first, first] and fresh != first


def test_a_worker_that_ends_gives_a_claim_without_an_answer_back() -> None:
    job = {"id": "j", "token": "t", "model": "m", "timeout_s": 600, "input": {}}
    answers: dict[str, Any] = {
        "register": {"worker_id": "w", "lease_s": 30, "beat_s": 10},
        "turn": (503, {}),
        "leave": {},
    }
    with scripted(answers) as (url, requests):
        queue = ApiQueue(url, lambda: "secret", ["m"], threading.Event())
        queue.serve({})
        with pytest.raises(Away):
            queue.turn((), (), 1)
        answers["turn"] = {"jobs": [job], "counted": 0, "serving": True}
        queue.leave()
    lost, again, back, left = requests[1:]
    assert again[1]["claim"]["token"] == lost[1]["claim"]["token"]
    assert back[1]["returned"] == [{"id": "j", "token": "t"}] and "claim" not in back[1]
    assert left[0] == "leave"


REFUSED = (401, refusal("unauthenticated"))
REGISTERED = {"worker_id": "w", "lease_s": 30.0, "beat_s": 10.0}


def test_a_token_that_is_replaced_between_two_requests_dismisses_no_worker() -> None:
    """The heartbeat and a turn are refused at the same time. The first of them reads the file."""
    token = "old"

    def renew(given: str) -> Any:
        return {"held": [], "serving": True} if given == "Bearer new" else REFUSED

    def turn(given: str) -> Any:
        if given == "Bearer new":
            return {"jobs": [], "counted": 0, "serving": True}
        nonlocal token
        token = "new"
        assert queue.renew([]) == set()
        return REFUSED

    with scripted({"register": REGISTERED, "renew": renew, "turn": turn}) as (url, requests):
        queue = ApiQueue(url, lambda: token, ["m"], threading.Event())
        queue.serve({})
        assert queue.turn((), (), 1) == (0, [])
    assert [act for act, _ in requests] == ["register", "turn", "renew", "renew", "turn"]


def test_a_worker_waits_for_the_file_with_a_new_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator copies it to the machines after the old token has ended."""
    token = "old"

    def renew(given: str) -> Any:
        return {"held": [], "serving": True} if given == "Bearer new" else REFUSED

    answers: dict[str, Any] = {"register": REFUSED, "renew": renew}
    with scripted(answers) as (url, _):
        queue = ApiQueue(url, lambda: token, ["m"], threading.Event())
        with pytest.raises(Dismissed):
            queue.serve({})  # A token that never was valid.
        answers["register"] = REGISTERED
        queue.serve({})
        with pytest.raises(Away):
            queue.renew([])
        token = "new"
        assert queue.renew([]) == set()
        token = "another"
        queue._token = token
        monkeypatch.setattr("reconciler.pools.api_queue._PATIENCE_S", 0.0)
        with pytest.raises(Dismissed):
            queue.renew([])
