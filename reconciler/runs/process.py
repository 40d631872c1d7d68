"""The process of a run: `python -m reconciler.runs.process <run dir> <lock descriptor>`.

It detaches from the reconciler at once, holds the lock of the folder as long as it lives, and ends
by writing outcome.json. Without that file the run is lost: its effect is unknown. Only a run that
AWX carries out goes on without its process, which is then started again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ansible_runner

from reconciler.runs import contract, lock
from reconciler.runs.events import Recorder, judge
from reconciler.runs.paths import RunPaths, read_json, write_json
from reconciler.runs.spec import BY_HAND

# Ansible's message when SSH ended while the first module was being sent: it hides SSH's reason.
_CUT_SHORT = "Data could not be sent to remote host"
_BACK = "the connection ended before anything was sent; the host answers now"
_PROBE = "probe"
_PROBE_LIMIT_S = 120
# Ansible needs 60 MiB, and about ten times the length of the longest answer (`bounded_ssh`).
_MEMORY = 320 * 1024 * 1024
# The files of a run are kept for weeks.
_LONGEST_OUTPUT = 1024 * 1024


def main(arguments: list[str]) -> int:
    paths, descriptor = RunPaths(Path(arguments[0])), int(arguments[1])
    # Before it detaches: whoever finds a process of the run finds it limited.
    _limit_memory(paths)
    if os.fork():
        return 0
    os.umask(0o077)
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(paths)
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, stop.on_signal)
    write_json(paths.process, _identity())
    _carry_out(paths, stop)
    return 0


class StopRequest:
    """Whether the run was asked to stop, by a signal or by the file `cancel`."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._signalled = False

    def on_signal(self, _number: int, _frame: object) -> None:
        self._signalled = True

    def __call__(self) -> bool:
        return self._signalled or self._paths.cancel.exists()


def _identity() -> dict[str, Any]:
    """Information for people; no decision depends on it."""
    return {
        "pid": os.getpid(),
        "start_ticks": lock.start_ticks(),
        "boot_id": lock.boot_id(),
        "started_at": datetime.now(UTC).isoformat(),
    }


def _carry_out(paths: RunPaths, stop_requested: Callable[[], bool]) -> None:
    manifest = read_json(paths.manifest)
    if manifest is None:
        raise FileNotFoundError(paths.manifest)
    started = datetime.now(UTC).isoformat()
    play = _play_in_awx if "awx" in manifest else _play
    verdict = play(paths, manifest, stop_requested)
    if verdict is None:
        return
    verdict = {"result": None, "unreachable": False, "problem": "", **verdict}
    others = set(verdict.get("answered_by", ())) - {manifest["node_id"]}
    if others and manifest["node_id"] != BY_HAND:
        # Its modules ran elsewhere, so nothing that it says counts for the node.
        problem = f"wrong_node: {', '.join(sorted(others))} answered for {manifest['node_id']}"
        verdict |= {"status": "failed", "result": None, "touched": True, "problem": problem}
    if verdict["result"] and verdict["result"]["playbook"] != manifest["playbook"]:
        # Its evidence was checked for another playbook.
        problem = f"{contract.INVALID}: playbook: {manifest['playbook']}"
        verdict |= {"status": "failed", "result": None, "problem": problem}
    _forget_variables(paths)
    _shorten(paths.output)
    write_json(
        paths.outcome,
        {
            "schema": 1,
            "run_id": manifest["run_id"],
            "started_at": started,
            "finished_at": datetime.now(UTC).isoformat(),
            **verdict,
        },
    )


def _limit_memory(paths: RunPaths) -> None:
    """Limit the memory of each process of the run. A host must not exhaust the controller.

    Modules that work on this machine itself, in a run by hand, may need more and have no limit.
    """
    if (read_json(paths.env / "envvars") or {}).get("ANSIBLE_TRANSPORT") != "local":
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))


def _play(
    paths: RunPaths, manifest: dict[str, Any], stop_requested: Callable[[], bool]
) -> dict[str, Any] | None:
    if stop_requested():
        return {"status": "canceled", "rc": None, "problem": "never_began", "begun": False}
    recorder = Recorder(paths.progress)
    begun = time.monotonic()
    try:
        runner = ansible_runner.run(
            private_data_dir=str(paths.root),
            ident=paths.artifacts.name,
            playbook=manifest["target"],
            inventory=str(paths.inventory),
            timeout=manifest["deadline_s"],
            event_handler=recorder,
            cancel_callback=stop_requested,
            fact_cache_type="",
            quiet=True,
        )
    finally:
        # The runner kills the process group of ansible-playbook; its workers are not in it.
        lock.end_processes(paths.root)
    verdict = judge(recorder, runner.status, runner.rc, time.monotonic() - begun)
    if verdict["unreachable"] and not verdict["touched"] and _CUT_SHORT in verdict["problem"]:
        verdict["problem"] = f"unreachable: {_ssh_message(paths, manifest) or _BACK}"
    return verdict


def _play_in_awx(
    paths: RunPaths, manifest: dict[str, Any], stop_requested: Callable[[], bool]
) -> dict[str, Any] | None:
    # Its HTTP client and settings take longer to load than all that other runs need.
    from reconciler.runs.awx import job  # noqa: PLC0415

    return job.play(paths, manifest, stop_requested)


def _ssh_message(paths: RunPaths, manifest: dict[str, Any]) -> str:
    """The message of SSH when no module is sent; "" when the host answers now."""
    recorder = Recorder(Path(os.devnull))
    try:
        ansible_runner.run(
            private_data_dir=str(paths.root),
            ident=_PROBE,
            module="ansible.builtin.raw",
            module_args="true",
            host_pattern=manifest["node_id"],
            inventory=str(paths.inventory),
            timeout=_PROBE_LIMIT_S,
            event_handler=recorder,
            fact_cache_type="",
            quiet=True,
        )
    except (OSError, ansible_runner.exceptions.AnsibleRunnerException) as failure:
        # The outcome of the run itself must be written in any case.
        return f"SSH could not be asked again: {failure}"
    shutil.rmtree(paths.artifacts.parent / _PROBE, ignore_errors=True)
    return recorder.reason if recorder.unreachable else ""


def _forget_variables(paths: RunPaths) -> None:
    """Delete the variables: the task keeps them, and a finished run needs only its output."""
    for folder in (paths.env, paths.root / "home", paths.artifacts / "job_events"):
        if folder.is_dir():
            shutil.rmtree(folder)
    (paths.artifacts / "command").unlink(missing_ok=True)


def _shorten(output: Path) -> None:
    """Keep the end of the output, of which people read less. A host may have filled it.

    In place, so that a full disk does not prevent it. The outcome must be written in any case.
    """
    with contextlib.suppress(OSError), output.open("r+b") as handle:
        if handle.seek(0, os.SEEK_END) > _LONGEST_OUTPUT:
            handle.seek(-_LONGEST_OUTPUT, os.SEEK_END)
            end = handle.read()
            handle.seek(0)
            handle.write(end)
            handle.truncate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
