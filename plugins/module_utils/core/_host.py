"""File tree of the host: one root for every path and one way to write a file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Tests point this at a recorded tree; on a host it is the real root.
ROOT = Path("/")

STATE_DIRECTORY = "/var/lib/gpuaas"


def path(absolute: str) -> Path:
    """`absolute` (starts with /) under the current root."""
    return ROOT / absolute.lstrip("/")


def read(absolute: str) -> str | None:
    """The stripped text of a small file, or None when it is not there or not readable.

    Where something is decided by a file's absence: `kept` or `document`.
    """
    try:
        return path(absolute).read_text(errors="replace").strip()
    except OSError:
        return None


def kept(absolute: str) -> str | None:
    """The stripped text of a file that is decided by; None only when it is not there.

    Unreadable is not absent: an I/O error or a folder in its place is a Refusal.
    """
    try:
        return path(absolute).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def content(absolute: str) -> bytes | None:
    """The same, with every byte as it is: a name in a table may be in no known encoding."""
    try:
        return path(absolute).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def listed(absolute: str) -> list[str]:
    """Names in a folder, sorted; [] only when it is not there."""
    try:
        return sorted(entry.name for entry in path(absolute).iterdir())
    except FileNotFoundError:
        return []
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def document(absolute: str, *, code: str, remedy: str) -> dict[str, Any] | None:
    """A JSON object that the host keeps; None only when the file is not there.

    Whatever else there is in its place is a Refusal with this code: it is never an empty record.
    """
    try:
        found = json.loads(path(absolute).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        broken: Exception = TypeError(f"a {type(found).__name__}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        broken = problem
    raise Refusal(
        code,
        expected=f"a JSON object in {absolute}",
        found=f"{absolute}: {_why(broken)}",
        remedy=remedy,
    ) from broken


def unreadable(absolute: str, broken: OSError) -> Refusal:
    """Why nothing is decided by a file or folder that cannot be read."""
    return Refusal(
        "file_unreadable",
        expected=f"a readable {absolute}, or none",
        found=f"{absolute}: {_why(broken)}",
        remedy="repair what keeps it from being read, then run again; nothing was changed",
    )


def shown(text: str) -> str:
    """A name or line as plans and results show it, where not every byte may stand."""
    told = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return told.replace("\0", "\\x00")


def _why(problem: Exception) -> str:
    """Without the path of an OSError, which is the one under our root."""
    said = problem.strerror if isinstance(problem, OSError) else None
    return said or str(problem) or type(problem).__name__


def write(absolute: str, text: str, mode: int = 0o644) -> None:
    """Replace a file in one step: mode set before content shows, both synced to the disk."""
    target = path(absolute)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        os.fchmod(descriptor, mode)
        # What was read with surrogateescape goes back as it was.
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    _sync_directory(target.parent)


def remove(absolute: str) -> None:
    """Remove a file if it is there."""
    target = path(absolute)
    target.unlink(missing_ok=True)
    if target.parent.is_dir():
        _sync_directory(target.parent)


@contextlib.contextmanager
def locked(directory: str, *, mode: int) -> Iterator[None]:
    """One holder at a time on this host; the directory is made, with `mode`, when it is missing."""
    folder = path(directory)
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds."""
    return datetime.now(timezone.utc).isoformat()


def identity() -> dict[str, str]:
    """What says whether this is still the same boot of the same installation."""
    return {
        "boot_id": read("/proc/sys/kernel/random/boot_id") or "",
        "machine_id": read("/etc/machine-id") or "",
        "host_key": read("/etc/ssh/ssh_host_ed25519_key.pub") or "",
    }
