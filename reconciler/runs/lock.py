"""The lock of a run folder: whoever holds it is the run.

It belongs to the open file, not to a process id, and is handed to the process of the run before
that process exists. So there is no moment without a holder, and a reused process id means nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Someone who only asks holds the lock for microseconds; a run holds it for as long as it lives.
_TRIES = 5
_PAUSE_S = 0.02


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


def _take(descriptor: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        else:
            return True
    return False


def held(path: Path) -> bool:
    """Whether the run is alive. A shared lock asks, so that askers do not see one another."""
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
