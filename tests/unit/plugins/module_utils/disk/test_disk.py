"""NVMe disks by their identity: spelling, wrong links, and devices that are no whole namespace."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _disk, _nvme_admin

bench = runpy.run_path(str(Path(__file__).parents[2] / "storage_bench.py"))["bench"]

EUI = "5e0000000000a000"
BY_ID = f"/dev/disk/by-id/nvme-eui.{EUI}"


def refused(path: str) -> str:
    with pytest.raises(Refusal) as caught:
        _block.resolve(path)
    return caught.value.code


@pytest.mark.covers("HOST-9", "HOST-11")
def test_a_disk_is_known_by_what_the_device_says(bench) -> None:
    bench.disk()
    disk = _block.resolve("/dev/nvme1n1")
    assert (disk.disk_identity, disk.by_id, disk.serial) == (f"eui.{EUI}", BY_ID, "LABNVME0")
    assert (disk.devt, disk.size_bytes, disk.model) == ("259:1", 48 << 20, "QEMU NVMe Ctrl")
    assert _block.resolve(BY_ID) == disk


def test_an_nguid_goes_before_the_eui_as_in_the_kernels_link(bench) -> None:
    nguid = "000000000000000100a075244a103331"
    bench.disk(nguid=nguid)
    disk = _block.resolve(f"/dev/disk/by-id/nvme-eui.{nguid}")
    assert disk.disk_identity == f"eui.{nguid}"
    assert disk.is_known_as(EUI) and disk.is_known_as(nguid.upper())


@pytest.mark.parametrize("name", [EUI, EUI.upper(), f"eui.{EUI}", f"EUI.{EUI.upper()}", BY_ID])
def test_a_disks_identity_has_one_spelling(name: str) -> None:
    assert _disk.disk_identity(name) == f"eui.{EUI}"


def test_no_identifier_is_no_disk(bench) -> None:
    bench.disk()
    disk = _block.resolve(BY_ID)
    assert not disk.nguid and not disk.is_known_as("") and not disk.is_known_as("eui.")


@pytest.mark.covers("HOST-9")
def test_a_link_that_lies_is_refused(bench) -> None:
    bench.disk()
    bench.disk("nvme0n1", minor=9, eui="5e000000000000ff", serial="LABOS")
    bench.link("nvme0n1", f"nvme-eui.{EUI}")
    assert refused(BY_ID) == "identity_mismatch"
    assert [disk.by_id for disk in _block.disks()] == [
        "/dev/disk/by-id/nvme-eui.5e000000000000ff",
        "",
    ]


@pytest.mark.covers("HOST-9", "HOST-11")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/dev/nvme9n1", "device_not_found"),
        ("/dev/nvme1c1n1", "multipath_member"),
        ("/dev/nvme1n1p1", "not_a_whole_disk"),
        ("/dev/vda", "not_a_whole_disk"),
    ],
)
def test_what_is_no_whole_namespace(bench, name: str, code: str) -> None:
    for other in ("nvme1c1n1", "nvme1n1p1", "vda"):
        (bench.root / "dev" / other).touch()
    assert refused(name) == code


@pytest.mark.covers("HOST-9")
def test_a_namespace_without_any_identifier_is_not_used(bench) -> None:
    bench.disk(eui="")
    assert refused("nvme1n1") == "device_not_answering"
    assert _block.disks() == []


@pytest.mark.covers("HOST-11")
def test_a_file_in_place_of_a_device_hides_no_other_disk(bench) -> None:
    """A careless `dd of=/dev/nvme2n1` leaves such a file when the disk is gone."""
    bench.disk()
    (bench.root / "sys/block/nvme2n1").mkdir()
    (bench.root / "dev/nvme2n1").write_text("not a disk")
    assert [disk.kernel_name for disk in _block.disks()] == ["nvme1n1"]
    assert "not a block device" in _disk.why_unknown("nvme2n1")
    assert _disk.why_unknown("nvme1n1") == ""
    assert refused("/dev/nvme2n1") == "not_a_block_device"


@pytest.mark.covers("HOST-9", "HOST-11")
def test_paths_of_a_multipath_namespace_are_not_disks(bench) -> None:
    bench.disk()
    (bench.root / "sys/block/nvme1c1n1").mkdir()
    assert [disk.kernel_name for disk in _block.disks()] == ["nvme1n1"]


@pytest.mark.covers("HOST-9", "I7")
def test_one_namespace_under_two_names_is_refused(bench) -> None:
    """Without native multipath each path is a disk, and the kernel shares no mount between them."""
    bench.disk()
    bench.disk("nvme2n1", minor=11)
    for path in (BY_ID, "/dev/nvme1n1", "/dev/nvme2n1"):
        assert refused(path) == "duplicate_identity"
    assert len(_block.disks()) == 2


def recorded(bench, name: str, field: str, text: str) -> None:
    file = bench.root / "sys/class/block" / name / field
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.mark.covers("HOST-9", "I7")
@pytest.mark.parametrize(
    ("serial", "nsid", "eui", "twin"),
    [
        ("", "", "5e 00 00 00 00 00 a0 00", True),
        ("LABNVME0  ", "1", "", True),
        ("LABNVME0  ", "1", "00 00 00 00 00 00 00 00", True),
        ("LABNVME0  ", "2", "", False),
        ("LABNVME0  ", "1", "5e 00 00 00 00 00 00 ff", False),
        ("", "", "", False),
    ],
)
def test_a_silent_path_is_known_by_the_kernels_record(
    bench, serial: str, nsid: str, eui: str, twin: bool
) -> None:
    bench.disk()
    recorded(bench, "nvme1n1", "nsid", "1")
    bench.disk("nvme2n1", minor=11, unsupported={_nvme_admin.NVME_IOCTL_ADMIN_CMD})
    bench.link("nvme1n1", f"nvme-eui.{EUI}")
    recorded(bench, "nvme2n1/device", "serial", serial)
    recorded(bench, "nvme2n1", "nsid", nsid)
    recorded(bench, "nvme2n1", "eui", eui)
    if twin:
        assert refused(BY_ID) == "duplicate_identity"
    else:
        assert _block.resolve(BY_ID).kernel_name == "nvme1n1"


def test_disks_with_nguids_of_their_own_may_share_an_eui(bench) -> None:
    bench.disk(nguid="0" * 31 + "1")
    bench.disk("nvme2n1", minor=11, nguid="0" * 31 + "2")
    assert _block.resolve("nvme1n1").kernel_name == "nvme1n1"
    recorded(bench, "nvme2n1", "nguid", "00000000-0000-0000-0000-000000000001")
    assert refused("nvme1n1") == "duplicate_identity"


@pytest.mark.covers("HOST-9")
def test_paths_and_partitions_of_a_namespace_are_no_second_disk(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", 1 << 20, 20 << 20, minor=2)
    for path in ("nvme1c1n1", "nvme1c2n1"):
        (bench.root / "sys/block" / path).mkdir()
        recorded(bench, path, "eui", "5e 00 00 00 00 00 a0 00")
    assert _block.resolve(BY_ID).kernel_name == "nvme1n1"


@pytest.mark.parametrize(
    "wrong",
    [{"nvme_eui": "5e0000000000a001"}, {"nvme_serial": "$(reboot)"}, {"nvme_size_bytes": 4096}],
)
def test_a_slot_names_exactly_one_disk(bench, wrong: dict[str, object]) -> None:
    bench.disk()
    slot = {
        "nvme_device": BY_ID,
        "nvme_eui": EUI,
        "nvme_serial": "LABNVME0",
        "nvme_size_bytes": 48 << 20,
    }
    assert _block.of_slot(slot).kernel_name == "nvme1n1"
    with pytest.raises(Refusal) as caught:
        _block.of_slot(slot | wrong)
    assert caught.value.code == "identity_mismatch"


def test_pci_addresses_of_one_path_and_of_several(bench) -> None:
    bench.disk()
    parent = bench.root / "sys/devices/virtual/nvme1"
    parent.mkdir()
    (parent / "address").write_text("0000:22:00.0\n")
    device = bench.root / "sys/devices/virtual/nvme1n1/device"
    device.symlink_to("../nvme1")
    disk = _disk.resolve("nvme1n1")
    assert _block.pci_addresses(disk) == ["0000:22:00.0"]
    device.unlink()
    subsystem = bench.root / "sys/devices/virtual/nvme-subsys1"
    subsystem.mkdir()
    (subsystem / "nvme1").symlink_to("../nvme1")
    device.symlink_to("../nvme-subsys1")
    assert _block.pci_addresses(disk) == ["0000:22:00.0"]
