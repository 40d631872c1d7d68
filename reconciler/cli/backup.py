"""`gpuaas backup` and `gpuaas restore`; docs/operations.md describes the steps afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli import output, session
from reconciler.model.errors import Problem


def mount(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("backup")(backup)
    app.command("restore")(restore)


def backup(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A new file; it will contain private keys.")],
) -> None:
    """Save database, SSH authorities and settings in one file. The service may keep running."""
    from reconciler.backup import archive
    from reconciler.settings import Settings

    output.record(session.of(context), archive.write(Settings(), file))


def restore(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A file of `gpuaas backup`.")],
) -> None:
    """Restore a backup into an empty state folder, with the service stopped.

    Running and waiting tasks are ended, not repeated. Nothing is on sale until its host is proven
    again. Tokens and host keys that were revoked after the backup are valid again: the answer lists
    them with the steps to take.
    """
    _check_readable(file)
    from reconciler.backup.restore import restore as make
    from reconciler.settings import Settings

    output.record(session.of(context), make(Settings(), file))


def _check_readable(file: Path) -> None:
    """Problem `backup_unreadable` for a file that cannot be opened, before any change."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise Problem(
            "backup_unreadable",
            404 if isinstance(error, FileNotFoundError) else 422,
            expected=f"a file that `gpuaas backup` made, at {file}",
            found=error.strerror or type(error).__name__,
            remedy="correct the path, or let this user read the file; nothing was restored",
        ) from error
