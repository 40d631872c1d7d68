"""Scripted runs, and workers that attend to the next task."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.model.states import TaskKind
from reconciler.records import leasing, nodes, queue
from reconciler.runs import collect
from reconciler.runs.collect import Outcome, Phase, RunState
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from reconciler.work import worker
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import Machines

Attend = Callable[[], Task]
READINESS = {
    "mac": "52:54:00:64:00:0a",
    "expected_ip": "10.100.0.10",
    "actual_ip": "10.100.0.10",
    "lease_state": "bound",
}


class Runs:
    """Stands in for ansible-runner: records launches and answers as told."""

    def __init__(self) -> None:
        self.launched: list[RunSpec] = []
        self.outcome: Outcome | None = None
        self.alive = False
        # Events while the run lives, a single event at each look; the last as it ends.
        self.during: list[Callable[[], None]] = []

    def launch(self, _site: object, spec: RunSpec) -> Path:
        self.launched.append(spec)
        self.alive = True
        return Path("unused")

    def observe(self, _directory: Path) -> RunState:
        if self.alive and self.during:
            self.during.pop(0)()
            if self.during:
                return RunState(Phase.ALIVE)
        if self.outcome is not None and self.alive:
            return RunState(Phase.FINISHED, self.outcome)
        return RunState(Phase.ALIVE if self.alive else Phase.ABSENT, None)

    def ends(self, status: str = "successful", **result: Any) -> None:
        document = {"schema": 1, "ok": status == "successful", "step": "", "error": {}, **result}
        report = document if status in ("successful", "failed") else None
        self.outcome = Outcome(status, report)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    scripted = Runs()
    monkeypatch.setattr(worker, "launch", scripted.launch)
    monkeypatch.setattr(worker, "_site", lambda *_: None)
    monkeypatch.setattr(collect, "observe", scripted.observe)
    return scripted


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, poll_s=0.01)


def attend_next(engine: sa.Engine, settings: Settings, *kinds: TaskKind) -> Task:
    """Lease the next task, of these kinds if any are named, and bring it to its end."""
    with transaction(engine) as conn:
        (task,) = leasing.lease(conn, "worker", kinds=kinds or None)
    worker.attend(engine, settings, task, threading.Event())
    with transaction(engine) as conn:
        return queue.get(conn, task.id)


def attending(engine: sa.Engine, settings: Settings, runs: Runs, *kinds: TaskKind) -> Attend:
    """Each call brings the next task of these kinds to its end, with a run of its own."""

    def attend() -> Task:
        runs.alive = False
        return attend_next(engine, settings, *kinds)

    return attend


def canceled_at_launch(engine: sa.Engine, runs: Runs) -> Callable[[object, RunSpec], Path]:
    """A launch of the only task, which is canceled at that moment."""

    def launch(site: object, spec: RunSpec) -> Path:
        with transaction(engine) as conn:
            (task,) = queue.every(conn)
            queue.cancel(conn, task.id, ADMIN)
        return runs.launch(site, spec)

    return launch


@pytest.fixture
def machines(site: Site) -> Machines:
    """A site with a whole machine."""
    made = Machines(site)
    made.machine(profile="lab")
    return made


def statuses(sold: Site) -> list[str]:
    """The states of the slots of n1, sorted."""
    with transaction(sold.engine) as conn:
        return sorted(sold.statuses(conn))


@pytest.fixture
def attend(sold: Site, tmp_path: Path, runs: Runs) -> Attend:
    """Lease the next task and bring it to its end."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
    return partial(attend_next, sold.engine, Settings(state_dir=tmp_path, poll_s=0.01))


def launched(sold: Site) -> str:
    with transaction(sold.engine) as conn:
        return sold.allocate(conn)
