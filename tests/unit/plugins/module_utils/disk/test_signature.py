"""Signatures on a disk, as the real tools write them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _signature

pytestmark = pytest.mark.covers("HOST-9")

SIZE = 16 << 20


def types(image: Path, start: int = 0, length: int = SIZE) -> list[str]:
    descriptor = os.open(image, os.O_RDONLY)
    try:
        return [mark.type for mark in _signature.scan(descriptor, start, length)]
    finally:
        os.close(descriptor)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    made = tmp_path / "image"
    made.touch()
    os.truncate(made, SIZE)
    return made


def write_magic(image: Path, offset: int, magic: bytes) -> None:
    with image.open("r+b") as handle:
        handle.seek(offset)
        handle.write(magic)


def test_zeros_carry_nothing(image: Path) -> None:
    assert types(image) == []


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["mke2fs", "-q", "-t", "ext4"], "ext4"),
        (["mke2fs", "-q", "-t", "ext3"], "ext3"),
        (["mke2fs", "-q", "-t", "ext2"], "ext2"),
        (["mkswap", "-q"], "swap"),
    ],
)
def test_what_the_real_tools_write(image: Path, argv: list[str], kind: str) -> None:
    subprocess.run([*argv, str(image)], check=True, capture_output=True)
    assert types(image)[0] == kind


def test_a_partition_table_shows_at_both_ends(image: Path) -> None:
    subprocess.run(["sfdisk", "-q", str(image)], input=b"label: gpt\n,,L\n", check=True)
    assert types(image) == ["gpt", "dos", "gpt"]


@pytest.mark.parametrize(
    ("offset", "magic", "kind"),
    [
        (0, b"LUKS\xba\xbe", "crypto_LUKS"),
        (512, b"LABELONE", "LVM2_member"),
        (4096, b"\xfc\x4e\x2b\xa9", "linux_raid_member"),
        (SIZE - 8192, b"\xfc\x4e\x2b\xa9", "linux_raid_member"),
        (SIZE - 65536, b"\xfc\x4e\x2b\xa9", "linux_raid_member"),
        (65600, b"_BHRfS_M", "btrfs"),
        (130 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0", "zfs_member"),
        (1 << 20, b"\x0d\xd0\x01\xc0", "VMFS_volume_member"),
        (2 << 20, b"\x5e\xf1\xab\x2f", "VMFS"),
        (SIZE - 1024, b"Intel Raid ISM Cfg Sig. 1.3.00", "isw_raid_member"),
        (SIZE - 8192, b"Intel Raid ISM Cfg Sig. 1.3.00", "isw_raid_member"),
        (SIZE - 512, b"\xde\x11\xde\x11", "ddf_raid_member"),
        (SIZE - 257 * 512, b"\xde\x11\xde\x11", "ddf_raid_member"),
        (SIZE - 512, b"$XIDE$", "lsi_mega_raid_member"),
        (SIZE - 1024, b"NVIDIA", "nvidia_raid_member"),
        (32, b"ORCLDISK", "oracleasm"),
        (2048, b"NSD descriptor for /dev/sdb created by GPFS", "gpfs"),
        (32768, b"JFS1", "jfs"),
        (65536 + 52, b"ReIsEr2Fs", "reiserfs"),
        (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "bcache"),
        (16384, b"SKUL\xba\xbe", "crypto_LUKS"),
        (300 * 1024 + 128 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0", "zfs_member"),
        (SIZE - 512 * 1024 + 130 * 1024, b"\0\0\0\0\x00\xba\xb1\x0c", "zfs_member"),
    ],
)
def test_members_of_bigger_things(image: Path, offset: int, magic: bytes, kind: str) -> None:
    write_magic(image, offset, magic)
    assert types(image) == [kind]


@pytest.mark.parametrize("odd", [0, 4096, 100 * 1024, 200 * 1024 + 512])
def test_ends_are_found_on_a_disk_of_any_size(image: Path, odd: int) -> None:
    """ZFS counts whole labels, md 0.90 whole 64 KiB, both from the start of the disk."""
    length = SIZE - odd
    labels = length - length % (256 * 1024)
    write_magic(image, labels - 256 * 1024 + 128 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0")
    assert types(image, 0, length) == ["zfs_member"]
    write_magic(image, length - length % 65536 - 65536, b"\xfc\x4e\x2b\xa9")
    assert types(image, 0, length)[0] == "linux_raid_member"


def test_a_member_tells_more_than_what_is_mirrored_on_it(image: Path) -> None:
    """A mirror with its superblock at the end begins with the filesystem of the volume."""
    write_magic(image, 0, b"XFSB")
    write_magic(image, 512, b"EFI PART")
    write_magic(image, SIZE - 1024, b"Intel Raid ISM Cfg Sig. 1.3.00")
    assert types(image) == ["isw_raid_member", "xfs", "gpt"]


def test_a_filesystem_is_described_with_its_identifier(image: Path) -> None:
    uuid = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
    make = ["mke2fs", "-q", "-t", "ext4", "-U", uuid, str(image)]
    subprocess.run(make, check=True, capture_output=True)
    descriptor = os.open(image, os.O_RDONLY)
    (mark,) = _signature.scan(descriptor, 0, SIZE)
    assert _signature.describe(descriptor, mark) == f"ext4@1080#{uuid.replace('-', '')}"
    os.close(descriptor)


def test_offsets_are_those_of_the_disk(image: Path) -> None:
    write_magic(image, 4 << 20, b"XFSB")
    descriptor = os.open(image, os.O_RDONLY)
    signatures = _signature.scan(descriptor, 4 << 20, 8 << 20)
    os.close(descriptor)
    assert signatures == [_signature.Signature("xfs", 4 << 20)]


def test_a_fat_boot_sector_is_no_partition_table(image: Path) -> None:
    write_magic(image, 82, b"FAT32   ")
    write_magic(image, 510, b"\x55\xaa")
    assert types(image) == ["vfat"]
