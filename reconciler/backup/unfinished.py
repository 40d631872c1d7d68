"""Marker, lock and work folder of a restore in progress.

Until the last step the restored records are outdated without a sign of it. The marker keeps every
command from opening such a site, and lets an interrupted restore be repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reconciler.model.errors import Problem
from reconciler.runs.paths import write_text
from reconciler.settings import Settings

# File in the state folder with the digest of the backup that is being restored.
MARK = "restoring"
_WORK_PREFIX = ".restore-"


def digest(file: Path) -> str:
    """Digest of a backup; "" for an unreadable file, which `archive.read` reports."""
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return ""


def backup_in_progress(settings: Settings) -> str | None:
    """Digest of the backup whose restore has not ended; None without a restore."""
    mark = settings.state_dir / MARK
    return mark.read_text().strip() if mark.exists() else None


def refuse(settings: Settings) -> None:
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
def locked(settings: Settings) -> Iterator[None]:
    """Hold the lock of restores; Problem `restore_unfinished` while another process holds it."""
    folder = os.open(settings.state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as busy:
        raise Problem(
            "restore_unfinished",
            expected="no other restore",
            found=f"another restore that is running in {settings.state_dir}",
            remedy="wait until it ends",
        ) from busy
    finally:
        os.close(folder)


def begin(settings: Settings, backup: str) -> None:
    write_text(settings.state_dir / MARK, f"{backup}\n")


def end(settings: Settings) -> None:
    (settings.state_dir / MARK).unlink()


@contextmanager
def work_folder(settings: Settings) -> Iterator[Path]:
    """A folder for the unpacked backup. Folders of killed restores are removed: they hold keys."""
    state = settings.state_dir
    for leftover in state.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=state) as folder:
        yield Path(folder)
