"""The id of a folder of runs."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reconciler.runs.paths import runner_id
from reconciler.runs.spec import RunError


def test_all_processes_on_a_folder_share_its_id_and_no_other_folder_has_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        result = set(pool.map(lambda _: runner_id(tmp_path / "a"), range(16)))
    (first,) = result
    assert uuid.UUID(first)
    assert [path.name for path in (tmp_path / "a" / "runs").iterdir()] == ["runner"]
    assert runner_id(tmp_path / "a") == first
    assert runner_id(tmp_path / "b") != first


def test_a_file_that_says_nothing_is_not_an_id(tmp_path: Path) -> None:
    runner_id(tmp_path)
    (tmp_path / "runs" / "runner").write_text("")
    with pytest.raises(RunError, match="runner_unreadable"):
        runner_id(tmp_path)
