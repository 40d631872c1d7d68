"""Unreadable disks: they count neither as empty nor as unused, and hide no other disk."""

from __future__ import annotations

import errno
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _content,
    _proof,
    _takeover,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _checks_runtime

pytestmark = pytest.mark.covers("HOST-9")

# Saved before the stand-in takes its place.
is_claimed = _usage.is_claimed
bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]

MIB = 1 << 20
EUI = "5e0000000000a000"
OTHER = "5e0000000000a001"


def code(act: Any) -> str:
    with pytest.raises(Refusal) as caught:
        act()
    return caught.value.code


@pytest.fixture
def broken(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two disks, and no sector of the first can be read."""
    ours = bench.disk().node.stat().st_ino
    bench.disk("nvme2n1", minor=7, eui=OTHER, serial="LABNVME1")
    read = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if os.fstat(descriptor).st_ino == ours:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.covers("HOST-10")
def test_parity_names_the_disk_that_cannot_be_read_and_no_other(parity: Any, broken: None) -> None:
    slots = [
        {**parity.slot, "slot_id": serial, "nvme_serial": serial, "nvme_size_bytes": 48 * MIB}
        | {"nvme_device": f"/dev/disk/by-id/nvme-eui.{eui}"}
        for serial, eui in (("LABNVME0", EUI), ("LABNVME1", OTHER))
    ]
    check = _checks_runtime.nvme_ownership
    result = check(parity.facts(*slots))
    assert result.status == "FAIL"
    assert (
        result.detail.startswith(f"eui.{EUI}: device_unreadable: ") and OTHER not in result.detail
    )
    assert "Input/output error" in result.detail
    # An unapproved disk decides nothing.
    assert check(parity.facts(slots[1])).status == "PASS"


@pytest.mark.parametrize("what", ["start", "size", "dev"])
def test_a_partition_without_a_place_or_number_is_not_passed_over(bench, what: str) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 8 * MIB, b"rows of a database")
    place = bench.root / f"sys/class/block/nvme1n1p1/{what}"
    place.unlink()
    place.mkdir()
    assert code(lambda: _block.usage(_block.resolve("nvme1n1"))) == "device_unreadable"


def test_what_lies_where_a_partition_went_away_is_the_disks(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", 8 * MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 12 * MIB, b"rows" * MIB)
    (bench.root / "sys/class/block/nvme1n1p1/start").unlink()
    assert _block.usage(_block.resolve("nvme1n1")).filesystems == {"nvme1n1": "raw_data"}


@pytest.mark.parametrize("folder", ["sys/class/block/nvme1n1/holders", "sys/fs/btrfs"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(bench, folder: str) -> None:
    bench.disk()
    place = bench.root / folder
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rmdir()
    place.touch()
    assert code(lambda: _block.usage(_block.resolve("nvme1n1"))) == "file_unreadable"


def test_only_a_device_that_is_not_there_is_claimed_by_nobody(tree: Path) -> None:
    assert is_claimed("nvme9n1") is False
    loop = _host.path("/dev/nvme1n1")
    loop.parent.mkdir()
    loop.symlink_to("nvme1n1")
    with pytest.raises(OSError, match="Too many levels"):
        is_claimed("nvme1n1")


@pytest.mark.parametrize("text", [None, "", "{", "[]", b"{\xe9}"])
def test_a_manifest_that_cannot_be_read_is_not_written_anew(bench, text: Any) -> None:
    bench.disk()
    manifest = "/var/log/gpuaas/slice-storage-transition-20261121093831.txt"
    proof = {"disk": f"eui.{EUI}", "verified": True, "finished_at": "2020-01-01T00:00:00+00:00"}
    _proof.record(f"eui.{EUI}", proof, manifest=manifest)
    assert _takeover.observe("nvme1n1").manifest == ""
    _host.write(manifest, "{}")
    assert _takeover.observe("nvme1n1").manifest == manifest
    if text is None:
        _host.remove(manifest)
        _host.path(manifest).mkdir()
    else:
        _host.path(manifest).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert code(lambda: _takeover.observe("nvme1n1")) == "manifest_unreadable"


def test_types_and_marks_come_from_one_look(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.disk()
    bench.write("nvme1n1", 0, b"XFSB")
    looks, marks = [], _content.marks

    def counted(disk: Any, descriptor: int | None = None) -> Any:
        looks.append(disk.kernel_name)
        return marks(disk, descriptor)

    monkeypatch.setattr(_content, "marks", counted)
    device = _takeover.observe("nvme1n1")
    assert device.used.filesystems == {"nvme1n1": "xfs"}
    assert device.signatures == tuple(_content.described(_block.resolve("nvme1n1")))
    assert looks == ["nvme1n1", "nvme1n1"], "once by the plan, once by this comparison"
