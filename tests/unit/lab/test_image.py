"""Partition tables and overlays of disk images."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

import pytest

from lab import image

UUID = "5e000000-0000-4000-8000-000000000001"


def spans(layout: image.Layout) -> list[tuple[int, int]]:
    """First and last byte of each partition."""
    found = []
    for line in layout.table().splitlines()[1:]:
        fields = dict(part.strip().split("=") for part in line.split(","))
        start, size = int(fields["start"]) * 512, int(fields["size"]) * 512
        found.append((start, start + size - 1))
    return found


@pytest.mark.parametrize(("bios", "count"), [(False, 2), (True, 3)])
def test_partitions_follow_each_other_and_leave_room_for_the_backup_table(
    bios: bool, count: int
) -> None:
    layout = image.Layout(1152, UUID, "5E00-0001", bios)
    partitions = spans(layout)
    assert len(partitions) == count
    assert all(left[1] < right[0] for left, right in itertools.pairwise(partitions))
    assert partitions[-1][1] < 1152 * image.MIB - 33 * 512
    assert partitions[-1] == (
        image.ROOT_START,
        image.ROOT_START + layout.root_kib * 1024 - 1,
    )


def test_the_overlay_belongs_to_root_and_keeps_secrets(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/secret").write_text("x")
    (tmp_path / "etc/open").write_text("y")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o750)
    content = image.overlay_tar(tmp_path, frozenset({"etc/secret"}))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        modes = {entry.name: (entry.mode, entry.uid) for entry in tar}
    assert modes == {
        "./etc/open": (0o644, 0),
        "./etc/secret": (0o600, 0),
        "./tool": (0o755, 0),
    }
