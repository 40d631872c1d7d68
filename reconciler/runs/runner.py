"""Whose folder of runs this is: an id that every worker on it shares, and no other has.

A run's files tell whether it lives only where they are. The id lies beside them, so that a folder
that was emptied has another one. A copy of the folder on another machine must not take it along.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from reconciler.runs.errors import RunError
from reconciler.runs.paths import runs_directory, write_text


def runner_id(state_dir: Path) -> str:
    """The id, made the first time; of several processes at once all get the same."""
    folder = runs_directory(state_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "runner"
    if not path.exists():
        fresh = folder / f".runner.{uuid.uuid4()}"
        write_text(fresh, f"{uuid.uuid4()}\n")
        try:
            # Unlike a rename, a link never replaces what another process has put there.
            path.hardlink_to(fresh)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    text = path.read_text(encoding="utf-8").strip()
    try:
        return str(uuid.UUID(text))
    except ValueError as broken:
        raise RunError(
            "runner_unreadable",
            expected=f"a UUID in {path}",
            found=repr(text)[:100],
            remedy="end the runs of this folder, then move the file away: a new id is made",
        ) from broken
