"""Entries of a disk in /etc/fstab: recognised, disabled, and restored byte for byte."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _fstab_entries, _usage

pytestmark = pytest.mark.covers("HOST-9")

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]


@pytest.mark.parametrize(
    "line",
    [
        "UUID=abc /share ext4 defaults 0 2",
        "LABEL=my\\040share /share ext4",
        "/dev/nvme1n1p1 /share ext4",
        "/dev/disk/by-uuid/abc /elsewhere ext4",
        "/dev/gone /mounted\\040here ext4",
    ],
)
def test_a_line_is_known_by_device_or_by_what_is_mounted_on_its_place(bench, line: str) -> None:
    bench.link("nvme1n1p1", "abc", "by-uuid")
    bench.link("nvme1n1p1", "my\\x20share", "by-label")
    _host.write("/etc/fstab", f"# UUID=abc /old ext4\n\nUUID=other / ext4\n{line}\n")
    assert _fstab_entries.lines_of(["nvme1n1", "nvme1n1p1"], ["/mounted here"]) == [line]


def test_a_line_of_another_disk_is_not_ours_because_we_are_mounted_over_it(bench) -> None:
    bench.disk("nvme2n1", minor=7)
    bench.partition("nvme2n1", 1 << 20, 20 << 20, minor=8)
    bench.link("nvme2n1p1", "abc", "by-uuid")
    _host.write("/etc/fstab", "UUID=abc /home ext4\nUUID=gone /home ext4\n/home/swap none swap\n")
    assert _fstab_entries.lines_of(["nvme1n1", "nvme1n1p1"], ["/home"]) == [
        "UUID=gone /home ext4",
        "/home/swap none swap",
    ]


@pytest.mark.parametrize("source", ["nas:/share", "//nas/share", "tmpfs", "/srv/share"])
def test_a_line_without_a_device_is_not_a_disks(bench, source: str) -> None:
    bench.disk()
    _host.write("/etc/fstab", f"/dev/nvme1n1 /share xfs\n{source} /share none\n")
    assert _fstab_entries.lines_of(["nvme1n1"], ["/share"]) == ["/dev/nvme1n1 /share xfs"]


def test_a_password_in_the_file_stays_hidden(tree: Path) -> None:
    _host.write("/etc/fstab", "//nas/x /nas cifs password=S\nb /share ext4\n", mode=0o600)

    def modes() -> set[int]:
        return {file.stat().st_mode & 0o777 for file in _host.path("/etc").iterdir()}

    _fstab_entries.disable(["b /share ext4"], backup="/etc/fstab.backup")
    assert modes() == {0o600}
    _fstab_entries.enable(["b /share ext4"])
    assert modes() == {0o600}
    _fstab_entries.remove(["b /share ext4"], backup="/etc/fstab.other")
    assert modes() == {0o600}


def test_only_the_named_lines_are_put_out_of_force(tree: Path) -> None:
    _host.write("/etc/fstab", "a / ext4\nb /share ext4\n")
    _fstab_entries.disable(["b /share ext4"], backup="/etc/fstab.backup")
    assert _host.read("/etc/fstab") == "a / ext4\n# gpuaas-slice-storage-disabled b /share ext4"
    assert _host.read("/etc/fstab.backup") == "a / ext4\nb /share ext4"
    assert _fstab_entries.lines_of([], ["/share"]) == []


ODD = b"# caf\xe9\nUUID=r / ext4\x0b\r\n/dev/nvme1n1p1 /d\xe9 ext4\n/dev/nvme1n1p1 /data ext4 0 2 "


def test_every_byte_of_the_file_stays_and_every_line_is_found(bench) -> None:
    bench.disk()
    file = _host.path("/etc/fstab")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(ODD)
    lines = _fstab_entries.lines_of(["nvme1n1p1"], [])
    assert lines == ["/dev/nvme1n1p1 /d\\xe9 ext4", "/dev/nvme1n1p1 /data ext4 0 2 "]
    _fstab_entries.disable(lines, backup="/etc/backup")
    assert _host.path("/etc/backup").read_bytes() == ODD
    assert _fstab_entries.lines_of(["nvme1n1p1"], []) == [] and _fstab_entries.disabled() == lines
    _fstab_entries.enable(lines)
    assert file.read_bytes() == ODD
    _fstab_entries.remove(lines, backup="/etc/backup")
    assert file.read_bytes() == ODD[: ODD.index(b"/dev")]


def test_a_file_on_a_mount_is_known_whatever_bytes_the_mounts_name_has(bench) -> None:
    row = b"36 35 259:1 / /d\xe9 rw,noatime shared:1 - ext4 /dev/nvme1n1 rw\n"
    _host.path("/proc/self/mountinfo").write_bytes(row)
    _host.write("/etc/fstab", "")
    _host.path("/etc/fstab").write_bytes(b"/d\xe9/swap none swap\nUUID=gone /d\xe9 ext4\n/e / ext4")
    (mount,) = _usage.mounts()
    assert _fstab_entries.lines_of([], [mount.point]) == [
        "/d\\xe9/swap none swap",
        "UUID=gone /d\\xe9 ext4",
    ]


@pytest.mark.parametrize("odd", [b"LABEL=\xe9", b"/dev/a\0b", b"UUID=" + b"x" * 5000])
def test_a_line_that_names_nothing_stops_nobody(bench, odd: bytes) -> None:
    _host.write("/etc/fstab", "")
    _host.path("/etc/fstab").write_bytes(odd + b" /data ext4\n")
    (line,) = _fstab_entries.lines_of(["nvme1n1"], ["/data"])
    assert line.endswith(" /data ext4") and line.isprintable()
