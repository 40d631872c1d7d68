"""Disk access for other modules, with the exclusive descriptor of every destructive action.

`exclusive` implements invariant I7: a single descriptor, opened O_EXCL. Identity and use are
checked on it, and every destructive action uses it. The path is never opened a second time; even
the disk's content is read through that descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _disk, _usage

Result = TypeVar("Result")

Disk = _disk.Disk
Usage = _usage.Usage
disks = _disk.disks
resolve = _disk.resolve
of_slot = _disk.of_slot
pci_addresses = _disk.pci_addresses
usages = _usage.usages
written = _usage.written

# QEMU keeps shared locks on bytes from 100 and from 200 of an open image.
_QEMU_LOCKS = (100, 200)
_PATIENCE_S = 15.0  # How long udev or a scan may hold the disk before that counts as use.


def usage(disk: Disk, *, dirty: bool = False) -> Usage:
    """The use of a disk; a Refusal `device_unreadable` when it cannot be read.

    dirty: the ledger says that the disk holds a tenant's bytes. They are reported if readable, and
    decide nothing: neither a bad sector nor a pool label may prevent their erase.
    """
    try:
        if not dirty:
            return _usage.usage(disk)
        used = _usage.claims(disk)
    except OSError as broken:
        raise _unreadable(disk, broken) from broken
    with contextlib.suppress(OSError):
        used = replace(used, filesystems=_usage.signatures(disk))
    return used


def judged(
    slot: Mapping[str, Any], *, own_pids: Collection[int] = ()
) -> tuple[Disk | None, list[Refusal]]:
    """The disk of a slot bundle as the device identifies itself, and reasons against its use.

    own_pids: the QEMU of the allocation that already holds the slot, whose use is no obstacle.
    """
    try:
        disk = of_slot(slot)
        used = usage(disk)
    except Refusal as refusal:
        return None, [refusal]
    if own_pids and set(used.qemu_pids) <= set(own_pids):
        used.qemu_pids.clear()
    return disk, refusals(disk, used)


def refusals(disk: Disk, used: Usage, exclude: Iterable[str] = ()) -> list[Refusal]:
    """Reasons against writing to the disk: `excluded_model`, `os_disk` or `disk_in_use`; [] for a
    free data disk. exclude: models beyond the known boot cards.
    """
    excluded = _disk.excluded(disk, exclude)
    findings = used.findings()
    codes = [code for code, _why in findings]
    if not findings:
        return excluded
    return [
        *excluded,
        Refusal(
            "os_disk" if "os_disk" in codes else "disk_in_use",
            expected=f"{disk.label} not in use by anything",
            found="; ".join(f"{code}: {text}" for code, text in findings),
            remedy="stop its users, or choose another disk; nothing is taken away by force",
        ),
    ]


@contextlib.contextmanager
def exclusive(disk: Disk, *, seen: Collection[str] | None = None) -> Iterator[int]:
    """An exclusive descriptor of the disk, verified to be that disk and unused.

    Opened for direct I/O. While it is open, no partition of the disk can be mounted or formatted,
    and a QEMU that shares the host's /dev cannot start on it.

    seen: the signatures in the plan, as `written` names them. The disk is refused if it has any
    other content, because its loss was not approved.
    """
    flags = os.O_RDWR | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
    try:
        descriptor = _patiently(lambda: os.open(_disk.node(disk.kernel_name), flags))
    except OSError as busy:
        if busy.errno != errno.EBUSY:
            raise
        raise _busy(disk, "the kernel: it is claimed") from busy
    try:
        _reserve(descriptor, disk)
        actual = _disk.of_descriptor(descriptor)
        _disk.require(
            actual, identifier=disk.disk_identity, serial=disk.serial, size=disk.size_bytes
        )
        _disk.require_single(actual)
        _refuse_use(actual)
        if _host.read(f"/sys/class/block/{actual.kernel_name}/ro") == "1":
            raise _write_protected(disk)
        if seen is not None:
            _refuse_change(descriptor, actual, seen)
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_use(disk: Disk) -> None:
    """Refuse a disk in use. A brief open by a program is tolerated; any other use is refused at
    once.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        used = _usage.claims(disk)
        blockers = refusals(disk, used)
        if not blockers:
            return
        lasting = {code for code, _why in used.findings()} - {"held_open"}
        if lasting or _disk.excluded(disk) or time.monotonic() > until:
            raise blockers[0]
        time.sleep(0.2)


def _refuse_change(descriptor: int, disk: Disk, seen: Collection[str]) -> None:
    try:
        there = written(_usage.signatures(disk, descriptor))
    except OSError as broken:
        raise _unreadable(disk, broken) from broken
    if sorted(seen) != sorted(there):
        raise Refusal(
            "changed_since_plan",
            expected=f"{disk.disk_identity} as planned, with {', '.join(seen) or 'no signature'}",
            found=", ".join(there) or "nothing",
            remedy="find the user of the disk; make a new plan and have it approved",
        )


def _reserve(descriptor: int, disk: Disk) -> None:
    try:
        # udev's protocol: it leaves a locked disk alone.
        _patiently(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except OSError as locked:
        raise _busy(disk, "a program that locked it") from locked
    for first in _QEMU_LOCKS:
        lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, first, 100, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        except OSError as locked:
            raise _busy(disk, "QEMU's image locks") from locked


def _patiently(act: Callable[[], Result]) -> Result:
    """Retry while a transient user holds the disk; the last OSError is raised."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return act()
        except OSError as refused:
            if refused.errno not in (errno.EBUSY, errno.EAGAIN) or time.monotonic() > until:
                raise
        time.sleep(0.2)


def _unreadable(disk: Disk, broken: OSError) -> Refusal:
    return Refusal(
        "device_unreadable",
        expected=f"the content of {disk.label} readable",
        found=str(broken),
        remedy="read the kernel log; replace the disk, or have it formatted when nothing on it is "
        "needed, and run again; nothing was changed",
    )


def _write_protected(disk: Disk) -> Refusal:
    return Refusal(
        "disk_write_protected",
        expected=f"{disk.label} writable",
        found="read-only: a former user may have write-protected its namespace",
        remedy="lift the protection (`nvme set-feature --feature-id=0x84`, `blockdev --setrw`), or "
        "replace the disk; nothing was changed",
    )


def _busy(disk: Disk, who: str) -> Refusal:
    """The visible users of the disk; otherwise the call that failed."""
    try:
        blockers = refusals(disk, _usage.usage(disk))
    except OSError:
        blockers = refusals(disk, _usage.claims(disk))
    if blockers:
        return blockers[0]
    return Refusal(
        "disk_in_use",
        expected=f"{disk.label} free to be claimed",
        found=f"held by {who}",
        remedy="find its user (`lsblk`, `fuser`) and stop it; nothing is taken away by force",
    )
