"""`gpuaas worker` whose runs contact no host: `python -m tests.bench.fleet.worker noop|runner`.

noop: all of a launch but the process; the run has ended well as soon as it is prepared. runner: the
whole launch, with ansible-runner, of a playbook that does nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from reconciler.cli import service
from reconciler.runs import launch
from reconciler.runs.paths import RunPaths, read_json, write_json
from reconciler.runs.spec import RunSpec
from reconciler.work import worker

EMPTY = Path(__file__).parent / "empty"


@contextlib.contextmanager
def noop() -> Iterator[None]:
    """Let runs of this process end without a start."""
    with patch.object(launch, "_spawn", _end):
        yield


@contextlib.contextmanager
def runner() -> Iterator[None]:
    """Let runs of this process play the playbooks in `empty`."""

    def here(site: launch.Site, spec: RunSpec) -> Path:
        return launch.launch(replace(site, playbooks=EMPTY), spec)

    with patch.object(worker, "launch", here):
        yield


LAUNCHERS = {"noop": noop, "runner": runner}


def _end(paths: RunPaths, _descriptor: int) -> None:
    """Write the result that the process of a run writes at its end."""
    manifest = read_json(paths.manifest)
    if manifest is None:
        raise FileNotFoundError(paths.manifest)
    now = datetime.now(UTC).isoformat()
    result = {"schema": 1, "playbook": manifest["playbook"], "ok": True, "step": "", "error": {}}
    write_json(
        paths.outcome,
        {
            "schema": 1,
            "run_id": manifest["run_id"],
            "started_at": now,
            "finished_at": now,
            "status": "successful",
            "rc": 0,
            "result": {**result, "evidence": {}},
            "problem": "",
            "unreachable": False,
        },
    )


if __name__ == "__main__":
    with LAUNCHERS[sys.argv[1]]():
        service.worker()
