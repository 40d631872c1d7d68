"""Open block devices: reads past the page cache, and zeroing of a range."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]
MIB = 1 << 20


def test_any_range_can_be_read_past_the_page_cache(bench) -> None:
    node = bench.disk(size=2 * MIB).node
    bench.write("nvme1n1", MIB + 449, b"mark")
    descriptor = os.open(node, os.O_RDWR | os.O_DIRECT)
    assert _device.read(descriptor, MIB + 449, 4) == b"mark"
    assert _device.read(descriptor, 2 * MIB - 3, 100) == bytes(3)
    assert _device.size(descriptor) == 2 * MIB
    os.close(descriptor)


def test_zeroing_stays_inside_its_range_whichever_way_it_is_done(bench) -> None:
    namespace = bench.disk(size=16 * MIB)
    descriptor = os.open(namespace.node, os.O_RDWR | os.O_DIRECT)
    for unsupported, how in ((set(), "write_zeroes"), ({_device.BLKZEROOUT}, "writes")):
        namespace.unsupported = unsupported
        bench.write("nvme1n1", 0, b"\xff" * 16 * MIB)
        assert _device.zero(descriptor, MIB, 9 * MIB) == how
        assert not any(bench.read("nvme1n1", MIB, 9 * MIB))
        assert bench.read("nvme1n1", MIB - 1, 1) == bench.read("nvme1n1", 10 * MIB, 1) == b"\xff"
    os.close(descriptor)


def test_a_file_is_not_a_block_device(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as handle, pytest.raises(Refusal) as caught:
        _device.number(handle.fileno())
    assert caught.value.code == "not_a_block_device"


def test_a_range_of_an_image_file_becomes_zeros(tmp_path: Path) -> None:
    """On a file system with unwritten ranges nothing is written; elsewhere zeros are."""
    image = tmp_path / "image"
    image.write_bytes(b"x" * 3 * MIB)
    with image.open("r+b") as handle:
        _device.zero(handle.fileno(), MIB, MIB)
    assert image.read_bytes() == b"x" * MIB + bytes(MIB) + b"x" * MIB
