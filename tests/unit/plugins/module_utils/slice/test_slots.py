"""Slot bundles, and their functions against the host: every difference is a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slots

GPU = "0000:43:00.0"
SLOT = {
    "slot_id": "slot-3",
    "slot_index": 3,
    "fence": 7,
    "gpu_pci_address": GPU,
    "nvme_device": "/dev/disk/by-id/nvme-eui.5e0000000000a003",
    "nvme_serial": "LABNVME3",
}


def gpu(machine: Any, driver: str = "vfio-pci", power: str = "D0") -> None:
    machine.pci(GPU, "1234:11e8", group=12, driver=driver, power_state=power)
    machine.file(f"/sys/devices/pci0000:00/{GPU}/config", "\x34\x12")


def codes(refusals: list[Refusal]) -> list[str]:
    return [refusal.code for refusal in refusals]


def test_the_boot_slot_is_the_first_given() -> None:
    slots = [{**SLOT, "slot_id": "b", "slot_index": 2}, {**SLOT, "slot_id": "a", "slot_index": 1}]
    assert [slot["slot_id"] for slot in _slots.checked(slots)] == ["b", "a"]


@pytest.mark.parametrize("key", ["slot_id", "fence", "gpu_pci_address", "nvme_device"])
def test_an_incomplete_bundle_is_refused(key: str) -> None:
    with pytest.raises(Refusal, match=f"bundle_incomplete.*{key}"):
        _slots.checked([{**SLOT, key: None}])


@pytest.mark.covers("I18")
def test_a_bound_function_that_answers_is_fit(machine: Any) -> None:
    gpu(machine)
    assert _slots.passthrough([GPU]) == []


@pytest.mark.covers("I18")
def test_a_function_of_another_driver_is_not(machine: Any) -> None:
    gpu(machine, driver="nvidia")
    assert codes(_slots.passthrough([GPU])) == ["not_bound", "group_not_viable"]


@pytest.mark.covers("I18")
def test_a_function_asleep_or_gone_is_not(machine: Any) -> None:
    assert codes(_slots.passthrough([GPU])) == ["device_missing"]
    gpu(machine, power="D3cold")
    assert codes(_slots.passthrough([GPU])) == ["device_not_answering"]


@pytest.mark.parametrize(("own_pids", "expected"), [((), ["device_in_use"]), ((77,), [])])
def test_a_group_that_a_process_has_open_is_in_use(
    machine: Any, own_pids: tuple[int, ...], expected: list[str]
) -> None:
    gpu(machine)
    machine.folder("/proc/77/fd")
    (machine.root / "proc/77/fd/9").symlink_to("/dev/vfio/12")
    (machine.root / "proc/77/fd/8").symlink_to("/dev/vfio/vfio")
    assert codes(_slots.passthrough([GPU], own_pids=own_pids)) == expected


def test_a_live_neighbour_in_the_group_is_named(machine: Any) -> None:
    gpu(machine)
    machine.pci("0000:43:00.1", "1234:0001", group=12, driver="snd_hda_intel")
    problems = _slots.passthrough([GPU])
    assert codes(problems) == ["group_not_viable"]
    assert "0000:43:00.1" in problems[0].found
