"""Binding of devices to vfio-pci, and its reversal."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _vfio_bind
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _host,
    _host_mode,
    _ledger,
    _pci,
)

pytestmark = pytest.mark.covers("HOST-8")

GPU, AUDIO, OTHER, SWITCH = "0000:43:00.0", "0000:43:00.1", "0000:44:00.0", "0000:45:00.0"
PF, VF = "0000:25:00.0", "0000:25:10.0"
IDS = {"gpu_ids": ["10de:2335"], "pf_ids": ["8086:10c9"]}


@pytest.fixture(autouse=True)
def slice_mode(tree: Path) -> None:
    _host.write(_host_mode.MARKER, json.dumps({"mode": "slice"}))
    (tree / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)


def drive(*addresses: str, **more: Any) -> _change.Outcome:
    params = {"addresses": list(addresses), "state": "bound", **IDS, **more}
    return _change.drive(_vfio_bind.LIVE, params, check_mode=False)


def remember(*addresses: str, id_: str = "10de:2335") -> None:
    _host.write(_vfio_bind.SETTINGS, json.dumps({"devices": dict.fromkeys(addresses, id_)}))


def refused(outcome: _change.Outcome) -> str:
    assert outcome.failure is not None and not outcome.done
    return outcome.failure.code


def hold(tree: Path, path: str) -> None:
    """Run a process of the host with `path` open."""
    process = tree / "proc/4242"
    (process / "fd").mkdir(parents=True)
    (process / "comm").write_text("qemu-system-x86\n")
    (process / "fd/9").symlink_to(path)


def test_binds_a_gpu_and_a_virtual_function_once(pci: Any) -> None:
    pci.add(GPU, group=7).add(PF, "8086:10c9", group=8, totalvfs=7, driver="igb")
    pci.store(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "1")
    outcome = drive(GPU, VF)
    assert outcome.failure is None
    assert outcome.done == ["bind_device", "bind_device"]
    assert [(b["address"], b["driver"]) for b in outcome.facts["bound"]] == [
        (VF, "vfio-pci"),
        (GPU, "vfio-pci"),
    ]
    assert drive(GPU, VF).plan.steps == ()


def test_takes_a_gpu_from_its_driver_with_the_functions_of_its_card(pci: Any) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    pci.add(AUDIO, "10de:22ba", class_code="040300", group=7, driver="snd_hda_intel")
    assert drive(GPU).done == ["bind_device", "bind_device"]
    assert pci.driver(AUDIO) == "vfio-pci"


def test_loads_the_driver_when_the_kernel_has_not(pci: Any, script: Any, tree: Path) -> None:
    pci.add(GPU, group=7)
    (tree / "sys/bus/pci/drivers/vfio-pci").rmdir()
    script.on("modprobe", "vfio-pci")
    drive(GPU)
    assert script.calls == [("modprobe", "vfio-pci")]


def test_bridges_of_the_group_keep_their_driver(pci: Any) -> None:
    pci.add(GPU, group=7)
    pci.add("0000:42:00.0", "1b36:000c", class_code="060400", group=7, driver="pcieport")
    assert drive(GPU).failure is None
    assert pci.driver("0000:42:00.0") == "pcieport"


def test_a_stranger_in_the_group_is_refused_unless_approved_too(pci: Any) -> None:
    pci.add(GPU, group=7)
    pci.add(SWITCH, "10de:22a3", class_code="068000", group=7, driver="nvidia-nvswitch")
    assert refused(drive(GPU)) == "group_not_viable"
    assert pci.driver(GPU) == ""
    assert drive(GPU, SWITCH, gpu_ids=["10de:2335", "10de:22a3"]).failure is None


def test_without_an_iommu_nothing_is_bound(pci: Any) -> None:
    pci.add(GPU)
    assert refused(drive(GPU)) == "group_not_viable"


def test_a_host_that_is_not_in_slice_mode_keeps_its_devices(pci: Any) -> None:
    pci.add(GPU, group=7)
    _host.write(_host_mode.MARKER, json.dumps({"mode": "baremetal"}))
    assert refused(drive(GPU)) == "not_slice_mode"


def test_a_missing_device_is_refused(pci: Any) -> None:
    assert refused(drive(GPU)) == "device_missing"


@pytest.mark.parametrize(
    ("id_", "class_code"),
    [("144d:a808", "010802"), ("8086:10c9", "020000"), ("1b36:000c", "060400")],
)
def test_only_devices_of_the_profile_are_taken(pci: Any, id_: str, class_code: str) -> None:
    pci.add(GPU, id_, class_code=class_code, group=7)
    assert refused(drive(GPU)) == "wrong_class"


def test_a_gpu_that_a_process_uses_is_not_taken(pci: Any, tree: Path) -> None:
    pci.add(GPU, group=7, driver="nvidia")
    hold(tree, "/dev/nvidia0")
    outcome = drive(GPU)
    assert refused(outcome) == "device_busy"
    assert outcome.failure is not None and "4242 (qemu-system-x86)" in outcome.failure.found
    assert pci.driver(GPU) == "nvidia"


@pytest.mark.parametrize("held", [True, False])
def test_a_graphics_node_counts_as_use(pci: Any, tree: Path, held: bool) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    (pci.folder(GPU) / "drm/card1").mkdir(parents=True)
    hold(tree, "/dev/dri/card1" if held else "/dev/dri/card0")
    assert (drive(GPU).failure is not None) is held


def test_an_interface_with_an_address_is_not_taken(pci: Any, script: Any) -> None:
    pci.add(PF, "8086:10c9", group=8, totalvfs=7, driver="igb")
    pci.store(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "1")
    pci._bind(VF, "igbvf")
    pci.interface("eth9", VF)
    shown = [{"addr_info": [{"local": "192.0.2.7", "prefixlen": 24, "scope": "global"}]}]
    script.on("ip", "-j", "address", "show", "dev", "eth9", out=json.dumps(shown))
    assert refused(drive(VF)) == "device_busy"


def test_an_interface_in_a_bridge_is_not_taken(pci: Any) -> None:
    pci.add(PF, "8086:10c9", group=8, totalvfs=7, driver="igb")
    pci.store(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "1")
    pci._bind(VF, "igbvf")
    (pci.interface("eth9", VF) / "master").mkdir()
    assert refused(drive(VF)) == "device_busy"


def test_an_interface_below_a_vlan_is_not_taken(pci: Any) -> None:
    pci.add(PF, "8086:10c9", group=8, totalvfs=7, driver="igb")
    pci.store(f"/sys/bus/pci/devices/{PF}/sriov_numvfs", "1")
    pci._bind(VF, "igbvf")
    (pci.interface("eth9", VF) / "upper_eth9.100").mkdir()
    assert refused(drive(VF)) == "device_busy"


def test_no_port_of_the_host_goes_with_a_function_of_its_card(pci: Any) -> None:
    """A firmware that has lost ACS puts the whole card into one group. At boot the ports have no
    address yet.
    """
    card = "0000:ca:00.{}"
    kinds = {"class_code": "020000", "driver": "mlx5_core", "group": 7}
    pci.add(card.format(0), "15b3:1021", **kinds).add(card.format(1), "15b3:1021", **kinds)
    pci.add(card.format(2), "15b3:101e", **kinds, physfn=card.format(0))
    pci.add(GPU, group=9, driver="nouveau")
    remember(card.format(2), GPU)
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) != 0
    assert [pci.driver(card.format(number)) for number in range(3)] == ["mlx5_core"] * 3


def test_exclusive_gives_back_what_is_no_longer_approved(pci: Any) -> None:
    pci.add(GPU, group=7, driver="nouveau").add(OTHER, group=9, driver="nouveau")
    drive(GPU, OTHER)
    remember(GPU, OTHER)
    assert drive(GPU).plan.steps == ()
    outcome = drive(GPU, exclusive=True)
    assert outcome.done == ["release_device"]
    assert (pci.driver(GPU), pci.driver(OTHER)) == ("vfio-pci", "nouveau")


@pytest.mark.covers("I2")
def test_the_gpu_of_a_slice_that_is_off_is_not_given_back(pci: Any) -> None:
    """Nothing has the device open then; a file that names other slots only must not take it."""
    pci.add(GPU, group=7, driver="nouveau").add(OTHER, group=9, driver="nouveau")
    drive(GPU, OTHER)
    remember(GPU, OTHER)
    _ledger.hold("slot-2", fence=3, allocation_id="a", disk_identity="d")
    entry = json.loads(_host.read(f"{_ledger.DIRECTORY}/slot-2.json") or "")
    entry["gpu"] = {"address": OTHER}
    _host.write(f"{_ledger.DIRECTORY}/slot-2.json", json.dumps(entry))
    for outcome in (drive(GPU, exclusive=True), drive(state="unbound")):
        assert outcome.failure is not None and outcome.failure.code == "slot_leased"
    assert pci.driver(OTHER) == "vfio-pci"
    assert drive(GPU, OTHER, exclusive=True).failure is None


@pytest.mark.covers("HOST-15")
def test_unbound_returns_every_recorded_device(pci: Any) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    pci.add(AUDIO, "10de:22ba", class_code="040300", group=7, driver="snd_hda_intel")
    drive(GPU)
    remember(GPU, AUDIO)
    assert drive(state="unbound").failure is None
    assert (pci.driver(GPU), pci.driver(AUDIO)) == ("nouveau", "snd_hda_intel")
    assert drive(state="unbound").plan.steps == ()


@pytest.mark.covers("P11")
def test_a_gpu_that_its_driver_gets_or_had_counts_as_used(pci: Any) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    drive(GPU)
    remember(GPU)
    for again in (functools.partial(drive, state="unbound"), functools.partial(drive, GPU)):
        _ledger.mark_gpu_reset("slot-0", fence=1, evidence={"address": GPU})
        assert again().failure is None
        assert _ledger.standing_gpu("slot-0", GPU) is None


def test_a_device_in_a_running_guest_is_not_given_back(pci: Any, tree: Path) -> None:
    pci.add(GPU, group=7)
    drive(GPU)
    remember(GPU)
    hold(tree, "/dev/vfio/7")
    assert refused(drive(state="unbound")) == "device_busy"
    assert pci.driver(GPU) == "vfio-pci"


def test_a_device_that_does_not_come_back_fails_the_verification(pci: Any) -> None:
    pci.add(GPU, group=7)
    pci.stubborn.add(GPU)
    outcome = drive(GPU)
    assert outcome.failure.code == "verify_failed"


def test_boot_binds_what_was_recorded(pci: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    remember(GPU)
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == 0
    assert pci.driver(GPU) == "vfio-pci"
    assert capsys.readouterr().out == "done: bind_device\n"


def test_boot_refuses_an_address_that_holds_another_device(
    pci: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pci.add(GPU, "144d:a808", group=7, driver="nvme")
    remember(GPU)
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == 1
    assert pci.driver(GPU) == "nvme"
    assert "wrong_class" in capsys.readouterr().out


@pytest.mark.parametrize("stays", [False, True])
def test_boot_waits_for_who_looks_at_gpus_and_names_who_stays(
    pci: Any,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stays: bool,
) -> None:
    """Monitoring opens a GPU for a moment, and a boot has no operator to repeat the binding."""
    pci.add(GPU, group=7, driver="nvidia")
    remember(GPU)
    hold(tree, "/dev/nvidia0")
    clock = itertools.count(step=40)

    def sleep(_seconds: float) -> None:
        if not stays:
            (tree / "proc/4242/fd/9").unlink()

    monkeypatch.setattr(_boot_service.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(_boot_service, "boot", functools.partial(_boot_service.boot, sleep=sleep))
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == (1 if stays else 0)
    assert pci.driver(GPU) == ("nvidia" if stays else "vfio-pci")
    output = capsys.readouterr().out
    assert ("process 4242 (qemu-system-x86)" in output) is stays, output


def test_boot_binds_the_others_while_one_is_missing_and_one_in_use(
    pci: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = "0000:63:00.0"
    pci.add(OTHER, group=8, driver="nvidia").add(third, group=9)
    remember(GPU, OTHER, third)
    hold(tree, "/dev/nvidia0")
    meanwhile: list[tuple[str, str]] = []
    clock = itertools.count(step=40)
    monkeypatch.setattr(_boot_service.time, "monotonic", lambda: float(next(clock)))

    def sleep(_seconds: float) -> None:
        meanwhile.append((pci.driver(OTHER), pci.driver(third)))

    monkeypatch.setattr(_boot_service, "boot", functools.partial(_boot_service.boot, sleep=sleep))
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == 1
    assert set(meanwhile) == {("nvidia", "vfio-pci")}


def test_boot_leaves_a_host_outside_slice_mode_alone(pci: Any) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    remember(GPU)
    _host.remove(_host_mode.MARKER)
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == 0
    assert pci.driver(GPU) == "nouveau"


def test_early_at_boot_a_recorded_device_is_kept_from_the_hosts_drivers(
    pci: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs before drivers are loaded; the fabric card's functions are created later."""
    pci.add(GPU, group=7).add(OTHER, group=9)
    remember(GPU, VF)
    assert _vfio_bind.claim(_vfio_bind.SETTINGS) == 0
    assert capsys.readouterr().out == "done: claim_devices\n"
    pci.natural[GPU] = "nouveau"
    for address in (GPU, OTHER):
        pci.store("/sys/bus/pci/drivers_probe", address)
    assert (pci.driver(GPU), _pci.read(OTHER).driver_override) == ("vfio-pci", "")
    # The service also starts where the devices are bound already.
    assert _vfio_bind.claim(_vfio_bind.SETTINGS) == 0
    assert capsys.readouterr().out == "done: nothing to do\n"


def test_early_at_boot_one_device_that_cannot_be_claimed_costs_no_other(
    pci: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pci.add(GPU, group=7).add(OTHER, group=9)
    remember(GPU, OTHER, "43:00")

    def override(address: str, driver: str) -> None:
        if address == GPU:
            raise _change.Refusal("kernel_refused", expected="", found="busy", remedy="")
        pci.store(f"/sys/bus/pci/devices/{address}/driver_override", driver)

    monkeypatch.setattr(_pci, "override", override)
    assert _vfio_bind.claim(_vfio_bind.SETTINGS) == 1
    assert "kernel_refused" in capsys.readouterr().out
    assert [_pci.read(a).driver_override for a in (GPU, OTHER)] == ["", "vfio-pci"]


def test_a_record_that_cannot_be_used_claims_nothing_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _host.write(_vfio_bind.SETTINGS, "[1]")
    assert _vfio_bind.claim(_vfio_bind.SETTINGS) == 1
    assert "binding_record_unreadable" in capsys.readouterr().out


def test_a_card_that_goes_back_finds_its_driver_again(pci: Any, script: Any, tree: Path) -> None:
    """A claim at boot hides all cards of a kind from their driver, which then unloads."""
    pci.add(GPU, group=7)
    (tree / "sys/bus/pci/devices" / GPU / "modalias").write_text("pci:v000010DEd00002335\n")
    assert drive(GPU).failure is None
    pci.natural[GPU] = "nouveau"
    script.on("modprobe", "-q", "-b", "--", "pci:v000010DEd00002335")
    assert drive(GPU, state="unbound").failure is None
    assert (pci.driver(GPU), len(script.calls)) == ("nouveau", 1)


@pytest.mark.parametrize("why", ["driven", "another", "not a slice host", "leased"])
def test_early_at_boot_nothing_is_said_about_what_is_not_the_slices(
    pci: Any, tree: Path, why: str
) -> None:
    """A device that has a driver is left to the binding, which checks its users."""
    id_ = "10de:20b5" if why == "another" else "10de:2335"
    pci.add(GPU, id_, group=7, driver="nouveau" if why == "driven" else "")
    remember(GPU)
    if why == "not a slice host":
        _host.remove(_host_mode.MARKER)
    if why == "leased":
        _ledger.hold(_ledger.MACHINE, fence=1, allocation_id="a tenant", disk_identity="")
    assert _vfio_bind.claim(_vfio_bind.SETTINGS) == (1 if why == "leased" else 0)
    assert _pci.read(GPU).driver_override == ""


def test_a_broken_record_is_named(pci: Any) -> None:
    _host.write(_vfio_bind.SETTINGS, "[1]")
    with pytest.raises(_change.Refusal, match="binding_record_unreadable"):
        drive()
    with pytest.raises(_change.Refusal):
        drive(state="unbound")


@pytest.mark.covers("HOST-10")
def test_a_broken_record_is_no_bar_to_who_says_what_it_holds(pci: Any) -> None:
    pci.add(GPU, group=7, driver="nouveau")
    _host.write(_vfio_bind.SETTINGS, "not json")
    assert drive(GPU).failure is None
    assert pci.driver(GPU) == "vfio-pci"


def test_a_gpu_that_failed_keeps_no_other_from_being_bound(
    pci: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPU was bound earlier and is gone. At boot it may be late; the others do not wait for it."""
    pci.add(OTHER, group=8, driver="nouveau")
    remember(GPU, OTHER)
    outcome = drive(GPU, OTHER)
    assert outcome.failure is None and pci.driver(OTHER) == "vfio-pci"
    assert [(doubt.code, GPU in doubt.expected) for doubt in outcome.doubts] == [
        ("device_missing", True)
    ]
    assert refused(drive(OTHER, SWITCH)) == "device_missing"
    pci.store(f"/sys/bus/pci/devices/{OTHER}/driver_override", "")
    pci.store(f"/sys/bus/pci/devices/{OTHER}/driver/unbind", OTHER)
    meanwhile: list[str] = []
    clock = itertools.count(step=40)
    monkeypatch.setattr(_boot_service.time, "monotonic", lambda: float(next(clock)))

    def sleep(_seconds: float) -> None:
        meanwhile.append(pci.driver(OTHER))

    monkeypatch.setattr(_boot_service, "boot", functools.partial(_boot_service.boot, sleep=sleep))
    assert _vfio_bind.boot(_vfio_bind.SETTINGS) == 0
    assert meanwhile and set(meanwhile) == {"vfio-pci"}
    assert (
        f"WARN device_missing: expected the approved PCI function {GPU}" in capsys.readouterr().out
    )
