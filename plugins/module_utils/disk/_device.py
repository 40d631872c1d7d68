"""Open block device: size, ioctls, and I/O that the page cache cannot falsify.

Every buffer is page aligned and every offset a multiple of 4096, so a descriptor opened with
O_DIRECT works on 512-byte and on 4-KiB disks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

ALIGN = 4096
MIB = 1 << 20

# <linux/fs.h>
BLKRRPART = 0x125F
BLKFLSBUF = 0x1261
BLKDISCARD = 0x1277
BLKZEROOUT = 0x127F
BLKGETSIZE64 = 0x80081272

# An ioctl of this size takes less than a minute on slow disks, so a run can be stopped between two.
_STRIDE = 1 << 30
# <linux/falloc.h>
_KEEP_SIZE, _ZERO_RANGE = 0x01, 0x10
# Errors of a device or driver that does not support the request.
_UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)


def call(descriptor: int, request: int, buffer: bytearray) -> int:
    """Run the ioctl. A positive result is the device's own status; an OSError comes from the
    kernel.
    """
    return int(fcntl.ioctl(descriptor, request, buffer))


def number(descriptor: int) -> str:
    """The device number as sysfs writes it, `259:0`."""
    status = os.fstat(descriptor)
    if not stat.S_ISBLK(status.st_mode):
        raise Refusal(
            "not_a_block_device",
            expected="a block device",
            found=f"a file of mode {stat.filemode(status.st_mode)}",
            remedy="pass the /dev/disk/by-id/nvme-eui.* path of the disk",
        )
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def size(descriptor: int) -> int:
    """Size in bytes, as the device reports it."""
    buffer = bytearray(8)
    call(descriptor, BLKGETSIZE64, buffer)
    return int(struct.unpack("=Q", buffer)[0])


def discard(descriptor: int, start: int, length: int) -> None:
    """Tell the device that the range is unused; later reads may return anything."""
    for offset, part in _strides(start, length):
        call(descriptor, BLKDISCARD, bytearray(struct.pack("=QQ", offset, part)))


def zero(descriptor: int, start: int, length: int) -> str:
    """Make the range read as zeros; returns the method: `write_zeroes`, or `writes` when
    unsupported.
    """
    for offset, part in _strides(start, length):
        try:
            call(descriptor, BLKZEROOUT, bytearray(struct.pack("=QQ", offset, part)))
        except OSError as refused:
            if refused.errno not in _UNKNOWN:
                raise
            if refused.errno == errno.ENOTTY and _zero_in_file(descriptor, offset, part):
                continue
            write_zeros(descriptor, offset, start + length - offset)
            return "writes"
    return "write_zeroes"


def _zero_in_file(descriptor: int, start: int, length: int) -> bool:
    """A disk image on a file system: whether its file system zeroed the range without writing."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(call(descriptor, _KEEP_SIZE | _ZERO_RANGE, start, length) == 0)


def write_zeros(descriptor: int, start: int, length: int) -> None:
    """Write zeros, past every layer that could report success without writing."""
    zeros = mmap.mmap(-1, min(4 * MIB, max(length, ALIGN)))
    with memoryview(zeros) as view:
        offset, end = start, start + length
        while offset < end:
            offset += os.pwritev(descriptor, [view[: min(len(zeros), end - offset)]], offset)


def forget_cache(descriptor: int) -> None:
    """Write back and drop the kernel's cache of the device."""
    call(descriptor, BLKFLSBUF, bytearray(8))


def reread_partitions(descriptor: int) -> bool:
    """Let the kernel read the partition table; False when the device does not support partitions.

    Fails with EBUSY while a partition is in use, which is intended.
    """
    try:
        call(descriptor, BLKRRPART, bytearray(8))
    except OSError as refused:
        if refused.errno not in _UNKNOWN:
            raise
        return False
    return True


def fill(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into `view` until it is full or the file ends; returns the number of bytes read."""
    got = 0
    while got < len(view):
        part = os.preadv(descriptor, [view[got:]], offset + got)
        if part == 0:
            break
        got += part
    return got


def drain(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of `view`."""
    put = 0
    while put < len(view):
        put += os.pwritev(descriptor, [view[put:]], offset + put)


def read(descriptor: int, offset: int, length: int) -> bytes:
    """Bytes of any range, read through an aligned buffer."""
    if length <= 0:
        return b""  # a partition that went away during the read has no bytes
    start = offset - offset % ALIGN
    span = -(-(offset + length - start) // ALIGN) * ALIGN
    buffer = mmap.mmap(-1, span)
    with memoryview(buffer) as view:
        got = fill(descriptor, view, start)
    return buffer[offset - start : min(offset - start + length, got)]


def _strides(start: int, length: int) -> Iterator[tuple[int, int]]:
    for offset in range(start, start + length, _STRIDE):
        yield offset, min(_STRIDE, start + length - offset)
