"""Real runs of small local playbooks, in a state directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.runs import collect, lock
from reconciler.runs.launch import Site
from reconciler.runs.spec import NodeAccess, RunSpec

ROOT = Path(__file__).resolve().parents[4]

MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose runs are ended with the test, whatever became of them."""
    yield Site(
        state_dir=tmp_path,
        collections_path=ROOT / "build" / "collections",
        ssh=None,
        playbooks=ROOT / "tests" / "data" / "playbooks",
    )
    for run_dir in (tmp_path / "runs").glob("*"):
        collect.cancel(run_dir)
        collect.wait(run_dir, 15)
        assert lock.end_processes(run_dir) == []


@pytest.fixture
def spec() -> MakeSpec:
    def make(playbook: str, run_id: str = "run-1", deadline_s: int = 60, **more: Any) -> RunSpec:
        node = NodeAccess("node-1", "localhost")
        return RunSpec(run_id, playbook, node, more, deadline_s, "corr-1")

    return make
