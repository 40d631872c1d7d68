"""File tree of the host: the common root of all paths, and the file writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Tests point this at a recorded tree; on a host it is the real root.
ROOT = Path("/")

STATE_DIRECTORY = "/var/lib/gpuaas"

# Answers of the kernel for a process that has ended.
_ENDED = (FileNotFoundError, ProcessLookupError)

# Seconds to wait for a lock. Its holders run programs with limits of their own.
LOCK_S = 600.0


def path(absolute: str) -> Path:
    """`absolute` (starts with /) under the current root."""
    return ROOT / absolute.lstrip("/")


def read(absolute: str) -> str | None:
    """The stripped text of a small file, or None when it is absent or unreadable.

    If a decision depends on the file's absence, use `kept` or `document`.
    """
    try:
        return path(absolute).read_text(errors="replace").strip()
    except OSError:
        return None


def kept(absolute: str) -> str | None:
    """The stripped text of a file for a decision; None only when the file does not exist.

    Unreadable is not absent: an I/O error or a folder in its place is a Refusal.
    """
    try:
        return path(absolute).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def content(absolute: str) -> bytes | None:
    """As `kept`, but the unmodified bytes, because names in a table may have any encoding."""
    try:
        return path(absolute).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def listed(absolute: str) -> list[str]:
    """Names in a folder, sorted; [] only when the folder does not exist."""
    try:
        return sorted(entry.name for entry in path(absolute).iterdir())
    except FileNotFoundError:
        return []
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def matching(absolute: str, pattern: str) -> list[str]:
    """As `listed`, but only names of a shell's pattern.

    Not `Path.glob`, for which an unreadable folder is an empty folder.
    """
    return fnmatch.filter(listed(absolute), pattern)


def is_there(absolute: str) -> bool:
    """Whether anything has this name, even a broken link."""
    try:
        path(absolute).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as broken:
        raise unreadable(absolute, broken) from broken
    return True


def document(absolute: str, *, code: str, remedy: str) -> dict[str, Any] | None:
    """A JSON object in a file on the host; None only when the file does not exist.

    Any other content is a Refusal with this code, and never an empty record.
    """
    try:
        parsed = json.loads(path(absolute).read_text(encoding="utf-8"))
        if isinstance(parsed, dict):
            return parsed
        broken: Exception = TypeError(f"a {type(parsed).__name__}")
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
    """The refusal of a decision that depends on an unreadable file or folder."""
    return Refusal(
        "file_unreadable",
        expected=f"a readable {absolute}, or none",
        found=f"{absolute}: {_why(broken)}",
        remedy="make it readable, then run again; nothing was changed",
    )


def shown(text: str) -> str:
    """A printable form of a name or line for plans and results."""
    decoded = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return decoded.replace("\0", "\\x00")


def abridged(text: str, longest: int) -> str:
    """A printable form of at most `longest` characters. Of a longer text it has the beginning and a
    digest, so that no difference is cut off.
    """
    whole = shown(text)
    if len(whole) <= longest:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{whole[: longest - 17]} {digest}"


def _why(problem: Exception) -> str:
    """The message without the path of an OSError, which includes the current root."""
    reason = problem.strerror if isinstance(problem, OSError) else None
    return reason or str(problem) or type(problem).__name__


def processes() -> list[int]:
    """Every process of the host."""
    return [int(name) for name in listed("/proc") if name.isdecimal()]


def of_process(pid: int, name: str) -> str:
    """A process's file in /proc; "" when the process has ended, or the kernel has no such file."""
    absolute = f"/proc/{pid}/{name}"
    try:
        return path(absolute).read_bytes().decode(errors="replace")
    except _ENDED:
        return ""
    except OSError as broken:
        raise unreadable(absolute, broken) from broken


def descriptors(process: int | None = None) -> Iterator[tuple[int, str]]:
    """Process and link of each open file. A process that ends during the scan may have none.

    process: by default every process of the host.
    """
    for pid in processes() if process is None else [process]:
        folder = f"/proc/{pid}/fd"
        try:
            links = [entry.path for entry in os.scandir(path(folder))]
        except _ENDED:
            continue
        except OSError as broken:
            raise unreadable(folder, broken) from broken
        yield from ((pid, link) for link in links)


def open_files(process: int | None = None) -> Iterator[tuple[int, str]]:
    """As `descriptors`, with the names of the files.

    A file that is closed during the scan does not hide the others of its process.
    """
    for pid, link in descriptors(process):
        try:
            # Thousands, of which a Path would take longer than the kernel.
            yield pid, os.readlink(link)  # noqa: PTH115
        except _ENDED:
            continue
        except OSError as broken:
            name = f"/proc/{pid}/fd/{Path(link).name}"
            # No device has a name that is too long. Of a process that has just ended the kernel
            # says EACCES.
            if broken.errno != errno.ENAMETOOLONG and is_there(name):
                raise unreadable(name, broken) from broken


def numbers(text: str) -> list[int]:
    """The list format of the kernel and libvirt: `0-3,8` is 0, 1, 2, 3, 8."""
    every: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _sep, last = part.partition("-")
        every.extend(range(int(first), int(last or first) + 1))
    return every


def write(absolute: str, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically, with its mode; file and folder are synced."""
    target = path(absolute)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        # Text that was read with surrogateescape is written back unchanged.
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as handle:
            handle.write(text)
            handle.flush()
            # Last, because libvirt runs every program in its folder of hooks, drafts included.
            os.fchmod(handle.fileno(), mode)
            os.fsync(handle.fileno())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    _sync_directory(target.parent)


def remove(absolute: str) -> None:
    """Remove a file if it exists."""
    target = path(absolute)
    target.unlink(missing_ok=True)
    if target.parent.is_dir():
        _sync_directory(target.parent)


def wait_gone(absolute: str, limit_s: float) -> None:
    """Wait until a folder is gone, or the time is over."""
    end = time.monotonic() + limit_s
    while path(absolute).is_dir() and time.monotonic() < end:
        time.sleep(0.2)


@contextlib.contextmanager
def locked(directory: str, *, mode: int, wait_s: float = 0) -> Iterator[None]:
    """Lock with one holder at a time on this host. A missing directory is created with `mode`.

    wait_s: longest wait for another holder, in seconds; 0 means LOCK_S. Then the caller is refused
    (`lock_held`).
    """
    folder = path(directory)
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + (wait_s or LOCK_S)
    try:
        while not _taken(descriptor):
            if time.monotonic() > end:
                raise Refusal(
                    "lock_held",
                    expected=f"the end of another run that holds {directory}/.lock",
                    found=f"still held after {wait_s or LOCK_S:g} s",
                    remedy=f"find it with `fuser {directory}/.lock`; a process that waits for a "
                    "dead device ends with a restart of the host",
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds."""
    return datetime.now(timezone.utc).isoformat()


def node_id() -> str:
    """The node that this host enrolled as; "" on a host that never enrolled."""
    for line in (kept("/etc/gpuaas/enrolment.env") or "").splitlines():
        if line.startswith("GPUAAS_NODE_ID="):
            return line.partition("=")[2].strip()
    return ""


def identity() -> dict[str, str]:
    """Identifiers of the current boot and of the installation."""
    return {
        "boot_id": read("/proc/sys/kernel/random/boot_id") or "",
        "machine_id": read("/etc/machine-id") or "",
        "host_key": read("/etc/ssh/ssh_host_ed25519_key.pub") or "",
    }
