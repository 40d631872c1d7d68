from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils import _signature

pytestmark = pytest.mark.covers("HOST-9")

SIZE = 16 << 20


def types(image: Path, start: int = 0, length: int = SIZE) -> list[str]:
    descriptor = os.open(image, os.O_RDONLY)
    try:
        return [mark.type for mark in _signature.found(descriptor, start, length)]
    finally:
        os.close(descriptor)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    made = tmp_path / "image"
    made.touch()
    os.truncate(made, SIZE)
    return made


def put(image: Path, offset: int, magic: bytes) -> None:
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
    ],
)
def test_members_of_bigger_things(image: Path, offset: int, magic: bytes, kind: str) -> None:
    put(image, offset, magic)
    assert types(image) == [kind]


def test_offsets_are_those_of_the_disk(image: Path) -> None:
    put(image, 4 << 20, b"XFSB")
    descriptor = os.open(image, os.O_RDONLY)
    found = _signature.found(descriptor, 4 << 20, 8 << 20)
    os.close(descriptor)
    assert found == [_signature.Signature("xfs", 4 << 20)]


def test_a_fat_boot_sector_is_no_partition_table(image: Path) -> None:
    put(image, 82, b"FAT32   ")
    put(image, 510, b"\x55\xaa")
    assert types(image) == ["vfat"]
