"""Binding that is kept over reboots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _vfio_bind
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_units,
    _change,
    _command,
    _host,
    _host_mode,
)
from ansible_collections.gpuaas.slice.plugins.modules import vfio_bind as module

pytestmark = pytest.mark.covers("HOST-8")

GPU, OTHER = "0000:43:00.0", "0000:44:00.0"
UNIT = "/etc/systemd/system/gpuaas-slice-vfio.service"
CLAIM = "/etc/systemd/system/gpuaas-slice-vfio-claim.service"


@pytest.fixture(autouse=True)
def host(pci: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs on a host in slice mode, whose systemd obeys."""
    pci.add(GPU, group=7, driver="nouveau").add(OTHER, group=9, driver="nouveau")
    (tree / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    _host.write(_host_mode.MARKER, json.dumps({"mode": "slice"}))
    done: set[str] = set()

    def run(argv: list[str], **_: Any) -> _command.Result:
        assert argv[0] == "systemctl", argv
        done.add(argv[1])
        active = "active" if "restart" in done else "inactive"
        enabled = "enabled" if "enable" in done else ""
        return _command.Result(0, f"ActiveState={active}\nUnitFileState={enabled}\n", "")

    monkeypatch.setattr(_command, "run", run)


def drive(*addresses: str, check_mode: bool = False, **more: Any) -> _change.Outcome:
    params = {
        "addresses": list(addresses), "gpu_ids": ["10de:2335"], "pf_ids": [],
        "exclusive": True, "state": "bound", **more,
    }  # fmt: skip
    subject = _change.Subject(module.observe, module.plan, module.apply, module.facts)
    return _change.drive(subject, params, check_mode=check_mode)


def test_binds_records_and_starts_the_service_once() -> None:
    assert drive(GPU, check_mode=True).changed
    assert _vfio_bind.recorded() == {}
    outcome = drive(GPU)
    assert outcome.failure is None
    assert outcome.done == ["bind_device", *["install_service", "start_service"] * 2]
    assert _vfio_bind.recorded() == {GPU: "10de:2335"}
    assert "Before=libvirtd.service" in (_host.read(UNIT) or "")
    claim = _host.read(CLAIM) or ""
    assert "DefaultDependencies=no\nBefore=systemd-modules-load.service" in claim
    assert "WantedBy=sysinit.target" in claim
    assert not drive(GPU).changed


def test_another_topology_replaces_the_record(pci: Any) -> None:
    drive(GPU)
    assert drive(OTHER).failure is None
    assert _vfio_bind.recorded() == {OTHER: "10de:2335"}
    assert (pci.driver(GPU), pci.driver(OTHER)) == ("nouveau", "vfio-pci")


def test_without_exclusive_devices_add_up() -> None:
    drive(GPU)
    assert drive(OTHER, exclusive=False).failure is None
    assert _vfio_bind.recorded() == {GPU: "10de:2335", OTHER: "10de:2335"}


@pytest.mark.covers("HOST-15")
def test_unbound_leaves_no_service(pci: Any) -> None:
    drive(GPU, OTHER)
    outcome = drive(state="unbound")
    assert outcome.failure is None
    assert outcome.done == ["release_device", "release_device", *["remove_service"] * 2]
    assert _host.read(UNIT) is _host.read(CLAIM) is None
    assert not drive(state="unbound").changed


def test_one_device_goes_back_and_the_rest_stays() -> None:
    drive(GPU, OTHER)
    assert drive(GPU, state="unbound").failure is None
    assert _vfio_bind.recorded() == {OTHER: "10de:2335"}


def test_a_refusal_leaves_the_record_alone(pci: Any) -> None:
    drive(GPU)
    pci.add("0000:45:00.0", "144d:a808", class_code="010802", group=11, driver="nvme")
    outcome = drive(GPU, "0000:45:00.0")
    assert outcome.failure.code == "wrong_class"
    assert _vfio_bind.recorded() == {GPU: "10de:2335"}


def test_a_host_that_was_bound_before_there_was_a_claim_gives_back_what_it_has() -> None:
    drive(GPU)
    for path in (CLAIM, "/usr/local/sbin/gpuaas-slice-vfio-claim"):
        _host.remove(path)
    _boot_files.forget(_boot_units.CLAIM)
    outcome = drive(state="unbound")
    assert outcome.failure is None
    assert outcome.done == ["release_device", "remove_service"]
    assert _host.read(_vfio_bind.SETTINGS) is None
