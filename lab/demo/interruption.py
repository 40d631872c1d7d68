"""Clean end of an interrupted demonstration: every process that it started is ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# Conventional exit code of a program that Ctrl-C ended.
EXIT_CODE = 130
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0


class Interrupted(BaseException):
    """Ctrl-C, or a request to end the process."""


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise Interrupted on the first SIGINT or SIGTERM; a second signal does not disturb clean-up.

    From here on, this process is the parent of every orphan among its descendants, so that
    `end_descendants` also reaches QEMU and the runs. Both leave their parents on purpose.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    except Interrupted:
        raise
    else:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_descendants() -> None:
    """End all children, then kill the remaining children and the orphans that come from them."""
    for pid in _children():
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.05)
    # The children of a killed process become children of this process: a round per generation.
    while _reap():
        for pid in _children():
            _send(pid, signal.SIGKILL)
        time.sleep(0.05)


def _children() -> list[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in tasks for pid in file.read_text().split()]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> bool:
    """Collect the children that have ended. Return whether any other child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
