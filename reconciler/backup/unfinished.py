"""A restore that was cut off leaves a site that nobody opens, and that can be begun again.

What it has put in place is a picture of the past that says so nowhere, until the last step.
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

# In the state folder: which backup is being restored.
MARK = "restoring"
_WORKPLACE = ".restore-"


def name_of(file: Path) -> str:
    """What makes this backup this one; "" when it cannot be read, which its reader says better."""
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return ""


def begun(settings: Settings) -> str | None:
    """Which backup's restore was begun here and has not ended; None when none was."""
    mark = settings.state_dir / MARK
    return mark.read_text().strip() if mark.exists() else None


def refuse(settings: Settings) -> None:
    """Problem `restore_unfinished` where the database may be a picture of the past."""
    if begun(settings) is not None:
        raise Problem(
            "restore_unfinished",
            expected="a site, or none",
            found=f"{settings.state_dir / MARK}: a restore that goes on, or was cut off",
            remedy="`gpuaas restore` with the same file once more; or empty the state folder and"
            " the database",
        )


@contextmanager
def alone(settings: Settings) -> Iterator[None]:
    """Problem `restore_unfinished` while another restores here: it would lose its workplace."""
    folder = os.open(settings.state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as taken:
        raise Problem(
            "restore_unfinished",
            expected="no other restore",
            found=f"one that goes on in {settings.state_dir}",
            remedy="let it end",
        ) from taken
    finally:
        os.close(folder)


def begin(settings: Settings, backup: str) -> None:
    write_text(settings.state_dir / MARK, f"{backup}\n")


def end(settings: Settings) -> None:
    (settings.state_dir / MARK).unlink()


@contextmanager
def workplace(settings: Settings) -> Iterator[Path]:
    """Where a backup is unpacked; what one that was killed left there goes: it holds keys."""
    state = settings.state_dir
    for left in state.glob(f"{_WORKPLACE}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_WORKPLACE, dir=state) as folder:
        yield Path(folder)
