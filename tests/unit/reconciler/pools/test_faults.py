"""Killed workers, services, Redis and databases, a full disk, wrong clocks: every job ends once
(I19).
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db.engine import open_engine, reading, retrying
from reconciler.db.migrations import migrate
from reconciler.db.schema import PoolWorker
from reconciler.db.schema import jobs as table
from reconciler.model.jobs import LOST_LIMIT
from reconciler.model.states import Role
from reconciler.pools.hints import Hints
from reconciler.records import tokens
from tests import postgresql
from tests.redis_server import RedisServer
from tests.unit.reconciler.conftest import ADMIN, Database
from tests.unit.reconciler.pools.conftest import Workers, pieces
from tests.unit.reconciler.pools.test_leases import Queue
from tests.unit.reconciler.service.service import Service, alive, pauses, serving, until

# Jobs of a request in this test.
TOGETHER = 10
# Less than the database, and more than the notes of its calls.
NOTES = 1 << 16


@pytest.fixture(scope="module")
def own_server() -> Iterator[postgresql.Server]:
    """A PostgreSQL server that writes through to the disk and may be killed."""
    with postgresql.running(fsync=True) as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def engine(
    request: pytest.FixtureRequest, database: Database, template: Path
) -> Iterator[sa.Engine]:
    """An empty database of either kind."""
    if request.param == "sqlite":
        yield database.restore(template)
        return
    server: postgresql.Server = request.getfixturevalue("own_server")
    engine = open_engine(server.database("jobs"))
    migrate(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with closing(RedisServer(tmp_path)) as redis:
        yield redis


@pytest.fixture
def service(workers: Workers, redis: RedisServer, tmp_path: Path) -> Iterator[Service]:
    """A service of the site to which the workers belong, with a Redis."""
    workers.environment["GPUAAS_REDIS_URL"] = redis.url
    with serving(tmp_path, **workers.environment) as service:
        yield service


@pytest.mark.covers("I19", "ORCH-2")
@pytest.mark.parametrize(("jobs", "kills", "first"), pieces(10_000, 300, number=5))
def test_every_job_ends_once(
    workers: Workers,
    redis: RedisServer,
    service: Service,
    request: pytest.FixtureRequest,
    jobs: int,
    kills: int,
    first: int,
) -> None:
    """Half of the jobs come by requests, which are repeated until the service has answered. SQLite
    has no server that could be killed.
    """
    engine = workers.queue.engine
    server = engine.dialect.name == "postgresql" and request.getfixturevalue("own_server")
    redis.start()
    streams = Hints(redis.url)
    streams.announce(workers.submit(jobs // 2, "p2", seconds=0.01))
    running = [workers.start() for _ in range(3)]
    asleep = 0
    full: list[int] = []
    with ThreadPoolExecutor(1) as client:
        sent = client.submit(send, workers, service, jobs // 2, kills / 10)
        for number, pause in enumerate(pauses(kills, 0.05, 0.4, first=first), first):
            time.sleep(pause)
            if asleep:
                os.kill(asleep, signal.SIGCONT)
            limit_files(full, None)
            # A worker that begins without a database ends, and systemd starts it again.
            running = [pid if alive(pid) else workers.start() for pid in running]
            revive(service, kill=number % 4 == 0)
            # Every fifth worker is away for longer than its lease; the others are killed.
            victim, asleep, full = running.pop(0), 0, []
            if number % 5 == 4 and is_known(workers, victim):
                asleep = victim
                running.append(victim)
                expire(workers, victim, partial(os.kill, victim, signal.SIGSTOP))
            else:
                expire(workers, victim, partial(workers.kill, victim))
            disturb(redis, number)
            if server and number % 3 == 1:
                server.stop()
                engine.dispose()
                server.start()
            if number % 3 == 2:
                full = [running[0], *service.pids]
                limit_files(full, NOTES)
            if not asleep:
                # The clock of every second worker is wrong by an hour, before or behind.
                workers.environment["SKEW_S"] = ("0", "3600", "0", "-3600")[number % 4]
                running.append(workers.start())
        if asleep:
            os.kill(asleep, signal.SIGCONT)
        limit_files(full, None)
        until(lambda: revive(service) or sent.done())
        ids = sent.result()
    until(lambda: not workers.queue.open(), 300 if jobs > 300 else 60)
    with reading(engine) as conn:
        ended = conn.execute(sa.select(table)).all()
    assert {job.id for job in ended if job.project_id == "p1"} == ids
    assert Counter(job.status for job in ended) == {"done": jobs}
    assert {job.attempts for job in ended} == {1}, "each end counts once"
    assert all(job.result == {"twice": job.input["number"] * 2} for job in ended)
    ran = Counter(workers.ran())
    assert sorted(ran) == list(range(jobs // 2)) and min(ran.values()) >= 2, "in both projects"
    assert sum(ran.values()) - jobs <= sum(job.lost for job in ended), "no more than were lost"


def revive(service: Service, *, kill: bool = False) -> None:
    """Start a service that has ended, as systemd does it."""
    if kill or not (service.pids and all(map(alive, service.pids))):
        service.kill()
        service.start()


def disturb(redis: RedisServer, number: int) -> None:
    """Kill, start, flush and spare it, in turns."""
    if number % 4 == 1:
        redis.kill()
    elif number % 4 == 2:
        redis.start()
    elif number % 4 == 3:
        redis.client.flushall()


def send(workers: Workers, service: Service, count: int, seconds: float) -> set[str]:
    """Ids of so many jobs of p1 that a member sends in this time, or as long as it takes."""
    given = {"role": Role.PROJECT_MEMBER, "project_id": "p1", "name": "member"}

    def issue(conn: sa.Connection) -> str:
        return tokens.issue(conn, ADMIN, **given)[1]

    secret = retrying(workers.queue.engine, issue)
    inputs = [{"file": str(workers.note), "number": number} for number in range(count)]
    ids: set[str] = set()
    with httpx.Client(base_url=service.url, trust_env=False, timeout=30) as client:
        for begin in range(0, count, TOGETHER):
            time.sleep(seconds * TOGETHER / count)
            calls = inputs[begin : begin + TOGETHER]
            body = {"jobs": [{"model": "m", "input": {**call, "seconds": 0.01}} for call in calls]}
            headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": f"from-{begin}"}
            post = partial(client.post, "/api/v1/projects/p1/jobs/batch", json=body)
            ids |= set(until(partial(answered, partial(post, headers=headers))))
    assert len(ids) == count
    return ids


def answered(post: Callable[[], httpx.Response]) -> list[str]:
    """The ids in an answer; [] if the request has to be repeated."""
    try:
        response = post()
    except httpx.TransportError:
        return []
    if response.status_code == 201:
        ids: list[str] = response.json()["ids"]
        return ids
    code: Any = response.json()["code"]
    assert code in ("database_unavailable", "idempotency_in_flight"), response.text
    return []


@pytest.mark.covers("I19", "ORCH-2")
def test_a_job_that_kills_its_workers_is_buried_alone(workers: Workers) -> None:
    calls = [{"file": str(workers.note), "number": number, "how": "list"} for number in range(201)]
    calls[100]["how"] = "kill_worker"
    poison = workers.queue.submit(calls)[100]
    for _ in range(LOST_LIMIT):
        worker = workers.start(function="misbehave")
        workers.ended(worker)
        expire(workers, worker, lambda: None)
    workers.start(function="misbehave")
    until(lambda: not workers.queue.open())
    with reading(workers.queue.engine) as conn:
        ended = {job.id: job for job in conn.execute(sa.select(table))}
    assert ended.pop(poison).error["code"] == "worker_lost"
    assert {(job.attempts, job.error["code"]) for job in ended.values()} == {(1, "result_invalid")}
    assert max(job.lost for job in ended.values()) <= 1
    assert workers.ran().count(100) == LOST_LIMIT


def limit_files(pids: Iterable[int], size: int | None) -> None:
    """As a full disk, for these processes and those that they start: no file becomes larger, such
    as their log. None: as before.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if size is None else size, most))


def is_known(workers: Workers, pid: int) -> bool:
    """Whether the worker has reached the database."""
    with reading(workers.queue.engine) as conn:
        query = sa.select(PoolWorker.TABLE.c.id).where(PoolWorker.TABLE.c.pid == pid)
        return conn.execute(query).first() is not None


def expire(workers: Workers, pid: int, end: Callable[[], None]) -> None:
    """Kill or stop a worker whose leases run out at that moment.

    On SQLite it then holds no write lock. On PostgreSQL it may hold its rows' locks, until the
    server ends its session.
    """
    dead = sa.select(PoolWorker.TABLE.c.id).where(PoolWorker.TABLE.c.pid == pid)
    running = sa.update(table).where(table.c.worker.in_(dead), table.c.status == "running")

    def expire(conn: sa.Connection) -> None:
        end()
        conn.execute(running.values(lease_expires_at=1.0))

    retrying(workers.queue.engine, expire)


@pytest.mark.covers("I19", "ORCH-2")
def test_a_full_disk_delays_outcomes_and_repeats_no_call(
    database: Database, template: Path, tmp_path: Path
) -> None:
    with closing(Workers(Queue(database.restore(template)), tmp_path)) as workers:
        worker = workers.start()
        # The worker learns from them to hold several.
        workers.submit(20, seconds=0.01)
        # A job that comes back to the queue is overtaken by others: these must not wait for a file.
        until(lambda: not workers.queue.open())
        call = {"file": str(workers.note), "seconds": 0.01, "until": str(workers.go)}
        # No call takes too long because the machine stood still for a minute.
        workers.queue.submit([{**call, "number": number} for number in range(80)], timeout_s=3600)
        until(lambda: len(workers.ran()) > 20)
        limit_files([worker], 1)
        workers.go.touch()
        stuck = -1
        while stuck != (stuck := workers.queue.open()):
            time.sleep(0.5)
        assert stuck > 0
        limit_files([worker], None)
        until(lambda: not workers.queue.open())
        with reading(workers.queue.engine) as conn:
            ended = conn.execute(sa.select(table)).all()
        lines = workers.log.read_text().splitlines()
        shown = "\n".join(line for line in lines if "banner" not in line)[-3000:]
        assert {(job.status, job.attempts, job.lost) for job in ended} == {("done", 1, 0)}, shown
        assert sorted(workers.ran()) == sorted([*range(20), *range(80)])
