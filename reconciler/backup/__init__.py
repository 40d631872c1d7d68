"""Backup of a site in a single file, and restore from it; the marker of a restore in progress.

Until the last step of a restore the records are outdated without a sign of it. The marker keeps
every command from opening such a site, and lets an interrupted restore be repeated.
"""

from __future__ import annotations

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
