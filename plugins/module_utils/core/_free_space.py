"""Full, nearly full and read-only file systems of a host, on which launches and modules fail."""

from __future__ import annotations

import contextlib
import os

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_LEAST_BYTES = 256 << 20
# /run is small on some hosts, and holds locks, sockets and the snapshot of telemetry.
_LEAST_OF = {"/run": 4 << 20}
_FOLDERS = ("/", "/tmp", "/var/lib/gpuaas", "/var/lib/libvirt", "/run")  # noqa: S108


def full() -> list[Refusal]:
    """A refusal for each of them."""
    by_device: dict[int, Refusal] = {}
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
            path = _host.path(folder)
            if refusal := _refusal(folder, os.statvfs(path)):
                by_device.setdefault(path.stat().st_dev, refusal)
    return list(by_device.values())


def _refusal(folder: str, free: os.statvfs_result) -> Refusal | None:
    if free.f_flag & os.ST_RDONLY:
        return Refusal(
            "host_read_only",
            expected=f"a file system of {folder} that can be written",
            found="it is mounted read-only",
            remedy="look for the cause in `dmesg`, which is mostly a failing disk, then run `mount "
            f"-o remount,rw` on its mount point (`findmnt -T {folder}`)",
        )
    room, least = free.f_bavail * free.f_frsize, _LEAST_OF.get(folder, _LEAST_BYTES)
    no_inodes = free.f_files and not free.f_favail
    if room >= least and not no_inodes:
        return None
    left = "no free inode" if no_inodes else f"{room >> 20} MiB free"
    return Refusal(
        "host_disk_full",
        expected=f"at least {least >> 20} MiB and free inodes",
        found=f"{left} in the file system of {folder}",
        remedy=f"free space in that file system (`df -h {folder}`): under /var mostly old logs, "
        "packages, and images that no slice needs in /var/lib/gpuaas/images",
    )
