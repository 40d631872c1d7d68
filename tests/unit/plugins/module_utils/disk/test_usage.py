"""Usage of a disk: mounts, swap, holders and open files, also through LVM and partitions."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _usage

pytestmark = pytest.mark.covers("HOST-9")

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]

MIB = 1 << 20


def codes(disk: _block.Disk) -> list[str]:
    return [code for code, _ in _block.usage(disk).findings()]


def test_a_raw_disk_is_unused(bench) -> None:
    bench.disk()
    assert _block.usage(_block.resolve("nvme1n1")) == _block.Usage()


def test_a_mounted_partition_counts_though_the_disk_is_not_mounted(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.mount("259:2", "/share\\0401", "/dev/nvme1n1p1")
    used = _block.usage(_block.resolve("nvme1n1"))
    assert used.children == ["nvme1n1p1"]
    assert used.mounts == ["/share 1"]
    assert codes(_block.resolve("nvme1n1")) == ["mounted"]


def test_a_mount_by_source_counts_when_its_device_number_is_anonymous(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.link("nvme1n1p1", "abc", "by-uuid")
    bench.mount("0:44", "/data", "/dev/disk/by-uuid/abc", "btrfs")
    assert codes(_block.resolve("nvme1n1")) == ["mounted"]


@pytest.mark.parametrize("point", ["/", "/boot/efi", "/var"])
def test_the_os_disk_is_known_by_its_mounts(bench, point: str) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.mount("259:2", point, "/dev/nvme1n1p1")
    assert codes(_block.resolve("nvme1n1"))[0] == "os_disk"


def test_the_os_disk_is_known_through_lvm(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.hold("nvme1n1p1", "dm-0", uuid="LVM-abc")
    bench.mount("253:4", "/", "/dev/mapper/vg-root")
    assert codes(_block.resolve("nvme1n1")) == ["os_disk", "lvm_member"]


@pytest.mark.parametrize(
    ("holder", "uuid", "code"),
    [
        ("md127", "", "md_member"),
        ("dm-3", "CRYPT-LUKS2-x", "dm_holder"),
        ("dm-4", "LVM-x", "lvm_member"),
        ("bcache0", "", "held"),
    ],
)
def test_what_is_stacked_on_a_disk(bench, holder: str, uuid: str, code: str) -> None:
    bench.disk()
    bench.hold("nvme1n1", holder, uuid=uuid)
    assert codes(_block.resolve("nvme1n1")) == [code]


def test_swap(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.swap("/dev/nvme1n1p1")
    assert codes(_block.resolve("nvme1n1")) == ["swap_in_use"]


def test_qemu_and_other_programs_that_have_it_open(bench, monkeypatch) -> None:
    bench.disk()
    held = {
        "259:1": [
            _usage.Opener(7, "qemu-system-x86"),
            _usage.Opener(8, "dd"),
            _usage.Opener(9, "(udev-worker)"),
        ]
    }
    monkeypatch.setattr(_usage, "openers", lambda _numbers: held)
    used = _block.usage(_block.resolve("nvme1n1"))
    assert (used.qemu_pids, used.openers) == ([7], ["8:dd"])
    refusal = _block.refusals(_block.resolve("nvme1n1"), used)[0]
    assert refusal.code == "disk_in_use"
    assert "qemu_holds_disk" in refusal.found


def test_of_several_qemus_only_the_slots_own_is_no_obstacle(bench, monkeypatch) -> None:
    bench.disk()
    held = {"259:1": [_usage.Opener(7, "qemu-system-x86"), _usage.Opener(9, "qemu-system-x86")]}
    monkeypatch.setattr(_usage, "openers", lambda _numbers: held)
    slot = {"nvme_device": "nvme1n1"}
    assert _block.judged(slot, own_pids=[7, 9])[1] == []
    (refusal,) = _block.judged(slot, own_pids=[7])[1]
    assert "qemu_holds_disk" in refusal.found


def test_swap_on_a_volume_of_the_disk_and_in_a_file_on_it(bench) -> None:
    bench.disk()
    bench.hold("nvme1n1", "dm-0", uuid="LVM-x")
    bench.swap("/dev/dm-0")
    bench.mount("259:1", "/share", "/dev/nvme1n1")
    bench.swap("/share/swapfile")
    assert _block.usage(_block.resolve("nvme1n1")).swap == ["dm-0", "/share/swapfile"]


def test_filesystems_are_read_from_disk_and_partitions(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", MIB, b"XFSB")
    used = _block.usage(_block.resolve("nvme1n1"))
    assert used.filesystems == {"nvme1n1": "gpt", "nvme1n1p1": "xfs"}


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_names_with_other_line_ends_hide_no_mount_and_break_no_look(bench, odd: str) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 32 * MIB, minor=2)
    bench.mount("259:2", f"/a{odd}b", "/dev/nvme1n1p1")
    bench.swap(f"/a{odd}b/swap{odd}file")
    used = _block.usage(_block.resolve("nvme1n1"))
    assert used.mounts == [f"/a{odd}b"]
    assert used.swap == [f"/a{odd}b/swap{odd}file"]


@pytest.mark.parametrize("row", ["x", "36 35 259:1 / /x rw", "36 35 - ext4 /dev/x", " - "])
def test_a_row_of_another_form_hides_no_other_mount(bench, row: str) -> None:
    bench.disk()
    bench.mounts.append(row)
    bench.mount("259:1", "/share", "/dev/nvme1n1")
    assert _block.usage(_block.resolve("nvme1n1")).mounts == ["/share"]


def test_a_btrfs_volume_that_is_unmounted_while_it_is_looked_at(bench) -> None:
    bench.disk()
    (bench.root / "sys/fs/btrfs/u").mkdir(parents=True)
    assert _block.usage(_block.resolve("nvme1n1")) == _block.Usage()


def test_a_partition_that_goes_away_while_it_is_looked_at(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 0, minor=2)
    assert _block.usage(_block.resolve("nvme1n1")).filesystems == {}


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("name", ["tank", ""])
def test_a_pools_name_counts_where_the_kernel_has_claimed_what_carries_it(
    bench, claimed: bool, name: str
) -> None:
    bench.disk()
    label = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank"
    if name:
        bench.write("nvme1n1", 16 * 1024, label)
    bench.write("nvme1n1", 130 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0")
    (bench.root / "proc/spl/kstat/zfs/tank").mkdir(parents=True)
    bench.mount("0:50", "/var/log", "tank/log", "zfs")
    bench.claimed = {"nvme1n1"} if claimed else set()
    assert codes(_block.resolve("nvme1n1")) == (["os_disk", "zfs_pool"] if claimed else [])
