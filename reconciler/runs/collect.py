"""Look at a run from outside: how it stands, what it said, and asking it to stop.

Nothing here needs to have started the run, so a restarted reconciler collects like the first one.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from reconciler.runs import lock, orphans
from reconciler.runs import storable as legible
from reconciler.runs.errors import RunError
from reconciler.runs.launch import resume
from reconciler.runs.paths import RunPaths, read_json, write_text


class Phase(StrEnum):
    """How a run stands."""

    ABSENT = "absent"  # nothing was ever prepared
    PREPARED = "prepared"  # no process began; launching (again) is right
    ALIVE = "alive"  # its process holds the lock
    FINISHED = "finished"  # it wrote its outcome
    LOST = "lost"  # its process is gone without one: what the host did is unknown


@dataclass(frozen=True)
class Outcome:
    """How a run ended. result is the checked slice_result; without one `problem` says why.

    touched: False when no module of the run can have begun on the host.
    """

    run_id: str
    status: str
    rc: int | None
    result: dict[str, Any] | None
    problem: str
    started_at: str
    finished_at: str
    unreachable: bool
    touched: bool = True

    @property
    def ok(self) -> bool:
        return self.status == "successful" and self.result is not None and bool(self.result["ok"])


@dataclass(frozen=True)
class RunState:
    phase: Phase
    outcome: Outcome | None = None


def observe(run_dir: Path) -> RunState:
    """How the run stands now.

    The outcome is read before the lock and again after it: a process writes the one and then gives
    up the other.
    """
    paths = RunPaths(run_dir)
    if outcome := _outcome(paths):
        return RunState(Phase.FINISHED, outcome)
    if lock.held(paths.lock):
        return RunState(Phase.ALIVE)
    if outcome := _outcome(paths):
        return RunState(Phase.FINISHED, outcome)
    if began := read_json(paths.process):
        return _without_process(run_dir, began)
    return RunState(Phase.PREPARED if paths.manifest.exists() else Phase.ABSENT)


def _without_process(run_dir: Path, began: dict[str, Any]) -> RunState:
    """A process that was killed leaves Ansible behind. It is ended before the run counts as lost:
    lost means that nothing of ours acts on the host any more. What AWX does goes on, and is
    followed again.
    """
    if "awx" in (read_json(RunPaths(run_dir).manifest) or {}):
        resume(run_dir)
        return RunState(Phase.ALIVE)
    if orphans.end(run_dir):
        return RunState(Phase.ALIVE)
    RunPaths(run_dir).variables.unlink(missing_ok=True)
    return RunState(Phase.LOST, _lost(run_dir, began))


def wait(run_dir: Path, timeout_s: float, every_s: float = 0.2) -> RunState:
    """Observe until the run is over or the time is; the last state seen."""
    limit = time.monotonic() + timeout_s
    while True:
        state = observe(run_dir)
        if state.phase is not Phase.ALIVE or time.monotonic() > limit:
            return state
        time.sleep(every_s)


def progress(run_dir: Path, since: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Whole lines written after the offset `since`, and the offset to ask from next time.

    What a crash of the machine left in between is no line: it is passed over.
    """
    try:
        with RunPaths(run_dir).progress.open("rb") as handle:
            handle.seek(since)
            text = handle.read()
    except FileNotFoundError:
        return [], since
    whole = text[: text.rfind(b"\n") + 1]
    lines = [_line(text) for text in whole.splitlines()]
    return [line for line in lines if line], since + len(whole)


def output(run_dir: Path, limit: int = 20_000) -> str:
    """The end of what Ansible printed. Hosts speak here: show it as text, never as markup."""
    try:
        with RunPaths(run_dir).output.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - limit))
            return handle.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def cancel(run_dir: Path) -> None:
    """Ask the run to stop; it does within about a second. Asking a finished run does nothing."""
    if run_dir.is_dir():
        write_text(RunPaths(run_dir).cancel, "")


def discard(run_dir: Path) -> None:
    """Delete the folder of a run that is over, or that never began and never will."""
    if not run_dir.is_dir():
        return
    phase = observe(run_dir).phase
    if phase is Phase.ALIVE:
        raise RunError(
            "run_not_over",
            expected="a run that does not go on",
            found=f"{run_dir.name} is {phase}",
            remedy="wait for it, or cancel it first",
        )
    shutil.rmtree(run_dir)


def _outcome(paths: RunPaths) -> Outcome | None:
    document = read_json(paths.outcome)
    if document is None:
        return None
    fields = Outcome.__dataclass_fields__
    return Outcome(**{name: document[name] for name in fields if name in document})


def _line(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    # Kept with its task, so it must not be what no database takes.
    told = isinstance(document, dict) and legible.unstorable(document) is None
    return document if told else {}


def _lost(run_dir: Path, began: dict[str, Any]) -> Outcome:
    return Outcome(
        run_id=run_dir.name,
        status="lost",
        rc=None,
        result=None,
        problem="process_gone",
        started_at=str(began["started_at"]),
        finished_at=datetime.now(UTC).isoformat(),
        unreachable=False,
    )
