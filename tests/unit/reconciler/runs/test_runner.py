"""The id of a folder of runs."""

from __future__ import annotations

import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reconciler.runs import paths
from reconciler.runs.paths import runner_id
from reconciler.runs.spec import RunError


def test_all_processes_on_a_folder_share_its_id_and_no_other_folder_has_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        result = set(pool.map(lambda _: runner_id(tmp_path / "a"), range(16)))
    (first,) = result
    assert uuid.UUID(first)
    left = {path.name for path in (tmp_path / "a" / "runs").iterdir()}
    assert left - {"machine"} == {"runner"}
    assert runner_id(tmp_path / "a") == first
    assert runner_id(tmp_path / "b") != first


def test_a_file_that_says_nothing_is_not_an_id(tmp_path: Path) -> None:
    runner_id(tmp_path)
    (tmp_path / "runs" / "runner").write_text("")
    with pytest.raises(RunError, match="runner_unreadable"):
        runner_id(tmp_path)


def test_a_folder_that_was_copied_from_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with the same id would begin the same run twice."""
    machine = tmp_path / "machine-id"
    monkeypatch.setattr(paths, "_MACHINE_ID", machine)
    machine.write_text("a" * 32)
    first = runner_id(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    machine.write_text("b" * 32)
    with pytest.raises(RunError, match="runner_copied") as refusal:
        runner_id(tmp_path / "b")
    assert "delete" in refusal.value.remedy
    # The machine has a new id; the folder is no copy.
    (tmp_path / "b" / "runs" / "machine").unlink()
    assert runner_id(tmp_path / "b") == first
    # A container has no machine id.
    machine.unlink()
    assert runner_id(tmp_path / "b") == first
