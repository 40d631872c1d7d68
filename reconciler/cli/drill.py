"""`gpuaas drill`: rehearsals of an operator's emergencies, each with a verdict and its evidence.

They play on the running site. Jobs and workers are a drill's own, of its project alone.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli import output
from reconciler.cli.allocations import Project
from reconciler.cli.options import Reason
from reconciler.cli.session import client
from reconciler.model.errors import Problem
from reconciler.model.jobs import JobStatus
from reconciler.model.pools import APART, SERVING_POOLS, PoolState

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = typer.Typer(no_args_is_help=True, help="Rehearse emergencies of jobs and of the leader.")

_MAINTENANCE = "/control/maintenance"
_START_S = 60.0
# A lease of 30 s, the next sweep of a worker, and the job itself.
_RECLAIM_S = 60.0
# A term, in which the last leader holds back, and elections every two seconds.
_LEADER_S = 30.0
# Three heartbeats of a worker.
_BEATS_S = 30.0
# For loading the model, and for the grace period of an eviction.
_POOL_S = 120.0
# The model that every host of pools has for drills.
_MODEL = "drill"
Memory = Annotated[int, typer.Option(min=256, help="MiB of the worker.")]
Patience = Annotated[int, typer.Option(min=1, help="Seconds for running jobs to end in.")]


class _Drill:
    def __init__(self, project: str) -> None:
        self.project = project
        self.model = f"drill-{secrets.token_hex(4)}"
        self.folder = Path()
        self.evidence: list[dict[str, Any]] = []
        self.jobs: list[_Jobs] = []

    def check(self, step: str, holds: object, found: object) -> bool:
        """Record the finding of a step, and whether it is as expected."""
        self.evidence.append({"holds": bool(holds), "step": step, "found": str(found)})
        return bool(holds)

    @contextmanager
    def worker(self, function: str, model: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """A worker of this machine that serves a function of `pools.drills` under a name, for jobs
        of the drill's project alone. It may be killed.

        A pool without a host gives it the project. Its record is deleted, or jobs for its model
        would be admitted for days.
        """
        from reconciler.db import rows
        from reconciler.db.engine import open_existing, retrying
        from reconciler.pools import pools, workers
        from reconciler.pools.processes import MARK
        from reconciler.settings import Settings

        model = model or self.model
        wish = {
            **{"name": f"{self.model}-{secrets.token_hex(2)}", "models": [model]},
            **{"target": "remote", "project_id": self.project, "reason": "drill"},
        }
        pool_id = client().post("/pools", wish)["id"]
        id = rows.new_id()
        command = [sys.executable, "-m", "reconciler.cli.main", "jobs", "worker"]
        command += ["--model", f"{model}=reconciler.pools.drills:{function}"]
        try:
            with (
                open_existing(Settings()) as engine,
                (self.folder / "worker.log").open("ab") as output,
            ):

                def add(conn: Connection) -> None:
                    workers.add(conn, pools.get(conn, pool_id), id, host=socket.gethostname())

                retrying(engine, add)
                mark = {**os.environ, MARK: f"{self.model}/{id}"}
                process = subprocess.Popen(command, env=mark, stdout=output, stderr=output)
                try:
                    yield process
                finally:
                    process.kill()
                    process.wait()
                    retrying(engine, partial(workers.forget, worker_id=id))
        finally:
            client().post(f"/pools/{pool_id}/stop", {"reason": "end of the drill"})


@contextmanager
def _drill(name: str, project: str = "") -> Iterator[_Drill]:
    drill = _Drill(project)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpuaas-drill-") as folder:
        drill.folder = Path(folder)
        try:
            yield drill
        except Problem as problem:
            evidence = f"{problem.code}: expected {problem.expected}; found {problem.found}"
            drill.check("the drill came to its end", False, evidence)
        finally:
            # Jobs that a failed drill leaves would wait for ever, or disturb the next drill.
            for jobs in drill.jobs:
                with suppress(Problem):
                    jobs.give_up()
    passed = all(row["holds"] for row in drill.evidence)
    verdict = "passed" if passed else "failed"
    seconds = round(time.monotonic() - began, 1)
    document = {"drill": name, "verdict": verdict, "seconds": seconds, "evidence": drill.evidence}
    if not output.in_json(document):
        output.rows(drill.evidence, "holds", "step", "found")
        output.line(f"drill {name}: {verdict} after {seconds} s")
    if not passed:
        raise typer.Exit(1)


@app.command()
def drain(project: Project, patience: Patience = 300) -> None:
    """Drain the site, replace a worker, resume: no job fails or is lost.

    Jobs of all projects are refused meanwhile. None is canceled: the site resumes in any case.
    """
    with _drill("drain", project) as drill:
        jobs = _Jobs(drill)
        before = client().get(_MAINTENANCE)["mode"]
        if not drill.check("the site is in normal operation", before == "normal", before):
            return
        with drill.worker("wait") as process:
            jobs.submit([{"seconds": 1}] * 4)
            jobs.reach(lambda states: "running" in states, _START_S)
            try:
                _drained(drill, jobs, patience)
                process.send_signal(signal.SIGTERM)
                code = process.wait(timeout=60)
                drill.check("the worker ended in order", code == 0, f"status {code}")
            finally:
                client().post(_MAINTENANCE, {"mode": "normal", "reason": "end of the drill"})
        with drill.worker("wait"):
            jobs.reach(lambda states: set(states) == {"done"}, _START_S)
        rows = jobs.read()
        drill.check("all jobs are done", {row["status"] for row in rows} == {"done"}, jobs.states())
        tries = [(row["attempts"], row["lost"]) for row in rows]
        drill.check("each ran once", set(tries) == {(1, 0)}, f"(attempts, lost): {tries}")


def _drained(drill: _Drill, jobs: _Jobs, patience: int) -> None:
    # The longest deadline, so that the drill cancels no job of a tenant.
    wish = {"mode": "drain", "drain_deadline_s": 86_400, "reason": "drill"}
    client().post(_MAINTENANCE, wish)
    try:
        jobs.submit([{"seconds": 0}])
        drill.check("a new job is refused", False, "it was admitted")
    except Problem as problem:
        retry = problem.detail.get("retry_after_s")
        expected = (problem.code, problem.status) == ("maintenance", 503) and retry
        drill.check("a new job is refused", expected, f"{problem.code}, again after {retry} s")
    state, took = _reach(_MAINTENANCE, "mode", "drained", patience)
    evidence = f"{state['mode']} {took}, {state['running']} run"
    drill.check("no job runs", (state["mode"], state["running"]) == ("drained", 0), evidence)
    health = client().get("/health")
    drill.check("the site is alive", health["status"] == "ok", health["processes"])


@app.command()
def reclaim(project: Project) -> None:
    """Kill a worker in the middle of a job: another worker does the job."""
    with _drill("reclaim", project) as drill:
        jobs = _Jobs(drill)
        before = _metric("reclaimed_total")
        with drill.worker("wait") as process:
            jobs.submit([{"seconds": 2}])
            jobs.reach(lambda states: states == ["running"], _START_S)
            process.kill()
            process.wait()
        drill.check("the worker was killed while its job ran", True, f"process {process.pid}")
        with drill.worker("wait"):
            jobs.reach(lambda states: states == ["done"], _RECLAIM_S)
        (row,) = jobs.read()
        drill.check("another worker did the job", row["status"] == "done", row["status"])
        drill.check("its loss is recorded", row["lost"] == 1, f"lost {row['lost']} times")
        after = _metric("reclaimed_total")
        drill.check("the loss is counted", after > before, f"{before:.0f} before, {after:.0f} now")


@app.command()
def leader(reason: Reason = "drill") -> None:
    """End the leader's term: another process takes over, and pools keep their workers."""
    with _drill("leader") as drill:
        workers = _workers()
        before = client().get("/status/leader")
        candidates = client().get("/health")["processes"].get("loops", 0)
        client().post("/control/leader/release", {"reason": reason})
        after, took = _reach("/status/leader", "live", True, _LEADER_S)
        live = after["live"] and after["epoch"] > before["epoch"]
        evidence = f"term {after['epoch']} {took}; before: term {before['epoch']}"
        drill.check("a process leads again", live, evidence)
        evidence = f"{after['holder']} after {before['holder']}, of {candidates} candidates"
        other = after["holder"] != before["holder"] or candidates < 2
        drill.check("another process leads, if there is one", other, evidence)
        _until(_BEATS_S, lambda: _gone(workers) or not _silent(workers))
        gone, silent = _gone(workers), _silent(workers)
        evidence = f"{len(workers)} workers before; gone: {gone}, without a heartbeat: {silent}"
        drill.check("the workers of pools are known and serve as before", not silent, evidence)
        health = client().get("/health")
        drill.check("the site is alive", health["status"] == "ok", health["processes"])


@app.command()
def evict(project: Project, memory: Memory = 256) -> None:
    """Evict a pool that runs a job: its processes and leases are gone, other pools are not touched,
    and the job ends once, in another worker.
    """
    with _drill("evict", project) as drill:
        others = _serving()
        before = _metric("worker_pool_evictions_total")
        jobs = _Jobs(drill, _MODEL)
        with _pool(drill, memory) as (path, pids):
            # Longer than the grace period, so that the pool's worker cannot end it.
            jobs.submit([{"seconds": 10}])
            jobs.reach(lambda states: states == ["running"], _START_S)
            drill.check("a job runs in it", jobs.states() == ["running"], jobs.states())
        pool, took = _reach(path, "state", "evicted", _POOL_S)
        drill.check("it is evicted", pool["state"] == "evicted", f"{pool['state']} {took}")
        hosts = {host["id"]: host["name"] for host in client().get("/pools/hosts")["hosts"]}
        if hosts.get(pool["host_id"]) == socket.gethostname():
            alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
            drill.check("its processes are gone", not alive, f"{alive} left of {pids}")
        leases = [each for each in client().items("/leases") if each["pool_id"] == pool["id"]]
        drill.check("its leases are released", not leases, f"{len(leases)} left")
        after = _metric("worker_pool_evictions_total")
        drill.check("it is counted", after > before, f"{before:.0f} before, {after:.0f} now")
        gone = sorted(others - _serving())
        drill.check("other pools serve as before", not gone, f"{gone} of {len(others)} do not")
        with drill.worker("wait", _MODEL):
            jobs.reach(lambda states: states == ["done"], _RECLAIM_S)
        (row,) = jobs.read()
        evidence = f"{row['status']}, {row['attempts']} attempts, lost {row['lost']} times"
        drill.check("its job ended once", (row["status"], row["attempts"]) == ("done", 1), evidence)


@app.command()
def oom(project: Project, memory: Memory = 256) -> None:
    """Let a job exceed the memory of its worker: the kernel kills its process, and counts it.
    Another pool has `kill_on_oom`, and is evicted.

    Refused on machines where the service samples memory, because nothing but itself would count.
    """
    with _drill("oom", project) as drill:
        hosts = client().get("/pools/hosts")["hosts"]
        kinds = {host["id"]: host["isolation"] for host in hosts}
        kernel = [id for id, kind in kinds.items() if kind.startswith("cgroup")]
        named = [f"{host['name']}: {host['isolation']}" for host in hosts]
        evidence = ", ".join(named) or "no machine"
        if not drill.check("the kernel keeps the memory limits of a machine", kernel, evidence):
            return
        jobs = _Jobs(drill, _MODEL)
        with _pool(drill, memory, kernel[0]) as (path, pids):
            # Canceled before its attempts end, because a dead letter would disturb other drills.
            jobs.submit([{"seconds": 0, "mib": 2 * memory}], max_attempts=10)
            _until(_START_S, lambda: jobs.read()[0]["failure"])
            code = (jobs.read()[0]["failure"] or {}).get("code")
            jobs.cancel()
            drill.check("the call has failed for its memory", code == "memory_exceeded", code)

            def kills() -> int:
                return sum(int(worker["oom_kills"]) for worker in client().get(path)["workers"])

            _until(_START_S, kills)
            drill.check("the kernel has counted it", kills() > 0, f"oom_kill {kills()}")
            now = [worker["pid"] for worker in client().get(path)["workers"]]
            drill.check("the worker lives", now == pids, f"{now}; before: {pids}")
            jobs.submit([{"seconds": 0}])
            jobs.reach(lambda states: states == ["canceled", "done"], _START_S)
            drill.check("it takes the next job", jobs.states()[-1] == "done", jobs.states())
        jobs = _Jobs(drill, _MODEL)
        with _pool(drill, memory, kernel[0], kill_on_oom=True) as (path, _):
            jobs.submit([{"seconds": 0, "mib": 2 * memory}], max_attempts=10)
            pool, took = _reach(path, "state", "evicted", _POOL_S)
            jobs.cancel()
            code = pool["failure"].get("code")
            evicted = (pool["state"], code) == ("evicted", "memory_exceeded")
            evidence = f"{pool['state']} {took}, {code}"
            drill.check("a pool with kill_on_oom is evicted for its memory", evicted, evidence)


@contextmanager
def _pool(
    drill: _Drill, memory: int, host: str = "", *, kill_on_oom: bool = False
) -> Iterator[tuple[str, list[int]]]:
    """A pool of the drill while it runs: its path and its processes. It ends by eviction."""
    wish = {
        # The pool before may not have ended yet.
        **{"name": f"{drill.model}-kill" if kill_on_oom else drill.model, "host": host},
        **{"models": [_MODEL], "memory_mib": memory, "kill_on_oom": kill_on_oom},
        **{"project_id": drill.project, "grace_s": 2, "reason": "drill"},
    }
    path = f"/pools/{client().post('/pools', wish)['id']}"
    try:
        pool, _ = _reach(path, "state", "running", _POOL_S)
        pids = [worker["pid"] for worker in pool["workers"]]
        runs = pool["state"] == "running" and pids
        drill.check("a pool runs", runs, f"{pool['state']}, processes {pids}")
        yield path, pids
    finally:
        client().post(f"{path}/evict", {"reason": "end of the drill"})


def _workers() -> dict[str, str]:
    """Last heartbeats of the workers of pools that run on machines of the service."""
    return {
        worker["id"]: worker["beat_at"]
        for pool in client().items("/pools", live=True)
        if pool["state"] == PoolState.RUNNING and pool["host_id"] not in APART
        for worker in pool["workers"]
    }


def _gone(before: dict[str, str]) -> list[str]:
    return sorted(before.keys() - _workers())


def _silent(before: dict[str, str]) -> list[str]:
    """Workers without a heartbeat since then."""
    now = _workers()
    return [id for id, beat in before.items() if now.get(id, beat) == beat]


def _serving() -> set[str]:
    """Pools that take jobs, or will. Others may end at any time."""
    return {pool["id"] for pool in client().items("/pools") if pool["state"] in SERVING_POOLS}


@app.command()
def dlq(
    project: Project,
    count: Annotated[int, typer.Option(min=2, max=100, help="Jobs that fail.")] = 5,
) -> None:
    """Let jobs become dead letters, mend the cause, and take them back by a sample first.

    The project must have no other dead letters.
    """
    with _drill("dlq", project) as drill:
        jobs = _Jobs(drill)
        others = client().get(jobs.path, status="dead_letter", limit=1)["items"]
        if not drill.check(
            "the project has no dead letters", not others, f"{len(others)} at least"
        ):
            return
        cause = drill.folder / "broken"
        cause.touch()
        with drill.worker("fail"):
            jobs.submit([{"broken": str(cause)}] * count, max_attempts=1)
            jobs.reach(lambda states: set(states) == {"dead_letter"}, _START_S)
            codes = {(row["failure"] or {}).get("code") for row in jobs.read()}
            drill.check(
                "they failed for one reason", codes == {"function_failed"}, sorted(map(str, codes))
            )
            jobs.reprocess(sample=1)
            jobs.reach(lambda states: set(states) == {"dead_letter"}, _START_S)
            try:
                jobs.reprocess(all=True)
                drill.check("a bad sample keeps the others back", False, "all were queued")
            except Problem as problem:
                kept = problem.code == "sample_unfinished"
                drill.check("a bad sample keeps the others back", kept, problem.code)
            cause.unlink()
            jobs.reprocess(sample=1, force=True)
            jobs.reach(lambda states: states.count("done") == 1, _START_S)
            drill.check("a sample succeeds once the cause is mended", True, jobs.states())
            jobs.reprocess(all=True)
            jobs.reach(lambda states: set(states) == {"done"}, _START_S)
            drill.check("all are done", set(jobs.states()) == {"done"}, jobs.states())


class _Jobs:
    """Jobs of a drill."""

    def __init__(self, drill: _Drill, model: str = "") -> None:
        self.path = f"/projects/{drill.project}/jobs"
        self._model = model or drill.model
        self._drill = drill
        self._ids: list[str] = []
        drill.jobs.append(self)

    def submit(self, inputs: list[dict[str, Any]], **options: Any) -> None:
        """Queue jobs, as soon as the drill's worker serves its model."""
        body = [{"model": self._model, "input": given, **options} for given in inputs]
        end = time.monotonic() + _START_S
        while True:
            try:
                self._ids += client().post(f"{self.path}/batch", {"jobs": body})["ids"]
                return
            except Problem as problem:
                if problem.code != "model_unknown" or time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def read(self) -> list[dict[str, Any]]:
        return [client().get(f"{self.path}/{id}") for id in self._ids]

    def states(self) -> list[str]:
        return [row["status"] for row in self.read()]

    def reach(self, goal: Callable[[list[str]], bool], seconds: float) -> None:
        """Wait for states. Evidence if they do not come."""
        if not _until(seconds, lambda: goal(self.states())):
            evidence = f"{self.states()} after {seconds:.0f} s"
            self._drill.check("the jobs go on", False, evidence)

    def cancel(self) -> None:
        for id in self._ids:
            client().post(f"{self.path}/{id}/cancel")

    def give_up(self) -> None:
        """Cancel those that have not ended, and dead letters."""
        for row in self.read():
            if row["status"] not in (JobStatus.DONE, JobStatus.CANCELED):
                client().post(f"{self.path}/{row['id']}/cancel")

    def reprocess(self, **wish: Any) -> None:
        client().post(f"{self.path}/dlq/reprocess", {**wish, "reason": "drill"})


def _until(seconds: float, ask: Callable[[], object]) -> bool:
    end = time.monotonic() + seconds
    while not ask():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _reach(path: str, field: str, goal: object, seconds: float) -> tuple[dict[str, Any], str]:
    """A document once its field has this value, or when the time is over; and the time it took."""
    began = time.monotonic()
    _until(seconds, lambda: client().get(path)[field] == goal)
    took_s = time.monotonic() - began
    return client().get(path), f"after {took_s:.1f} s"


def _metric(name: str) -> float:
    for line in client().text("/metrics").splitlines():
        if line.startswith(f"gpu_orchestrator_{name} "):
            return float(line.split()[1])
    return 0.0
