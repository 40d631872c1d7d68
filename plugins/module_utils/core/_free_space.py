"""File systems of a host that are full, or almost: with less, a launch, a log or a module fails."""

from __future__ import annotations

import contextlib
import os

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_LEAST_BYTES = 256 << 20
_FOLDERS = ("/", "/tmp", "/var/lib/gpuaas", "/var/lib/libvirt")  # noqa: S108


def full() -> list[Refusal]:
    """A refusal for each full file system."""
    by_device: dict[int, Refusal] = {}
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
            path = _host.path(folder)
            free = os.statvfs(path)
            room = free.f_bavail * free.f_frsize
            no_inodes = free.f_files and not free.f_favail
            if room < _LEAST_BYTES or no_inodes:
                left = "no free inode" if no_inodes else f"{room >> 20} MiB free"
                by_device[path.stat().st_dev] = Refusal(
                    "host_disk_full",
                    expected=f"at least {_LEAST_BYTES >> 20} MiB and free inodes",
                    found=f"{left} in the file system of {folder}",
                    remedy="free space on the host: old logs, packages, and images that no slice "
                    "needs in /var/lib/gpuaas/images",
                )
    return list(by_device.values())
