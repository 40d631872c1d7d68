"""Runs by hand: a playbook on a host, without database or task; nothing is kept afterwards.

The run follows the same contract and process model as the reconciler's runs. Only the connection
differs: the operator's own SSH, or none on the host itself.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.model import hardware
from reconciler.runs import collect
from reconciler.runs.collect import Outcome, Phase
from reconciler.runs.launch import Site, launch
from reconciler.runs.spec import LONGEST_S, RunError, RunSpec
from reconciler.runs.ssh import Reach

# Time for everything that has no limit in the profile, such as packages from a slow mirror. A run
# that takes longer is ended and its effect is unknown, so the limit is generous.
DEADLINE_S = 4 * 3600
_EVERY_S = 0.3
# How long the command waits for a cancelled run to stop.
_CANCEL_S = 30.0
_TAIL = 2000


@dataclass(frozen=True)
class Work:
    """A playbook, its kind of task, and its variables without slice_run."""

    playbook: str
    kind: str
    variables: Mapping[str, Any]


def play(
    work: Work, reach: Reach, collections: Path, on_task: Callable[[str], None] = lambda _task: None
) -> dict[str, Any]:
    """The evidence of the playbook's result. on_task: gets the name of each task as it starts.

    Raises RunError with the host's own code when the playbook was refused or failed there, and
    `unreachable`, `run_canceled` or `run_failed` when there is no result.
    """
    run_id, node = f"hand-{uuid.uuid4().hex[:16]}", reach.access()
    run = {"id": run_id, "task_id": "", "kind": work.kind, "node_id": node.node_id}
    variables = {"slice_run": {**run, "correlation_id": run_id}, **work.variables}
    spec = RunSpec(run_id, work.playbook, node, variables, deadline_s(work), run_id)
    with tempfile.TemporaryDirectory(prefix="gpuaas-", ignore_cleanup_errors=True) as folder:
        state_dir = Path(folder)
        site = Site(state_dir, collections, ssh=None, environment=reach.environment(state_dir))
        run_dir = launch(site, spec)
        outcome = _follow(run_dir, on_task)
        return _evidence(outcome, collect.output(run_dir, _TAIL))


def deadline_s(work: Work) -> int:
    """Seconds that a run of this work may take. Disks are wiped in turn."""
    variables = work.variables
    parts: list[str] = []
    if variables.get("slice_apply"):
        parts += ["wipe"] * len(variables["slice_devices"])
    if variables.get("slice_allow_reboot"):
        parts.append("reboot")
    allowed = hardware.limit_s(variables["slice_profile"], parts) if parts else 0
    return min(LONGEST_S, DEADLINE_S + allowed)


def _follow(run_dir: Path, on_task: Callable[[str], None]) -> Outcome:
    """Wait for the end; an interrupted wait ends the run too."""
    offset = 0
    try:
        while True:
            state = collect.wait(run_dir, _EVERY_S, every_s=_EVERY_S)
            lines, offset = collect.progress(run_dir, offset)
            for line in lines:
                if line["event"] == "started" and line["task"]:
                    on_task(line["task"])
            if state.outcome is not None:
                return state.outcome
            if state.phase is not Phase.ALIVE:
                raise _failed("run_failed", f"the run is {state.phase}")
    finally:
        collect.cancel(run_dir)
        collect.wait(run_dir, _CANCEL_S)


def _evidence(outcome: Outcome, tail: str) -> dict[str, Any]:
    result = outcome.result
    if result is None:
        code = "unreachable" if outcome.unreachable else f"run_{outcome.status}"
        raise _failed(code, f"{outcome.problem or outcome.status}\n{tail}".strip())
    if result["ok"]:
        return dict(result["evidence"])
    error = result["error"]
    if not error:
        raise _failed("task_failed", f"step {result['step']!r}\n{tail}".strip())
    raise RunError(
        error["code"],
        expected=error["expected"],
        found=f"{error['found']} (step {result['step']!r})",
        remedy=error["remedy"],
    )


def _failed(code: str, found: str) -> RunError:
    return RunError(
        code,
        expected="the playbook to end with a result",
        found=found,
        remedy="see the text; with --host, look whether `ssh` with the same words reaches the host",
    )
