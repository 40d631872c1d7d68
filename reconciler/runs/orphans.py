"""What a run has started and not ended.

Every process of a run carries the run's folder in its environment. Ansible's workers each have a
session of their own, so ending a process group would miss them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "GPUAAS_RUN_DIR"
_PROC = Path("/proc")


def find(run_dir: Path) -> Iterator[int]:
    """Processes of this run, this one left out."""
    mark = f"{MARK}={run_dir}".encode()
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _belongs(entry, mark):
            yield int(entry.name)


def end(run_dir: Path, patience_s: float = 10) -> list[int]:
    """Kill what is left of a run; returns the processes that did not go."""
    mark = f"{MARK}={run_dir}".encode()
    limit = time.monotonic() + patience_s
    while left := list(find(run_dir)):
        for pid in left:
            _kill(pid, mark)
        if time.monotonic() > limit:
            return left
        time.sleep(0.05)
    return []


def _belongs(entry: Path, mark: bytes) -> bool:
    try:
        if mark not in (entry / "environ").read_bytes().split(b"\0"):
            return False
        # SSH's shared connection serves other runs on the same node and ends by itself.
        return not (entry / "cmdline").read_bytes().startswith(b"ssh: ")
    except OSError:
        return False


def _kill(pid: int, mark: bytes) -> None:
    """Through a descriptor, checked again: by now the number may be another process's."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _belongs(_PROC / str(pid), mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
