"""The same jobs on PostgreSQL, and workers that claim at the same time."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Job, jobs
from reconciler.model.errors import Problem
from reconciler.model.jobs import Outcome
from reconciler.pools import control, leases, pools, remote
from reconciler.pools import jobs as requests
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.pools import test_control, test_leases
from tests.unit.reconciler.pools.test_leases import FAILED, Queue
from tests.unit.reconciler.service.service import until

pytestmark = [pytest.mark.postgres, pytest.mark.covers("ORCH-2")]
engine = test_postgres.engine

STORIES: dict[str, Callable[[Queue], None]] = {
    name: story
    for name, story in {**vars(test_leases), **vars(test_control)}.items()
    if name.startswith("test_")
    and list(signature(story).parameters) == ["queue"]
    # Plans are read as SQLite shows them.
    and "reads_no_job" not in name
}


@pytest.mark.parametrize("story", STORIES)
def test_jobs_are_the_same(engine: sa.Engine, story: str) -> None:
    STORIES[story](Queue(engine))
    test_leases.check_counts(engine)


@pytest.mark.covers("ORCH-5")
def test_no_claim_slips_through_maintenance(engine: sa.Engine) -> None:
    """A change of the mode and a claim wait for each other, whichever comes first."""
    queue = Queue(engine)
    queue.add(3)
    with ThreadPoolExecutor(1) as pool:
        with transaction(engine) as conn:
            assert leases.claim(conn, queue.worker, limit=1)
            changed = pool.submit(test_control.drain, queue)
            until(lambda: waits_for_lock(engine))
            assert not changed.done()
        changed.result(timeout=60)
        with reading(engine) as conn:
            assert (control.read(conn).mode, control.running(conn)) == ("drain", 1)
        with transaction(engine) as conn:
            control.resume(conn, ADMIN)
        with transaction(engine) as conn:
            control.drain(conn, ADMIN, 60)
            claimed = pool.submit(queue.claim)
            until(lambda: waits_for_lock(engine))
        assert claimed.result(timeout=60) == []


def waits_for_lock(engine: sa.Engine) -> bool:
    with reading(engine) as conn:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return bool(conn.exec_driver_sql(waiting).scalar_one())


@pytest.mark.covers("ORCH-5")
def test_a_drain_is_not_starved_by_workers_that_claim_without_end(engine: sa.Engine) -> None:
    queue = Queue(engine)
    queue.add(2_000)
    ended = threading.Event()

    def take(_number: int) -> int:
        taken = 0
        while not ended.is_set():
            taken += len(queue.claim(1))
            # At this pace the jobs last until a slow machine drains the queue.
            ended.wait(0.05 if taken > 100 else 0)
        return taken

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(take, number) for number in range(4)]
        until(lambda: held(engine) > 50)
        test_control.drain(queue)
        at_the_change = held(engine)
        for _ in range(20):
            queue.claim(1)
        ended.set()
        assert sum(worker.result() for worker in workers) == at_the_change < 2_000


@pytest.mark.parametrize("act", ["finish", "fail", "give_back", "renew", "drain"])
def test_jobs_are_locked_in_the_order_of_their_ids(engine: sa.Engine, act: str) -> None:
    """A heartbeat and an end that lock the same jobs in another order wait for each other."""
    queue = Queue(engine)
    queue.add(2)
    low, high = sorted(queue.claim(2), key=lambda job: job.id)
    # In the table and in the index of leases, it lies behind the other now.
    queue.change(low.id, lease_expires_at=clock.now() + 60)
    acts: dict[str, Callable[[sa.Connection], object]] = {
        "finish": lambda conn: leases.finish(conn, [(job, Outcome({})) for job in (high, low)]),
        "fail": lambda conn: leases.finish(conn, [(high, Outcome({})), (low, FAILED)]),
        "give_back": lambda conn: leases.give_back(conn, [high, low]),
        "renew": lambda conn: leases.renew(conn, queue.worker, [low.token]),
        "drain": control.follow,
    }
    if act == "drain":
        test_control.drain(queue, 0)

    def lock(job: Job) -> sa.Select[tuple[str]]:
        return sa.select(jobs.c.id).where(jobs.c.id == job.id).with_for_update(skip_locked=True)

    with ThreadPoolExecutor(1) as pool:
        with transaction(engine) as conn:
            assert conn.execute(lock(low)).scalars().all() == [low.id]
            waiting = pool.submit(retrying, engine, acts[act])
            until(lambda: waits_for_lock(engine))
            assert conn.execute(lock(high)).scalars().all() == [high.id]
        waiting.result(timeout=30)


def test_sweeps_search_indexes_by_time(engine: sa.Engine) -> None:
    """Or each worker would read all delayed jobs once a second, and retention all jobs."""
    plans: list[str] = []

    def explain(conn: sa.Connection, _cursor: object, statement: str, values: Any, *_: Any) -> None:
        if "orchestrator_jobs" in statement and "EXPLAIN" not in statement:
            plan = conn.exec_driver_sql(f"EXPLAIN {statement}", values).scalars()
            plans.append("\n".join(plan))

    with transaction(engine) as conn:
        conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
        sa.event.listen(engine, "before_cursor_execute", explain)
        try:
            leases.any_to_tend(conn)
            leases.tend(conn)
            requests.forget(conn, age_s=60, limit=9)
        finally:
            sa.event.remove(engine, "before_cursor_execute", explain)
    due, shortened, ready, lost, forgotten = plans
    for plan, column in (
        *((due, name) for name in ("not_before <=", "lease_expires_at <", "lease_expires_at >")),
        *((shortened, "lease_expires_at >"), (ready, "not_before <=")),
        *((lost, "lease_expires_at <"), (forgotten, "updated_at <")),
    ):
        assert re.search(rf"Index Cond: .*\b{column}", plan), plan


@pytest.mark.covers("ORCH-5")
def test_a_turn_waits_for_a_drain_without_a_lock_that_it_needs(engine: sa.Engine) -> None:
    """Otherwise PostgreSQL would end the turn or the drain at the deadline of the drain."""
    queue = Queue(engine)
    wish = pools.NewPool("a", models=["m"], project_id="p1", target="remote")
    queue.add()
    with transaction(engine) as conn:
        pool = pools.start(conn, wish, ADMIN, most=1)
        worker = remote.register(conn, pool, host="x", pid=1, models=["m"])
        claim = remote.Claim(rows.new_id(), 1)
        (job,) = remote.turn(conn, pool, worker.id, claim=claim).jobs
    ends = partial(
        remote.turn,
        pool=pool,
        worker_id=worker.id,
        ended=[(job, Outcome({}))],
        claim=remote.Claim(rows.new_id(), 1),
    )
    with ThreadPoolExecutor(1) as threads:
        with transaction(engine) as conn:
            control.drain(conn, ADMIN, 0)
            waiting = threads.submit(retrying, engine, ends)
            until(lambda: waits_for_lock(engine))
            lock = sa.select(jobs.c.id).with_for_update(skip_locked=True)
            assert conn.execute(lock).scalars().all() == [job.id]
        assert waiting.result(timeout=30).counted == 1


@pytest.mark.parametrize(("act", "ends"), [("cancel", "canceled"), ("renew", "done")])
def test_an_outcome_waits_for_another_change_of_its_job(
    engine: sa.Engine, act: str, ends: str
) -> None:
    """It counts if the job is still held then."""
    queue = Queue(engine)
    (id,) = queue.add()
    (job,) = queue.claim()
    with ThreadPoolExecutor(1) as pool:
        with transaction(engine) as conn:
            if act == "cancel":
                requests.cancel(conn, "p1", id)
            else:
                assert leases.renew(conn, queue.worker, [job.token]) == {id}
            waiting = pool.submit(
                retrying, engine, lambda conn: leases.finish(conn, [(job, Outcome({"n": 1}))])
            )
            until(lambda: waits_for_lock(engine))
        counted = waiting.result(timeout=30)
    row = queue.read(id)
    assert (row.status, len(counted)) == (ends, int(ends == "done"))
    assert (row.attempts, row.token, row.lease_expires_at) == (len(counted), "", None)


def test_a_dead_letter_that_is_taken_back_is_not_forgotten(engine: sa.Engine) -> None:
    """The deletion of old jobs waits for the request, and sees the new state of the job."""
    queue = Queue(engine)
    (id,) = queue.bury(1)
    queue.change(id, updated_at=1.0)
    with ThreadPoolExecutor(1) as pool:
        with transaction(engine) as conn:
            assert requests.reprocess(conn, "p1", ADMIN, sample=None) == [id]
            forgotten = pool.submit(
                retrying, engine, lambda conn: requests.forget(conn, age_s=60, limit=10)
            )
            until(lambda: waits_for_lock(engine))
        assert forgotten.result(timeout=60) == 0
    assert queue.read(id).status == "pending"
    test_leases.check_counts(engine)


def held(engine: sa.Engine) -> int:
    with reading(engine) as conn:
        return control.running(conn)


def test_no_job_is_claimed_twice_at_the_same_time(engine: sa.Engine) -> None:
    queue = Queue(engine)
    ids = queue.add(200) + queue.add(200, "p2")

    def take(_number: int) -> list[str]:
        taken: list[str] = []
        while held := queue.claim(7):
            taken += [job.id for job in held]
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [id for part in pool.map(take, range(4)) for id in part]
    assert sorted(taken) == sorted(ids)


def test_limits_hold_for_requests_at_the_same_time(engine: sa.Engine) -> None:
    """While workers end the jobs of the same project."""
    queue = Queue(engine)
    test_leases.limit(queue, jobs_kept=60, jobs_per_hour=50)

    def send(_number: int) -> int:
        sent = 0
        while sent < 40:
            try:
                sent += len(queue.add(2))
            except Problem as problem:
                assert problem.code == "rate_exceeded"
                break
            queue.finish(queue.claim(1), Outcome({}))
        return sent

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(send, range(4))) == 50
    test_leases.check_counts(engine)
