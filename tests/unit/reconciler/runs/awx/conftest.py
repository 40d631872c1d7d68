"""Runs as jobs of a stand-in AWX, followed in this process or in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.runs import collect, launch, lock
from reconciler.runs.awx import job
from reconciler.runs.awx.job import Pace
from reconciler.runs.contract import PLAYBOOKS
from reconciler.runs.launch import Site
from reconciler.runs.paths import RunPaths, read_json
from reconciler.runs.spec import NodeAccess, RunSpec
from tests.standin.awx import FIRST_TEMPLATE
from tests.standin.controller import Controller, standing

ROOT = Path(__file__).resolve().parents[5]
NODE = NodeAccess("node-1", "192.0.2.7", port=2222)
PACE = Pace(every=0.01, longest=0.05, quiet=0.6, gap=0.2, saving=0.3, again=0.05)
RESULT = {
    "schema": 1,
    "playbook": "prepare_runtime",
    "ok": True,
    "step": "",
    "error": {},
    "evidence": {"network": {"bridge": "ovsbr0"}},
}
# The job template of that playbook in the stand-in.
TEMPLATE = FIRST_TEMPLATE + PLAYBOOKS.index("prepare_runtime")
LAUNCH = f"POST /job_templates/{TEMPLATE}/launch/"


def spec(run_id: str = "run-1", deadline_s: int = 60, word: str = "lab") -> RunSpec:
    run = {"id": run_id, "task_id": "t", "kind": "k", "node_id": "node-1", "correlation_id": "c-1"}
    profile = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    profile["nvme"]["exclude_models"] = [word]
    variables = {"slice_run": run, "slice_profile": profile}
    return RunSpec(run_id, "prepare_runtime", NODE, variables, deadline_s, "c-1")


def events(*tasks: str, **more: Any) -> list[dict[str, Any]]:
    """Events of ansible-runner for successful tasks."""
    made: list[dict[str, Any]] = [{"event": "playbook_on_start", "event_data": {}}]
    for task in tasks:
        data = {"task": task, "task_action": "ansible.builtin.command", "task_uuid": task}
        made.append({"event": "playbook_on_task_start", "event_data": data})
        done = {**data, "res": {"changed": False}, "duration": 0.5}
        made.append({"event": "runner_on_ok", "event_data": done})
    made.append({"event": "playbook_on_stats", "event_data": {}})
    return [
        {**event, "counter": number, "stdout": f"line {number}", **more}
        for number, event in enumerate(made, 1)
    ]


@pytest.fixture(scope="package")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with standing(tmp_path_factory.mktemp("awx")) as controller:
        yield controller


@pytest.fixture
def awx(process: Controller) -> Controller:
    process.begin(artifacts={"slice_result": RESULT}, events=events("One", "Two"))
    return process


@pytest.fixture
def site(awx: Controller, tmp_path: Path) -> Iterator[Site]:
    """A site whose runs are followed no longer than the test, whatever became of them."""
    yield Site(tmp_path, ROOT / "build" / "collections", None, awx=awx.access)
    for run_dir in (tmp_path / "runs").glob("*"):
        assert lock.end_processes(run_dir) == []


Play = Callable[..., dict[str, Any] | None]


@pytest.fixture
def prepared(site: Site, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A launched run without a process of its own: the test plays it."""
    monkeypatch.setattr(launch, "_spawn", lambda *_: None)
    return RunPaths(launch.launch(site, spec()))


@pytest.fixture
def play(prepared: RunPaths) -> Play:
    def play_once(
        stop_requested: Callable[[], bool] = lambda: False, **pace: float
    ) -> dict[str, Any] | None:
        manifest = read_json(prepared.manifest)
        assert manifest is not None
        quick = Pace(**{**PACE.__dict__, **pace})
        return job.play(prepared, manifest, stop_requested, quick)

    return play_once


def steps(paths: RunPaths) -> list[tuple[str, str]]:
    return [(line["event"], line["task"]) for line in collect.progress(paths.root)[0]]
