"""Partitions in the table on the disk, whether or not the kernel has read it.

A kernel without partitions of a disk proves nothing about the disk's content. The table may be
newer, or the kernel was told to forget it. All loops are bounded, because a disk may contain false
data.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator

from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device

_MOST = 128  # entries; a GPT's default, and more than any disk here has
_EXTENDED = (0x05, 0x0F, 0x85)
_PROTECTIVE = 0xEE


def table(descriptor: int, size: int, block: int) -> dict[int, tuple[int, int]]:
    """Start and length in bytes by partition number; block: the disk's logical block in bytes."""
    listed = _gpt(descriptor, size) or _dos(descriptor, block)
    return {
        number: (start, min(length, size - start))
        for number, start, length in listed
        if number and 0 < start < size and length > 0
    }


def chain(descriptor: int, block: int) -> list[tuple[int, int]]:
    """Start and length of the boot records that lie between logical partitions."""
    return [(start, length) for number, start, length in _dos(descriptor, block) if not number]


def guids(descriptor: int, size: int) -> set[tuple[int, str]]:
    """Number and GUID of each partition, in either copy of the table.

    UEFI's boot entries name a partition by its GUID. Firmware may repair one copy from the other.
    """
    return {
        (number, guid)
        for entries in _gpt_tables(descriptor, size)
        for number, _start, _length, guid in entries
    }


def _gpt(descriptor: int, size: int) -> list[tuple[int, int, int]]:
    """Entries from the first header, else from its copy at the end."""
    for entries in _gpt_tables(descriptor, size):
        return [entry[:3] for entry in entries]
    return []


def _gpt_tables(descriptor: int, size: int) -> Iterator[list[tuple[int, int, int, str]]]:
    for block in (512, 4096):
        for at in (block, size - block):
            header = _device.read(descriptor, at, 92)
            if len(header) == 92 and header.startswith(b"EFI PART"):
                entries = list(_gpt_entries(descriptor, header, block, size))
                if entries:
                    yield entries


def _gpt_entries(
    descriptor: int, header: bytes, block: int, size: int
) -> Iterator[tuple[int, int, int, str]]:
    place, count, width = struct.unpack_from("<QII", header, 72)
    if not (width in (128, 256, 512) and 0 < place * block < size):
        return
    entries = _device.read(descriptor, place * block, min(count, _MOST) * width)
    for number in range(len(entries) // width):
        entry = entries[number * width : (number + 1) * width]
        first, last = struct.unpack_from("<QQ", entry, 32)
        if any(entry[:16]) and last >= first:
            guid = str(uuid.UUID(bytes_le=entry[16:32]))
            yield number + 1, first * block, (last - first + 1) * block, guid


def _dos(descriptor: int, block: int) -> list[tuple[int, int, int]]:
    """Partitions by number; 0 for the records that make up an extended partition."""
    entries = []
    for number, (kind, first, count) in enumerate(_dos_entries(descriptor, 0), start=1):
        if kind in _EXTENDED:
            entries += list(_logical(descriptor, block, first))
        elif kind and kind != _PROTECTIVE:
            entries.append((number, first * block, count * block))
    return entries


def _logical(descriptor: int, block: int, base: int) -> Iterator[tuple[int, int, int]]:
    """The chain inside an extended partition; its links are relative to `base`."""
    link = 0
    for number in range(5, 5 + _MOST):
        entries = _dos_entries(descriptor, (base + link) * block)
        if not entries:
            return
        yield 0, (base + link) * block, 512
        (kind, first, count), (following, then, _count) = entries[:2]
        if kind:
            yield number, (base + link + first) * block, count * block
        if following not in _EXTENDED or then <= link:
            return
        link = then


def _dos_entries(descriptor: int, at: int) -> list[tuple[int, int, int]]:
    """Type, first block and number of blocks of the four entries; [] if the sector is no table."""
    sector = _device.read(descriptor, at, 512)
    if len(sector) < 512 or sector[510:] != b"\x55\xaa":
        return []
    entries = [sector[446 + 16 * number : 462 + 16 * number] for number in range(4)]
    # A filesystem's boot code looks like a table except for these bytes.
    if any(entry[0] not in (0, 0x80) for entry in entries):
        return []
    return [(entry[4], *struct.unpack_from("<II", entry, 8)) for entry in entries]
