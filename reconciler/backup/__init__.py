"""Backup of a site in a single file, and restore from it; the marker of a restore in progress.

Until the last step of a restore the records are outdated without a sign of it. The marker keeps
every command from opening such a site, and lets an interrupted restore be repeated. A lock on the
state folder keeps services and restores apart: services share it, a restore has it alone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from reconciler.model.errors import Problem
from reconciler.settings import Settings

# File in the state folder with the digest of the backup that is being restored.
MARK = "restoring"


def backup_in_progress(settings: Settings) -> str | None:
    """Digest of the backup whose restore has not ended; None without a restore."""
    mark = settings.state_dir / MARK
    return mark.read_text().strip() if mark.exists() else None


def refuse_unfinished_restore(settings: Settings) -> None:
    """Problem `restore_unfinished` while the records may be outdated by a restore."""
    if backup_in_progress(settings) is not None:
        raise Problem(
            "restore_unfinished",
            expected="no restore in progress",
            found=f"{settings.state_dir / MARK}: a restore that is running or was cut off",
            remedy="repeat `gpuaas restore` with the same file, or empty the state folder and the"
            " database",
        )


@contextmanager
def in_use(settings: Settings) -> Iterator[None]:
    """Keep restores out of the state folder for the life of a service; Problem `restore_unfinished`
    while one is running. Runs that outlive the service do not inherit the lock: their tasks are
    lost by a restore in any case.
    """
    with _opened(settings) as folder:
        if not take(folder, fcntl.LOCK_SH):
            raise _restoring(settings)
        yield


@contextmanager
def locked(settings: Settings) -> Iterator[None]:
    """Hold the lock of restores; Problem `restore_unfinished` while another restore holds it,
    `service_running` while a service does.
    """
    with _opened(settings) as folder:
        if not take(folder, fcntl.LOCK_EX):
            if not take(folder, fcntl.LOCK_SH):
                raise _restoring(settings)
            raise Problem(
                "service_running",
                expected=f"no process of the service that uses {settings.state_dir}",
                found="one that would go on writing to the database that it has open",
                remedy="stop the service, its gateway and its workers of jobs (`pgrep -af gpuaas`"
                " names them), then repeat the command; nothing was restored",
            )
        yield


@contextmanager
def _opened(settings: Settings) -> Iterator[int]:
    # Closed in programs that this process starts, so that it alone holds the lock.
    folder = os.open(settings.state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def take(folder: int, kind: int) -> bool:
    """Lock an open folder; False while another process has it in a way that excludes this."""
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _restoring(settings: Settings) -> Problem:
    return Problem(
        "restore_unfinished",
        expected="no other restore",
        found=f"another restore that is running in {settings.state_dir}",
        remedy="wait until it ends",
    )
