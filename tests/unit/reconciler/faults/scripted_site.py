"""A site with a scripted host: its database is real, its workers are real, runs are played.

A run stands where ansible-runner's process does: it is launched once, observed from outside, and
can be killed, stopped for a while, or sent twice. Its events go through the real recorder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import invariants
from reconciler.model.errors import Problem
from reconciler.model.states import TaskState
from reconciler.records import leasing, queue
from reconciler.runs import collect, contract
from reconciler.runs.collect import Outcome, Phase, RunState
from reconciler.runs.events import Recorder, judge
from reconciler.runs.paths import RunPaths, run_directory
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.loops import end_overdue
from tests.unit.reconciler import wipes
from tests.unit.reconciler.conftest import Database, Site
from tests.unit.reconciler.faults.host import Host
from tests.unit.reconciler.faults.playing import How, Killed, Playing, Step, play

# How a step is done, by its place in the run; Stopped and Killed may come out of it.
Decide = Callable[["Run", int, Step], How | None]
# State of a host that belongs to a single tenant.
EMPTY = ("reservations", "seeds", "running", "off", "plans", "accounts", "mounts", "baselines")


class Stopped(Exception):
    """The run's process stands still; it may go on later without notice."""


@dataclass
class Unanswered(Exception):
    """Contact with the host is lost. message: that of SSH at last."""

    message: str


@dataclass
class Run:
    """A run. steps: the steps that were begun."""

    spec: RunSpec
    playing: Playing
    recorder: Recorder
    phase: Phase = Phase.ALIVE
    outcome: Outcome | None = None
    steps: list[Step] = field(default_factory=list)
    pending: Step | None = None


class Runner:
    """Plays every run at once when it is launched.

    faults: the fault of the next run, by kind of task.
    """

    def __init__(self, host: Host, state_dir: Path, discovery: dict[str, Any]) -> None:
        self.host, self.runs = host, dict[str, Run]()
        self._state_dir, self._discovery = state_dir, discovery
        self.faults: dict[str, Decide] = {}
        self.dies_before_recording = False

    def launch(self, _site: object, spec: RunSpec) -> Path:
        directory = run_directory(self._state_dir, spec.run_id)
        if spec.run_id in self.runs:
            return directory
        contract.check_vars(spec.playbook, spec.variables)
        directory.mkdir(parents=True, exist_ok=True)
        run = Run(spec, self.playing(spec), Recorder(RunPaths(directory).progress))
        self.runs[spec.run_id] = run
        self.go_on(run, self.faults.pop(spec.variables["slice_run"]["kind"], None))
        return directory

    def playing(self, spec: RunSpec) -> Playing:
        """The steps of this run, from the beginning."""
        return play(spec.playbook, spec.variables, self.host.act)

    def go_on(self, run: Run, decide: Decide | None = None) -> None:
        """Play the run to its end, or to where `decide` lets it go no further."""
        try:
            if run.spec.playbook in ("discover", "parity"):
                verdict = self._seen(run.spec.playbook)
            else:
                verdict = self._through(run, decide)
        except Stopped:
            return
        except Unanswered as lost:
            self._tell(run, "runner_on_unreachable", run.steps[-1], res={"msg": lost.message})
            run.phase = Phase.FINISHED
            verdict_of_run = judge(run.recorder, "failed", 4, 1.0)
            run.outcome = _outcome(verdict_of_run)
            return
        except Killed:
            run.phase = Phase.LOST
            run.outcome = Outcome("lost", None, "process_gone")
            raise
        data = {"artifact_data": {"slice_result": verdict["result"]}, "dark": {}}
        run.recorder({"event": "playbook_on_stats", "event_data": data})
        verdict_of_run = judge(run.recorder, "successful" if verdict["ok"] else "failed", 0, 1.0)
        run.phase = Phase.FINISHED
        run.outcome = _outcome(verdict_of_run)

    def _through(self, run: Run, decide: Decide | None) -> dict[str, Any]:
        how: How | None = None
        try:
            while True:
                if run.pending is None:
                    if run.steps:
                        run.pending = run.playing.send(how)
                        self._tell(run, "runner_on_ok", run.steps[-1])
                    else:
                        run.pending = next(run.playing)
                    run.steps.append(run.pending)
                    self._tell(run, "playbook_on_task_start", run.pending)
                how = decide(run, len(run.steps) - 1, run.pending) if decide else None
                run.pending = None
        except StopIteration as end:
            verdict: dict[str, Any] = end.value
            return verdict

    def _tell(self, run: Run, event: str, step: Step, **more: Any) -> None:
        data = {"task": step.name, "task_action": f"gpuaas.slice.{step.module}"}
        data |= {"task_uuid": str(len(run.steps)), **more}
        run.recorder({"event": event, "event_data": data})

    def _seen(self, playbook: str) -> dict[str, Any]:
        """Discovery and parity report of a healthy host."""
        identity = self._discovery["identity"] | {"boot_id": self.host.boot_id}
        self._discovery = self._discovery | {"identity": identity}
        report: dict[str, Any] = {"intent": "slice", "failures": 0, "warnings": 0}
        report |= {**wipes.proven(self._discovery)}
        evidence = {"discovery": self._discovery} if playbook == "discover" else {"parity": report}
        document = {"schema": 1, "playbook": playbook, "ok": True, "step": "", "error": {}}
        return {"ok": True, "result": document | {"evidence": evidence}}

    def observe(self, directory: Path) -> RunState:
        run = self.runs.get(directory.name)
        if run is None:
            return RunState(Phase.ABSENT)
        if run.phase is Phase.FINISHED and self.dies_before_recording:
            self.dies_before_recording = False
            raise Killed
        return RunState(run.phase, run.outcome)


def _outcome(verdict: dict[str, Any]) -> Outcome:
    names = set(Outcome.__dataclass_fields__) & set(verdict)
    return Outcome(**{name: verdict[name] for name in names})


class ScriptedSite:
    """A scenario: a database and a host of its own, begun from a kept moment."""

    def __init__(self, site: Site, runner: Runner, settings: Settings) -> None:
        self.site, self.engine = site, site.engine
        self.runner, self.host, self.settings = runner, runner.host, settings

    def work(self) -> None:
        """Workers do all that can be done, and look at deadlines."""
        stopping = threading.Event()
        stopping.set()
        for _ in range(20):
            with transaction(self.engine) as conn:
                leased = leasing.lease(conn, "worker", limit=5)
            if not leased:
                return
            for task in leased:
                worker.attend(self.engine, self.settings, task, stopping)
        raise AssertionError("the work does not come to an end")

    def die(self) -> None:
        """As `work`, and the reconciler is killed in the middle; then another reconciler starts."""
        with pytest.raises(Killed):
            self.work()
        self.restart()

    def restart(self) -> None:
        """Another reconciler takes over the tasks of the first."""
        with transaction(self.engine) as conn:
            queue.abandon(conn, "worker")
        self.work()

    def deadlines_pass(self) -> None:
        """All running tasks are overdue and without a lease; deadlines are checked twice."""
        for _ in range(2):
            with transaction(self.engine) as conn:
                queue.abandon(conn, "worker")
                running = tables.tasks.c.state == TaskState.RUNNING
                past = clock.now() - 1
                conn.execute(sa.update(tables.tasks).where(running).values(deadline_at=past))
            end_overdue(self.engine, self.settings)

    def sound(self, where: str) -> None:
        """Every invariant of the database holds, and its records are true of the host."""
        with reading(self.engine) as conn:
            violations = invariants.check(conn)
            lies = self.lies(conn)
        assert violations == [], f"{where}: {violations}"
        assert lies == [], f"{where}: {lies}"

    # Differences between slices and whole machines.
    def lies(self, conn: sa.Connection) -> list[str]:
        raise NotImplementedError

    def launch(self, *, everything: bool = False) -> str:
        raise NotImplementedError

    def release(self, allocation_id: str) -> None:
        raise NotImplementedError

    def recover(self) -> bool:
        """Request the recovery that an operator would; False: nothing to recover."""
        raise NotImplementedError

    def state(self, allocation_id: str) -> str:
        with reading(self.engine) as conn:
            query = sa.select(tables.allocations.c.state)
            row = conn.execute(query.where(tables.allocations.c.id == allocation_id))
            return str(row.scalar_one())

    def reinstall(self) -> None:
        """Install a machine anew that a tenant had as root; a slice host is none."""

    def pristine(self, where: str) -> None:
        """Nothing of anybody is left, and all of it is on sale."""
        self.sound(where)
        left = [entry.slot_id for entry in self.host.ledger() if entry.dirty or entry.allocation_id]
        assert left == [], f"{where}: in the ledger {left}"
        for name in EMPTY:
            assert not getattr(self.host, name), f"{where}: {name} {getattr(self.host, name)}"
        assert not any(self.host.disks.values()), f"{where}: {self.host.disks}"
        # These stay: the cached image, and the slots' records of clones, outdated by the wipe.
        assert self.host.images <= self._catalogue(), f"{where}: images {self.host.images}"
        wiped = {
            entry.slot_id for entry in self.host.ledger() if entry.disk_identity in self.host.proofs
        }
        assert wiped.issuperset(self.host.clones), f"{where}: clones {self.host.clones}"

    def _catalogue(self) -> set[str]:
        with reading(self.engine) as conn:
            return set(conn.execute(sa.select(tables.images.c.digest)).scalars())


def scripted_site(
    kind: type[ScriptedSite],
    database: Database,
    moment: tuple[Path, Host],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> ScriptedSite:
    """A scenario at a kept moment."""
    template, host = moment
    engine = database.restore(template)
    site = Site.__new__(Site)
    site.engine, site.project = engine, "p1"
    settings = Settings(state_dir=folder, poll_s=0.01)
    # All scenarios have the same keys, because ssh-keygen makes them for the first only.
    keys = database.path.with_name("trust")
    keys.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / "trust").symlink_to(keys)
    number = 1 if kind.__name__ == "Whole" else 0
    runner = Runner(host.copied(), folder, site.document(number))
    monkeypatch.setattr(worker, "launch", runner.launch)
    monkeypatch.setattr(worker, "_site", lambda *_: None)
    monkeypatch.setattr(collect, "observe", runner.observe)
    scripted = kind(site, runner, settings)
    with reading(engine) as conn:
        query = sa.select(tables.images.c.id)
        site.image = str(conn.execute(query).scalar_one())
    return scripted


def refused(call: Callable[[], Any]) -> str:
    """The code with which it is refused; "" when it is not."""
    try:
        call()
    except Problem as problem:
        return problem.code
    return ""


def ended(scripted: ScriptedSite, kind: str) -> Task:
    """The task that the fault was in."""
    with reading(scripted.engine) as conn:
        return min(
            (task for task in queue.every(conn) if task.kind == kind),
            key=lambda task: (task.finished_at or 0, task.created_at),
        )
