"""Maintenance: nothing is admitted or claimed, and running jobs end within their bound."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import PoolWorker
from reconciler.model.errors import Problem
from reconciler.model.jobs import Outcome
from reconciler.pools import control, leases
from reconciler.pools.queue import Away, DatabaseQueue
from reconciler.settings import Settings
from reconciler.work.loops import follow_drain, tend_leases
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.pools.test_leases import FAILED, Queue, clock_ahead

pytestmark = pytest.mark.covers("ORCH-5")


@pytest.fixture
def queue(engine: sa.Engine) -> Queue:
    return Queue(engine)


def drain(queue: Queue, deadline_s: float = 600) -> None:
    with transaction(queue.engine) as conn:
        control.drain(conn, ADMIN, deadline_s)


def follow(queue: Queue) -> str:
    """The mode after another step of the leader."""
    for step in (tend_leases, follow_drain):
        step(queue.engine, Settings())
    with reading(queue.engine) as conn:
        return control.read(conn).mode


def counts(queue: Queue) -> dict[str, int]:
    with reading(queue.engine) as conn:
        return control.counters(conn)


def test_nothing_is_admitted_or_claimed_until_it_ends(queue: Queue) -> None:
    queue.bury(1)
    queue.add(2)
    drain(queue)
    assert queue.claim(5) == []
    for request in (queue.add, lambda: queue.reprocess(None)):
        with pytest.raises(Problem, match="maintenance") as refused:
            request()
        assert refused.value.detail == {"retry_after_s": 30}
    assert follow(queue) == "drained", "nothing ran"
    assert queue.claim(5) == []
    with transaction(queue.engine) as conn:
        control.resume(conn, ADMIN)
    assert follow(queue) == "normal"
    assert len(queue.claim(5)) == 2


def test_what_runs_ends_by_itself_before_the_deadline(queue: Queue) -> None:
    done, again = queue.add(2)
    held = {job.id: job for job in queue.claim(2)}
    drain(queue)
    assert follow(queue) == "drain"
    queue.finish([held[done]], Outcome({"n": 1}))
    assert follow(queue) == "drain"
    queue.finish([held[again]], FAILED)
    assert follow(queue) == "drained"
    assert (queue.read(done).status, queue.read(again).status) == ("done", "pending")


def test_what_runs_at_the_deadline_is_canceled_with_a_reason(queue: Queue) -> None:
    (id,) = queue.add()
    held = queue.claim()
    drain(queue)
    drain(queue, 0)  # An operator does not want to wait any longer.
    assert follow(queue) == "drain"
    job = queue.read(id)
    assert (job.status, job.error["code"]) == ("canceled", "maintenance")
    assert follow(queue) == "drain", "its worker does not know it yet"
    with transaction(queue.engine) as conn:
        assert leases.renew(conn, queue.worker, [held[0].token]) == set()
    assert follow(queue) == "drained"
    assert queue.finish(held, Outcome({"late": 1})) == {}


def test_a_dead_worker_does_not_delay_the_end(queue: Queue) -> None:
    canceled, lost = queue.add(2)
    queue.claim(2)
    queue.change(lost, lease_expires_at=1.0)
    drain(queue, 0)
    follow(queue)
    assert (queue.read(canceled).status, queue.read(lost).status) == ("canceled", "pending")
    with transaction(queue.engine) as conn:
        silent = sa.update(PoolWorker.TABLE).values(beat_at=clock.now() - 60)
        conn.execute(silent)
    assert follow(queue) == "drained"


def test_a_clock_set_back_delays_no_drain(queue: Queue) -> None:
    queue.add()
    queue.claim()
    drain(queue, 0)
    follow(queue)
    with clock_ahead(queue.engine, -3600):
        assert follow(queue) == "drain"
        with transaction(queue.engine) as conn:
            leases.renew(conn, queue.worker, [])
        assert follow(queue) == "drained"


def test_a_clock_set_back_does_not_move_the_deadline_of_a_drain(queue: Queue) -> None:
    (id,) = queue.add()
    queue.claim()
    drain(queue, 5)
    with clock_ahead(queue.engine, -3600):
        assert follow(queue) == "drain"
        assert queue.read(id).status == "running"
    with clock_ahead(queue.engine, -3590):
        follow(queue)
        assert queue.read(id).status == "canceled"


def test_retries_and_reclaimed_jobs_are_counted(queue: Queue) -> None:
    ids = queue.add(3)
    queue.finish(queue.claim(2), FAILED)
    queue.claim()
    queue.change(*ids, lease_expires_at=1.0)
    queue.tend()
    queue.tend()
    assert counts(queue) == {
        "job_retries": 2,
        "reclaimed": 1,
        "reclaimer_errors": 0,
        "worker_pool_evictions": 0,
    }


def test_failures_to_reclaim_are_counted_once_the_database_answers(engine: sa.Engine) -> None:
    queue = Queue(engine)
    worker = DatabaseQueue(engine, [])
    for name, other in (("orchestrator_jobs", "away"), ("away", "orchestrator_jobs")):
        with transaction(engine) as conn:
            conn.exec_driver_sql(f"ALTER TABLE {name} RENAME TO {other}")
        with pytest.raises(Away) if other == "away" else nullcontext():
            worker.tend()
    worker.tend()
    assert counts(queue)["reclaimer_errors"] == 1
