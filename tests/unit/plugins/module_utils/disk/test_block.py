"""Exclusive disk descriptor, against the kernel's own locks and mounts on a loop device."""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _bounded
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _device,
    _nvme_wipe,
    _usage,
)

pytestmark = pytest.mark.covers("HOST-9")

_fixtures = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))
bench, loop = _fixtures["bench"], _fixtures["loop"]
MIB = 1 << 20


class Watch:
    """Record of every block-device path that this process opens, by any function, while it is
    active.

    An audit hook cannot be removed, so a single hook stays, and `seen` says whether it records.
    """

    seen: list[str] | None = None
    hooked = False

    @classmethod
    def note(cls, event: str, arguments: tuple[object, ...]) -> None:
        path = arguments[0] if event == "open" else None
        if cls.seen is None or not isinstance(path, str | bytes):
            return
        if Path(os.fsdecode(path)).is_block_device():
            cls.seen.append(os.fsdecode(path))


@contextlib.contextmanager
def opened_block_devices() -> Iterator[list[str]]:
    if not Watch.hooked:
        sys.addaudithook(Watch.note)
        Watch.hooked = True
    Watch.seen = seen = []
    try:
        yield seen
    finally:
        Watch.seen = None


def refused(disk: _block.Disk) -> Refusal:
    """Refusal with a shorter wait for other users of the disk, such as udev on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_block, "_PATIENCE_S", 0.3)
        with pytest.raises(Refusal) as caught, _block.exclusive(disk):
            pass
    return caught.value


@pytest.mark.covers("I7")
def test_a_mounted_partition_keeps_the_disk_from_being_opened(loop, tmp_path: Path) -> None:
    disk = _block.resolve(loop.name)
    loop.run("mke2fs", "-q", "-t", "ext2", f"{loop.device}p1")
    point = tmp_path / "share"
    point.mkdir()
    loop.run("mount", f"{loop.device}p1", str(point))
    try:
        refusal = refused(disk)
        assert refusal.code == "disk_in_use"
        assert f"mounted on {point}" in refusal.found
    finally:
        loop.run("umount", str(point))
    with _block.exclusive(disk):
        busy = subprocess.run(
            ["mount", f"{loop.device}p1", str(point)], capture_output=True, check=False
        )
        assert busy.returncode != 0


@pytest.mark.covers("I7")
def test_a_claimed_disk_is_refused(loop) -> None:
    disk = _block.resolve(loop.name)
    with _block.exclusive(disk):
        assert refused(disk).code == "disk_in_use"


def test_a_disk_that_the_last_tenant_write_protected_is_named(loop) -> None:
    """A namespace stays write-protected over a new installation."""
    disk = _block.resolve(loop.name)
    loop.run("blockdev", "--setro", str(loop.device))
    try:
        assert refused(disk).code == "disk_write_protected"
    finally:
        loop.run("blockdev", "--setrw", str(loop.device))


@pytest.mark.covers("I7")
def test_swap_on_a_partition_is_refused(loop) -> None:
    disk = _block.resolve(loop.name)
    loop.run("mkswap", "-q", f"{loop.device}p1")
    loop.run("swapon", f"{loop.device}p1")
    try:
        assert "swap_in_use" in refused(disk).found
    finally:
        loop.run("swapoff", f"{loop.device}p1")


def test_a_dead_file_server_of_any_program_holds_up_no_disk(loop, silent_mount: Path) -> None:
    """A program of the host has a file open there, so stat(2) of that file never returns."""
    file = os.open(silent_mount, os.O_PATH)
    number = loop.device.stat().st_rdev
    scan = f"{os.major(number)}:{os.minor(number)}"
    try:
        with Path(loop.device).open("rb"):
            pids = _bounded.call(
                lambda: [opener.pid for opener in _usage.openers({scan})[scan]], deadline=60
            )
    finally:
        os.close(file)
    # udev may look at the new device at the same time.
    assert os.getpid() in pids


@pytest.mark.covers("I7")
def test_a_program_that_has_the_disk_open_is_found_by_device_number(loop) -> None:
    disk = _block.resolve(loop.name)
    with Path(loop.device).open("rb") as handle:
        reader = subprocess.Popen(["sleep", "30"], stdin=handle)
    try:
        reason = refused(disk).found
        assert "held_open" in reason and f"{reader.pid}:sleep" in reason
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.covers("I7")
@pytest.mark.parametrize("first", [101, 201])
def test_qemus_image_lock_is_respected_and_ours_keeps_qemu_out(loop, first) -> None:
    disk = _block.resolve(loop.name)
    node = _block._disk.node(loop.name)
    qemu = os.open(node, os.O_RDWR)
    shared = struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, first, 1, 0)
    fcntl.fcntl(qemu, fcntl.F_OFD_SETLK, shared)
    assert "QEMU" in refused(disk).found
    os.close(qemu)
    with _block.exclusive(disk):
        late = os.open(node, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(late, fcntl.F_OFD_SETLK, shared)
        os.close(late)


@pytest.mark.covers("I7")
def test_a_disk_that_changed_since_it_was_resolved_is_refused(loop) -> None:
    disk = _block.resolve(loop.name)
    loop.namespace.eui = "5e000000000000ff"
    assert refused(disk).code == "identity_mismatch"
    loop.namespace.eui, loop.namespace.serial = "5e0000000000a000", "{{ 7 * 7 }}"
    assert refused(disk).code == "identity_mismatch"


@pytest.mark.covers("I7")
def test_the_os_disk_is_refused_under_any_name(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.mount("259:2", "/", "/dev/root")
    bench.link("nvme1n1", "nvme-QEMU_NVMe_Ctrl_LABNVME0")
    for path in ("nvme1n1", "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_LABNVME0"):
        assert refused(_block.resolve(path)).code == "os_disk"


@pytest.mark.covers("I7")
def test_a_second_path_that_came_since_it_was_resolved_is_refused(bench) -> None:
    bench.disk()
    disk = _block.resolve("nvme1n1")
    bench.disk("nvme2n1", minor=11)
    refusal = refused(disk)
    assert (refusal.code, refusal.found) == ("duplicate_identity", "also on nvme2n1")


def test_a_passing_look_at_the_disk_is_waited_for(loop, monkeypatch) -> None:
    monkeypatch.setattr(_block, "_PATIENCE_S", 60.0)
    disk = _block.resolve(loop.name)
    began = time.monotonic()
    with Path(loop.device).open("rb") as handle:
        reader = subprocess.Popen(["sleep", "1"], stdin=handle)
    with _block.exclusive(disk):
        assert time.monotonic() - began > 0.5
    reader.wait()


def test_a_real_block_device_is_wiped_and_its_partitions_are_gone(loop) -> None:
    disk = _block.resolve(loop.name)
    loop.run("mke2fs", "-q", "-t", "ext4", f"{loop.device}p1")
    with _block.exclusive(disk) as descriptor:
        proof = _nvme_wipe.erase(descriptor, disk, ["user_data_erase", "zero_fill"])
        assert not any(_device.read(descriptor, 0, 64 * MIB))
    assert proof["method"] == "zero_fill"
    # The read-back caught a format that reports success and does nothing.
    assert "bytes left" in proof["attempts"][0]["outcome"]
    assert _block.usage(disk).children == []


@pytest.mark.covers("I7")
@pytest.mark.parametrize("seen", [None, "what is there"])
def test_the_path_is_opened_once(loop, seen: str | None) -> None:
    """A second lookup could reach another disk that has the name by then."""
    disk = _block.resolve(loop.name)
    loop.run("mke2fs", "-q", "-t", "ext4", f"{loop.device}p1")
    there = None if seen is None else [f"ext4 on {loop.name}p1"]
    with opened_block_devices() as opened, _block.exclusive(disk, seen=there) as descriptor:
        _nvme_wipe.erase(descriptor, disk, ["user_data_erase", "zero_fill"])
    assert opened == [str(_block._disk.node(loop.name))]


@pytest.mark.covers("I7")
def test_what_is_on_the_disk_must_be_what_the_plan_saw(loop) -> None:
    disk = _block.resolve(loop.name)
    with _block.exclusive(disk, seen=[]):
        pass
    loop.run("mke2fs", "-q", "-t", "ext4", f"{loop.device}p1")
    there = f"ext4 on {loop.name}p1"
    for seen in ([], [f"xfs on {loop.name}p1"], [there, f"gpt on {loop.name}"]):
        with pytest.raises(Refusal) as caught, _block.exclusive(disk, seen=seen):
            pass
        assert (caught.value.code, caught.value.found) == ("changed_since_plan", there)
        assert disk.disk_identity in caught.value.expected
    with _block.exclusive(disk, seen=[there]):
        pass
    with _block.exclusive(disk):
        pass


def _guests_table(start: int, last: int) -> tuple[bytes, bytes]:
    """Return a GPT in sectors of 512 bytes: its header, and the single entry that it lists at byte
    1024."""
    header = bytearray(92)
    header[:8] = b"EFI PART"
    struct.pack_into("<QII", header, 72, 2, 128, 128)
    return bytes(header), struct.pack("<16s16sQQ", b"t" * 16, b"u" * 16, start, last)


@pytest.mark.covers("I7")
def test_a_guests_partitions_on_a_disk_with_sectors_of_4096_bytes(loop) -> None:
    loop.run("losetup", "--sector-size", "4096", str(loop.device))
    disk = _block.resolve(loop.name)
    header, entry = _guests_table(70001, 80000)
    with Path(loop.device).open("r+b") as handle:
        handle.seek(512)
        handle.write(header)
        handle.seek(1024)
        handle.write(entry)
        handle.seek(70001 * 512)
        handle.write(b"XFSB")
    with _block.exclusive(disk) as descriptor:
        assert (70001 * 512, 10000 * 512) in _usage.extents(disk, descriptor).values()
        marks = _nvme_wipe.clear_signatures(descriptor, disk)
        assert 70001 * 512 in marks and all(mark % 512 == 0 for mark in marks)
        for at in (0, 70001 * 512 - 512, 80001 * 512 - MIB, 63 * MIB):
            assert not any(_device.read(descriptor, at, MIB))
        with pytest.raises(OSError, match="Invalid argument"):
            _device.write_zeros(descriptor, 70001 * 512, MIB)  # Unaligned for this disk.


@pytest.mark.covers("I7")
def test_what_the_kernel_has_claimed(loop, tmp_path: Path) -> None:
    loop.run("mke2fs", "-q", "-t", "ext2", f"{loop.device}p1")
    assert not _usage.is_claimed(loop.name) and not _usage.is_claimed("nvme99n1")
    point = tmp_path / "share"
    point.mkdir()
    loop.run("mount", f"{loop.device}p1", str(point))
    try:
        assert _usage.is_claimed(loop.name)
    finally:
        loop.run("umount", str(point))
    assert not _usage.is_claimed(loop.name)


DISK = _block.Disk("eui.1", "/dev/disk/by-id/nvme-eui.1", "nvme0n1", "S", "", "", 4096, "", "259:0")


@pytest.mark.parametrize(("own_pids", "expected"), [((), ["disk_in_use"]), ((4711,), [])])
def test_only_the_own_qemu_may_hold_the_disk(
    monkeypatch: pytest.MonkeyPatch, own_pids: tuple[int, ...], expected: list[str]
) -> None:
    monkeypatch.setattr(_block, "of_slot", lambda _slot: DISK)
    monkeypatch.setattr(_block, "usage", lambda _disk: _block.Usage(qemu_pids=[4711]))
    disk, problems = _block.judged({}, own_pids=own_pids)
    assert (disk, [refusal.code for refusal in problems]) == (DISK, expected)


def test_another_disk_under_the_name_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = Refusal("identity_mismatch", expected="", found="", remedy="")

    def of_slot(_slot: object) -> _block.Disk:
        raise swapped

    monkeypatch.setattr(_block, "of_slot", of_slot)
    assert _block.judged({}) == (None, [swapped])
