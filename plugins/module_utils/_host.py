"""The host's file tree: one root for every path, one way to write a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

# Tests point this at a recorded tree; on a host it is the real root.
ROOT = Path("/")

STATE_DIRECTORY = "/var/lib/gpuaas"


def path(absolute: str) -> Path:
    """`absolute` (starts with /) under the current root."""
    return ROOT / absolute.lstrip("/")


def read(absolute: str) -> str | None:
    """The stripped text of a small file, or None when it is not there or not readable."""
    try:
        return path(absolute).read_text(errors="replace").strip()
    except OSError:
        return None


def write(absolute: str, text: str, mode: int = 0o644) -> None:
    """Replace a file in one step: mode set before content shows, both synced to the disk."""
    target = path(absolute)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        os.fchmod(descriptor, mode)
        with os.fdopen(descriptor, "w") as handle:
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
    return datetime.now(UTC).isoformat()


def identity() -> dict[str, str]:
    """What says whether this is still the same boot of the same installation."""
    return {
        "boot_id": read("/proc/sys/kernel/random/boot_id") or "",
        "machine_id": read("/etc/machine-id") or "",
        "host_key": read("/etc/ssh/ssh_host_ed25519_key.pub") or "",
    }
