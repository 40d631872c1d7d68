"""The host leaves the disks of slices alone, and takes them back."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _slice_disks

pytestmark = pytest.mark.covers("HOST-9")

DISK = "/dev/disk/by-id/nvme-eui.5e0000000000a000"
SLOTS = [{"nvme_device": DISK}, {"nvme_device": "/dev/disk/by-id/nvme-eui.5e0000000000a001"}]
SITE = "local {\n}\n"


def drive(slots: list[dict[str, str]], *, check: bool = False) -> _change.Outcome:
    return _change.drive(_slice_disks.SUBJECT, {"slots": slots}, check_mode=check)


@pytest.fixture
def host(tree: Path, script: Any) -> Path:
    _host.write("/etc/lvm/lvm.conf", "devices {\n\t# global_filter = []\n}\n")
    _host.write(_slice_disks.LVM, SITE)
    script.on("udevadm", "control", "--reload")
    return tree


def test_the_files_are_written_once_and_taken_back(host: Path) -> None:
    assert drive(SLOTS, check=True).changed
    assert drive(SLOTS).done == ["write_rules", "filter_lvm"]
    assert drive(SLOTS).done == []
    assert _slice_disks.problems(SLOTS) == []
    # A slot that is no longer approved is the host's again.
    assert len(_slice_disks.problems(SLOTS[:1])) == 2
    assert drive(SLOTS[:1]).done == ["write_rules", "filter_lvm"]
    assert "a001" not in (_host.read(_slice_disks.RULES) or "")
    assert drive([]).done == ["write_rules", "filter_lvm"]
    assert not (host / _slice_disks.RULES.lstrip("/")).exists()
    assert (host / _slice_disks.LVM.lstrip("/")).read_text() == SITE
    assert _slice_disks.problems([]) == []


def test_a_disk_with_a_tenants_bytes_stays_left_alone_without_its_slot(host: Path) -> None:
    """This is the disk of a slot that was written off because its GPU died."""
    drive(SLOTS)
    _ledger.hold("slot-2", fence=3, allocation_id="a", disk_identity="eui.5e0000000000a001")
    _ledger.mark_dirty("slot-2", fence=3, disk_identity="eui.5e0000000000a001")
    assert _slice_disks.problems(SLOTS[:1]) == []
    assert drive(SLOTS[:1]).done == []
    assert "a001" in (_host.read(_slice_disks.RULES) or "")
    assert drive([]).done == ["write_rules", "filter_lvm"], "the host becomes an ordinary machine"


@pytest.mark.parametrize("disk", [DISK, "/dev/disk/by-id/nvme-MODEL_1.6T+_S6"])
def test_the_rule_names_the_disk_and_its_partitions_and_no_other(host: Path, disk: str) -> None:
    drive([{"nvme_device": disk}])
    rules = re.findall(r'SYMLINK=="([^"]*)"', _host.read(_slice_disks.RULES) or "")
    name = disk.removeprefix("/dev/")
    assert rules == [name, f"{name}-part*"]
    (pattern,) = re.findall(r'"r\|(.*?)\|"', _host.read(_slice_disks.LVM) or "")
    assert re.fullmatch(pattern, disk) and re.fullmatch(pattern, f"{disk}-part12")
    assert not re.fullmatch(pattern, f"{disk}0") and not re.fullmatch(pattern, "/dev/nvme0n1")


def test_the_initramfs_is_built_with_them_and_again_after_each_change(
    host: Path, script: Any
) -> None:
    for folder in ("etc/initramfs-tools", "etc/default/grub.d"):
        (host / folder).mkdir(parents=True)
    build = ("update-initramfs", "-u", "-k", "all")
    script.on(*build, rc=1, err="no space left")
    assert drive(SLOTS).failure is not None
    script.answers[build] = []
    script.on(*build)
    assert drive(SLOTS).done == ["update_initramfs", "quiet_os_prober"]
    assert drive(SLOTS).done == [] and _slice_disks.problems(SLOTS) == []
    assert "GRUB_DISABLE_OS_PROBER=true\n" in (_host.read(_slice_disks.GRUB) or "") + "\n"
    # An edit may be in an image that another program built meanwhile.
    _host.write(_slice_disks.RULES, "")
    assert len(_slice_disks.problems(SLOTS)) == 2
    assert drive(SLOTS).done == ["write_rules", "update_initramfs"]
    assert drive([]).done == ["write_rules", "filter_lvm", "quiet_os_prober"]
    assert not (host / _slice_disks.BUILT.lstrip("/")).exists()
    assert script.calls.count(build) == 3


def test_a_host_that_imports_any_pool_is_named(host: Path) -> None:
    place = host / _slice_disks.ZFS_SCAN.lstrip("/")
    place.parent.mkdir(parents=True)
    place.symlink_to("/lib/systemd/system/zfs-import-scan.service")
    assert [doubt.code for doubt in drive(SLOTS).doubts] == ["zfs_imports_any_pool"]
    assert any("zfs-import-scan" in row for row in _slice_disks.problems(SLOTS))


LINK = DISK.removeprefix("/dev/")
# As `scripts/setup --tests` unpacks it, on distributions with and without /bin of its own.
UDEVADM = shutil.which("udevadm", path=f"{sys.prefix}/udev/bin:{sys.prefix}/udev/usr/bin")


class Udev:
    """The real udev with its own rules, which evaluates a loop device that has a disk's name.

    A later rule adds a name and, as bcache's rule does, runs a program of its own on a disk without
    a recognised signature.
    """

    def __init__(self, folder: Path, program: Path, device: str) -> None:
        self.folder, self.program = folder, program
        self.device = device.removeprefix("/dev/")
        shutil.copytree(program.parents[1] / "lib/udev", folder)
        look = 'ENV{ID_FS_TYPE}!="?*", RUN+="/bin/register"\nSYMLINK+="disk/by-uuid/root"\n'
        self.write("69-standin", look)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"rules.d/{name}.rules").write_text(text)

    def of(self, link: str) -> str:
        """Properties of the device, and programs that are run for it, when it has this name."""
        self.write("61-names", f'KERNEL=="{self.device}", SYMLINK+="{link}"\n')
        test = f"{self.program} test --action=add /sys/class/block/{self.device} 2>&1"
        words = ["unshare", "--mount", "sh", "-c"]
        words.append(f"mount --bind {self.folder} /usr/lib/udev && {test}")
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A file and its loop device."""
    if os.geteuid() or not shutil.which("losetup"):
        pytest.skip("loop devices need root")
    file = tmp_path / "disk"
    file.write_bytes(bytes(64 << 20))
    words = ["losetup", "--find", "--show", str(file)]
    device = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    yield file, device
    subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.skipif(not UDEVADM, reason="needs udev, unpacked by `scripts/setup --tests`")
def test_udev_makes_nothing_of_a_tenants_disk(disk: tuple[Path, str], tmp_path: Path) -> None:
    """With a copy of the host's EFI partition, a physical volume, a disk for bcache's rule only."""
    file, device = disk
    udev = Udev(tmp_path / "udev", Path(UDEVADM or ""), device)
    assert "/bin/register" in udev.of(LINK)
    subprocess.run(["mkfs.vfat", "-n", "EFI", str(file)], check=True, capture_output=True)
    assert "disk/by-label/EFI" in udev.of(LINK)
    udev.write("62-gpuaas", _slice_disks.rules(_slice_disks.names(SLOTS[:1])))
    number = re.sub(r"\D", "", udev.device)
    for content in (file.read_bytes(), bytes(512) + b"LABELONE" + bytes(16) + b"LVM2 001", b""):
        file.write_bytes(content.ljust(64 << 20, b"\0"))
        for name in (LINK, f"{LINK}-part{number}"):
            text = udev.of(name)
            assert f"\nDEVLINKS=/dev/{name}\n" in text, text[-3000:]
            assert "\nSYSTEMD_READY=0\n" in text and "\nID_FS_TYPE=gpuaas_slice\n" in text
            assert "\nrun:" not in text
    assert "disk/by-uuid/root" in udev.of(f"{LINK}0")


@pytest.mark.parametrize("path", ["/etc/lvm/lvm.conf", _slice_disks.LVM])
def test_a_filter_of_the_site_is_kept_and_named(host: Path, path: str) -> None:
    _host.write(path, 'devices {\n  global_filter = [ "a|sda|", "r|.*|" ]\n}\n')
    outcome = drive(SLOTS)
    assert outcome.done == ["write_rules"]
    assert [doubt.code for doubt in outcome.doubts] == ["lvm_filter_of_site"]
    assert _slice_disks.problems(SLOTS) == []


def test_a_host_without_lvm_and_mdadm_gets_no_configuration_of_them(
    tree: Path, script: Any
) -> None:
    script.on("udevadm", "control", "--reload")
    _host.write("/proc/mdstat", "Personalities : [raid1]\nmd0 : active raid1 sdb[1] sda[0]\n")
    assert drive(SLOTS).done == ["write_rules"]
    assert not (tree / "etc/lvm").exists() and not (tree / "etc/mdadm").exists()


ARRAY = "ARRAY /dev/md/0 metadata=1.2 name=host:0 UUID=0a1b2c3d:00000001:00000002:00000003"
SCAN = ("mdadm", "--detail", "--scan")


def test_mdadm_assembles_no_array_of_a_tenant(host: Path) -> None:
    site = "HOMEHOST <system>\nMAILADDR root"
    _host.write(_slice_disks.MDADM, site)
    assert drive(SLOTS).done == ["write_rules", "filter_lvm", "limit_mdadm"]
    assert drive(SLOTS).done == [] and _slice_disks.problems(SLOTS) == []
    text = _host.content(_slice_disks.MDADM) or b""
    assert re.findall(rb"^AUTO.*", text, re.MULTILINE) == [b"AUTO -all"]
    _host.write(_slice_disks.MDADM, site)
    assert any("mdadm.conf" in row for row in _slice_disks.problems(SLOTS))
    assert drive(SLOTS).done == ["limit_mdadm"]
    assert drive([]).done == ["write_rules", "filter_lvm", "limit_mdadm"]
    assert (_host.content(_slice_disks.MDADM) or b"").rstrip() == site.encode()


def test_the_image_is_built_with_the_rule_for_arrays(host: Path, script: Any) -> None:
    """The hook of Debian's mdadm replaces a file without a line of ARRAY by a scan of all disks."""
    (host / "etc/initramfs-tools").mkdir()
    build = ("update-initramfs", "-u", "-k", "all")
    script.on(*build)
    drive(SLOTS)
    (host / "etc/mdadm").mkdir()
    assert drive(SLOTS).done == ["limit_mdadm", "update_initramfs"]
    assert re.search(r"^ARRAY <ignore> ", _host.read(_slice_disks.MDADM) or "", re.MULTILINE)
    assert drive(SLOTS).done == []
    # A file that was made for the block goes with it.
    assert "limit_mdadm" in drive([]).done
    assert not (host / _slice_disks.MDADM.lstrip("/")).exists()


def test_the_file_that_mdadm_reads_gets_the_rule(host: Path) -> None:
    (host / "etc/mdadm").mkdir()
    _host.write(_slice_disks.OTHER_MDADM, "MAILADDR root\n")
    assert drive(SLOTS).plan.steps[-1].subject == _slice_disks.OTHER_MDADM
    assert not (host / _slice_disks.MDADM.lstrip("/")).exists()


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (f"{ARRAY}\n", []),
        (ARRAY.replace(" UUID", "\n   UUID").upper(), []),
        ("", ["md_arrays_not_listed"]),
        (f"# {ARRAY}\n", ["md_arrays_not_listed"]),
        # mdadm takes these for no line of this array, or not at every boot.
        (f"HOMEHOST <system>\n  {ARRAY}\n", ["md_arrays_not_listed"]),
        (f"INACTIVE-{ARRAY}\n", ["md_arrays_not_listed"]),
        (ARRAY.replace("host:0", "former:0"), ["md_arrays_not_listed"]),
        (ARRAY.replace("/dev/md/0", "<ignore>"), ["md_arrays_not_listed"]),
        (f"{ARRAY} devices=/dev/sda,/dev/sdb\n", ["md_arrays_not_listed"]),
        (f"{ARRAY}\n\n# of the host\n\tsuper-minor=0\n", ["md_arrays_not_listed"]),
        (f"{ARRAY.replace(' name=host:0', '')} level=raid1 num-devices=2\n", []),
        (f"{ARRAY}\nAUTO +1.x -all\n", ["md_auto_of_site"]),
        (f"{ARRAY}\nauto\n  -all\n", []),
    ],
)
def test_an_array_of_the_host_is_still_assembled(
    host: Path, script: Any, text: str, codes: list[str]
) -> None:
    _host.write(_slice_disks.MDADM, text)
    script.on(*SCAN, out=f"INACTIVE-{ARRAY}\n" if "INACTIVE" in text else f"{ARRAY}\n")
    drive(SLOTS)
    _host.write("/proc/mdstat", "Personalities : [raid1]\nmd0 : active raid1 sdb[1] sda[0]\n")
    outcome = drive(SLOTS)
    assert [doubt.code for doubt in outcome.doubts] == codes
    has_block = "AUTO -all" in (_host.read(_slice_disks.MDADM) or "")
    assert has_block == (codes == []) and _slice_disks.problems(SLOTS) == []
    assert [doubt.code for doubt in drive([]).doubts] == []


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        (ARRAY.replace("0a1b", "ffff"), ["md_arrays_not_running"]),
        (ARRAY.replace("0a1b", "ffff").replace("/dev/md/0", "<ignore>"), []),
        ("ARRAY /dev/md/1 super-minor=1", []),
    ],
)
def test_a_line_of_an_array_that_does_not_run_is_named(
    host: Path, script: Any, line: str, codes: list[str]
) -> None:
    """It may be on a tenant's disk, from a scan of all disks. The block does not reach it."""
    _host.write("/proc/mdstat", "Personalities : [raid1]\nmd0 : active raid1 sdb[1] sda[0]\n")
    script.on(*SCAN, out=f"{ARRAY}\n")
    _host.write(_slice_disks.MDADM, f"{ARRAY}\n{line}\n")
    outcome = drive(SLOTS)
    assert [doubt.code for doubt in outcome.doubts] == codes
    assert "limit_mdadm" in outcome.done, "the rest is still left alone"
    assert drive([]).doubts == []


# As `scripts/setup --tests` unpacks it.
MDADM = shutil.which("mdadm", path=f"{sys.prefix}/mdadm/sbin:{os.environ['PATH']}:/sbin")


@pytest.mark.skipif(not MDADM, reason="needs mdadm, unpacked by `scripts/setup --tests`")
def test_the_real_mdadm_leaves_a_tenants_array_alone(
    disk: tuple[Path, str], tmp_path: Path
) -> None:
    """`mdadm --assemble --scan`, as the initramfs runs it. A machine without the driver of md
    reports the attempted assembly.
    """
    _file, device = disk
    Path(device).write_bytes(bytes(4096) + superblock() + bytes(4096))

    def scan(text: str) -> list[str]:
        config = tmp_path / "mdadm.conf"
        config.write_text(f"DEVICE {device}\n{text}")
        words = [str(MDADM), "--assemble", "--scan", "--verbose", f"--config={config}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        rows = [row for row in done.stderr.splitlines() if device in row or "/dev/md" in row]
        return [row for row in rows if "looking for" not in row]

    refused = f"mdadm: {device} has metadata type 1.x for which auto-assembly is disabled"
    block = _slice_disks.md_block()
    assert scan("") != [refused] != scan("AUTO +all\n" + block)
    assert scan(block) == [refused]
    listed = scan(f"ARRAY /dev/md/of-host UUID={UUID}\n{block}")
    assert listed and refused not in listed, "an array of the host is assembled"
    # Such lines are not taken for a list of the array (`md_arrays_not_listed`).
    for word in ("devices=/dev/other", "super-minor=0"):
        assert scan(f"ARRAY /dev/md/of-host UUID={UUID} {word}\n{block}") != listed, word
    assert scan(f"HOMEHOST <system>\n  ARRAY /dev/md/of-host UUID={UUID}\n{block}") == [refused]


UUID = "00010203:04050607:08090a0b:0c0d0e0f"


def superblock() -> bytes:
    """Superblock of md 1.2 of one disk of a mirror."""
    block = bytearray(260)
    struct.pack_into("<II8x16s", block, 0, 0xA92B4EFC, 1, bytes(range(16)))
    struct.pack_into("<32sQIIQII", block, 32, b"tenant:t", 0, 1, 0, 1 << 16, 0, 2)
    struct.pack_into("<QQQ", block, 128, 2048, 1 << 16, 8)
    struct.pack_into("<16s", block, 168, bytes(range(16, 32)))
    struct.pack_into("<QQQII", block, 192, 1, 1, 2**64 - 1, 0, 2)
    struct.pack_into("<HH", block, 256, 0, 0xFFFE)
    total = sum(struct.unpack(f"<{len(block) // 4}I", block))
    struct.pack_into("<I", block, 216, (total + (total >> 32)) & 0xFFFFFFFF)
    return bytes(block)


@pytest.mark.parametrize(
    "name", ["/dev/nvme0n1", '/dev/disk/by-id/x", RUN+="sh', "/dev/disk/by-id/*", ""]
)
def test_only_a_name_by_identity_becomes_a_rule(host: Path, name: str) -> None:
    with pytest.raises(Refusal, match="spec_invalid"):
        drive([{"nvme_device": name}])
