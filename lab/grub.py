"""GRUB for BIOS on a disk image, installed without a loop device as grub-bios-setup does.

Offsets are those of GRUB's include/grub/i386/pc/boot.h and grub-core/boot/i386/pc/diskboot.S.
"""

from __future__ import annotations

import struct

SECTOR = 512
# boot.img: position of the first sector of core.img, and a jump that trusts odd BIOS drive numbers.
BOOT_KERNEL_SECTOR = 0x5C
BOOT_DRIVE = 0x64
BOOT_DRIVE_CHECK = 0x66
# Code ends here; the disk signature and the (protective) partition table follow.
BOOT_CODE_END = 440
# core.img: its first sector ends with the block list of the rest: start, count, segment.
BLOCK_LIST = SECTOR - 12


def boot_sector(boot_image: bytes, current: bytes, core_sector: int) -> bytes:
    """Return the disk's first sector: boot.img's code for core.img, with `current`'s table."""
    if len(boot_image) != SECTOR or len(current) != SECTOR:
        raise ValueError("boot.img and the first sector of the disk are 512 bytes each")
    sector = bytearray(boot_image)
    struct.pack_into("<Q", sector, BOOT_KERNEL_SECTOR, core_sector)
    sector[BOOT_DRIVE] = 0xFF
    # Two NOPs, as grub-bios-setup does on hard disks.
    sector[BOOT_DRIVE_CHECK : BOOT_DRIVE_CHECK + 2] = b"\x90\x90"
    sector[BOOT_CODE_END:] = current[BOOT_CODE_END:]
    return bytes(sector)


def core_image(core: bytes, core_sector: int) -> bytes:
    """Return core.img, padded to sectors, with the block list of its rest."""
    padded = bytearray(core + bytes(-len(core) % SECTOR))
    _, count, segment = struct.unpack_from("<QHH", padded, BLOCK_LIST)
    expected = len(padded) // SECTOR - 1
    if count != expected:
        raise ValueError(f"core.img says {count} more sectors, it has {expected}")
    struct.pack_into("<QHH", padded, BLOCK_LIST, core_sector + 1, count, segment)
    return bytes(padded)
