"""Faults of a host that stop its runs: a full or read-only disk, and a wrong clock, by name."""

from __future__ import annotations

import re
from datetime import UTC, datetime

# Shows the time of a host in epoch seconds.
CLOCK_COMMAND = "date +%s"

# Codes of `unwritable`.
UNWRITABLE = ("host_disk_full", "host_read_only")
# Words of the kernel and of Python, as Ansible passes them on. Python names no cause when none
# of its folders for temporary files can be written.
_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|No usable temporary directory found",
    re.IGNORECASE,
)
_READ_ONLY = re.compile(r"Read-only file system", re.IGNORECASE)


def unwritable(message: str) -> dict[str, str] | None:
    """The fault if a full disk or a read-only file system ended the run; None if the message says
    otherwise.
    """
    if _READ_ONLY.search(message):
        return {
            "code": "host_read_only",
            "expected": "file systems of the host that can be written",
            "found": message,
            "remedy": "look for the cause in the host's `dmesg`, which is mostly a failing disk, "
            "and run `mount -o remount,rw` on the mount point (`findmnt -O ro`), then request the "
            "task again",
        }
    if not _FULL.search(message):
        return None
    return {
        "code": "host_disk_full",
        "expected": "room for the modules of the run and their files on the host",
        "found": message,
        "remedy": "free space on the host (`df -h; df -i`), mostly in /tmp, /var or /root, or make "
        "a file system writable that is read-only (`findmnt -O ro`), then request the task again",
    }


def wrong_clock(at: float, now: float, message: str = "") -> dict[str, str]:
    """Fault of a host whose clock shows `at` when it is `now`."""
    shown, right = (datetime.fromtimestamp(t, UTC).isoformat(timespec="seconds") for t in (at, now))
    way = "behind" if at < now else "ahead"
    return {
        "code": "clock_wrong",
        "expected": f"a clock near {right}",
        "found": f"{shown}, {abs(at - now):.0f} s {way}{f'; {message}' if message else ''}",
        "remedy": "set the host's clock and let it synchronise (`timedatectl`, `chronyc makestep`)",
    }


def refused_login(now: float, message: str) -> dict[str, str]:
    """Fault of a host that refuses AWX's login, and whose clock the service cannot read."""
    right = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    return {
        "code": "awx_login_refused",
        "expected": "a login by the certificate of AWX's Machine credential",
        "found": f"{message}; the service cannot read the host's clock",
        "remedy": f"compare `date -u` on the host's console with {right} and set its clock "
        "(`timedatectl`); if it is right, sign the credential's certificate anew",
    }
