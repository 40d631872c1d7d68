"""Partition tables, overlays and GRUB sectors of disk images."""

from __future__ import annotations

import io
import itertools
import os
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from lab import image

UUID = "5e000000-0000-4000-8000-000000000001"


def spans(layout: image.Layout) -> list[tuple[int, int]]:
    """First and last byte of each partition."""
    partitions = []
    for line in layout.table().splitlines()[1:]:
        fields = dict(part.strip().split("=") for part in line.split(","))
        start, size = int(fields["start"]) * 512, int(fields["size"]) * 512
        partitions.append((start, start + size - 1))
    return partitions


@pytest.mark.parametrize(("bios", "count"), [(False, 2), (True, 3)])
def test_partitions_follow_each_other_and_leave_room_for_the_backup_table(
    bios: bool, count: int
) -> None:
    layout = image.Layout(1152, UUID, "5E00-0001", bios)
    partitions = spans(layout)
    assert len(partitions) == count
    assert all(left[1] < right[0] for left, right in itertools.pairwise(partitions))
    assert partitions[-1][1] < 1152 * image.MIB - 33 * 512
    assert partitions[-1] == (image.ROOT_START, image.ROOT_START + layout.root_kib * 1024 - 1)


def test_the_overlay_belongs_to_root_and_keeps_secrets(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/secret").write_text("x")
    (tmp_path / "etc/open").write_text("y")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o750)
    content = image.overlay_tar([tmp_path], frozenset({"etc/secret"}))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        modes = {entry.name: (entry.mode, entry.uid) for entry in tar}
    assert modes == {"./etc/open": (0o644, 0), "./etc/secret": (0o600, 0), "./tool": (0o755, 0)}


def test_tar_reads_a_root_filesystem_to_its_end(tmp_path: Path) -> None:
    """If tar ends before it has read everything, the writer of the pipe dies by SIGPIPE."""
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        entry = tarfile.TarInfo("./file")
        # The end marker lies in the first two of tar's records.
        entry.size = 18 * tarfile.BLOCKSIZE
        tar.addfile(entry, io.BytesIO(bytes(entry.size)))
    with archive.open("ab") as stream:
        # mmdebstrap's own entries move the padding into a third record.
        stream.write(bytes(15 * tarfile.BLOCKSIZE))
    for _ in range(2):
        image.cut_padding(archive)
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as unread:
            with os.fdopen(writer, "wb") as stream:
                stream.write(archive.read_bytes())
            subprocess.run(["tar", "-xf", "-"], cwd=tmp_path, stdin=unread, check=True)
            assert unread.read() == b""
        assert (tmp_path / "file").read_bytes() == bytes(entry.size)


def core(sectors: int, *, claimed: int | None = None) -> bytes:
    """A core.img as grub-mkimage leaves it, a few bytes short of full sectors."""
    first = bytearray(image.SECTOR)
    count = sectors - 1 if claimed is None else claimed
    struct.pack_into("<QHH", first, image.BLOCK_LIST, 2, count, 0x820)
    return bytes(first) + bytes(range(256)) * 2 * (sectors - 2) + b"\xaa" * 100


def test_the_boot_sector_points_to_the_core_and_keeps_the_partition_table() -> None:
    boot = bytes(range(256)) * 2
    current = b"\x5e" * image.SECTOR
    sector = image.boot_sector(boot, current, 2048)
    assert struct.unpack_from("<Q", sector, 0x5C) == (2048,)
    assert sector[0x64] == 0xFF
    assert sector[0x66:0x68] == b"\x90\x90"
    assert sector[:0x5C] == boot[:0x5C]
    assert sector[440:] == current[440:]
    assert len(sector) == 512


def test_the_core_finds_its_own_rest() -> None:
    patched = image.core_image(core(5), 2048)
    assert len(patched) == 5 * 512
    assert struct.unpack_from("<QHH", patched, image.BLOCK_LIST) == (2049, 4, 0x820)
    assert patched[512:].rstrip(b"\0") == core(5)[512:].rstrip(b"\0")


def test_a_core_of_another_length_than_it_claims_is_refused() -> None:
    with pytest.raises(ValueError, match="it has 4"):
        image.core_image(core(5, claimed=9), 2048)


def test_sectors_have_512_bytes() -> None:
    with pytest.raises(ValueError, match="512"):
        image.boot_sector(b"short", bytes(512), 1)
