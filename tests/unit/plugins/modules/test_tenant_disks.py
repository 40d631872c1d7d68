"""Tenant's use of the disks: undone without force, and nothing else is changed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.modules import tenant_disks as module

pytestmark = pytest.mark.covers("CTRL-15")

EUI = "5e0000000000a000"
DISK = {
    "slot_id": f"disk-{EUI}",
    "nvme_device": f"/dev/disk/by-id/nvme-eui.{EUI}",
    "nvme_serial": "LABNVME0",
    "nvme_eui": EUI,
    "nvme_size_bytes": 48 << 20,
}
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)
MIB = 1 << 20


@pytest.fixture
def host(bench, monkeypatch: pytest.MonkeyPatch):
    """A disk with a partition, and the programs that take it out of use."""
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.calls = []

    def run(argv: Any, **_named: Any) -> Any:
        bench.calls.append(" ".join(argv))
        if argv[0] == "umount":
            bench.unmount(escaped(argv[-1]))
        elif argv[0] == "swapoff":
            bench.swaps = [line for line in bench.swaps if line.split(" ")[0] != escaped(argv[-1])]
            bench._tables()
        elif argv[0] in ("mdadm", "dmsetup"):
            name = {"data-vol": "dm-0"}.get(argv[-1], argv[-1].rpartition("/")[2])
            for link in bench.root.glob(f"sys/class/block/*/holders/{name}"):
                link.rmdir()
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", run)
    return bench


def escaped(name: str) -> str:
    """Return the name as the kernel's tables write it."""
    return name.replace("\\", "\\134").replace(" ", "\\040")


def free(**more: Any) -> _change.Outcome:
    return _change.drive(SUBJECT, {"fence": 1, "disks": [DISK], **more}, check_mode=False)


def test_a_free_disk_is_left_alone(host) -> None:
    assert free().changed is False and host.calls == []


def test_mounts_swap_and_fstab(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    host.mount("259:2", "/home/alice/data", "/dev/nvme1n1p1")
    host.swap("/dev/nvme1n1")
    before = "UUID=1 / ext4 defaults 0 1\n"
    _host.write("/etc/fstab", f"{before}/dev/nvme1n1p1 /data ext4 defaults 0 2\n")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == [
        "systemctl daemon-reload", "swapoff -- /dev/nvme1n1",
        "umount -- /home/alice/data", "umount -- /data",
    ]  # fmt: skip
    # Equal to the byte, because the baseline is compared next.
    assert _host.path("/etc/fstab").read_text() == before
    assert done.facts["used"] == {f"disk-{EUI}": []}
    assert free().changed is False


def test_a_volume_on_an_array_comes_apart_from_the_top(host) -> None:
    host.hold("nvme1n1p1", "md127")
    host.hold("md127", "dm-0", uuid="LVM-x")
    (host.root / "sys/class/block/dm-0/dm/name").write_text("data-vol\n")
    host.mount("253:4", "/data", "/dev/mapper/data-vol")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == [
        "umount -- /data",
        "dmsetup remove -- data-vol",
        "mdadm --stop /dev/md127",
    ]


@pytest.mark.covers("CTRL-15", "I11")
@pytest.mark.parametrize(
    "point", ["/home", "/opt", "/var/lib", "/var/log", "/usr", "/root", "/boot"]
)
def test_a_tenants_disk_stays_the_tenants_wherever_it_is_mounted(host, point: str) -> None:
    """The tenant's fstab mounts it there at every boot, and the machine must come back all the
    same."""
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity=f"eui.{EUI}")
    host.mount("259:2", point, "/dev/nvme1n1p1")
    before = "UUID=1 / ext4 defaults 0 1\n"
    _host.write("/etc/fstab", f"{before}/dev/nvme1n1p1 {point} ext4 defaults 0 2\n")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == ["systemctl daemon-reload", f"umount -- {point}"]
    assert _host.path("/etc/fstab").read_text() == before


@pytest.mark.covers("I8")
def test_a_mount_that_is_busy_is_out_of_fstab_so_that_a_restart_frees_it(
    host, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity=f"eui.{EUI}")
    host.mount("259:2", "/usr", "/dev/nvme1n1p1")
    _host.write("/etc/fstab", "/dev/nvme1n1p1 /usr ext4 defaults 0 2\n")

    def busy(argv: Any, **_named: Any) -> Any:
        if argv[0] == "umount":
            assert argv == ["umount", "--", "/usr"], "nothing is taken away by force"
            raise Refusal("command_failed", expected="", found="exit 32: busy", remedy="")
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", busy)
    outcome = free()
    assert outcome.failure.code == "mount_busy"
    assert "restart the machine" in outcome.failure.remedy
    assert not _host.read("/etc/fstab")


def test_a_disk_that_the_running_system_is_on_is_refused_given_or_not(host) -> None:
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity=f"eui.{EUI}")
    host.mount("259:2", "/", "/dev/nvme1n1p1")
    outcome = free()
    assert outcome.failure.code == "os_disk"
    assert host.calls == []


def test_swap_on_a_volume_and_in_a_file_is_switched_off_before_they_go(host) -> None:
    host.hold("nvme1n1p1", "dm-0", uuid="LVM-x")
    (host.root / "sys/class/block/dm-0/dm/name").write_text("data-vol\n")
    host.swap("/dev/dm-0")
    host.mount("259:1", "/data", "/dev/nvme1n1")
    host.swap("/data/swapfile")
    _host.write("/etc/fstab", "/data/swapfile none swap sw 0 0\n")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == [
        "systemctl daemon-reload",
        "swapoff -- /dev/dm-0",
        "swapoff -- /data/swapfile",
        "umount -- /data",
        "dmsetup remove -- data-vol",
    ]
    assert not _host.read("/etc/fstab")


def test_a_zfs_pool_is_named_with_what_to_do(host) -> None:
    label = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank"
    host.write("nvme1n1", 16 * 1024 + 64, label)
    host.write("nvme1n1", 130 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0")
    assert free().failure is None, "a pool that nobody has imported holds nothing"
    (host.root / "proc/spl/kstat/zfs/tank").mkdir(parents=True)
    (host.root / "proc/spl/kstat/zfs/other").mkdir()
    assert free().failure is None, "the tenant wrote the name of another's pool"
    host.claimed.add("nvme1n1")
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity=f"eui.{EUI}")
    outcome = free()
    assert outcome.failure.code == "zfs_pool"
    assert outcome.failure.found == "ZFS pool tank"
    assert "zpool export tank" in outcome.failure.remedy


@pytest.mark.covers("CTRL-15", "I7")
def test_a_bad_sector_keeps_no_tenants_disk_from_its_wipe(
    host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")

    def preadv(*_what: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    refused = free()
    assert refused.failure.code == "device_unreadable"
    assert host.calls == [], "nobody gave it to a tenant"
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity=f"eui.{EUI}")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == ["umount -- /data"]


@pytest.mark.covers("CTRL-15", "I13")
@pytest.mark.parametrize("there", [True, False])
def test_a_mount_table_that_cannot_be_read_or_is_not_there_stops_all(host, there: bool) -> None:
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity=f"eui.{EUI}")
    table = host.root / "proc/self/mountinfo"
    table.unlink()
    if there:
        table.mkdir()
    with pytest.raises(Refusal, match=r"file_unreadable.*/proc/self/mountinfo: "):
        free()
    assert host.calls == []


def test_a_name_in_no_encoding_keeps_no_tenants_disk_from_its_wipe(host) -> None:
    """The programs get every byte of the name; its printed form uses only storable characters."""
    host.mount("259:2", "/d\udce9\\040x", "/dev/nvme1n1p1")
    host.swap("/d\udce9\\040x/swap\udcff")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == ["swapoff -- /d\udce9 x/swap\udcff", "umount -- /d\udce9 x"]
    subjects = [step.subject for step in done.plan.steps]
    assert subjects == ["/d\\xe9 x/swap\\xff", "/d\\xe9 x"]
    assert json.dumps(done.document(), ensure_ascii=False).encode()


def test_two_names_that_are_shown_alike_are_both_unmounted(host) -> None:
    host.mount("259:2", "/d\udce9", "/dev/nvme1n1p1")
    host.mount("259:2", "/d\\134xe9", "/dev/nvme1n1p1")
    done = free()
    assert done.failure is None, done.failure
    assert host.calls == ["umount -- /d\\xe9", "umount -- /d\udce9"]


def test_what_is_mounted_over_the_disk_is_not_taken_in_its_place(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    host.mount("0:77", "/data", "server:/export", "nfs")
    outcome = free()
    assert outcome.failure.code == "mount_covered"
    assert outcome.failure.found == "nfs server:/export"
    assert host.calls == []


def test_the_system_disk_is_refused(host) -> None:
    host.mount("259:2", "/boot", "/dev/nvme1n1p1")
    outcome = free()
    assert outcome.failure.code == "os_disk"
    assert host.calls == []


@pytest.mark.covers("I10")
def test_a_run_that_became_late_while_it_looked_takes_nothing_away(
    host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*seen: Any) -> Any:
        _ledger.raise_fence(_ledger.MACHINE, fence=2)
        return module.plan(*seen)

    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    monkeypatch.setitem(globals(), "SUBJECT", dataclasses.replace(SUBJECT, plan=late))
    assert free().failure.code == "stale_fence"
    assert host.calls == []


def test_a_slice_host_is_refused(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    assert free().failure.code == "node_in_slice_mode"
    assert host.calls == []


@pytest.mark.covers("I7")
def test_the_mark_of_a_dead_disk_gives_no_right_to_the_mounts_of_the_next(host) -> None:
    _ledger.mark_dirty(f"disk-{EUI}", fence=1, disk_identity="eui.dead")
    host.mount("259:2", "/boot", "/dev/nvme1n1p1")
    assert free().failure.code == "os_disk"
    assert host.calls == []


def test_a_disk_of_another_identity_is_refused(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    outcome = free(disks=[{**DISK, "nvme_serial": "OTHER"}])
    assert outcome.failure.code == "identity_mismatch"
    assert host.calls == []


def test_no_byte_in_fstab_keeps_a_machine_from_being_released(host) -> None:
    host.mount("259:2", "/data", "/dev/nvme1n1p1")
    before = b"# caf\xe9\nUUID=1 / ext4 defaults 0 1\n"
    _host.write("/etc/fstab", "")
    _host.path("/etc/fstab").write_bytes(before + b"/dev/nvme1n1p1 /data ext4 defaults 0 2 ")
    done = free()
    assert done.failure is None, done.failure
    assert _host.path("/etc/fstab").read_bytes() == before
