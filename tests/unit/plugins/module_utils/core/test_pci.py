"""PCI functions, read from sysfs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

GPU = "0000:43:00.0"


@pytest.mark.covers("HOST-11")
def test_reads_a_function_through_its_symbolic_link(pci: Any) -> None:
    pci.add(GPU, driver="nvidia", group=7, numa=1)
    device = _pci.read(GPU)
    assert device == _pci.Device(GPU, "10de", "2335", "030200", "nvidia", 7, 1, "", 0, 0, "")
    assert device.id == "10de:2335"
    assert device.slot == "0000:43:00"
    assert _pci.devices() == [device]


def test_a_host_without_pci_has_no_devices(tree: Path) -> None:
    assert _pci.devices() == []


def test_what_is_not_there_is_refused(pci: Any) -> None:
    pci.add(GPU)
    with pytest.raises(Refusal, match="device_missing"):
        _pci.read("0000:44:00.0")


@pytest.mark.parametrize(
    "address", ["../../etc", "0000:43:00.0/x", "", "0000:43:00.8", "43:00.0\n"]
)
def test_nothing_but_an_address_becomes_a_path(pci: Any, address: str) -> None:
    with pytest.raises(Refusal, match="pci_address_invalid"):
        _pci.read(address)


@pytest.mark.covers("HOST-8", "HOST-11")
def test_group_holds_every_member_and_names_what_the_host_drives(pci: Any) -> None:
    pci.add(GPU, group=7, driver="vfio-pci")
    pci.add("0000:43:00.1", "10de:22ba", class_code="040300", group=7, driver="snd_hda_intel")
    pci.add("0000:42:00.0", "1b36:000c", class_code="060400", group=7, driver="pcieport")
    assert [d.address for d in _pci.group(GPU)] == ["0000:42:00.0", GPU, "0000:43:00.1"]
    assert _pci.group_blockers(GPU) == [
        "0000:43:00.1 (10de:22ba) of IOMMU group 7 is driven by snd_hda_intel"
    ]


def test_without_an_iommu_the_group_is_a_blocker(pci: Any) -> None:
    pci.add(GPU)
    assert _pci.group(GPU) == []
    assert _pci.group_blockers(GPU) == [f"{GPU} is in no IOMMU group"]


def test_virtual_functions_come_by_index(pci: Any) -> None:
    pci.add("0000:25:00.0", "8086:10c9", totalvfs=7, interface="ens30")
    pci.store("/sys/bus/pci/devices/0000:25:00.0/sriov_numvfs", "3")
    assert _pci.functions("0000:25:00.0") == ["0000:25:10.0", "0000:25:10.1", "0000:25:10.2"]
    assert _pci.read("0000:25:10.1").physfn == "0000:25:00.0"
    assert _pci.interfaces("0000:25:00.0") == ["ens30"]
    assert _pci.interfaces("0000:25:10.1") == []


def test_a_lost_device_answers_with_all_ones(pci: Any) -> None:
    pci.add(GPU)
    assert _pci.answers(GPU)
    (pci.folder(GPU) / "config").write_bytes(b"\xff" * 64)
    assert not _pci.answers(GPU)
    # A real virtual function of the lab's card reads like this: no identity, but a status.
    (pci.folder(GPU) / "config").write_bytes(b"\xff\xff\xff\xff\x00\x00\x10\x00" + bytes(56))
    assert _pci.answers(GPU)
    assert not _pci.answers("0000:44:00.0")


def test_a_write_that_the_kernel_refuses_says_so(tree: Path) -> None:
    with pytest.raises(Refusal, match="kernel_refused"):
        _pci.store("/sys/bus/pci/drivers_probe", GPU)


def test_an_attribute_is_written_in_place(tree: Path) -> None:
    attribute = tree / "sys/bus/pci/drivers_probe"
    attribute.parent.mkdir(parents=True)
    attribute.write_text("")
    _pci.probe(GPU)
    assert attribute.read_text() == GPU


@pytest.mark.covers("I18")
def test_a_device_that_never_answers_is_given_up(
    pci: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given_up() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(_pci, "ANSWER_S", 0.2)
            return not _pci.answers(GPU)

    pci.add(GPU)
    assert _pci.answers(GPU)
    config = tree / "sys/devices/pci0000:00" / GPU / "config"
    config.unlink()
    # The FIFO has no writer, so the read blocks as it does while the kernel resets the device.
    os.mkfifo(config)
    assert given_up()
    config.unlink()
    config.write_bytes(b"\xde\x10")
    assert _pci.answers(GPU)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(f"\0gpuaas-pci-{GPU}")
        assert given_up()


def test_one_child_reads_all_devices_unless_one_of_them_hangs(
    pci: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ("0000:44:00.0", "0000:45:00.0", "0000:46:00.0")
    for address in (GPU, *others):
        pci.add(address)
    lost, unreadable = (tree / "sys/devices/pci0000:00" / name / "config" for name in others[:2])
    lost.write_bytes(b"\xff" * 64)
    children: list[float] = []
    call = _pci._bounded.call

    def count(action: Any, *, deadline: float) -> Any:
        children.append(deadline)
        return call(action, deadline=deadline)

    monkeypatch.setattr(_pci._bounded, "call", count)
    assert (_pci.silent([GPU, *others]), len(children)) == ({others[0]}, 1)
    unreadable.unlink()
    assert _pci.silent([GPU, *others]) == {*others[:2]}
    os.mkfifo(unreadable)
    with monkeypatch.context() as patch:
        patch.setattr(_pci, "ANSWER_S", 0.2)
        silent = _pci.silent([GPU, *others])
    # This machine may be too slow for the others in that time.
    assert silent >= {*others[:2]}
    with pytest.raises(Refusal, match="pci_address_invalid"):
        _pci.silent(["../../etc"])
