"""Approval of a takeover: only approved data is erased, nothing newer and nothing unknown."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _proof,
    _takeover,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.modules import nvme_transition as module

pytestmark = pytest.mark.covers("HOST-9", "I7")

MIB = 1 << 20
SIZE = 48 * MIB
EUI = "5e0000000000a000"
BY_ID = f"/dev/disk/by-id/nvme-eui.{EUI}"
IDENTITY = {"serial": "LABNVME0", "eui": EUI}
SHARE = "/dev/nvme1n1p1 /share ext4 defaults,nofail 0 2"


def drive(
    subject: _change.Subject = module.SUBJECT, *, check_mode: bool = False, **other: Any
) -> _change.Outcome:
    params = {
        "devices": [BY_ID],
        "apply": False,
        "expected": {},
        "methods": ["zero_fill"],
        "manifest_directory": "/var/log/gpuaas",
    } | other
    return _change.drive(subject, params, check_mode=check_mode)


def take(approved: dict[str, Any], **other: Any) -> _change.Outcome:
    return drive(apply=True, expected={BY_ID: approved}, **other)


def approval(**more: Any) -> dict[str, Any]:
    (device,) = drive().facts["devices"]
    return {**device["approval"], **more}


def refused(outcome: _change.Outcome) -> Refusal:
    assert not outcome.changed and outcome.failure is not None
    assert len(outcome.plan.blockers) == 1, outcome.plan.blockers
    return outcome.failure


@pytest.fixture
def share(bench, calls: list[str]):
    """A disk with a partition that is mounted and in fstab."""
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", MIB, b"XFSB")
    bench.mount("259:2", "/share", "/dev/nvme1n1p1")
    _host.write("/etc/fstab", f"UUID=root / ext4 defaults 0 1\n{SHARE}\n")
    return bench


@pytest.mark.parametrize(
    "point",
    [
        *("/var/lib/gpuaas", "/var/lib/libvirt", "/var/lib/libvirt/images", "/srv", "/tmp"),
        *("/var/tmp", "/usr/local", "/var/lib/docker", "/boot/firmware", "/etc/gpuaas"),
    ],
)
def test_what_the_host_lives_on_is_never_taken(share, calls: list[str], point: str) -> None:
    approved = approval()
    share.mount("259:2", point, "/dev/nvme1n1p1")
    refusal = refused(take({**approved, "mounts": ["/share", point]}))
    assert refusal.code == "os_disk" and point in refusal.found
    assert calls == []


def test_our_state_is_known_through_a_link(share, tree: Path) -> None:
    """/var/lib/gpuaas leads to a share, so its filesystem counts and not its name."""
    (tree / "var/lib/gpuaas").mkdir(parents=True)
    number = tree.stat().st_dev
    share.mount(f"{os.major(number)}:{os.minor(number)}", "/data", "/dev/nvme1n1p1")
    refusal = refused(drive())
    assert refusal.code == "os_disk" and "/data" in refusal.found


def test_a_mount_that_the_approval_does_not_name_stays(share, calls: list[str]) -> None:
    refusal = refused(take(approval(mounts=[])))
    assert (refusal.code, refusal.found) == ("changed_since_approval", "mounted on /share")
    assert calls == []
    assert take(approval()).done[0] == "unmount"


def test_a_share_that_was_made_since_is_not_erased(share, calls: list[str]) -> None:
    approved = approval()
    share.partition("nvme1n1", 24 * MIB, 8 * MIB, minor=3, number=2)
    share.write("nvme1n1", 24 * MIB, b"XFSB")
    refusal = refused(take(approved))
    assert refusal.code == "changed_since_approval"
    assert refusal.found.startswith(f"xfs, xfs@{24 * MIB}")
    assert calls == []


def test_the_same_type_at_the_same_place_may_be_another_filesystem(share) -> None:
    approved = approval()
    share.write("nvme1n1", MIB + 32, b"another uuid")
    refusal = refused(take(approved))
    assert (refusal.code, refusal.found[:4]) == ("changed_since_approval", "xfs@")


def test_an_identity_alone_approves_a_blank_disk_only(bench, calls: list[str]) -> None:
    bench.disk()
    bench.write("nvme1n1", 0, b"XFSB")
    refusal = refused(take(IDENTITY))
    assert (refusal.code, refusal.found) == ("changed_since_approval", "xfs")
    bench.write("nvme1n1", 0, bytes(4))
    assert take(IDENTITY).failure is None
    assert calls == []


@pytest.mark.parametrize("offset", [0, 600_000, 24 * MIB, SIZE - 4096])
def test_bytes_that_nobody_knows_are_not_blank(bench, offset: int) -> None:
    bench.disk()
    bench.write("nvme1n1", offset, b"rows of a database")
    assert refused(drive()).found == "raw_data on nvme1n1"
    assert refused(take(IDENTITY)).code == "unexpected_filesystem"
    assert take({**IDENTITY, "filesystems": ["raw_data"]}).failure is None
    assert _proof.standing(f"eui.{EUI}") is not None


def test_bytes_beside_the_partitions_are_somebodys_too(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", MIB, b"XFSB")
    bench.write("nvme1n1", 21 * MIB, b"left of a partition")
    assert refused(drive()).found == "raw_data on nvme1n1"


@pytest.mark.parametrize(
    ("offset", "magic"),
    [(SIZE - 1024, b"Intel Raid ISM Cfg Sig. 1.3.00"), (SIZE - 512, b"\xde\x11\xde\x11")],
)
def test_a_member_of_a_firmware_array_shows_what_is_mirrored_at_its_start(
    bench, offset: int, magic: bytes
) -> None:
    bench.disk()
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", offset, magic)
    assert refused(drive()).code == "md_member"
    assert refused(take(approval())).code == "md_member", "whatever was approved"


@pytest.mark.parametrize("label", ["gpt", "dos"])
def test_partitions_that_the_kernel_does_not_show_are_looked_into(bench, label: str) -> None:
    bench.disk()
    table = f"label: {label}\nstart=2048, size=16384\nstart=20480, size=32768\n"
    node = str(bench.root / "dev/nvme1n1")
    subprocess.run(["sfdisk", "-q", node], input=table.encode(), check=True)
    bench.write("nvme1n1", 20480 * 512 + 512, b"LABELONE")
    refusal = refused(drive())
    assert (refusal.code, refusal.found) == ("lvm_member", "LVM2_member on nvme1n1p2")


def test_a_logical_partition_that_the_kernel_does_not_show_is_looked_into(bench) -> None:
    bench.disk()
    table = "label: dos\nstart=2048, size=4096\nstart=8192, size=80000, type=5\n"
    table += "start=10240, size=8192\nstart=20480, size=32768\n"
    node = str(bench.root / "dev/nvme1n1")
    subprocess.run(["sfdisk", "-q", node], input=table.encode(), check=True)
    bench.write("nvme1n1", 20480 * 512, b"LUKS\xba\xbe")
    assert refused(drive()).found == "crypto_LUKS on nvme1n1p6"


def test_a_table_that_lies_is_read_no_further_than_the_disk(bench) -> None:
    bench.disk()
    header = bytearray(92)
    header[:8] = b"EFI PART"
    struct.pack_into("<QII", header, 72, 2, 2**32 - 1, 128)
    bench.write("nvme1n1", 512, bytes(header))
    entry = b"\x01" * 16 + bytes(16) + struct.pack("<QQ", 2**60, 2**61)
    bench.write("nvme1n1", 1024, entry)
    assert drive().failure is None


def test_a_boot_card_is_never_taken_nor_what_the_profile_leaves_out(bench) -> None:
    namespace = bench.disk(model="DELLBOSS VD")
    assert refused(take(IDENTITY)).code == "excluded_model"
    disk = _block.resolve("nvme1n1")
    with pytest.raises(Refusal, match="excluded_model"), _block.exclusive(disk):
        pass
    for model in ("Dell BOSS-N1", "Dell BOSS-S2"):
        namespace.model = model
        assert refused(drive()).code == "excluded_model"
    namespace.model = "Some Other Card"
    assert refused(drive(exclude_models=["Other"])).code == "excluded_model"
    assert drive(exclude_models=["Elsewhere"]).failure is None


def volume(bench, *devices: str) -> None:
    for name in devices:
        (bench.root / "sys/fs/btrfs/5e00/devices" / name).mkdir(parents=True)


def test_the_second_device_of_a_btrfs_root_is_the_systems(bench) -> None:
    bench.disk()
    bench.disk("nvme2n1", minor=7, eui="5e0000000000a001", serial="LABNVME1")
    volume(bench, "nvme1n1", "nvme2n1")
    bench.mount("0:44", "/var", "/dev/nvme2n1", "btrfs")
    assert "os_disk" in [blocker.code for blocker in drive().plan.blockers]


def test_a_device_of_a_mounted_btrfs_volume_is_not_unmounted_for_its_own_sake(bench) -> None:
    bench.disk()
    bench.disk("nvme2n1", minor=7, eui="5e0000000000a001", serial="LABNVME1")
    volume(bench, "nvme1n1", "nvme2n1")
    bench.mount("0:44", "/share", "/dev/nvme2n1", "btrfs")
    refusal = refused(drive())
    assert (refusal.code, refusal.found.endswith("nvme2n1")) == ("btrfs_member", True)


def test_an_imported_pool_is_named(bench) -> None:
    bench.disk()
    label = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x05rpool"
    bench.write("nvme1n1", 16 * 1024, label)
    bench.write("nvme1n1", 130 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0")
    (bench.root / "proc/spl/kstat/zfs/rpool").mkdir(parents=True)
    bench.claimed.add("nvme1n1")
    reasons = {blocker.code: blocker.found for blocker in drive().plan.blockers}
    assert "zpool export" in reasons["zfs_pool"] and "rpool" in reasons["zfs_pool"]
    bench.mount("0:50", "/var/log", "rpool/log", "zfs")
    assert drive().plan.blockers[0].code == "os_disk"


def test_what_is_mounted_over_a_share_is_not_unmounted_in_its_place(
    share, calls: list[str]
) -> None:
    approved = approval()
    share.mount("0:77", "/share", "server:/export", "nfs")
    refusal = refused(take(approved))
    assert (refusal.code, refusal.found) == ("mount_covered", "nfs server:/export")
    assert calls == []


def test_a_mount_that_comes_over_it_after_the_plan_stays_too(share, calls: list[str]) -> None:
    approved = approval()

    def overtaken(params: _change.Params, step: _change.Step) -> Any:
        if step.name == "unmount":
            share.mount("0:77", "/share", "server:/export", "nfs")
        return module.apply(params, step)

    racing = _change.Subject(
        module.observe, module.plan, overtaken, module.facts, recover=module.recover
    )
    outcome = take(approved, subject=racing)
    assert (outcome.failure.code, calls) == ("mount_covered", [])


def test_a_disk_that_is_refused_after_all_gets_its_share_back(
    share, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the claim shows that another program uses it."""
    approved, fstab = approval(), _host.path("/etc/fstab").read_text()

    def held(*_what: Any, **_how: Any) -> Any:
        raise Refusal("disk_in_use", expected="", found="held by the kernel", remedy="")

    monkeypatch.setattr(_block, "exclusive", held)
    outcome = take(approved)
    assert outcome.failure is not None and outcome.failed_step == "erase_disk"
    assert outcome.failure.code == "disk_in_use"
    assert outcome.failure.found == ("held by the kernel; put back: 1 lines of /etc/fstab, /share")
    assert _host.path("/etc/fstab").read_text() == fstab
    assert calls == [
        "umount -- /share",
        "systemctl daemon-reload",
        "systemctl daemon-reload",
        "mount -t ext4 -o rw,noatime -- /dev/nvme1n1p1 /share",
    ]
    assert [mount.point for mount in _usage.mounts()] == ["/", "/share"]


def test_what_cannot_be_put_back_is_said(
    share, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    approved, run = approval(), _command.run

    def failing(argv: Any, **how: Any) -> Any:
        if argv[0] == "mount":
            raise Refusal("command_failed", expected="", found="exit 32: no", remedy="")
        return run(argv, **how)

    def held(*_what: Any, **_how: Any) -> Any:
        raise Refusal("disk_in_use", expected="", found="held", remedy="")

    monkeypatch.setattr(_command, "run", failing)
    monkeypatch.setattr(_block, "exclusive", held)
    outcome = take(approved)
    assert outcome.failure.found.endswith("left undone: /share (exit 32: no)")


def test_a_disk_whose_bytes_are_gone_is_not_mounted_again(
    share, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    approved = approval()

    def unproven(*_what: Any, **_how: Any) -> Any:
        raise Refusal("wipe_not_verified", expected="", found="bytes left", remedy="")

    monkeypatch.setattr(module._nvme_wipe, "erase", unproven)
    outcome = take(approved)
    assert outcome.failure.found == "bytes left"
    assert not [call for call in calls if call.startswith("mount ")]
    assert "gpuaas-slice-storage-disabled" in _host.path("/etc/fstab").read_text()


def test_a_real_share_is_mounted_again_when_the_disk_turns_out_to_be_another(
    loop, tmp_path: Path
) -> None:
    loop.run("mke2fs", "-q", "-t", "ext2", f"{loop.device}p1")
    point = tmp_path / "a share"
    point.mkdir()
    loop.run("mount", "-o", "noatime", f"{loop.device}p1", str(point))
    (point / "file").write_text("kept")
    try:
        (device,) = drive(devices=[loop.name]).facts["devices"]
        expected = {loop.name: device["approval"]}

        def swapped(params: _change.Params, step: _change.Step) -> Any:
            if step.name == "erase_disk":
                assert not (point / "file").exists()
                loop.namespace.serial = "OTHER"
            return module.apply(params, step)

        # A loop device has no by-id path.
        racing = _change.Subject(
            module.observe,
            lambda params, state: _change.Plan(module.plan(params, state).steps),
            swapped,
            module.facts,
            recover=module.recover,
        )
        outcome = drive(racing, devices=[loop.name], apply=True, expected=expected)
        assert outcome.failure.code == "identity_mismatch"
        assert (point / "file").read_text() == "kept"
        mounts = [mount for mount in _usage.mounts() if mount.point == str(point)]
        assert ["noatime" in mount.options for mount in mounts] == [True]
    finally:
        loop.run("umount", str(point))


def test_what_holds_a_partition_unseen_is_found_before_anything_is_unmounted(
    loop, tree: Path, tmp_path: Path
) -> None:
    loop.run("addpart", str(loop.device), "2", "70000", "20000")
    for number in (1, 2):
        real = Path(f"{loop.device}p{number}")
        os.mknod(tree / "dev" / real.name, 0o600 | 0o060000, real.stat().st_rdev)
    loop.run("mke2fs", "-q", "-t", "ext2", f"{loop.device}p1")
    point = tmp_path / "share"
    point.mkdir()
    loop.run("mount", f"{loop.device}p1", str(point))
    try:
        assert _takeover.observe(loop.name).obstacles == ()
        claimed = os.open(f"{loop.device}p2", os.O_RDONLY | os.O_EXCL)
        (refusal,) = _takeover.observe(loop.name).obstacles
        os.close(claimed)
        assert (refusal.code, refusal.found.split()[0]) == ("held", f"{loop.name}p2")
    finally:
        loop.run("umount", str(point))


def test_os_disk_renamed_from_nvme4_to_nvme7_between_boots(bench, calls: list[str]) -> None:
    """The incident: the disk approved as nvme7 had become the operating system's disk."""
    system, data = "5e0000000000a004", "5e0000000000a007"
    four = bench.disk("nvme4n1", minor=4, eui=system, serial="SYSTEM")
    seven = bench.disk("nvme7n1", minor=7, eui=data, serial="DATA")
    bench.write("nvme4n1", 0, b"XFSB")
    bench.mount("259:4", "/", "/dev/nvme4n1")
    path = f"/dev/disk/by-id/nvme-eui.{data}"
    (shown,) = drive(devices=[path]).facts["devices"]
    assert shown["kernel_name"] == "nvme7n1"

    bench.unmount("/")
    bench.mount("259:7", "/", "/dev/nvme7n1")
    four.eui, four.serial, seven.eui, seven.serial = data, "DATA", system, "SYSTEM"
    bench.write("nvme4n1", 0, bytes(4))
    bench.write("nvme7n1", 0, b"XFSB")

    def late(device: str) -> list[str]:
        expected = {device: shown["approval"]}
        outcome = drive(devices=[device], apply=True, expected=expected)
        return [blocker.code for blocker in outcome.plan.blockers]

    # udev has not caught up: the link still leads to nvme7n1.
    assert late(path) == ["identity_mismatch"]
    assert "os_disk" in late("/dev/nvme7n1")
    bench.link("nvme4n1", f"nvme-eui.{data}")
    bench.link("nvme7n1", f"nvme-eui.{system}")
    done = drive(devices=[path], apply=True, expected={path: shown["approval"]})
    assert done.failure is None, done.failure
    assert bench.read("nvme7n1", 0, 4) == b"XFSB"
    assert _proof.standing(f"eui.{data}") is not None
