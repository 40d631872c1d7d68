"""Whole runs: a process that follows, is killed and begun again; a playbook that is really run."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from reconciler.runs import collect, launch, lock
from reconciler.runs.awx import job
from reconciler.runs.collect import Phase
from reconciler.runs.launch import Site
from reconciler.runs.paths import RunPaths, read_json
from tests.standin.awx import REAPED_AT_START
from tests.standin.controller import TOKEN, Controller
from tests.unit.reconciler.runs.awx.conftest import LAUNCH, PACE, RESULT, ROOT, spec, steps
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("CTRL-9")
LIMIT_S = 45


def test_a_playbook_that_awx_really_runs(awx: Controller, site: Site) -> None:
    """Its variables come through as text, its events as progress, its result as an artifact."""
    word = "{{ lookup('pipe', 'id') }}"
    play = str(ROOT / "tests/data/playbooks/run_awx.yml")
    awx.begin(play=play, hosts=["node-1"], privileged=True)
    run_dir = launch.launch(site, spec(word=word))
    assert collect.observe(run_dir).phase is Phase.ALIVE
    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert outcome.ok, (outcome, collect.output(run_dir))
    assert outcome.result is not None
    evidence = {"word": word, "node": "node-1", "where": "192.0.2.7"}
    assert outcome.result["evidence"] == {"network": evidence}
    paths = RunPaths(run_dir)
    assert ("ok", "Say how it ended") in steps(paths)
    output = collect.output(run_dir)
    assert "Say how it ended" in output
    assert not {"\x1b", "\r"} & set(output)
    assert paths.log.read_text() == ""
    assert not paths.env.exists()
    for path in run_dir.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        assert not path.is_file() or TOKEN not in path.read_text()


def test_a_playbook_that_goes_on_after_awx_gave_its_job_up(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is lost, and not over: its playbook still changes the host."""
    mark = Path(tempfile.mkdtemp(dir="/tmp")) / "mark"
    begun, go, ended = (mark.with_suffix(f".{name}") for name in ("begun", "go", "ended"))
    awx.begin(
        play=str(ROOT / "tests/data/playbooks/run_awx_lost.yml"), lost=REAPED_AT_START, steps=5
    )
    monkeypatch.setattr(launch, "_spawn", lambda *_: None)
    paths = RunPaths(launch.launch(site, spec(word=str(mark))))
    manifest = read_json(paths.manifest)
    assert manifest is not None
    verdict = job.play(paths, manifest, lambda: False, PACE)
    assert (verdict["status"], verdict["problem"]) == ("lost", f"awx_failed: {REAPED_AT_START}")
    assert begun.exists()
    assert not ended.exists(), "the playbook goes on"
    go.touch()
    until(ended.exists)
    shutil.rmtree(mark.parent)


def test_a_killed_process_is_begun_again_and_finds_its_job(
    awx: Controller, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it did not know yet whether its job had been begun."""
    monkeypatch.setattr(launch, "_AGAIN_S", 0.0)
    awx.change(cut={LAUNCH: 1}, later_s=0.5, steps=0)
    run_dir = launch.launch(site, spec())
    until(lambda: LAUNCH in awx.record()["requests"])
    kill(run_dir, signal.SIGKILL)
    assert launch.launch(site, spec()) == run_dir
    assert collect.observe(run_dir).phase is Phase.ALIVE
    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert outcome.result == RESULT, outcome
    assert len(awx.jobs()) == 1


def test_a_process_told_to_go_leaves_the_job_and_a_canceled_run_does_not(
    awx: Controller, site: Site
) -> None:
    """The machine goes down: AWX goes on. Begun again not at once, so that it is no storm."""
    awx.change(steps=1000)
    run_dir = launch.launch(site, spec())
    until(lambda: "GET /jobs/1/" in awx.record()["requests"])
    kill(run_dir, signal.SIGTERM)
    os.utime(RunPaths(run_dir).process)
    assert collect.observe(run_dir).phase is Phase.ALIVE
    assert awx.record()["canceled"] == []
    assert not lock.held(RunPaths(run_dir).lock), "too soon"
    os.utime(RunPaths(run_dir).process, (0, 0))
    assert collect.observe(run_dir).phase is Phase.ALIVE
    assert lock.held(RunPaths(run_dir).lock)
    collect.cancel(run_dir)
    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert outcome.status == "canceled"
    assert awx.record()["canceled"] == [1]


def kill(run_dir: Path, number: int) -> None:
    began = read_json(RunPaths(run_dir).process)
    os.kill(began["pid"], number)
    # A process that ends gives its memory back, and with it its name, before it closes its files.
    until(lambda: not list(lock.processes(run_dir)) and not lock.held(RunPaths(run_dir).lock))
