"""`gpuaas jobs` against a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.model.jobs import Outcome
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.api.test_jobs import ERROR, bury, play, with_model
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("ORCH-2")
AT = ("--project", "demo", "--output", "json")


def run(gpuaas: Gpuaas, *words: str) -> Any:
    return json.loads(gpuaas("jobs", *words, *AT) or "{}")


def test_the_life_of_jobs(
    new: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_model(new)
    gpuaas.at(new, "member")
    assert run(gpuaas, "models") == [{"name": "m", "serving": True, "due": 0}]
    file = tmp_path / "input.json"
    file.write_text('{"x": 1}')
    monkeypatch.setattr(time, "sleep", lambda _seconds: play(new, Outcome({"y": 2})))
    assert run(gpuaas, "submit", "m", str(file), "--wait")["result"] == {"y": 2}
    file.write_text('[{"x": 1}, {"x": 2}, {"x": 3}]')
    results = run(gpuaas, "submit", "m", str(file), "--wait")
    assert [(job["input"]["x"], job["result"]) for job in results] == [
        (number, {"y": 2}) for number in (1, 2, 3)
    ]
    # The ids are printed before the wait, for a person who interrupts it.
    assert gpuaas.err.split() == ["queued", *(job["id"] for job in results)]
    assert gpuaas.status == 0
    failure = Outcome(error=ERROR, permanent=True)
    monkeypatch.setattr(time, "sleep", lambda _seconds: play(new, failure))
    failed = run(gpuaas, "submit", "m", str(file), "--wait")
    assert {(job["status"], gpuaas.status) for job in failed} == {("dead_letter", 1)}
    run(gpuaas, "cancel", "--model", "m", "--dead")
    first, *others = run(gpuaas, "submit", "m", str(file))["ids"]
    assert run(gpuaas, "cancel", first)["status"] == "canceled"
    play(new, Outcome(error=ERROR, permanent=True))
    assert run(gpuaas, "show", others[0])["failure"]["code"] == "function_failed"
    listed = run(gpuaas, "list", "--status", "dead_letter")
    assert {job["id"] for job in listed} == set(others)
    (sample,) = run(gpuaas, "reprocess", "--sample", "1")["ids"]
    assert sample in others
    gpuaas("jobs", "reprocess", "--sample", "0", *AT)
    assert (gpuaas.status, "sample_unfinished" in gpuaas.err) == (1, True)
    forced = run(gpuaas, "reprocess", "--sample", "0", "--force")["ids"]
    assert [sample, *forced] == [sample, *(set(others) - {sample})]
    run(gpuaas, "submit", "m", str(file))
    assert run(gpuaas, "list", "--model", "m", "--status", "done") != []
    assert run(gpuaas, "list", "--model", "n") == []
    monkeypatch.setattr("reconciler.pools.jobs.CANCEL_LIMIT", 2)
    assert run(gpuaas, "cancel", "--model", "m") == {"canceled": 5}
    play(new, Outcome(error=ERROR, permanent=True))
    assert run(gpuaas, "cancel", "--all", "--dead") == {"canceled": 0}
    for words in ((), ("--all", "--model", "m"), (first, "--all"), (first, "--dead")):
        gpuaas("jobs", "cancel", *words, *AT)
        assert (gpuaas.status, "request_invalid" in gpuaas.err) == (1, True)
    file.write_text("[1]")
    gpuaas("jobs", "submit", "m", str(file), *AT)
    assert (gpuaas.status, "request_invalid" in gpuaas.err) == (1, True)


def test_operators_learn_whose_jobs_are_dead_letters(new: Stack, gpuaas: Gpuaas) -> None:
    with_model(new)
    bury(new)
    gpuaas.at(new, "admin")
    (project,) = json.loads(gpuaas("jobs", "queue", "--output", "json"))
    assert (project["project_id"], project["dead_letter"], project["pending"]) == ("demo", 1, 0)


@pytest.mark.parametrize("word", ["m", "m=module", "=a:b", "m=:b", "m=none.onnx"])
def test_a_model_without_a_target_is_refused(gpuaas: Gpuaas, word: str) -> None:
    gpuaas("jobs", "worker", "--model", word)
    assert (gpuaas.status, "model_unusable" in gpuaas.err) == (1, True)


def test_a_folder_of_models_is_not_that_of_relative_settings(tmp_path: Path) -> None:
    """Such as GPUAAS_DATABASE_URL=sqlite:///site.db."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "own.onnx").write_text("not a model")
    words = ["jobs", "worker", "--models", "models", "--model", "own"]
    environment = {**os.environ, "GPUAAS_DATABASE_URL": "sqlite:///site.db"}
    done = subprocess.run(
        [sys.executable, "-m", "reconciler.cli.main", *words],
        cwd=tmp_path,
        env={**environment, "GPUAAS_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "model_unusable" in done.stderr) == (1, True), done.stderr
    assert (tmp_path / "site.db").exists()
