"""Lock of a run's folder, which shows whether the run is alive, and its left-over processes.

The lock belongs to the open file, not to a process id. It is handed to the process of the run
before that process exists, so it always has a holder, and a reused process id means nothing.

Every process of a run carries the run's folder in its environment. Ansible's workers each have a
session of their own, so ending a process group would miss them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

# A process that tests the lock holds it for microseconds; a run holds it for as long as it lives.
_TRIES = 5
_PAUSE_S = 0.02
# A program begins within milliseconds.
_NAPS, _NAP_S = 1000, 0.001
# The environment variable that marks the processes of a run.
MARK = "GPUAAS_RUN_DIR"
_PROC = Path("/proc")


@contextmanager
def attempt(path: Path) -> Iterator[int | None]:
    """The descriptor that holds the lock, or None when a run holds it.

    Only closed at the end, never unlocked: a child that inherited it keeps the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor if _take(descriptor) else None
    finally:
        os.close(descriptor)


def held(path: Path) -> bool:
    """Whether the run is alive. Tests with a shared lock, so that two tests do not collide."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def processes(run_dir: Path) -> Iterator[int]:
    """Process ids of this run, without the calling process."""
    mark = f"{MARK}={run_dir}".encode()
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _belongs(entry, mark):
            yield int(entry.name)


def end_processes(run_dir: Path, timeout_s: float = 10) -> list[int]:
    """Kill the remaining processes of a run; returns those that did not end."""
    mark = f"{MARK}={run_dir}".encode()
    limit = time.monotonic() + timeout_s
    while remaining := list(processes(run_dir)):
        for pid in remaining:
            send(pid, partial(is_marked, pid, mark))
        if time.monotonic() > limit:
            return remaining
        time.sleep(0.05)
    return []


def environment(entry: Path) -> list[bytes]:
    """Variables of a process, by its folder in /proc. While it begins a program, it has none yet
    and would pass for one without a mark, so that moment is waited for.
    """
    file = entry / "environ"
    if text := file.read_bytes():
        return text.split(b"\0")
    # Bounded, because a program on a file system that hangs never begins.
    for _ in range(_NAPS):
        if not _begins(entry.name):
            break
        time.sleep(_NAP_S)
    return file.read_bytes().split(b"\0")


def _begins(pid: str) -> bool:
    """Whether a process has memory, unlike threads of the kernel and zombies, and no place for
    variables in it: fields 23 and 51.
    """
    fields = stat(pid)
    return int(fields[20]) > 0 and int(fields[48]) == 0


def _take(descriptor: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _belongs(entry: Path, mark: bytes) -> bool:
    try:
        if mark not in environment(entry):
            return False
        # SSH's shared connection serves other runs on the same node and ends by itself.
        return not (entry / "cmdline").read_bytes().startswith(b"ssh: ")
    # It has ended, or belongs to another user. No other error may hide a process.
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def is_marked(pid: int, mark: bytes) -> bool:
    """Whether a process has the mark, NAME=VALUE, in its environment."""
    return _belongs(_PROC / str(pid), mark)


def send(pid: int, is_meant: Callable[[], bool], number: int = signal.SIGKILL) -> None:
    """Send a signal through a descriptor, and ask before: the id may have been reused."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_meant():
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def stat(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state. The name before them may be any bytes."""
    text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def start_ticks(pid: int | str = "self") -> int:
    """Time of a process's start, in clock ticks since the boot. With it a process id is unique."""
    return int(stat(pid)[19])  # field 22


def boot_id() -> str:
    """The id of this boot of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
