"""Marks that partition tables, filesystems and members of bigger things leave on a disk.

Read from the device itself, because a database of signatures may be stale and a forgotten member
of an array has no holder. Types are named as blkid names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils import _device

# What is read at each end of a disk or partition: ZFS labels reach 256 KiB in.
EDGE = 256 * 1024

TABLES = ("gpt", "dos")
# A file share of a bare-metal host; everything else needs to be named in the approval.
PLAIN = ("ext2", "ext3", "ext4", "xfs", "vfat")

# type: (offset from the start, magic)
_AT_START: tuple[tuple[str, int, bytes], ...] = (
    ("crypto_LUKS", 0, b"LUKS\xba\xbe"),
    ("xfs", 0, b"XFSB"),
    ("squashfs", 0, b"hsqs"),
    ("BitLocker", 3, b"-FVE-FS-"),
    ("ntfs", 3, b"NTFS    "),
    ("exfat", 3, b"EXFAT   "),
    ("vfat", 54, b"FAT1"),
    ("vfat", 82, b"FAT32   "),
    ("gpt", 512, b"EFI PART"),
    ("gpt", 4096, b"EFI PART"),
    ("LVM2_member", 0, b"LABELONE"),
    ("LVM2_member", 512, b"LABELONE"),
    ("LVM2_member", 1024, b"LABELONE"),
    ("LVM2_member", 1536, b"LABELONE"),
    ("linux_raid_member", 0, b"\xfc\x4e\x2b\xa9"),
    ("linux_raid_member", 4096, b"\xfc\x4e\x2b\xa9"),
    ("bcache", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    ("ceph_bluestore", 0, b"bluestore block device"),
    ("swap", 4096 - 10, b"SWAPSPACE2"),
    ("swap", 65536 - 10, b"SWAPSPACE2"),
    ("f2fs", 1024, b"\x10\x20\xf5\xf2"),
    ("iso9660", 32769, b"CD001"),
    ("btrfs", 65600, b"_BHRfS_M"),
    ("VMFS_volume_member", 1 << 20, b"\x0d\xd0\x01\xc0"),
)
_ZFS_UBERBLOCKS = range(128 * 1024, 256 * 1024, 1024)
_ZFS_MAGIC = (b"\x0c\xb1\xba\x00\0\0\0\0", b"\0\0\0\0\x00\xba\xb1\x0c")
_EXT_SUPERBLOCK, _EXT_MAGIC = 1024, b"\x53\xef"
_RAID_MAGIC = b"\xfc\x4e\x2b\xa9"


@dataclass(frozen=True)
class Signature:
    """type: as blkid says. offset: bytes from the start of the disk."""

    type: str
    offset: int


def found(descriptor: int, start: int, length: int) -> list[Signature]:
    """The signatures of the disk, or of the partition at `start`; the telling one first."""
    head = _device.read(descriptor, start, min(length, (1 << 20) + _device.ALIGN))
    tail_at = max(0, length - EDGE)
    tail = _device.read(descriptor, start + tail_at, length - tail_at)
    marks = [*_of_head(head), *((kind, tail_at + offset) for kind, offset in _of_tail(tail))]
    return [Signature(kind, start + offset) for kind, offset in marks]


def _of_head(head: bytes) -> list[tuple[str, int]]:
    marks = [(kind, offset) for kind, offset, magic in _AT_START if head.startswith(magic, offset)]
    if head.startswith(_EXT_MAGIC, _EXT_SUPERBLOCK + 56):
        marks.append((_ext_version(head), _EXT_SUPERBLOCK + 56))
    marks += [("zfs_member", at) for at in _ZFS_UBERBLOCKS if head.startswith(_ZFS_MAGIC, at)][:1]
    # A FAT boot sector carries the same two bytes as a partition table.
    if head.startswith(b"\x55\xaa", 510) and not any(
        kind in ("vfat", "ntfs") for kind, _offset in marks
    ):
        marks.append(("dos", 510))
    return marks


def _of_tail(tail: bytes) -> list[tuple[str, int]]:
    marks = [
        ("gpt", at)
        for at in (len(tail) - 512, len(tail) - 4096)
        if at >= 0 and tail.startswith(b"EFI PART", at)
    ]
    # md keeps version 1.0 in the last 8 to 12 KiB, version 0.90 in the last 64 to 128 KiB.
    for at in (_down(len(tail) - 8192, 4096), _down(len(tail), 65536) - 65536):
        if at >= 0 and tail.startswith(_RAID_MAGIC, at):
            marks.append(("linux_raid_member", at))
    return marks


def _ext_version(head: bytes) -> str:
    compatible = int.from_bytes(head[_EXT_SUPERBLOCK + 92 : _EXT_SUPERBLOCK + 96], "little")
    incompatible = int.from_bytes(head[_EXT_SUPERBLOCK + 96 : _EXT_SUPERBLOCK + 100], "little")
    # Extents, 64-bit or flexible groups make it ext4; a journal alone makes it ext3.
    if incompatible & 0x2C0:
        return "ext4"
    return "ext3" if compatible & 4 else "ext2"


def _down(value: int, step: int) -> int:
    return value - value % step
