"""GRUB's boot sector and core image on a disk image."""

from __future__ import annotations

import struct

import pytest

from lab import grub


def core(sectors: int, *, claimed: int | None = None) -> bytes:
    """A core.img as grub-mkimage leaves it, a few bytes short of full sectors."""
    first = bytearray(grub.SECTOR)
    count = sectors - 1 if claimed is None else claimed
    struct.pack_into("<QHH", first, grub.BLOCK_LIST, 2, count, 0x820)
    return bytes(first) + bytes(range(256)) * 2 * (sectors - 2) + b"\xaa" * 100


def test_the_boot_sector_points_to_the_core_and_keeps_the_partition_table() -> None:
    boot = bytes(range(256)) * 2
    current = b"\x5e" * grub.SECTOR
    sector = grub.boot_sector(boot, current, 2048)
    assert struct.unpack_from("<Q", sector, 0x5C) == (2048,)
    assert sector[0x64] == 0xFF
    assert sector[0x66:0x68] == b"\x90\x90"
    assert sector[:0x5C] == boot[:0x5C]
    assert sector[440:] == current[440:]
    assert len(sector) == 512


def test_the_core_finds_its_own_rest() -> None:
    patched = grub.core_image(core(5), 2048)
    assert len(patched) == 5 * 512
    assert struct.unpack_from("<QHH", patched, grub.BLOCK_LIST) == (2049, 4, 0x820)
    assert patched[512:].rstrip(b"\0") == core(5)[512:].rstrip(b"\0")


def test_a_core_of_another_length_than_it_claims_is_refused() -> None:
    with pytest.raises(ValueError, match="it has 4"):
        grub.core_image(core(5, claimed=9), 2048)


def test_sectors_have_512_bytes() -> None:
    with pytest.raises(ValueError, match="512"):
        grub.boot_sector(b"short", bytes(512), 1)
