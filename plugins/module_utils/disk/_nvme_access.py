"""Reservation and password (TCG Opal) of an NVMe namespace that a former tenant has left.

Both make a device refuse an erase. They are looked for after an erase has failed, to name the
cause. Written from the NVMe base specification (Reservation Report, Security Receive) and the TCG
Storage Architecture Core Specification (Level 0 discovery); not yet run on hardware.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device, _nvme_admin
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import Disk

# <linux/nvme_ioctl.h>: _IOWR('N', 0x43, struct nvme_passthru_cmd)
NVME_IOCTL_IO_CMD = 0xC0484E43
_RESERVATION_REPORT, _SECURITY_RECEIVE = 0x0E, 0x82
_LENGTH = 4096
# Security protocol 1 with ComID 1, which every TCG device answers without a session.
_LEVEL_0 = 0x01 << 24 | 0x0001 << 8
_LOCKING, _LOCKED = 0x0002, 0x04
_REPAIR = "then repair the slot (`gpuaas recover`)"


def obstacle(descriptor: int, disk: Disk, attempts: str) -> Refusal | None:
    """The refusal that names a lock or a reservation; None if the device has neither. attempts: its
    answers to the erase.
    """
    name = f"{disk.disk_identity} (serial {disk.serial})"
    if _locked(_security(descriptor)):
        return Refusal(
            "disk_locked",
            expected=f"{name} without a locked range",
            found=f"a range locked by a password (TCG Opal); {attempts}",
            remedy="revert the disk with the PSID on its label (`sedutil-cli --PSIDrevert`), which"
            f" erases it, {_REPAIR}; or replace it",
        )
    if kind := _reserved(_reservations(descriptor)):
        return Refusal(
            "disk_reserved",
            expected=f"{name} without a reservation",
            found=f"{kind}; {attempts}",
            remedy="clear it from a host that is registered, or register this one and preempt"
            f" (`nvme resv-report`, `nvme resv-register`, `nvme resv-acquire`), {_REPAIR}",
        )
    return None


def _reserved(report: bytes) -> str:
    """Type and number of registered hosts of a reservation; "" without a reservation."""
    kind, registered = struct.unpack_from("<BH", report, 4) if len(report) >= 24 else (0, 0)
    return f"a reservation of type {kind} with {registered} registered hosts" if kind else ""


def _locked(answer: bytes) -> bool:
    """Whether the Level 0 discovery shows a locked range."""
    return any(
        code == _LOCKING and bool(data[:1] and data[0] & _LOCKED)
        for code, data in _features(answer)
    )


def _features(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Code and content of each feature descriptor behind the header of 48 bytes."""
    if len(answer) < 48:
        return
    end = min(struct.unpack_from(">I", answer)[0] + 4, len(answer))
    at = 48
    while at + 4 <= end:
        code, _version, length = struct.unpack_from(">HBB", answer, at)
        yield code, answer[at + 4 : min(at + 4 + length, end)]
        at += 4 + length


def _reservations(descriptor: int) -> bytes:
    # The length in dwords, counted from zero.
    return _answer(descriptor, NVME_IOCTL_IO_CMD, _RESERVATION_REPORT, _LENGTH // 4 - 1)


def _security(descriptor: int) -> bytes:
    request = _nvme_admin.NVME_IOCTL_ADMIN_CMD
    return _answer(descriptor, request, _SECURITY_RECEIVE, _LEVEL_0, _LENGTH)


def _answer(descriptor: int, request: int, opcode: int, cdw10: int, cdw11: int = 0) -> bytes:
    """The answer to a command; empty for a device that does not know it."""
    data = ctypes.create_string_buffer(_LENGTH)
    try:
        namespace = _device.call(descriptor, _nvme_admin.NVME_IOCTL_ID, bytearray(8))
        status = _nvme_admin.command(
            descriptor, request, opcode, namespace=namespace, cdw10=cdw10, cdw11=cdw11, data=data
        )
    except OSError:
        return b""
    return b"" if status else data.raw
