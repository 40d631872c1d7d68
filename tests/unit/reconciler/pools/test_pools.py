"""Worker pools in the database: started within limits, ended by their states only."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import (
    Pool,
    PoolWorker,
    audit_log,
    device_leases,
    pool_hosts,
    pool_workers,
)
from reconciler.db.schema import jobs as queued
from reconciler.db.schema import pools as table
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.jobs import Outcome
from reconciler.model.pools import ENDS_S, ENDS_WITH_JOBS, Load, PoolState, victim
from reconciler.pools import jobs, leases, memory, pools, processes, remote, workers
from reconciler.pools.pools import NewPool
from reconciler.pools.processes import Process
from reconciler.pools.supervisor import Supervisor
from reconciler.settings import Settings
from reconciler.work import loops
from tests.unit.reconciler.conftest import ADMIN, PostgresDatabase
from tests.unit.reconciler.pools.test_leases import ERROR, Queue

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-3")

HOST: dict[str, Any] = {
    "id": "host-1",
    "name": "control",
    "boot_id": "b",
    "memory_bytes": 8 << 30,
    "memory_used_bytes": 1 << 30,
    "isolation": "process",
    "models": ["digits", "m"],
    "devices": [{"id": f"GPU-{n}", "memory_bytes": 1, "memory_used_bytes": 0} for n in range(2)],
}


def host(engine: sa.Engine, **values: Any) -> None:
    with transaction(engine) as conn:
        workers.report(conn, {**HOST, **values}, {})


def start(engine: sa.Engine, name: str = "a", most: int = 4, **values: Any) -> Pool:
    wish = NewPool(name, **{"models": ["m"], "memory_mib": 1024, **values})
    return retrying(engine, lambda conn: pools.start(conn, wish, ADMIN, most=most))


def refusal(engine: sa.Engine, **values: Any) -> Problem:
    with pytest.raises(Problem) as raised:
        start(engine, **values)
    return raised.value


def begun(engine: sa.Engine, pool: Pool) -> tuple[Pool, PoolWorker]:
    """The pool runs, with a worker that has come up."""
    with transaction(engine) as conn:
        workers.move(conn, pool, "begin", ADMIN)
        pool = pools.get(conn, pool.id)
        assert workers.add(conn, pool, f"w-{pool.name}", host="control", boot_id="b", cgroup="")
        leases.enter(conn, f"w-{pool.name}", pid=7, start_ticks=1)
        worker = leases.serve(conn, f"w-{pool.name}", ["m"], {})
        workers.move(conn, pool, "ready", ADMIN)
        return pools.get(conn, pool.id), worker


def read(engine: sa.Engine, pool: Pool) -> Pool:
    with reading(engine) as conn:
        return pools.get(conn, pool.id)


def held(engine: sa.Engine) -> list[str]:
    with reading(engine) as conn:
        return [lease.device for lease in pools.leases(conn)]


def test_a_pool_that_its_host_cannot_take_is_refused(engine: sa.Engine) -> None:
    assert refusal(engine).code == "pool_host_missing"
    host(engine)
    start(engine, devices=["GPU-0"], replicas=2)
    wrong = {
        "pool_exists": {"name": "a"},
        "pool_host_missing": {"host": "other"},
        "model_unknown": {"models": ["m", "none"]},
        "device_unknown": {"devices": ["GPU-9"]},
        "device_leased": {"devices": ["GPU-1", "GPU-0"]},
        "project_not_found": {"project_id": "none"},
        # 8 GiB, of which 2 are another pool's.
        "pool_memory_exceeded": {"replicas": 7},
        "pool_limit": {"most": 1},
    }
    for code, values in wrong.items():
        problem = refusal(engine, **{"name": "b", **values})
        assert problem.code == code
        assert all(problem.to_dict().values()), code
    assert "at most 6144 MiB" in refusal(engine, name="b", replicas=7).expected
    assert held(engine) == ["GPU-0"], "a refusal leases nothing"
    start(engine, "b", replicas=6, devices=["GPU-1"])


def test_the_host_with_most_free_memory_is_taken(engine: sa.Engine) -> None:
    host(engine)
    host(engine, id="host-2", name="larger", memory_bytes=16 << 30, models=["digits"])
    assert start(engine).host_id == "host-1", "the other lacks the model"
    host(engine, id="host-2", name="larger", memory_bytes=16 << 30)
    assert start(engine, "b").host_id == "host-2"
    with transaction(engine) as conn:
        silent = sa.update(pool_hosts).where(pool_hosts.c.id == "host-2")
        conn.execute(silent.values(seen_at=clock.now() - pools.SILENT_S - 1))
    assert start(engine, "c").host_id == "host-1"
    assert refusal(engine, name="d", host="larger").code == "pool_host_missing"


def test_an_ended_pool_frees_name_seat_memory_and_devices(engine: sa.Engine) -> None:
    host(engine)
    pool = start(engine, most=1, replicas=8, devices=["GPU-0"])
    with transaction(engine) as conn:
        assert pools.stop(conn, "a", ADMIN).state == "stopped", "nothing had begun"
        assert pools.stop(conn, pool.id, ADMIN).state == "stopped"
    assert held(engine) == []
    twin = start(engine, pool.id, most=1)
    with transaction(engine) as conn:
        assert pools.get(conn, pool.id).id == pool.id, "not that of the same name"
        pools.stop(conn, twin.id, ADMIN)
    again = start(engine, most=1, replicas=8, devices=["GPU-0"])
    assert (again.id != pool.id, again.seat) == (True, 1)
    with transaction(engine) as conn, pytest.raises(Problem, match="pool_not_found"):
        pools.get(conn, "b")


@pytest.mark.parametrize("stopping", [False, True])
def test_a_pool_whose_host_is_lost_ends_by_an_operator_s_word(
    engine: sa.Engine, *, stopping: bool
) -> None:
    queue = Queue(engine)
    host(engine)
    pool, worker = begun(engine, start(engine, devices=["GPU-0"]))
    queue.add()
    word = ADMIN.because("its board has burnt out")

    def evict(act: Act = word) -> Pool:
        return retrying(engine, lambda conn: pools.evict_lost(conn, "a", act))

    with transaction(engine) as conn:
        (job,) = leases.claim(conn, worker, limit=1)
    with pytest.raises(Problem, match="pool_host_present"):
        evict()
    with transaction(engine) as conn:
        conn.execute(sa.update(pool_hosts).values(seen_at=clock.now() - pools.LOST_S - 1))
        pools.stop(conn, "a", ADMIN)
        if stopping:
            pools.end(conn, pools.get(conn, "a"), ADMIN, {})
    with pytest.raises(Problem, match="reason_required"):
        evict(replace(ADMIN, reason=""))
    assert evict().state == "evicted"
    assert held(engine) == []
    with transaction(engine) as conn:
        assert workers.living(conn, [pool.id]) == {pool.id: []}
        assert leases.finish(conn, [(job, Outcome({}))]) == {}, "should it live after all"
        assert leases.claim(conn, worker, limit=1) == []
        detail = sa.select(audit_log.c.detail).where(audit_log.c.action == "pool.host_lost")
        assert conn.execute(detail).scalar_one()["host"] == "control"
    queue.tend()
    assert queue.read(job.id).status == "pending"
    host(engine)
    assert start(engine, most=1, devices=["GPU-0"]).seat == 1


def test_stop_drains_and_evict_does_not(engine: sa.Engine, caplog: Any) -> None:
    queue = Queue(engine)
    host(engine)
    _, worker = begun(engine, start(engine, drain_s=100))
    second, _ = begun(engine, start(engine, "b", devices=["GPU-0"]))
    queue.add(2)
    with transaction(engine) as conn:
        (job,) = leases.claim(conn, worker, limit=1)
        stopped = pools.stop(conn, "a", ADMIN)
        assert stopped.state == "draining"
        assert stopped.deadline_at == pytest.approx(stopped.state_since + 100, abs=1)
        assert leases.is_idle(conn, worker) and leases.claim(conn, worker, limit=1) == []
        assert workers.holding(conn, [worker.id, "w-b"]) == {worker.id: 1}
        assert pools.evict(conn, "b", ADMIN).state == "stopping"
        assert pools.evict(conn, "b", ADMIN).ends_as == "evicted"
        assert pools.evict(conn, "a", ADMIN).state == "stopping", "also while it drains"
    assert caplog.text.count("Pool eviction") == 2
    assert held(engine) == ["GPU-0"], "its processes may still use it"
    with transaction(engine) as conn:
        workers.end(conn, worker, "exit status 0")
        workers.conclude(conn, read(engine, second), ADMIN, PoolState.EVICTED)
    assert held(engine) == []
    queue.tend()
    assert (queue.read(job.id).status, queue.read(job.id).lost) == ("pending", 1)
    with reading(engine) as conn:
        states = [change.target for change in journal.history_of(conn, "pool", second.id)]
        actions = conn.execute(sa.select(audit_log.c.action)).scalars().all()
    assert states == ["requested", "starting", "running", "stopping", "evicted"]
    assert [action for action in actions if action.startswith("pool.")].count("pool.evicted") == 2
    with reading(engine) as conn, pytest.raises(Problem, match="not_found"):
        pools.get(conn, "b")
    with transaction(engine) as conn:
        assert len(pools.stop_all(conn, ADMIN)) == 1, "living pools only"


def test_a_pool_that_is_evicted_before_it_begins_says_why(engine: sa.Engine) -> None:
    host(engine)
    start(engine)
    with transaction(engine) as conn:
        pool = pools.evict(conn, "a", ADMIN, ERROR)
    assert (pool.state, pool.ends_as, pool.failure) == ("evicted", "evicted", ERROR)


def end_worker(
    engine: sa.Engine, pool: Pool, *, holding: Sequence[str] = (), taken: str = ""
) -> int:
    """Let a new worker end with a job of each of these projects; returns the ends that count.

    taken: how the jobs were taken from it before.
    """
    with transaction(engine) as conn:
        conn.execute(sa.delete(queued))
        for project in holding:
            jobs.enqueue(conn, project, [jobs.NewJob("m", {})], ADMIN)
        worker = workers.add(conn, pool, rows.new_id(), host="control", boot_id="b", cgroup="")
        leases.enter(conn, worker.id, pid=7, start_ticks=1)
        serving = leases.serve(conn, worker.id, ["m"], {})
        claimed = leases.claim(conn, serving, limit=9)
        assert len(claimed) == len(holding)
        if taken == "canceled":
            for job, project in zip(claimed, holding, strict=True):
                jobs.cancel(conn, project, job.id)
        elif taken:
            conn.execute(sa.update(queued).values(lease_expires_at=clock.now() - 1))
            leases.tend(conn)
        if taken == "claimed again":
            other = leases.register(conn, host="other", pid=1, models=["m"])
            assert leases.claim(conn, other, limit=1)
        workers.end(conn, worker, "signal 9")
        return workers.recent_ends(conn, pool)


def test_jobs_do_not_end_a_pool_of_all(engine: sa.Engine) -> None:
    Queue(engine)
    host(engine)
    pool, _ = begun(engine, start(engine))
    both = end_worker(engine, pool, holding=["p1", "p2"])
    assert both == 0, "whose job it was shows at the next end"
    assert [end_worker(engine, pool, holding=["p1"]) for _ in range(5)] == [1, 2, 3, 3, 3]
    assert [end_worker(engine, pool) for _ in range(2)] == [4, 5]
    assert end_worker(engine, pool, holding=["p2"]) == 5, "nor those of several who agree"
    own_pool, _ = begun(engine, start(engine, "own", project_id="p1"))
    assert [end_worker(engine, own_pool, holding=["p1"]) for _ in range(5)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("taken", ["canceled", "reclaimed", "claimed again"])
def test_jobs_that_were_taken_from_a_worker_count_as_held(engine: sa.Engine, taken: str) -> None:
    Queue(engine)
    host(engine)
    pool, _ = begun(engine, start(engine))
    ends = [end_worker(engine, pool, holding=["p1"], taken=taken) for _ in range(5)]
    assert ends == [1, 2, 3, 3, 3]
    with transaction(engine) as conn:
        worker = workers.living(conn, [pool.id])[pool.id][0]
        long_ago = clock.now() - ENDS_S - 1
        conn.execute(sa.update(queued).values(taken_from=worker.id, updated_at=long_ago))
        workers.end(conn, worker, "signal 9")
        assert workers.recent_ends(conn, pool) == 4, "alone"


def test_ends_that_do_not_count_put_off_the_next_worker(engine: sa.Engine) -> None:
    Queue(engine)
    host(engine)
    pool, _ = begun(engine, start(engine))

    def pause() -> float:
        with reading(engine) as conn:
            return workers.pause(conn, pool, workers.recent_ends(conn, pool))

    assert pause() <= 0
    for _ in range(ENDS_WITH_JOBS):
        end_worker(engine, pool, holding=["p1"])
    assert pause() <= 0, "these end the pool soon"
    for _ in range(5):
        end_worker(engine, pool, holding=["p1"])
    assert 1 < pause() <= 5
    for _ in range(30):
        end_worker(engine, pool, holding=["p1", "p2"])
    assert 10 < pause() <= 30


def test_a_pool_keeps_few_of_its_ended_workers(engine: sa.Engine) -> None:
    """A guest that has the token may register and leave without end."""
    Queue(engine)
    pool = start(engine, target="remote", project_id="p1", models=["theirs"], replicas=2)
    with transaction(engine) as conn:
        for number in range(100):
            worker = remote.register(conn, pool, host="x", pid=number, models=["theirs"])
            remote.leave(conn, pool, worker.id)
        kept = conn.execute(sa.select(pool_workers.c.pid).where(pool_workers.c.pool_id == pool.id))
        pids = kept.scalars().all()
        assert 8 <= len(pids) <= 16
        assert min(pids) > 70, "the newest"
        assert jobs.enqueue(conn, "p1", [jobs.NewJob("theirs", {})], ADMIN), "served lately"
        with pytest.raises(Problem, match="model_unknown") as refused:
            jobs.enqueue(conn, "p1", [jobs.NewJob("none", {})], ADMIN)
        assert "m, theirs" in refused.value.expected
        with pytest.raises(Problem, match="model_unknown"):
            jobs.enqueue(conn, "p2", [jobs.NewJob("theirs", {})], ADMIN)


def test_retention_keeps_the_workers_of_living_pools(engine: sa.Engine) -> None:
    """Their machine may be cut off for longer. Without its workers, a pool would end at once."""
    host(engine)
    pool, worker = begun(engine, start(engine))
    gone, left = begun(engine, start(engine, "b"))

    def forget() -> list[str]:
        with transaction(engine) as conn:
            conn.execute(sa.update(pool_workers).values(beat_at=1.0))
            jobs.forget(conn, age_s=60, limit=10)
            return list(conn.execute(sa.select(pool_workers.c.id)).scalars())

    assert sorted(forget()) == [worker.id, left.id]
    with transaction(engine) as conn:
        workers.end(conn, worker, "exit status 0")
        conn.execute(sa.update(table).where(table.c.id == gone.id).values(state="evicted"))
    assert read(engine, pool).state == "running"
    assert forget() == [], "a worker that has ended, and a pool"


def test_a_repeated_claim_renews_no_job_that_has_had_its_time(engine: sa.Engine) -> None:
    queue = Queue(engine)
    pool = start(engine, target="remote", project_id="p1")
    claim = remote.Claim(rows.new_id(), 1)
    with transaction(engine) as conn:
        worker = remote.register(conn, pool, host="x", pid=1, models=["m"])

    def repeat() -> list[str]:
        with transaction(engine) as conn:
            return [job.id for job in remote.turn(conn, pool, worker.id, claim=claim).jobs]

    (id,) = queue.add()
    assert repeat() == repeat() == [id]
    queue.change(id, started_at=clock.now() - 3600, lease_expires_at=clock.now() - 1)
    assert repeat() == []
    queue.tend()
    assert (queue.read(id).status, queue.read(id).lost) == ("pending", 1)


def test_every_living_state_ends_in_time(engine: sa.Engine, tmp_path: Path) -> None:
    host(engine)
    waiting = start(engine, devices=["GPU-0"])
    late, draining = start(engine, "b"), begun(engine, start(engine, "c"))[0]
    with transaction(engine) as conn:
        workers.move(conn, late, "begin", ADMIN)
        pools.stop(conn, "c", ADMIN)
        conn.execute(sa.update(table).values(deadline_at=1.0))
    settings = Settings(state_dir=tmp_path)
    loops.end_overdue(engine, settings)
    after = [read(engine, pool) for pool in (waiting, late, draining)]
    assert [pool.state for pool in after] == ["failed", "stopping", "stopping"]
    assert [pool.ends_as for pool in after[1:]] == ["failed", "stopped"]
    assert {pool.failure.get("code") for pool in after[:2]} == {"pool_late"}
    assert held(engine) == []


def test_a_pool_of_a_project_runs_its_jobs_only(engine: sa.Engine) -> None:
    queue = Queue(engine)
    host(engine)
    _, worker = begun(engine, start(engine, project_id="p2"))
    queue.add(1, "p1")
    ids = queue.add(1, "p2")
    with transaction(engine) as conn:
        leases.serve(conn, worker.id, ["m", "theirs"], {})
        jobs.enqueue(conn, "p2", [jobs.NewJob("theirs", {}, priority=9)], ADMIN)
        with pytest.raises(Problem, match="model_unknown"):
            jobs.enqueue(conn, "p1", [jobs.NewJob("theirs", {})], ADMIN)
    with transaction(engine) as conn:
        assert [job.id for job in leases.claim(conn, worker, limit=9)] == ids


def test_a_process_is_a_worker_s_own_by_id_and_time_of_its_start(engine: sa.Engine) -> None:
    """Ids of processes are used again."""
    worker = replace(Queue(engine).worker, pid=7, start_ticks=100)
    assert processes.leads(worker, Process(7, 100))
    assert not processes.leads(worker, Process(7, 101))
    assert not processes.leads(worker, Process(8, 100))


def test_a_pool_and_its_leases_end_together(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(engine)
    begun(engine, start(engine, devices=["GPU-0"]))
    with transaction(engine) as conn:
        pool = pools.evict(conn, "a", ADMIN)
    assert pool.state == "stopping"
    supervisor = Supervisor(Settings(state_dir=tmp_path), engine)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("as a full disk")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(workers, "advance", fail)
        supervisor._conclude(pool)
    assert (read(engine, pool).state, held(engine)) == ("stopping", ["GPU-0"])
    supervisor._conclude(pool)
    assert (read(engine, pool).state, held(engine)) == ("evicted", [])


def test_the_memory_of_the_host_warns_and_evicts(
    engine: sa.Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host(engine)
    small, large, kept = (
        begun(engine, start(engine, name, kill_on_oom=name != "kept"))[0]
        for name in ("small", "large", "kept")
    )
    loads = [
        Load(pool.id, size, 0.1, pool.kill_on_oom)
        for pool, size in ((small, 1), (large, 2), (kept, 3))
    ]
    supervisor = Supervisor(Settings(state_dir=tmp_path), engine)

    def states(used: int) -> list[str]:
        monkeypatch.setattr(memory, "of_host", lambda _own: (100, used))
        caplog.clear()
        supervisor._due.clear()
        with reading(engine) as conn:
            now = clock.read(conn)
        supervisor._relieve([read(engine, pool) for pool in (small, large, kept)], loads, now)
        return [read(engine, pool).state for pool in (small, large, kept)]

    assert states(84) == ["running"] * 3 and caplog.text == ""
    assert states(86) == ["running"] * 3
    assert "memory: 86 % of this host, 10 % of a worker" in caplog.text
    assert states(91) == ["running", "stopping", "running"]
    assert "Pool eviction" in caplog.text
    assert read(engine, large).failure["code"] == "memory_exceeded"
    assert states(91) == ["running", "stopping", "running"], "its memory comes free soon"
    with transaction(engine) as conn:
        conn.execute(sa.update(table).where(table.c.id == large.id).values(deadline_at=1.0))
    assert states(91) == ["stopping", "stopping", "running"], "a driver may hold its processes"


def test_a_late_process_finds_no_place(engine: sa.Engine) -> None:
    host(engine)
    pool, worker = begun(engine, start(engine))
    with transaction(engine) as conn:
        assert leases.enter(conn, worker.id, pid=8, start_ticks=2) is None, "it has a process"
        assert workers.add(conn, pool, "late", host="control", boot_id="b", cgroup="")
        workers.end(conn, workers.living(conn, [pool.id])[pool.id][-1], "never seen")
        assert leases.enter(conn, "late", pid=8, start_ticks=2) is None, "it is given up"
        pools.stop(conn, pool.id, ADMIN)
        assert workers.add(conn, pool, "more", host="control", boot_id="b", cgroup="") is None


@pytest.mark.postgres
def test_simultaneous_starts_exceed_no_limit(postgres_database: PostgresDatabase) -> None:
    engine = postgres_database.restore()
    host(engine)
    host(engine, id="host-2", name="other")
    results: list[str] = []

    def attempt(number: int) -> None:
        try:
            on = {"host": f"host-{number % 2 + 1}"}
            start(engine, f"p{number}", most=3, devices=["GPU-0"][: number % 3 == 0], **on)
            results.append("started")
        except Problem as problem:
            results.append(problem.code)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("started") == 3, results
    assert set(results) <= {"started", "pool_limit", "device_leased"}
    with reading(engine) as conn:
        assert sorted(conn.execute(sa.select(table.c.seat)).scalars()) == [1, 2, 3]
        leased = conn.execute(sa.select(device_leases.c.host_id)).scalars().all()
    assert len(leased) == len(set(leased))


def load(pool_id: str, size: int, share: float = 0.1, **values: bool) -> Load:
    return Load(pool_id, size, share, **{"kill_on_oom": True, **values})


@pytest.mark.covers("ORCH-8")
@pytest.mark.parametrize(
    ("loads", "host_share", "expected"),
    [
        ([load("a", 9), load("b", 1)], 0.89, None),
        ([load("a", 1), load("b", 9)], 0.90, "b"),
        ([load("a", 1), load("b", 9, kill_on_oom=False)], 0.99, "a"),
        ([load("a", 9), load("b", 1, 0.9)], 0.1, "b"),
        ([load("a", 1, killed=True), load("b", 9, 0.89)], 0.1, "a"),
        ([load("a", 9, 1.0, kill_on_oom=False, killed=True)], 0.1, None),
        ([], 1.0, None),
    ],
)
def test_the_largest_pool_ends_for_memory(
    loads: list[Load], host_share: float, expected: str | None
) -> None:
    chosen = victim(loads, host_share)
    assert (chosen.pool_id if chosen else None) == expected


@pytest.mark.covers("ORCH-8")
def test_groups_of_the_second_version_are_made_beside_the_service(tmp_path: Path) -> None:
    """As systemd's DelegateSubgroup lays them out. Files stand for the kernel's."""
    slice_ = tmp_path / "fs" / "gpuaas.service"
    unit = slice_ / "main"
    unit.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/x\n0::/top/gpuaas.service/main\n")
    mount = f"35 1 0:30 /top {tmp_path}/fs rw - cgroup2 cgroup2 rw,nsdelegate\n"
    (tmp_path / "mountinfo").write_text(f"34 1 0:9 / /proc rw - proc proc rw\n{mount}")
    assert memory.own_group(tmp_path) is None, "no memory controller"
    (unit / "memory.current").write_text("1\n")
    own_group = memory.own_group(tmp_path)
    assert own_group == memory.Group(2, unit)
    assert memory.parent_group(own_group) is None
    (slice_ / "cgroup.subtree_control").write_text("cpu memory\n")
    (slice_ / "cgroup.procs").write_text("")
    assert memory.parent_group(own_group) == memory.Group(2, slice_)
    group = Path(memory.make(memory.Group(2, slice_), "w1", 1 << 30))
    assert (group / "memory.max").read_text() == str(1 << 30)
    assert (group / "memory.swap.max").read_text() == "0"
    (group / "memory.current").write_text("1000\n")
    (group / "memory.stat").write_text("anon 700\ninactive_file 300\n")
    (group / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert memory.of_group(str(group)) == memory.Usage(700, 1)
    # The limit of the unit holds for all of its groups together.
    (unit / "memory.max").write_text("max\n")
    (slice_ / "memory.max").write_text("5000\n")
    (slice_ / "memory.current").write_text("4800\n")
    (slice_ / "memory.stat").write_text("inactive_file 300\n")
    (slice_ / "memory.events").write_text("oom_kill 0\n")
    assert memory.of_host(own_group) == (5000, 4500)
