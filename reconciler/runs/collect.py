"""State, progress, output and cancellation of a run, read from its folder.

Nothing here needs to have started the run, so a restarted reconciler collects like the first.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from reconciler.durable import write_text
from reconciler.model.storable import unstorable
from reconciler.runs import lock, ssh
from reconciler.runs.launch import resume
from reconciler.runs.paths import RunPaths, read_json
from reconciler.runs.spec import RunError

# The problem of a run whose folder was deleted while it was alive.
FOLDER_GONE = "run_folder_gone"
# Longer than the pause between two requests to a silent AWX.
_QUEUED_S = 60.0


class Phase(StrEnum):
    """State of a run."""

    ABSENT = "absent"  # nothing was ever prepared
    PREPARED = "prepared"  # no process began; launching (again) is right
    ALIVE = "alive"  # its process holds the lock
    FINISHED = "finished"  # it wrote its outcome
    LOST = "lost"  # its process ended without an outcome: the effect on the host is unknown


@dataclass(frozen=True)
class Outcome:
    """End of a run. result is the checked slice_result; without it `problem` gives the reason.

    touched: False when no module of the run can have begun on the host. begun: False when the
    launcher never began the run.
    """

    status: str
    result: dict[str, Any] | None
    problem: str = ""
    unreachable: bool = False
    touched: bool = True
    begun: bool = True

    @property
    def may_go_on(self) -> bool:
        """Whether the playbook may still act: AWX lost the job. The processes of a run that is lost
        on this machine were ended.
        """
        return self.status == "lost" and self.problem.startswith("awx_")

    @property
    def ok(self) -> bool:
        return self.status == "successful" and self.result is not None and bool(self.result["ok"])


@dataclass(frozen=True)
class RunState:
    phase: Phase
    outcome: Outcome | None = None


def observe(run_dir: Path) -> RunState:
    """Current state of the run.

    The outcome is read before the lock and again after it, because a process writes the outcome
    first and then releases the lock.
    """
    paths = RunPaths(run_dir)
    if outcome := _outcome(paths):
        return RunState(Phase.FINISHED, outcome)
    if lock.held(paths.lock):
        return RunState(Phase.ALIVE)
    if outcome := _outcome(paths):
        return RunState(Phase.FINISHED, outcome)
    if paths.process.exists():
        return _without_process(run_dir)
    return RunState(Phase.PREPARED if paths.manifest.exists() else Phase.ABSENT)


def end_without_folder(run_dir: Path, *, by_awx: bool) -> Outcome | None:
    """End a run that had begun, and whose folder is gone; None while its processes still end.

    They carry the folder's name in their environment, and can report nothing any more. A job of AWX
    may go on, because the folder had its number.
    """
    if lock.end_processes(run_dir):
        return None
    code = f"awx_{FOLDER_GONE}" if by_awx else FOLDER_GONE
    return Outcome("lost", None, f"{code}: {run_dir} was deleted while the run was alive")


def is_untouched(outcome: Outcome) -> bool:
    """Whether the run ended before it reached the host, because the host was unreachable."""
    return outcome.unreachable and not outcome.touched and ssh.is_unreachable(outcome.problem)


def wait(run_dir: Path, timeout_s: float, every_s: float = 0.2) -> RunState:
    """Observe until the run is over or the timeout has passed; returns the last state."""
    limit = time.monotonic() + timeout_s
    while True:
        state = observe(run_dir)
        if state.phase is not Phase.ALIVE or time.monotonic() > limit:
            return state
        time.sleep(every_s)


def progress(run_dir: Path, since: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Complete lines written after the offset `since`, and the offset for the next call.

    A fragment left by a crash of the machine is skipped.
    """
    try:
        with RunPaths(run_dir).progress.open("rb") as handle:
            handle.seek(since)
            text = handle.read()
    except FileNotFoundError:
        return [], since
    complete = text[: text.rfind(b"\n") + 1]
    lines = [_line(text) for text in complete.splitlines()]
    return [line for line in lines if line], since + len(complete)


def queued_limit_s(run_dir: Path) -> int | None:
    """Time limit in seconds of a run whose job waits in AWX's queue now; None for any other."""
    paths = RunPaths(run_dir)
    try:
        age_s = time.time() - paths.queued.stat().st_mtime
    except FileNotFoundError:
        return None
    manifest = read_json(paths.manifest) if age_s < _QUEUED_S else None
    return int(manifest["deadline_s"]) if manifest else None


def output(run_dir: Path, limit: int = 20_000) -> str:
    """The end of Ansible's output. Hosts control this text: show it as text, never as markup."""
    try:
        with RunPaths(run_dir).output.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - limit))
            return handle.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def cancel(run_dir: Path) -> None:
    """Ask the run to stop, which takes about a second. Does nothing to a finished run."""
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


def _without_process(run_dir: Path) -> RunState:
    """A killed process leaves Ansible running. Ansible is ended before the run counts as lost,
    because lost means that none of our processes acts on the host any more. A job of AWX goes on,
    and a new process follows it.
    """
    if "awx" in (read_json(RunPaths(run_dir).manifest) or {}):
        resume(run_dir)
        return RunState(Phase.ALIVE)
    if lock.end_processes(run_dir):
        return RunState(Phase.ALIVE)
    RunPaths(run_dir).variables.unlink(missing_ok=True)
    return RunState(Phase.LOST, Outcome("lost", None, "process_gone"))


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
    # The line is stored with its task, so every database must accept it.
    valid = isinstance(document, dict) and unstorable(document) is None
    return document if valid else {}
