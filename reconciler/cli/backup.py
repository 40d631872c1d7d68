"""`gpuaas backup` and `gpuaas restore`: docs/operations.md says what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli import session, show
from reconciler.model.errors import Problem


def mount(app: typer.Typer) -> None:
    """Add both."""
    app.command("backup")(backup)
    app.command("restore")(restore)


def backup(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A new file; it will hold private keys.")],
) -> None:
    """Database, SSH authorities and settings in one file, beside a service that runs."""
    from reconciler.backup import archive
    from reconciler.settings import Settings

    show.record(session.of(context), archive.write(Settings(), file))


def restore(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What `gpuaas backup` made.")],
) -> None:
    """Make the site of a backup in an empty state folder, with the service stopped.

    What was running or waiting is ended, not repeated; nothing is on sale until its host is proven
    again. Tokens and host keys that were revoked after the backup are valid again: the answer names
    each, and what to do.
    """
    _readable(file)
    from reconciler.backup.restore import restore as make
    from reconciler.settings import Settings

    show.record(session.of(context), make(Settings(), file))


def _readable(file: Path) -> None:
    """Problem `backup_unreadable` for what cannot be opened, in words and before anything is."""
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
