"""Jobs in the database: claimed fairly, finished by their holder only, retried, buried."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, leader, rows
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Job, PoolWorker, audit_log, pool_workers
from reconciler.db.schema import jobs as table
from reconciler.lifecycle import quota
from reconciler.model.errors import Problem
from reconciler.model.jobs import LOST_LIMIT, JobStatus, Outcome
from reconciler.pools import control, counts, jobs, leases, pools, remote, workers
from reconciler.pools.queue import Away, DatabaseQueue
from reconciler.records import projects
from reconciler.settings import Settings
from reconciler.work import loops
from tests.unit.reconciler.conftest import ADMIN

pytestmark = pytest.mark.covers("ORCH-2")

ERROR = {"code": "function_failed", "expected": "a", "found": "b", "remedy": "c"}
FAILED = Outcome(error=ERROR)


class Queue:
    """Two projects and a worker of the model "m"."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        with transaction(engine) as conn:
            for name in ("p1", "p2"):
                projects.create(conn, name, ADMIN, id=name)
        self.worker = self.register()

    def register(self) -> PoolWorker:
        with transaction(self.engine) as conn:
            return leases.register(conn, host="here", pid=1, models=["m"])

    def add(self, count: int = 1, project: str = "p1", **options: Any) -> list[str]:
        return self.submit([{"number": n} for n in range(count)], project, **options)

    def submit(
        self, inputs: Sequence[dict[str, Any]], project: str = "p1", **options: Any
    ) -> list[str]:
        new = [jobs.NewJob("m", given, **options) for given in inputs]
        with transaction(self.engine) as conn:
            return jobs.enqueue(conn, project, new, ADMIN)

    def open(self) -> int:
        """How many jobs have not ended."""
        query = sa.select(sa.func.count()).where(table.c.status.in_(("pending", "running")))
        with reading(self.engine) as conn:
            return int(conn.execute(query).scalar_one())

    def claim(self, limit: int = 1, **options: Any) -> list[Job]:
        with transaction(self.engine) as conn:
            ids = [call.id for call in leases.claim(conn, self.worker, limit=limit, **options)]
            query = sa.select(table).where(table.c.id.in_(ids))
            return sorted(rows.every(conn, query, Job), key=lambda job: ids.index(job.id))

    def finish(self, held: Sequence[Job], outcome: Outcome) -> dict[str, JobStatus]:
        with transaction(self.engine) as conn:
            return leases.finish(conn, [(job, outcome) for job in held])

    def tend(self) -> leases.Tended:
        with transaction(self.engine) as conn:
            return leases.tend(conn)

    def read(self, id: str, project: str = "p1") -> Job:
        with transaction(self.engine) as conn:
            return jobs.get(conn, project, id)

    def change(self, *ids: str, **values: Any) -> None:
        """Change rows, as the time that passes does."""
        with transaction(self.engine) as conn:
            conn.execute(sa.update(table).where(table.c.id.in_(ids)).values(**values))

    def reprocess(self, sample: int | None, **options: Any) -> list[str]:
        with transaction(self.engine) as conn:
            return jobs.reprocess(conn, "p1", ADMIN, sample=sample, **options)

    def bury(self, count: int) -> list[str]:
        ids = self.add(count)
        self.finish(self.claim(count), Outcome(error=ERROR, permanent=True))
        return ids


def check_counts(engine: sa.Engine) -> None:
    """The counts of jobs are those of the jobs that exist, whatever has happened to them."""
    number, each = sa.func.count(), (table.c.project_id, table.c.status)
    with reading(engine) as conn:
        real: dict[str, Counter[str]] = {}
        for project, status, count, size in conn.execute(
            sa.select(*each, number, sa.func.sum(table.c.size)).group_by(*each)
        ):
            mine = real.setdefault(project, Counter())
            mine.update({status: count, "size": int(size)})
        kept = counts.read(conn)
        shown = {id: Counter(of) for id, of in jobs.by_project(conn).items()}
    assert {id: of.pop("size") for id, of in real.items()} == {
        id: of["size"] for id, of in kept.items() if id in real or of["size"]
    }
    assert shown == real


def test_a_job_is_claimed_once_and_finished_once(queue: Queue) -> None:
    (id,) = queue.add()
    (held,) = queue.claim(5)
    assert queue.claim(5) == []
    assert queue.finish([held], Outcome({"n": 1})) == {id: JobStatus.DONE}
    assert queue.finish([held], Outcome({"n": 2})) == {}
    job = queue.read(id)
    assert (job.status, job.result, job.attempts, job.token) == ("done", {"n": 1}, 1, "")
    assert job.size > held.size


def test_an_input_is_as_large_as_postgresql_gives_it_back(queue: Queue) -> None:
    """It writes 1e308 and 5e-324 with all their digits: 64 KiB became 2.5 MB, which ended each
    worker, or filled its memory with the 256 jobs of a claim.
    """
    for number, size in ((1e308, 2_488_007), (5e-324, 2_624_007)):
        with pytest.raises(Problem) as refused:
            queue.submit([{"x": [number] * 8_000}])
        assert refused.value.code == "input_too_large"
        assert f"{size} bytes" in refused.value.found
    given = {"x": [1e308, -1.5e300, 1e-300, 1e16, 0.5] * 60, "text": "1e+308" * 1_000}
    queue.submit([given])
    (job,) = queue.claim()
    assert [float(number) for number in job.input["x"]] == given["x"]
    with reading(queue.engine) as conn:
        text = conn.execute(sa.select(sa.cast(table.c.input, sa.Text()))).scalar_one()
    assert len(text) <= job.size <= jobs.INPUT_BYTES


def test_a_group_of_outcomes_counts_job_by_job(queue: Queue) -> None:
    queue.add(6)
    done, failed, refused, canceled, given, kept = queue.claim(6)
    with transaction(queue.engine) as conn:
        jobs.cancel(conn, "p1", canceled.id)
    group = [
        *((job, Outcome({"n": job.input["number"], "ü": [1.5, None]})) for job in (kept, done)),
        (replace(given, token="other"), Outcome({})),
        (canceled, Outcome({})),
        (failed, FAILED),
        (refused, Outcome(error=ERROR, permanent=True)),
        # Of two outcomes, the first counts.
        (done, FAILED),
        (failed, Outcome({})),
        (kept, Outcome({"n": 99})),
        (replace(refused, token="other"), Outcome({})),
    ]
    with transaction(queue.engine) as conn:
        counted = leases.finish(conn, group)
    ends = {done.id: "done", kept.id: "done", failed.id: "pending", refused.id: "dead_letter"}
    assert counted == ends
    ends |= {canceled.id: "canceled", given.id: "running"}
    rows_ = {id: queue.read(id) for id in ends}
    assert {id: job.status for id, job in rows_.items()} == ends
    job = rows_[done.id]
    assert (job.result, job.error) == ({"n": 0, "ü": [1.5, None]}, {})
    assert job.size == done.size + len(json.dumps(job.result))
    assert {rows_[each.id].attempts for each in (done, kept, failed, refused)} == {1}
    assert {job.result and job.result["n"] for job in rows_.values()} == {0, 5, None}
    assert rows_[given.id].token == given.token


def test_an_answer_lost_at_the_commit_loses_no_job(queue: Queue) -> None:
    first, second, third, fourth, fifth = queue.add(5)
    database = DatabaseQueue(queue.engine, ["m"])
    database.serve({})
    with lost_answers(queue.engine), pytest.raises(Away):
        database.turn((), (), 3)
    assert not database.is_idle(), "it asks again, whatever is due"
    calls = database.turn((), (), 3).calls
    assert {call.id for call in calls} == {first, second, third}
    held = {call.id: call for call in calls}
    assert held.keys() == database.renew([calls[0].token])
    ended = [(held[first], Outcome({}))]
    with lost_answers(queue.engine), pytest.raises(Away):
        database.turn(ended, [held[second]], 1)
    assert queue.read(fourth).status == "running"
    # A worker that ends meanwhile keeps nothing that it did not get.
    assert database.turn(ended, [held[second]], 0).counted == 0
    with lost_answers(queue.engine), pytest.raises(Away):
        database.turn((), (), 2)
    database.leave()
    states = [queue.read(id).status for id in (first, second, third, fourth, fifth)]
    assert states == ["done", "pending", "running", "pending", "pending"]
    assert {queue.read(id).lost for id in (second, fourth, fifth)} == {0}


@contextmanager
def commits(engine: sa.Engine) -> Iterator[list[bool]]:
    """Whether each commit waits for the disk."""
    how = {"sqlite": "PRAGMA synchronous", "postgresql": "SHOW synchronous_commit"}
    waits = {"sqlite": "2", "postgresql": "on"}
    durable: list[bool] = []

    def look(conn: sa.Connection) -> None:
        name = conn.dialect.name
        durable.append(str(conn.exec_driver_sql(how[name]).scalar()) == waits[name])

    sa.event.listen(engine, "commit", look)
    try:
        yield durable
    finally:
        sa.event.remove(engine, "commit", look)


def test_only_outcomes_wait_for_the_disk(queue: Queue) -> None:
    queue.add(2)
    database = DatabaseQueue(queue.engine, ["m"])
    database.serve({})
    with commits(queue.engine) as durable:
        (call,) = database.turn((), (), 1).calls
        (other,) = database.turn([(call, Outcome({}))], (), 1).calls
        database.turn((), [other], 0)
    assert durable == [False, True, False]


@contextmanager
def lost_answers(engine: sa.Engine) -> Iterator[None]:
    """Every connection dies after the database has committed, before its answer arrives."""
    commit = engine.dialect.do_commit

    def die(connection: Any) -> None:
        commit(connection)
        connection.driver_connection.close()
        raise engine.dialect.loaded_dbapi.OperationalError("the connection has died")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.dialect, "do_commit", die)
        yield


def test_priority_and_age_decide_within_a_project(queue: Queue) -> None:
    late, soon = queue.add(priority=9)[0], queue.add(priority=0)[0]
    first, second = queue.add(2)
    queue.change(first, enqueued_at=1.0)

    def claim(limit: int) -> list[str]:
        with transaction(queue.engine) as conn:
            held = leases.claim(conn, queue.worker, limit=limit)
            leases.give_back(conn, held)
        return [call.id for call in held]

    order = [soon, first, second, late]
    assert [claim(count)[-1] for count in (1, 2, 3, 4)] == order
    assert claim(4) == order, "a worker runs them in this order"


def test_a_long_queue_does_not_delay_another_project(queue: Queue) -> None:
    queue.add(50)
    queue.add(3, "p2")
    taken = Counter(job.project_id for job in queue.claim(6))
    assert taken == {"p1": 3, "p2": 3}
    queue.add(2, "p2")
    # The first project runs as many, so the places go on in turns.
    assert Counter(job.project_id for job in queue.claim(4)) == {"p1": 2, "p2": 2}
    queue.claim(1)
    queue.claim(5)
    queue.add(1, "p2")
    assert queue.claim()[0].project_id == "p2", "of those that run, it has the fewest"


def test_jobs_in_a_pool_of_its_own_cost_a_project_no_shared_worker(queue: Queue) -> None:
    request = pools.NewPool("own", ["big"], project_id="p1", target="remote")
    with transaction(queue.engine) as conn:
        pool = pools.start(conn, request, ADMIN, most=1)
        worker = remote.register(conn, pool, host="x", pid=1, models=["big"])
        jobs.enqueue(conn, "p1", [jobs.NewJob("big", {})] * 3, ADMIN)
        assert len(leases.claim(conn, worker, limit=3)) == 3
    queue.add(8)
    queue.add(8, "p2")
    assert Counter(job.project_id for job in queue.claim(4)) == {"p1": 2, "p2": 2}


def test_a_project_behind_others_gets_what_they_leave(queue: Queue) -> None:
    queue.add(4)
    queue.add(2, "p2")
    behind = {"p1"}
    assert [job.project_id for job in queue.claim(9, behind=behind)] == ["p2", "p2"]
    assert [job.project_id for job in queue.claim(9, behind=behind)] == ["p1"] * 4


def test_a_worker_takes_only_jobs_of_its_models(queue: Queue) -> None:
    with transaction(queue.engine) as conn:
        leases.register(conn, host="there", pid=2, models=["other"])
        jobs.enqueue(conn, "p1", [jobs.NewJob("other", {})], ADMIN)
    assert queue.claim() == []
    with transaction(queue.engine) as conn:
        assert leases.is_idle(conn, queue.worker)


def test_a_delayed_job_waits_for_its_time(queue: Queue) -> None:
    (id,) = queue.add(delay_s=60)
    assert (queue.tend().due, queue.claim()) == (0, [])
    queue.change(id, not_before=clock.now() - 1)
    assert queue.tend().due == 1
    assert [job.id for job in queue.claim()] == [id]


def test_a_failure_is_tried_again_later_until_its_attempts_end(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    (id,) = queue.add(max_attempts=2)
    assert queue.finish(queue.claim(), FAILED) == {id: JobStatus.PENDING}
    retried = f"Job retry: job {id}, function_failed, found b"
    assert [record.getMessage() for record in caplog.records] == [retried], "as runbooks have it"
    job = queue.read(id)
    assert (job.attempts, job.error["code"]) == (1, "function_failed")
    assert job.not_before is not None and job.not_before > job.updated_at
    assert queue.claim() == []
    queue.change(id, not_before=None)
    assert queue.finish(queue.claim(), FAILED) == {id: JobStatus.DEAD_LETTER}


def test_a_lost_lease_belongs_to_the_next_worker(queue: Queue) -> None:
    (id,) = queue.add()
    (old,) = queue.claim()
    queue.change(id, lease_expires_at=1.0)
    assert queue.tend().reclaimed == 1
    with transaction(queue.engine) as conn:
        assert leases.renew(conn, queue.worker, [old.token]) == set()
    (new,) = queue.claim()
    assert queue.finish([old], Outcome({"from": "old"})) == {}
    with transaction(queue.engine) as conn:
        leases.give_back(conn, [old])
    assert queue.read(id).token == new.token
    assert queue.finish([new], Outcome({"from": "new"})) == {id: JobStatus.DONE}
    job = queue.read(id)
    assert (job.result, job.lost, job.attempts) == ({"from": "new"}, 1, 1)


def test_the_database_s_clock_may_jump_forward(queue: Queue) -> None:
    clock_jumps(queue, 1)


def test_the_database_s_clock_may_jump_back(queue: Queue) -> None:
    clock_jumps(queue, -1)


def clock_jumps(queue: Queue, hours: int) -> None:
    """Each job ends once, and that of a dead worker waits for no more than a lease."""
    alive, dead, delayed = queue.add(3)
    queue.change(delayed, not_before=clock.now() + 60)
    living, other = queue.claim(1), replace(queue.worker, id=rows.new_id())
    with transaction(queue.engine) as conn:
        leases.claim(conn, other, limit=1)
    with clock_ahead(queue.engine, hours * 3600):
        with transaction(queue.engine) as conn:
            renewed = leases.renew(conn, queue.worker, [living[0].token])
        assert renewed == {alive}
        swept = queue.tend()
        assert (swept.reclaimed, swept.due) == ((1, 1) if hours > 0 else (0, 0))
        with clock_ahead(queue.engine, leases.LEASE_S + 2):
            with transaction(queue.engine) as conn:
                assert leases.renew(conn, queue.worker, [living[0].token]) == {alive}
            assert queue.tend().reclaimed == (0 if hours > 0 else 1)
        assert queue.finish(living, Outcome({})) == {alive: JobStatus.DONE}
        again = {job.id: job for _ in range(2) for job in queue.claim(9)}
        assert again.keys() == ({dead, delayed} if hours > 0 else {dead})
        assert (again[dead].lost, again[dead].attempts) == (1, 0)


def test_the_leader_takes_the_jobs_of_the_last_worker_back(queue: Queue) -> None:
    """Without a worker and without a pool, so that an alert sees jobs wait and none run."""
    lost, delayed, ahead = queue.add(3)
    queue.claim()
    queue.change(lost, lease_expires_at=1.0)
    queue.change(delayed, not_before=1.0)
    queue.change(ahead, status="running", lease_expires_at=clock.now() + 3600)
    term = retrying(queue.engine, lambda conn: leader.campaign(conn, leader.LOOPS, "p", 3600))
    assert "leases" in loops.Loops(Settings(), queue.engine, lambda: term).run_due()
    assert (queue.read(lost).status, queue.read(lost).lost) == ("pending", 1)
    assert queue.read(delayed).not_before is None
    with clock_ahead(queue.engine, leases.LEASE_S + 2):
        assert queue.tend().reclaimed == 1
    statements: list[str] = []

    def executed(_conn: sa.Connection, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    queue.add()
    queue.change(*queue.add(), not_before=clock.now() + 60)
    queue.claim()
    sa.event.listen(queue.engine, "after_cursor_execute", executed)
    loops.tend_leases(queue.engine, Settings())
    sa.event.remove(queue.engine, "after_cursor_execute", executed)
    assert [statement.split()[0] for statement in statements if "jobs" in statement] == ["SELECT"]


@contextmanager
def clock_ahead(engine: sa.Engine, seconds: float) -> Iterator[None]:
    """The clock of the database, as every statement reads it, so many seconds ahead."""
    now = str(clock.now().compile(dialect=engine.dialect))

    def jump(
        _conn: sa.Connection, _cursor: Any, statement: str, values: Any, *_: Any
    ) -> tuple[str, Any]:
        return statement.replace(now, f"({now} + {seconds})"), values

    sa.event.listen(engine, "before_cursor_execute", jump, retval=True)
    try:
        yield
    finally:
        sa.event.remove(engine, "before_cursor_execute", jump)


def test_a_heartbeat_renews_only_what_is_still_held(queue: Queue) -> None:
    ids = queue.add(3)
    for job in queue.claim(3):
        assert job.lease_expires_at is not None
        queue.change(job.id, lease_expires_at=job.lease_expires_at - 25)
    held = [queue.read(id) for id in ids]
    queue.finish(held[:1], Outcome({}))
    with transaction(queue.engine) as conn:
        jobs.cancel(conn, "p1", held[1].id)
        assert leases.renew(conn, queue.worker, [held[0].token]) == {held[2].id}
    last = queue.read(held[2].id)
    assert last.lease_expires_at is not None and held[2].lease_expires_at is not None
    assert last.lease_expires_at > held[2].lease_expires_at + 20
    assert set(ids) == {job.id for job in held}


def test_a_job_that_kills_every_worker_is_buried(queue: Queue) -> None:
    (id,) = queue.add()
    for _ in range(LOST_LIMIT):
        assert queue.claim()
        queue.change(id, lease_expires_at=1.0)
        queue.tend()
    job = queue.read(id)
    assert (job.status, job.error["code"]) == ("dead_letter", "worker_lost")


def test_a_job_that_kills_its_workers_does_not_bury_its_neighbours(queue: Queue) -> None:
    ids = queue.add(200)
    poison = ids[100]
    kills = 0
    while queue.open():
        held = queue.claim(64)
        if poison in {job.id for job in held}:
            queue.change(*(job.id for job in held), lease_expires_at=1.0)
            queue.tend()
            kills += 1
        else:
            queue.finish(held, Outcome({}))
    ends = {id: queue.read(id) for id in ids}
    assert (ends[poison].lost, kills) == (LOST_LIMIT, LOST_LIMIT)
    assert ends.pop(poison).error["code"] == "worker_lost"
    assert {job.status for job in ends.values()} == {"done"}
    assert Counter(job.lost for job in ends.values()) == {0: 136, 1: 63}


def test_a_job_that_was_lost_waits_for_a_worker_that_holds_no_other(queue: Queue) -> None:
    lost, _ = queue.add(2)
    urgent, late = queue.add(1, priority=0)[0], queue.add(1, priority=9)[0]
    queue.change(lost, lost=1)
    assert [job.id for job in queue.claim(9)] == [urgent], "those before it come first"
    assert queue.claim(9, alone=False) == [], "the worker gets nothing until it is alone"
    (other,) = queue.add(1, "p2")
    assert [job.id for job in queue.claim(9, alone=False)] == [other], "of p1, a job runs"
    assert [job.id for job in queue.claim(9)] == [lost]
    assert [job.id for job in queue.claim(9)][-1] == late


def test_jobs_given_back_cost_nothing(queue: Queue) -> None:
    (id,) = queue.add()
    held = queue.claim()
    with transaction(queue.engine) as conn:
        leases.give_back(conn, held)
    job = queue.read(id)
    assert (job.status, job.attempts, job.lost, job.token) == ("pending", 0, 0, "")


def test_a_canceled_job_does_not_run_and_its_result_does_not_count(queue: Queue) -> None:
    waiting, running = queue.add(2)
    (held,) = queue.claim()
    assert held.id == waiting
    with transaction(queue.engine) as conn:
        for id in (waiting, running):
            assert jobs.cancel(conn, "p1", id).status == jobs.cancel(conn, "p1", id).status
    assert queue.claim() == []
    assert queue.finish([held], Outcome({})) == {}
    assert queue.read(waiting).status == "canceled"
    (done,) = queue.add()
    queue.finish(queue.claim(), Outcome({}))
    with pytest.raises(Problem, match="job_ended"), transaction(queue.engine) as conn:
        jobs.cancel(conn, "p1", done)


def test_dead_letters_come_back_by_a_sample_first(queue: Queue) -> None:
    ids = queue.bury(5)
    assert set(queue.reprocess(2)) < set(ids)
    with pytest.raises(Problem, match="sample_unfinished"):
        queue.reprocess(None)
    sample = queue.claim(5)
    assert [job.attempts for job in sample] == [0, 0]
    queue.finish(sample[:1], Outcome({}))
    queue.finish(sample[1:], Outcome(error=ERROR, permanent=True))
    with pytest.raises(Problem, match="sample_unfinished"):
        queue.reprocess(None)
    assert len(queue.reprocess(None, force=True)) == 4
    queue.finish(queue.claim(4), Outcome({}))
    assert queue.reprocess(None) == []
    with transaction(queue.engine) as conn:
        acts = conn.execute(sa.select(audit_log.c.detail).where(
            audit_log.c.action == "jobs.reprocessed")).scalars().all()  # fmt: skip
    assert [act["jobs"] for act in acts] == [2, 4]


def test_dead_letters_that_always_fail_keep_no_others_from_coming_back(queue: Queue) -> None:
    hopeless, good = queue.bury(2), queue.bury(2)
    assert set(queue.reprocess(2)) == set(hopeless)
    queue.finish(queue.claim(2), Outcome(error=ERROR, permanent=True))
    assert set(queue.reprocess(2, force=True)) == set(good)
    queue.finish(queue.claim(2), Outcome({}))
    assert set(queue.reprocess(None)) == set(hopeless)
    queue.finish(queue.claim(2), Outcome(error=ERROR, permanent=True))
    with transaction(queue.engine) as conn:
        given_up = jobs.cancel(conn, "p1", hopeless[0])
        assert (given_up.status, given_up.error["code"]) == ("canceled", "function_failed")
        assert jobs.cancel_all(conn, "p1", ADMIN, dead=True) == 1
    queue.bury(1)
    assert len(queue.reprocess(None)) == 1, "a canceled job is no bad sample"


def test_dead_letters_of_one_model_come_back_without_those_of_another(queue: Queue) -> None:
    broken, mended = queue.bury(2), queue.bury(2)
    queue.change(*broken, model="n")
    assert set(queue.reprocess(2)) == set(broken)
    queue.change(*broken, status="dead_letter")
    assert set(queue.reprocess(1, model="m")) < set(mended)
    with pytest.raises(Problem, match="sample_unfinished"):
        queue.reprocess(None, model="m")
    queue.finish(queue.claim(1), Outcome({}))
    with pytest.raises(Problem, match="sample_unfinished"):
        queue.reprocess(None)  # The last sample of the other model has failed.
    assert set(queue.reprocess(None, model="m")) < set(mended)
    queue.change(*broken, status="pending")


def test_all_jobs_of_a_model_are_canceled_together(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CANCEL_LIMIT", 3)
    done = queue.add(1)
    queue.finish(queue.claim(1), Outcome({}))
    dead = queue.bury(1)
    others = queue.add(1, "p2")
    (held,), (delayed,), (other_model,) = queue.add(1), queue.add(1, delay_s=60), queue.add(1)
    queue.change(other_model, model="n")
    call = next(job for job in queue.claim(2) if job.id == held)
    waiting = queue.add(2)

    def cancel(**options: Any) -> int:
        with transaction(queue.engine) as conn:
            return jobs.cancel_all(conn, "p1", ADMIN, **options)

    assert [cancel(model="m") for _ in range(3)] == [3, 1, 0]
    for id in (held, delayed, *waiting):
        job = queue.read(id)
        assert (job.status, job.token, job.not_before) == ("canceled", "", None)
    assert queue.read(call.id).taken_from == queue.worker.id
    assert queue.finish([call], Outcome({})) == {}
    assert queue.read(other_model).status == "pending"
    assert (cancel(), cancel()) == (1, 0)
    assert (cancel(dead=True), queue.read(dead[0]).status) == (1, "canceled")
    assert queue.read(done[0]).status == "done"
    assert queue.read(others[0], "p2").status in ("pending", "running")
    with reading(queue.engine) as conn:
        query = sa.select(audit_log.c.detail).where(audit_log.c.action == "jobs.canceled")
        assert sorted(row["jobs"] for row in conn.execute(query).scalars()) == [1, 1, 1, 3]


def test_an_unknown_model_is_refused_by_name(queue: Queue) -> None:
    with pytest.raises(Problem, match="model_unknown") as refused, transaction(queue.engine) as c:
        jobs.enqueue(c, "p1", [jobs.NewJob("m", {}), jobs.NewJob("none", {})], ADMIN)
    assert (refused.value.expected, refused.value.status) == ("one of the models m", 422)
    assert queue.claim() == []
    queue.add(2)
    with reading(queue.engine) as conn:
        assert jobs.models(conn, "p1") == [("m", True, 2)]
        assert jobs.models(conn, "p2") == [("m", True, 0)]


def test_jobs_that_no_living_worker_takes_are_counted(queue: Queue) -> None:
    """By project: a worker of one project's pool serves no job of another."""

    def unserved() -> int:
        with reading(queue.engine) as conn:
            return jobs.unserved(conn)

    assert unserved() == 0, "no job waits"
    queue.add(2)
    queue.change(*queue.add(3), model="a")
    queue.change(*queue.add(5, "p2"), model="z")
    queue.change(*queue.add(7, delay_s=60), model="a")
    assert unserved() == 8
    with transaction(queue.engine) as conn:
        wish = pools.NewPool("p", ["a", "z"], project_id="p1", target="remote")
        pool = pools.start(conn, wish, ADMIN, most=9)
        worker = remote.register(conn, pool, host="h", pid=1, models=["a", "z"])
    assert unserved() == 5, "those of the other project"
    with transaction(queue.engine) as conn:
        leases.sign_off(conn, queue.worker.id)
    assert unserved() == 7
    for later_s in (-31, 3600):  # The clock was set back after the last heartbeat.
        with transaction(queue.engine) as conn:
            silent = sa.update(pool_workers).where(pool_workers.c.id == worker.id)
            conn.execute(silent.values(beat_at=clock.now() + later_s))
        assert unserved() == 10


def test_a_project_has_a_limit_of_open_jobs(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.LIMITS, "jobs_open", 3)
    queue.bury(2)
    queue.add(2)
    for ask in (lambda: queue.add(2), lambda: queue.reprocess(None)):
        with pytest.raises(Problem, match="job_limit") as refused:
            ask()
        assert (refused.value.status, refused.value.detail["retry_after_s"]) == (429, 60)
    queue.add(3, "p2")


@pytest.mark.parametrize(("name", "value"), [("jobs_kept", 4), ("jobs_mib", 60 / (1 << 20))])
def test_old_results_make_room_and_new_ones_do_not(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setitem(jobs.LIMITS, name, value)
    old = queue.add(4)
    queue.finish(queue.claim(4), Outcome({}))
    with pytest.raises(Problem, match="job_limit"):
        queue.add(1)
    queue.change(*old[:2], updated_at=clock.now() - jobs.READABLE_S - 1)
    (new,) = queue.add(1)
    with transaction(queue.engine) as conn:
        assert {job["id"] for job in jobs.every(conn, "p1")} == {new, *old[2:]}
    queue.add(1)
    # Those that ended before the clock was set back are old, too.
    queue.change(*old[2:], updated_at=clock.now() + 3600)
    queue.add(2)
    with transaction(queue.engine) as conn:
        assert not {job["id"] for job in jobs.every(conn, "p1")} & {*old}


def limit(queue: Queue, **limits: int) -> None:
    with transaction(queue.engine) as conn:
        quota.change(conn, "p1", limits, ADMIN)


def refused(queue: Queue, count: int) -> Problem:
    with pytest.raises(Problem) as caught:
        queue.add(count)
    return caught.value


def test_operators_limit_the_jobs_of_a_project(queue: Queue) -> None:
    limit(queue, jobs_kept=3, jobs_open=2)
    queue.add(2)
    queue.finish(queue.claim(2), Outcome({}))
    problem = refused(queue, 2)
    assert (problem.code, problem.detail["limit"]) == ("job_limit", "jobs_kept")
    queue.add(1)
    # A client does not repeat a request that no waiting can satisfy.
    assert (refused(queue, 3).code, refused(queue, 3).status) == ("quota_exceeded", 409)
    queue.add(3, "p2")
    limit(queue, jobs_mib=0)
    assert refused(queue, 1).detail == {"limit": "jobs_mib", "used": 1, "allowed": 0}
    with transaction(queue.engine) as conn:
        use = jobs.used(conn, projects.get(conn, "p1"))
    assert use == {"jobs_open": 1, "jobs_kept": 3, "jobs_mib": 1, "jobs_per_hour": 0}
    # How long a call of a project may occupy a worker that others share.
    limit(queue, jobs_timeout_s=30)
    with pytest.raises(Problem, match="timeout_too_long") as problem_of_time:
        queue.add(1, timeout_s=31)
    assert problem_of_time.value.found == "31 s in job 0"
    queue.add(1, timeout_s=30)
    queue.add(1, "p2", timeout_s=31)


def test_a_lowered_limit_does_not_lock_a_project_out(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_ROOM", 2)
    old = queue.add(7)
    queue.finish(queue.claim(7), Outcome({}))
    queue.change(*old, updated_at=1.0)
    limit(queue, jobs_kept=3)
    queue.add(1)
    with transaction(queue.engine) as conn:
        assert jobs.used(conn, projects.get(conn, "p1"))["jobs_kept"] == 2


def test_a_rate_comes_back_evenly(queue: Queue) -> None:
    limit(queue, jobs_per_hour=4)
    queue.add(3)
    problem = refused(queue, 2)
    assert (problem.code, problem.status) == ("rate_exceeded", 429)
    assert 600 <= int(str(problem.detail["retry_after_s"])) <= 901
    with clock_ahead(queue.engine, 910):
        queue.add(2)
        assert refused(queue, 1).code == "rate_exceeded"
        limit(queue, jobs_per_hour=40)
        queue.add(9)
        limit(queue, jobs_per_hour=0)
        assert refused(queue, 1).code == "quota_exceeded"
    limit(queue, jobs_per_hour=40)
    # Far behind the last request, the clock has been set back.
    with clock_ahead(queue.engine, -7200):
        queue.add(40)
        assert refused(queue, 1).code == "rate_exceeded"


def test_jobs_and_workers_are_kept_for_their_time(queue: Queue) -> None:
    dead, live = queue.bury(1)[0], queue.add()[0]
    queue.change(dead, live, updated_at=1.0)
    with transaction(queue.engine) as conn:
        assert jobs.forget(conn, age_s=60, limit=10) == 1
        assert [job["id"] for job in jobs.every(conn, "p1")] == [live]
        for number in range(24):
            leases.register(conn, host="here", pid=number, models=["m"])
        conn.execute(sa.update(PoolWorker.TABLE).values(beat_at=1.0))
        deleted = [jobs.forget(conn, age_s=60, limit=10) for _ in range(3)]
    assert deleted == [10, 10, 5], "by its result, the loop knows whether more are left"
    with pytest.raises(Problem, match="model_unknown"):
        queue.add()


def test_the_leader_keeps_ended_jobs_for_a_week_or_as_the_site_says(queue: Queue) -> None:
    old, young = queue.bury(2)
    waiting = queue.add()[0]
    queue.change(old, waiting, updated_at=clock.now() - 7.1 * loops.DAY_S)
    queue.change(young, updated_at=clock.now() - 6.9 * loops.DAY_S)
    assert loops.forget(queue.engine, Settings(keep_jobs_days=8))["jobs"] == 0
    assert loops.forget(queue.engine, Settings())["jobs"] == 1
    with reading(queue.engine) as conn:
        assert {job["id"] for job in jobs.every(conn, "p1")} == {young, waiting}


def test_a_claim_reads_no_job_that_it_does_not_take(queue: Queue) -> None:
    """With a million queued jobs, each statement uses a partial index, and so do those of requests
    with 50,000 jobs that are kept.
    """
    plans: list[str] = []

    def explain(conn: sa.Connection, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if "orchestrator_jobs" in statement and "EXPLAIN" not in statement:
            plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            plans.extend(row.detail for row in plan if "orchestrator_jobs" in row.detail)

    queue.add(3)
    queue.change(*queue.add(2), not_before=1.0)
    sa.event.listen(queue.engine, "before_cursor_execute", explain)
    try:
        held = queue.claim(3)
        assert len(held) == 3
        with transaction(queue.engine) as conn:
            assert len(leases.renew(conn, queue.worker, [held[0].token])) == 3
        assert len(queue.finish(held[:1], Outcome({}))) == 1
        assert len(queue.finish(held[1:], FAILED)) == 2
        with reading(queue.engine) as conn:
            assert leases.any_to_tend(conn)
            assert jobs.models(conn, "p1")
            assert jobs.unserved(conn) == 0
        assert queue.tend().due == 2
        queue.bury(2)
        assert len(queue.reprocess(1)) == 1
        assert len(queue.reprocess(1, force=True)) == 1
        queue.claim(1)
        with transaction(queue.engine) as conn:
            workers.end(conn, queue.worker, "ended")
            control.drain(conn, ADMIN, 0)
            assert "1 jobs" in control.follow(conn)
    finally:
        sa.event.remove(queue.engine, "before_cursor_execute", explain)
    assert len(plans) > 4
    for plan in plans:
        index = "INDEX ix_orchestrator_jobs_(due|delayed|running|dead|reprocessed|taken)"
        assert re.search(f"{index}|autoindex.*id=", plan), plan


def test_counts_that_an_older_process_left_wrong_are_mended(queue: Queue) -> None:
    queue.bury(2)
    done, gone, _ = queue.add(3)
    queue.add(1, "p2")
    size = queue.read(done).size
    queue.change(done, status="done", size=size + 90)
    with transaction(queue.engine) as conn:
        conn.execute(sa.delete(table).where(table.c.id == gone))
    with reading(queue.engine) as conn:
        lack = {"open_jobs": -2, "done": 1, "dead_letter": 0, "canceled": 0, "size": 90 - size}
        assert counts.missing(conn) == {"p1": lack}
    loops.mend_job_counts(queue.engine, Settings())
    with reading(queue.engine) as conn:
        assert counts.missing(conn) == {}
    check_counts(queue.engine)


def test_the_depth_of_a_queue_is_counted_back(queue: Queue) -> None:
    now = jobs.DEPTH_STEPS * jobs.DEPTH_STEP_S
    with transaction(queue.engine) as conn:
        since = clock.read(conn) - now
    ended, old, new = queue.add(3)
    queue.finish(queue.claim(), Outcome({}))
    queue.add(1, "p2")
    queue.change(old, enqueued_at=since - 600)
    # In the middle of a step, because time goes on until the depth is read.
    queue.change(new, enqueued_at=since + 30 * 60 + 30)
    queue.change(ended, enqueued_at=since + 10 * 60 + 30, updated_at=since + 40 * 60 + 30)
    with transaction(queue.engine) as conn:
        open_ = jobs.depth(conn, "p1").open
        site = jobs.depth(conn).open
    # A step is a minute; the row shows the queue at the end of each.
    assert open_ == [1] * 10 + [2] * 20 + [3] * 10 + [2] * 20
    assert site == [*open_[:-1], open_[-1] + 1], "the job of p2 has just come"
