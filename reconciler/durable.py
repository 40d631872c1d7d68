"""Files that a loss of power does not undo: content before its name, and the name before return."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically and durably. A crash leaves the old file or the new file, and a
    loss of power after this call the new file.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        os.fchmod(descriptor, mode)
        handle.write(text)
    place(Path(name), path)


def place(file: Path, path: Path) -> None:
    """Move a file, or a folder with durable files, to its place on the same file system."""
    sync(file)
    file.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder: without this, a loss of power
    may undo a rename.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
