"""Signatures of partition tables, filesystems and volume members on a disk.

Read from the device itself, because a database of signatures may be stale and a forgotten member of
an array has no holder. Types have blkid's names.
"""

from __future__ import annotations

from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device

# Bytes read at the end of a disk or partition: two ZFS labels, and the remainder after them.
EDGE = 1 << 20
_HEAD = 2 * (1 << 20) + _device.ALIGN

TABLES = ("gpt", "dos")
# File shares of a bare-metal host; the approval must name any other content.
PLAIN = ("ext2", "ext3", "ext4", "xfs", "vfat")
# Bytes of unknown kind; a database on the bare disk looks like that.
RAW = "raw_data"
# Members of larger volumes, assembled or not, by the code that refuses them.
MEMBERS = {
    "LVM2_member": "lvm_member",
    "linux_raid_member": "md_member",
    "isw_raid_member": "md_member",
    "ddf_raid_member": "md_member",
    "lsi_mega_raid_member": "md_member",
    "nvidia_raid_member": "md_member",
}

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
    ("bcachefs", 4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9"),
    ("stratis", 528, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("vdo", 0, b"dmvdo001"),
    ("oracleasm", 32, b"ORCLDISK"),
    ("apfs", 32, b"NXSB"),
    ("jfs", 32768, b"JFS1"),
    ("reiserfs", 8192 + 52, b"ReIsEr"),
    ("reiserfs", 65536 + 52, b"ReIsEr"),
    ("reiser4", 65536, b"ReIsEr4"),
    ("gfs2", 65536, b"\x01\x16\x19\x70"),
    *(("ocfs2", at, b"OCFSV2") for at in (1024, 2048, 4096, 8192)),
    # The second header of LUKS2, which survives when the first is overwritten.
    *(("crypto_LUKS", 0x4000 << step, b"SKUL\xba\xbe") for step in range(9)),
    ("ceph_bluestore", 0, b"bluestore block device"),
    ("swap", 4096 - 10, b"SWAPSPACE2"),
    ("swap", 65536 - 10, b"SWAPSPACE2"),
    ("f2fs", 1024, b"\x10\x20\xf5\xf2"),
    ("iso9660", 32769, b"CD001"),
    ("btrfs", 65600, b"_BHRfS_M"),
    ("VMFS_volume_member", 1 << 20, b"\x0d\xd0\x01\xc0"),
    ("VMFS", 2 << 20, b"\x5e\xf1\xab\x2f"),
)
# type: (bytes before the end, magic)
_BEFORE_END: tuple[tuple[str, int, bytes], ...] = (
    ("gpt", 512, b"EFI PART"),
    ("gpt", 4096, b"EFI PART"),
    ("isw_raid_member", 2 * 512, b"Intel Raid ISM Cfg Sig."),
    ("isw_raid_member", 2 * 4096, b"Intel Raid ISM Cfg Sig."),
    ("ddf_raid_member", 512, b"\xde\x11\xde\x11"),
    ("ddf_raid_member", 257 * 512, b"\xde\x11\xde\x11"),
    ("lsi_mega_raid_member", 512, b"$XIDE$"),
    ("nvidia_raid_member", 2 * 512, b"NVIDIA"),
)
_ZFS_LABEL = 256 * 1024
_ZFS_UBERBLOCKS = range(128 * 1024, 256 * 1024, 1024)
_ZFS_PAIRS = 16 * 1024
_ZFS_NAME = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01"
_ZFS_MAGIC = (b"\x0c\xb1\xba\x00\0\0\0\0", b"\0\0\0\0\x00\xba\xb1\x0c")
# type: (bytes from the magic to the UUID or serial, its length)
_IDENTIFIERS = {
    **dict.fromkeys(("ext2", "ext3", "ext4"), (48, 16)),
    "xfs": (32, 16),
    "gpt": (56, 16),
    "btrfs": (-32, 16),
    "vfat": (-15, 4),
}
_EXT_SUPERBLOCK, _EXT_MAGIC = 1024, b"\x53\xef"
_RAID_MAGIC = b"\xfc\x4e\x2b\xa9"


@dataclass(frozen=True)
class Signature:
    """type: blkid's name. offset: bytes from the start of the disk."""

    type: str
    offset: int


def scan(descriptor: int, start: int, length: int) -> list[Signature]:
    """The signatures of the disk, or of the partition at `start`; the decisive signature first."""
    head = _device.read(descriptor, start, min(length, _HEAD))
    tail_at = max(0, length - EDGE)
    tail = _device.read(descriptor, start + tail_at, length - tail_at)
    marks = [*_of_head(head), *((kind, tail_at + at) for kind, at in _of_tail(tail, length))]
    marks.sort(key=lambda mark: _weight(mark[0]))
    return [Signature(kind, start + offset) for kind, offset in dict.fromkeys(marks)]


def describe(descriptor: int, mark: Signature) -> str:
    """`type@byte`, with `#` and the identifier for types whose identifier has a known place."""
    place, length = _IDENTIFIERS.get(mark.type, (0, 0))
    text = f"{mark.type}@{mark.offset}"
    if not length:
        return text
    return f"{text}#{_device.read(descriptor, mark.offset + place, length).hex()}"


def _weight(kind: str) -> int:
    """Sort key: the decisive type first. A mirror's member looks like its content except at its
    end.
    """
    if kind in MEMBERS:
        return 0
    return 3 if kind in TABLES else 2 if kind in PLAIN else 1


def pool(descriptor: int, start: int) -> str:
    """The name of the ZFS pool in the label at `start`; "" when no name can be read."""
    pairs = _device.read(descriptor, start + _ZFS_PAIRS, 112 * 1024)
    _before, key, rest = pairs.partition(_ZFS_NAME)
    length = int.from_bytes(rest[:4], "big") if key else 0
    return rest[4 : 4 + length].decode(errors="replace") if 0 < length <= 256 else ""


def _of_head(head: bytes) -> list[tuple[str, int]]:
    marks = [(kind, offset) for kind, offset, magic in _AT_START if head.startswith(magic, offset)]
    if head.startswith(_EXT_MAGIC, _EXT_SUPERBLOCK + 56):
        marks.append((_ext_version(head), _EXT_SUPERBLOCK + 56))
    nsd = head.find(b"NSD descriptor", 0, 65536)
    if nsd >= 0:
        marks.append(("gpfs", nsd))
    marks += _zfs(head, (0, _ZFS_LABEL))
    # A FAT boot sector carries the same two bytes as a partition table.
    if head.startswith(b"\x55\xaa", 510) and not any(
        kind in ("vfat", "ntfs") for kind, _offset in marks
    ):
        marks.append(("dos", 510))
    return marks


def _of_tail(tail: bytes, length: int) -> list[tuple[str, int]]:
    marks = [
        (kind, len(tail) - before)
        for kind, before, magic in _BEFORE_END
        if before <= len(tail) and tail.startswith(magic, len(tail) - before)
    ]
    # md keeps version 1.0 in the last 8 to 12 KiB, version 0.90 in the last 64 to 128 KiB.
    for place in (_down(length - 8192, 4096), _down(length, 65536) - 65536):
        at = place - (length - len(tail))
        if at >= 0 and tail.startswith(_RAID_MAGIC, at):
            marks.append(("linux_raid_member", at))
    # The last two of four labels, aligned to whole labels from the start of the device.
    last = len(tail) - length % _ZFS_LABEL - _ZFS_LABEL
    marks += _zfs(tail, (last - _ZFS_LABEL, last))
    return marks


def _zfs(area: bytes, labels: tuple[int, int]) -> list[tuple[str, int]]:
    places = (label + block for label in labels if label >= 0 for block in _ZFS_UBERBLOCKS)
    return [("zfs_member", at) for at in places if area.startswith(_ZFS_MAGIC, at)][:1]


def _ext_version(head: bytes) -> str:
    compatible = int.from_bytes(head[_EXT_SUPERBLOCK + 92 : _EXT_SUPERBLOCK + 96], "little")
    incompatible = int.from_bytes(head[_EXT_SUPERBLOCK + 96 : _EXT_SUPERBLOCK + 100], "little")
    # Extents, 64-bit or flexible groups make it ext4; a journal alone makes it ext3.
    if incompatible & 0x2C0:
        return "ext4"
    return "ext3" if compatible & 4 else "ext2"


def _down(value: int, step: int) -> int:
    return value - value % step
