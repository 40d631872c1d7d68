"""Reset of a GPU between tenants, on a recorded PCI tree and a model of the device's registers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _bounded,
    _change,
    _host,
    _ledger,
    _vfio,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _gpu_reset, _gpu_scrub
from ansible_collections.gpuaas.slice.plugins.modules import gpu_reset as module

pytestmark = pytest.mark.covers("I18")

GPU, OTHER = "0000:43:00.0", "0000:44:00.0"
ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
BAR = 0xFE800000
# Registers of a GH100 chip that has booted and cleared its memory.
CLEARED = {0x200BC: 0xFF, 0x100B20: 1}
RECORDED = Path(__file__).parents[3] / "data" / "h200"
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)


@dataclass
class Edu:
    """QEMU's edu device by its specification, without its time: registers, buffer and DMA."""

    id: str = "1234:11e8"
    registers: dict[int, int] = field(default_factory=lambda: {0: 0x010000ED})
    buffer: bytearray = field(default_factory=lambda: bytearray(4096))
    page: bytearray = field(default_factory=lambda: bytearray(4096))

    def read(self, register: int) -> int:
        return self.registers.get(register, 0)

    def write(self, register: int, value: int) -> None:
        if register == 0x04:
            value ^= 0xFFFFFFFF
        elif register == 0x08:
            value = 1 if value == 0 else value
        elif register == 0x64:
            register, value = 0x24, self.read(0x24) & ~value
        elif register == 0x98:
            self._transfer(to_memory=bool(value & 2))
            value &= ~1
        self.registers[register] = value

    def _transfer(self, *, to_memory: bool) -> None:
        source, target, count = (self.read(register) for register in (0x80, 0x88, 0x90))
        if to_memory:
            at = target - 0x1000000
            self.page[at : at + count] = self.buffer[source - 0x40000 :][:count]
        else:
            at = target - 0x40000
            self.buffer[at : at + count] = self.page[source - 0x1000000 :][:count]

    @contextlib.contextmanager
    def memory(self, address: int) -> Iterator[bytearray]:
        assert address == 0x1000000
        yield self.page


class Host:
    """A PCI tree in a folder, whose kernel takes a reset."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.device = Edu()

    def add(self, address: str, *, bridge: str = "0000:40:01.0", **attributes: str) -> Path:
        folder = self.tree / f"sys/devices/pci0000:40/{bridge}" / address
        folder.mkdir(parents=True)
        header = struct.pack("<HHHHBBHBBBB6I", 0x1234, 0x11E8, *[0] * 9, BAR, *[0] * 5)
        (folder / "config").write_bytes(header.ljust(64, b"\0"))
        values = {
            "vendor": "0x1234", "device": "0x11e8", "class": "0x00ff00", "power_state": "D0",
            "reset_method": "flr bus", "reset": "",
            "resource": f"{BAR:#x} {BAR + 0xFFFFF:#x} 0x40200",
        }  # fmt: skip
        for name, value in {**values, **attributes}.items():
            (folder / name).write_text(f"{value}\n")
        for link in (
            f"sys/bus/pci/devices/{address}",
            f"sys/kernel/iommu_groups/7/devices/{address}",
        ):
            (self.tree / link).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / link).symlink_to(folder)
        (folder / "iommu_group").symlink_to(self.tree / "sys/kernel/iommu_groups/7")
        driver = self.tree / "sys/bus/pci/drivers/vfio-pci"
        driver.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(driver)
        return folder

    def reset(self, **params: Any) -> _change.Outcome:
        given = {"allocation_id": ONE, "methods": ["flr", "bus"], "scrub": "none", **params}
        slot = {"slot_id": "slot-3", "fence": 7, "gpu_pci_address": GPU}
        return _change.drive(SUBJECT, {"slots": [slot], **given}, check_mode=False)


@pytest.fixture
def host(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tree)

    @contextlib.contextmanager
    def opened(_address: str) -> Iterator[Edu]:
        yield host.device

    monkeypatch.setattr(_vfio, "opened", opened)
    return host


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code


def test_a_reset_leaves_evidence_and_is_not_repeated(host: Host) -> None:
    folder = host.add(GPU)
    outcome = host.reset()
    assert (outcome.failure, outcome.done) == (None, ["reset_gpu"])
    evidence = outcome.facts["proofs"]["slot-3"]["gpu"]
    shown = {name: evidence[name] for name in ("address", "id", "method", "boot", "fence")}
    assert shown == {
        "address": GPU, "id": "1234:11e8", "method": "flr", "boot": "0x010000ed", "fence": 7,
    }  # fmt: skip
    assert evidence["verified"] is True and evidence["link"] == {}
    assert (folder / "reset").read_text().strip() == "1"
    # The kernel's own order of methods is as before.
    assert (folder / "reset_method").read_text().split() == ["flr", "bus"]
    again = host.reset()
    assert (again.changed, again.facts) == (False, outcome.facts)


def test_the_evidence_ends_with_the_next_use(host: Host) -> None:
    host.add(GPU)
    host.reset()
    assert _ledger.standing_gpu("slot-3", GPU)
    assert not _ledger.standing_gpu("slot-3", OTHER)
    for use in (
        lambda: _ledger.mark_gpu_used("slot-3", fence=7),
        lambda: _ledger.distrust_gpu(GPU),
        lambda: _ledger.mark_dirty(_ledger.MACHINE, fence=1, disk_identity=""),
    ):
        assert host.reset().failure is None
        use()
        assert not _ledger.standing_gpu("slot-3", GPU)


def test_a_clock_that_was_ahead_keeps_no_evidence_alive(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's clock jumps back between the reset and the tenant of the whole machine."""
    host.add(GPU)
    host.reset()
    monkeypatch.setattr(_host, "now", lambda: "2020-01-01T00:00:00+00:00")
    _ledger.mark_dirty(_ledger.MACHINE, fence=1, disk_identity="")
    assert not _ledger.standing_gpu("slot-3", GPU)


def test_a_release_takes_no_evidence_of_an_older_claim(host: Host) -> None:
    host.add(GPU)
    host.reset()
    later = {"slot_id": "slot-3", "fence": 8, "gpu_pci_address": GPU}
    assert host.reset(slots=[later]).done == ["reset_gpu"]
    assert code(host.reset()) == "stale_fence"
    # With another method or scrub in the profile, the GPU needs a new reset.
    assert host.reset(slots=[later], scrub="edu").done == ["reset_gpu"]


@pytest.mark.parametrize(
    ("methods", "offered", "expected"),
    [
        (["bus", "flr"], "flr bus", "flr"),
        (["bus"], "bus", "gpu_reset_unsupported"),
        (["flr", "bus"], "pm bus", "gpu_reset_unsupported"),
        (["flr"], "", "gpu_reset_unsupported"),
    ],
)
def test_a_bus_with_another_card_is_never_reset(
    host: Host, methods: list[str], offered: str, expected: str
) -> None:
    folder = host.add(GPU, reset_method=offered)
    host.add("0000:43:01.0")
    # A function below another port of the same switch is on another bus.
    host.add(OTHER, bridge="0000:40:02.0")
    outcome = host.reset(methods=methods)
    if outcome.failure is None:
        assert outcome.facts["proofs"]["slot-3"]["gpu"]["method"] == expected
        return
    assert code(outcome) == expected
    if "bus" in offered:
        assert "0000:43:01.0" in outcome.failure.found
        assert OTHER not in outcome.failure.found
    assert (folder / "reset").read_text().strip() == ""


def test_a_card_alone_below_its_port_is_reset_by_its_bus(host: Host) -> None:
    host.add(GPU)
    host.add("0000:43:00.1")
    host.add(OTHER, bridge="0000:40:02.0")
    outcome = host.reset(methods=["bus"])
    assert outcome.facts["proofs"]["slot-3"]["gpu"]["method"] == "bus"


def test_a_reset_that_never_returns_ends_by_name(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = host.add(GPU)
    host.reset()
    assert _ledger.standing_gpu("slot-3", GPU)
    (folder / "reset").unlink()
    # The write blocks, because the pipe has no reader.
    os.mkfifo(folder / "reset")
    monkeypatch.setattr(_gpu_reset, "DEADLINE_S", 0.2)
    later = {"slot_id": "slot-3", "fence": 8, "gpu_pci_address": GPU}
    assert code(host.reset(slots=[later], methods=["bus"])) == "gpu_reset_hangs"
    # Otherwise the kernel would keep this single method until the next boot.
    assert (folder / "reset_method").read_text().split() == ["flr", "bus"]
    # The evidence of the earlier reset ended when this reset began.
    assert not _ledger.standing_gpu("slot-3", GPU)


Break = Callable[[Host, Path], object]


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        (lambda _h, f: (f / "config").write_bytes(bytes(64)), "gpu_not_restored"),
        (lambda _h, f: (f / "config").write_bytes(b"\xff" * 64), "device_not_answering"),
        (lambda _h, f: (f / "resource").write_text("0x10 0x1f 0x40200"), "gpu_not_restored"),
        (lambda h, _f: h.device.registers.update({0: 0xFFFFFFFF}), "gpu_not_restored"),
        (lambda h, _f: h.device.registers.update({0: 0xBADF1100}), "gpu_not_restored"),
        (lambda _h, f: (f / "aer_dev_fatal").write_text("DLP 1\nTOTAL_ERR_FATAL 1"), "gpu_errors"),
        (lambda _h, f: (f / "power_state").write_text("D3cold"), "device_not_answering"),
        (lambda _h, f: (f / "driver").unlink(), "not_bound"),
        (lambda _h, f: (f / "reset").unlink(), "kernel_refused"),
    ],
)
def test_a_device_that_does_not_come_back_is_no_evidence(
    host: Host, defect: Break, expected: str
) -> None:
    defect(host, host.add(GPU))
    assert code(host.reset()) == expected
    assert not _ledger.standing_gpu("slot-3", GPU)


def test_another_chip_at_the_address_is_refused(host: Host) -> None:
    host.add(GPU)
    host.reset()
    host.device.registers[0] = 0x020000ED
    later = {"slot_id": "slot-3", "fence": 8, "gpu_pci_address": GPU}
    assert code(host.reset(slots=[later])) == "gpu_changed"


def test_an_h200_is_judged_by_the_files_of_its_kernel(host: Host) -> None:
    """With files of a real H200. Its registers are those of NVIDIA's sources."""
    recorded = json.loads((RECORDED / "pci.json").read_text())
    folder = host.add(GPU, **recorded["files"])
    config = bytearray.fromhex(recorded["config"])
    (folder / "config").write_bytes(config)
    host.device = Edu("10de:2335", {0: 0x180000A1, **CLEARED})
    outcome = host.reset(methods=["flr"], scrub="nvidia")
    assert outcome.failure is None
    evidence = outcome.facts["proofs"]["slot-3"]["gpu"]
    assert evidence["id"] == "10de:2335" and evidence["errors"] == {}
    assert evidence["link"] == {"speed": "32.0 GT/s PCIe", "width": "16"}
    assert evidence["scrub"]["memory_clear_finished"] is True
    assert code(host.reset(methods=["bus"])) == "gpu_reset_unsupported"
    # The upper half of a 64-bit base address.
    config[0x1D] ^= 1
    (folder / "config").write_bytes(config)
    failure = host.reset(methods=["flr"]).failure
    assert failure and failure.found == "BAR 2 at 0x110000000000, not 0x100000000000"


def test_without_an_allocation_tenants_are_left_alone_and_faults_are_warnings(host: Host) -> None:
    folder = host.add(GPU)
    _ledger.hold("slot-3", fence=7, allocation_id=ONE, disk_identity="d")
    outcome = host.reset(allocation_id="")
    assert (outcome.changed, outcome.facts["proofs"]) == (False, {})
    two = "33bd713b-6073-4ef7-8a51-2897e902365d"
    assert code(host.reset(allocation_id=two)) == "slot_leased"
    _ledger.release("slot-3", fence=7)
    (folder / "reset_method").write_text("pm")
    dead = {"slot_id": "slot-4", "gpu_pci_address": OTHER}
    idle = {"slot_id": "slot-3", "gpu_pci_address": GPU}
    outcome = host.reset(allocation_id="", slots=[dead, idle])
    assert outcome.failure is None
    assert {doubt.code for doubt in outcome.doubts} == {"device_missing", "gpu_reset_unsupported"}
    (folder / "reset_method").write_text("flr")
    outcome = host.reset(allocation_id="", slots=[dead, idle])
    assert list(outcome.facts["proofs"]) == ["slot-3"]


def test_nothing_of_the_last_user_stays_in_an_edu_device(host: Host) -> None:
    device = host.device
    device.buffer[:] = b"secret" * 682 + b"secr"
    device.registers |= {4: 0x5EC4E7, 8: 3628800, 0x24: 5, 0x80: 7, 0x88: 8, 0x90: 9}
    assert _gpu_scrub.METHODS["edu"](device) == {"buffer_bytes": 4096, "read_back": "zeros"}  # type: ignore[arg-type]
    assert device.buffer == bytes(4096)
    left = {register: device.read(register) for register in (4, 8, 0x24, 0x80, 0x88, 0x90)}
    assert left == {4: 0, 8: 1, 0x24: 0, 0x80: 0, 0x88: 0, 0x90: 0}


def test_an_edu_device_that_keeps_bytes_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.add(GPU)
    monkeypatch.setattr(Edu, "_transfer", lambda *_, **__: None)
    assert code(host.reset(scrub="edu")) == "gpu_scrub_failed"


@pytest.mark.parametrize(
    ("id", "registers", "expected"),
    [
        ("10de:2335", {0x100B20: 0}, "gpu_scrub_failed"),
        ("10de:2335", {0x200BC: 0}, "gpu_scrub_failed"),
        ("10de:2335", {0x200BC: 0xFFFFFFFF, 0x100B20: 0xFFFFFFFF}, "gpu_scrub_failed"),
        ("10de:20b0", {}, "gpu_scrub_unsupported"),
    ],
)
def test_memory_that_no_chip_reports_as_cleared_is_refused(
    monkeypatch: pytest.MonkeyPatch, id: str, registers: dict[int, int], expected: str
) -> None:
    monkeypatch.setattr(_gpu_scrub, "WAIT_S", 0.0)
    scrub: Callable[[Any], dict[str, Any]] = _gpu_scrub.METHODS["nvidia"]
    with pytest.raises(Refusal, match=expected):
        scrub(Edu(id, CLEARED | registers))


def test_a_bounded_call_gives_value_refusal_and_failure() -> None:
    assert _bounded.call(lambda: {"a": [1]}, deadline=60) == {"a": [1]}

    def refuse() -> None:
        raise Refusal("x", expected="a", found="b", remedy="c")

    with pytest.raises(Refusal, match="x: expected a"):
        _bounded.call(refuse, deadline=60)
    with pytest.raises(OSError, match="ZeroDivisionError"):
        _bounded.call(lambda: 1 / 0, deadline=60)
    with pytest.raises(OSError, match="without an answer"):
        _bounded.call(lambda: os._exit(3), deadline=60)


def test_a_bounded_call_holds_nothing_of_its_caller() -> None:
    """A hanging child must not keep a pipe open whose end the caller's parent waits for."""
    descriptors = Path("/proc/self/fd")
    reader, writer = os.pipe()
    mine = (descriptors / str(writer)).readlink()
    targets = _bounded.call(
        lambda: [str(link.readlink()) for link in descriptors.iterdir() if link.is_symlink()],
        deadline=60,
    )
    os.close(reader)
    os.close(writer)
    assert targets[:3] == ["/dev/null"] * 3
    assert str(mine) not in targets


def test_a_bounded_call_ends_at_its_deadline() -> None:
    with pytest.raises(_bounded.Overdue):
        _bounded.call(signal.pause, deadline=0.1)
