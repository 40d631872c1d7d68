"""Erase of a whole disk, proven by reading back.

Works only on the descriptor of `_block.exclusive`. A method counts when the read-back finds zeros.
A method that reports success and leaves bytes is recorded as a failed attempt, and the next method
runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _device,
    _nvme_access,
    _nvme_admin,
    _proof,
    _signature,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._device import ALIGN, MIB
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import Disk

# NIST SP 800-88: `purge` withstands a laboratory, `clear` the disk's own interface.
METHODS: Mapping[str, str] = {
    "crypto_erase": "purge",
    "user_data_erase": "purge",
    "discard": "clear",
    "zero_fill": "clear",
}
# Codes of an erase that has begun and is not proven.
UNPROVEN = ("wipe_not_verified", "disk_locked", "disk_reserved")
# Errors of a device that its driver cannot read: broken, reserved (EBADE) or locked (ENODATA).
_UNREADABLE = (errno.EIO, errno.EBADE, errno.ENODATA)
# A 15 TB disk without crypto erase may take hours to format.
FORMAT_TIMEOUT_S = 6 * 3600


def erase(descriptor: int, disk: Disk, methods: Sequence[str]) -> dict[str, Any]:
    """Erase with the first method whose read-back finds zeros; returns the sealed proof."""
    started = _host.now()
    marks = clear_signatures(descriptor, disk)
    identity = _nvme_admin.identify(descriptor)
    attempts: list[dict[str, Any]] = []
    for method in methods:
        if not identity.supports(method):
            attempts.append({"method": method, "outcome": "not supported by the controller"})
            continue
        chosen = _proof.samples(disk.size_bytes, marks, os.urandom(16))
        try:
            status = _run(descriptor, disk, identity, method)
            left = _proof.residue(descriptor, chosen) if status["status"] == 0 else []
        except OSError as failed:
            attempts.append({"method": method, "outcome": f"failed: {failed}"})
            continue
        if status["status"] != 0:
            attempts.append({"method": method, "outcome": f"refused: {status}"})
            continue
        if left:
            shown = ", ".join(map(str, left[:4]))
            attempts.append({"method": method, "outcome": f"bytes left at {shown}"})
            continue
        return _proof.seal(
            {
                **_subject(disk),
                "method": method,
                "class": METHODS[method],
                "started_at": started,
                "finished_at": _host.now(),
                "controller_status": status,
                "samples": len(chosen),
                "sample_bytes": sum(length for _offset, length in chosen),
                "sample_offsets": [offset for offset, _length in chosen],
                "attempts": attempts,
                "verified": True,
            }
        )
    outcomes = "; ".join(f"{attempt['method']}: {attempt['outcome']}" for attempt in attempts)
    raise _nvme_access.obstacle(descriptor, disk, outcomes) or Refusal(
        UNPROVEN[0],
        expected=f"one of {', '.join(methods)} to leave nothing but zeros on {disk.disk_identity}",
        found=outcomes or "no method",
        remedy="keep the slot blocked; replace the disk, or allow a method that it supports",
    )


def clear_signatures(descriptor: int, disk: Disk) -> list[int]:
    """Overwrite both ends of the disk and of each partition, and forget the partitions.

    Returns the offsets of the old signatures and of the overwritten ends, to be read back later. An
    interrupted erase then leaves no table or filesystem. A place that can be neither read nor
    written is skipped: the erase may cure it, and without zeros at the end there is no proof.
    """
    marks: list[int] = []
    # The disk itself comes last, because its table contains the places of the partitions.
    extents = sorted(_extents(descriptor, disk), reverse=True)
    for start, length in extents:
        with contextlib.suppress(OSError):
            marks += [mark.offset for mark in _signature.scan(descriptor, start, length)]
    for start, length in extents:
        first, end = _outwards(start, length, disk.size_bytes)
        span = min(MIB, end - first)
        for at in sorted({first, end - span}):
            marks.append(at)
            with contextlib.suppress(OSError):
                _device.write_zeros(descriptor, at, span)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    try:
        _device.reread_partitions(descriptor)
    except OSError as refused:
        if refused.errno not in _UNREADABLE:
            raise
    return sorted(set(marks))


def _extents(descriptor: int, disk: Disk) -> list[tuple[int, int]]:
    """The disk and its partitions; if the table is unreadable, the kernel's partitions."""
    try:
        return list(_usage.extents(disk, descriptor).values())
    except OSError:
        return list(_usage.known_extents(disk).values())


def _outwards(start: int, length: int, size: int) -> tuple[int, int]:
    """First byte and end, rounded outwards to blocks that direct I/O can write.

    A guest that counts in sectors of 512 bytes ends its partitions inside a 4096-byte block.
    """
    return start - start % ALIGN, min(-(-(start + length) // ALIGN) * ALIGN, size)


def _run(
    descriptor: int, disk: Disk, identity: _nvme_admin.Identity, method: str
) -> dict[str, Any]:
    """Run a method over the whole disk; `status` is 0 when the device reports success."""
    whole = (0, disk.size_bytes)
    attempt: dict[str, Any] = {"command": method, "status": 0}
    if method in _nvme_admin.SECURE_ERASE:
        _device.forget_cache(descriptor)
        attempt["command"] = "format_nvm"
        attempt["secure_erase_setting"] = _nvme_admin.SECURE_ERASE[method]
        attempt["status"] = _nvme_admin.format_namespace(
            descriptor, identity, method, timeout=FORMAT_TIMEOUT_S
        )
    elif method == "discard":
        # Discard guarantees nothing about reads, so the whole disk is read and the residue
        # overwritten.
        _device.discard(descriptor, *whole)
        attempt["rewritten_bytes"] = _zero_residue(descriptor, disk.size_bytes)
    else:
        attempt["command"] = _device.zero(descriptor, *whole)
    os.fsync(descriptor)
    _device.forget_cache(descriptor)
    if (size := _device.size(descriptor)) != disk.size_bytes:
        attempt["status"] = f"size changed from {disk.size_bytes} to {size}"
    return attempt


def _zero_residue(descriptor: int, size: int) -> int:
    left = _proof.residue(descriptor, [(0, size)])
    for offset in left:
        _device.write_zeros(descriptor, offset, min(MIB, size - offset))
    return sum(min(MIB, size - offset) for offset in left)


def _subject(disk: Disk) -> dict[str, Any]:
    return {
        "disk": disk.disk_identity,
        "nvme_device": disk.by_id,
        "serial": disk.serial,
        "model": disk.model,
        "size_bytes": disk.size_bytes,
    }
