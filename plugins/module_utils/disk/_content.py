"""Content of a disk: signatures on it and its partitions, and bytes of unknown kind.

A disk counts as blank only after a read: zeros at both ends and at all sampled places.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _device,
    _disk,
    _partitions,
    _signature,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._device import ALIGN, MIB

Marks = dict[str, list[_signature.Signature]]
Extents = dict[str, tuple[int, int]]

# 64 spots of 64 KiB: 6 MiB of a blank disk are read, and data on 5 % of it is missed with
# probability 4 %. The spots are fixed, so that two reads of the same bytes agree.
_SPOTS = 64
_SPOT = 64 * 1024


def partitions(disk: _disk.Disk) -> list[str]:
    """The kernel's current names of the disk's partitions."""
    folder = f"/sys/class/block/{disk.kernel_name}"
    return [
        name for name in _host.listed(folder) if _host.path(f"{folder}/{name}/partition").exists()
    ]


def attribute(name: str, what: str) -> str | None:
    """A sysfs attribute of a block device; None only when it does not exist or no longer exists.

    Raises OSError: an unreadable number, offset or size would hide content.
    """
    try:
        return _host.path(f"/sys/class/block/{name}/{what}").read_text().strip()
    except OSError as broken:
        # ENODEV: the device went away while the file was open.
        if broken.errno in (errno.ENOENT, errno.ENODEV):
            return None
        raise


def extents(disk: _disk.Disk, descriptor: int) -> Extents:
    """Start and length in bytes of the disk and of each partition, by name.

    Partitions that exist only in the disk's own table get the kernel's naming.
    """
    places = known_extents(disk)
    listed = _partitions.table(descriptor, disk.size_bytes, _block_size(disk))
    for number, place in listed.items():
        if place not in places.values():
            name = f"{disk.kernel_name}p{number}"
            places[f"{name}@{place[0]}" if name in places else name] = place
    return places


def known_extents(disk: _disk.Disk) -> Extents:
    """As `extents`, without the disk's own table: the kernel's current view."""
    places = {disk.kernel_name: (0, disk.size_bytes)}
    for name in partitions(disk):
        start, size = attribute(name, "start"), attribute(name, "size")
        # A partition that is gone covers nothing; its bytes are then checked as the disk's.
        if start and size:
            places[name] = (int(start) * 512, int(size) * 512)
    return places


def _block_size(disk: _disk.Disk) -> int:
    return int(attribute(disk.kernel_name, "queue/logical_block_size") or 512)


def marks(disk: _disk.Disk, descriptor: int | None = None) -> Marks:
    """Every signature of the disk and of each partition with signatures, the decisive signature
    first.

    descriptor: an open descriptor of the disk for direct I/O; without it the path is opened.
    """
    if descriptor is None:
        with opened(disk) as reading:
            return marks(disk, reading)
    places = extents(disk, descriptor)
    by_place = {
        name: _signature.scan(descriptor, start, length) for name, (start, length) in places.items()
    }
    for name, raw in _unexplained(disk, descriptor, places, by_place):
        by_place[name] = [raw, *by_place[name]]
    return {name: signs for name, signs in by_place.items() if signs}


def signatures(disk: _disk.Disk, descriptor: int | None = None) -> dict[str, str]:
    """Signature type of the disk and of each partition, read past the page cache."""
    return _types(marks(disk, descriptor))


def both(disk: _disk.Disk) -> tuple[dict[str, str], list[str]]:
    """`signatures` and `described` from the same read, because the disk may change between two
    reads.
    """
    with opened(disk) as descriptor:
        by_place = marks(disk, descriptor)
        return _types(by_place), _named(descriptor, by_place)


def described(disk: _disk.Disk, descriptor: int | None = None) -> list[str]:
    """Every signature as an approval names it: type, byte and, if present, its identifier.

    A new filesystem at the same place has another identifier.
    """
    if descriptor is None:
        with opened(disk) as reading:
            return described(disk, reading)
    return _named(descriptor, marks(disk, descriptor))


def _types(by_place: Marks) -> dict[str, str]:
    return {name: signs[0].type for name, signs in by_place.items()}


def _named(descriptor: int, by_place: Marks) -> list[str]:
    every = [mark for signs in by_place.values() for mark in signs]
    return sorted({_signature.describe(descriptor, mark) for mark in every})


def pools(disk: _disk.Disk) -> dict[str, str]:
    """ZFS pools from the labels on the disk and its partitions, by kernel name.

    "?" for a label without a name.
    """
    with opened(disk) as descriptor:
        return {
            name: _signature.pool(descriptor, start) or "?"
            for name, (start, length) in extents(disk, descriptor).items()
            if any(
                signature.type == "zfs_member"
                for signature in _signature.scan(descriptor, start, length)
            )
        }


@contextlib.contextmanager
def opened(disk: _disk.Disk) -> Iterator[int]:
    """Read-only, past the page cache."""
    descriptor = os.open(_disk.node(disk.kernel_name), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unexplained(
    disk: _disk.Disk, descriptor: int, places: Extents, by_place: Marks
) -> Iterator[tuple[str, _signature.Signature]]:
    """Bytes on the disk or on a partition that belong to no signature."""
    whole = disk.kernel_name
    if any(signature.type not in _signature.TABLES for signature in by_place[whole]):
        return  # a filesystem or a member that covers the whole disk
    for name, (start, length) in places.items():
        if name != whole and not by_place[name]:
            yield from _raw(descriptor, name, start, length)
    # Tables and boot code lie at both ends.
    edge = MIB if by_place[whole] else 0
    records = _partitions.chain(descriptor, _block_size(disk))
    for start, end in _gaps(places, records, whole, edge):
        raw = list(_raw(descriptor, whole, start, end - start))
        if raw:
            yield raw[0]
            return


def _gaps(
    places: Mapping[str, tuple[int, int]],
    records: Sequence[tuple[int, int]],
    whole: str,
    edge: int,
) -> Iterator[tuple[int, int]]:
    """Ranges of the disk outside all partitions and partition records."""
    reach, end = edge, places[whole][1] - edge
    taken = sorted([*(place for name, place in places.items() if name != whole), *records])
    for start, length in [*taken, (end, 0)]:
        if min(start, end) > reach:
            yield reach, min(start, end)
        reach = max(reach, start + length)


def _raw(
    descriptor: int, name: str, start: int, length: int
) -> Iterator[tuple[str, _signature.Signature]]:
    for offset, span in _samples(start, length):
        data = _device.read(descriptor, offset, span)
        if data.count(0) != len(data):
            yield name, _signature.Signature(_signature.RAW, offset)
            return


def _samples(start: int, length: int) -> Iterator[tuple[int, int]]:
    """Ranges to sample: both ends first, because nearly all formats start there."""
    edge = min(MIB, length)
    yield start, edge
    yield start + length - edge, edge
    for spot in range(1, _SPOTS):
        offset = length * spot // _SPOTS
        offset -= offset % ALIGN
        yield start + offset, min(_SPOT, length - offset)
