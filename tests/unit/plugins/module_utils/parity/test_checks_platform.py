"""Platform checks of a host: the passing state on a recorded host, and each failing state."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _boot_units, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _api_names
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _checks_platform,
    _host_facts,
    _slice_parity,
)

pytestmark = pytest.mark.covers("HOST-10")


@pytest.mark.covers("HOST-13")
def test_an_enrolled_host_has_a_valid_certificate(parity: Any, machine: Any) -> None:
    parity.enrolled(before=int(time.time()) + 600)
    result = _checks_platform.node_agent(parity.facts())
    assert result.status == "PASS"
    assert result.detail.startswith("node certificate enrolled")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"before": 1000}, "local certificate expired at 1970-01-01T00:16:40Z"),
        ({"before": 2**64 - 1, "after": 2**40}, "not valid before"),
        ({"before": 2**64 - 1, "key": b"x" * 32}, "for another host key"),
    ],
)
def test_a_certificate_that_does_not_hold(
    parity: Any, machine: Any, arguments: dict[str, Any], words: str
) -> None:
    parity.enrolled(**arguments)
    result = _checks_platform.node_agent(parity.facts())
    assert result.status == "FAIL"
    assert words in result.detail


@pytest.mark.covers("HOST-13")
def test_a_host_that_never_enrolled_or_lost_its_certificate(parity: Any, machine: Any) -> None:
    assert "not enrolled" in _checks_platform.node_agent(parity.facts()).detail
    machine.file("/etc/gpuaas/enrolment.env", "GPUAAS_NODE_ID=n\n")
    assert "no host certificate" in _checks_platform.node_agent(parity.facts()).detail


def test_a_user_certificate_or_noise_is_refused(parity: Any, machine: Any) -> None:
    for text in (parity.certificate(b"k", before=1, kind=1), "ssh-rsa AAAA", "ssh-ed25519 x"):
        machine.file("/etc/gpuaas/enrolment.env", "A=b")
        machine.file("/etc/ssh/ssh_host_ed25519_key-cert.pub", text)
        with pytest.raises(ValueError):
            _checks_platform.node_agent(parity.facts())


def test_sshd_must_offer_the_certificate(parity: Any, machine: Any) -> None:
    parity.enrolled(before=2**64 - 1)
    machine.file("/etc/ssh/sshd_config.d/60-gpuaas.conf", "# nothing\n")
    assert "does not offer" in _checks_platform.node_agent(parity.facts()).detail


@pytest.mark.covers("HOST-14")
def test_the_api_name_resolves(parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parity.enrolled(before=1)
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_a, **_k: answer)
    lookups: list[tuple[str, int]] = []
    monkeypatch.setattr(_api_names, "unreachable", lambda *where: lookups.append(where) or "")
    result = _checks_platform.name_resolution(parity.facts())
    assert result == _check.passed("api.lab is 192.0.2.1")
    assert lookups == [("192.0.2.1", 8443)]


@pytest.mark.covers("HOST-14")
def test_a_name_that_leads_nowhere_fails(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on every host of a customer's site: the name resolved to an address without a route."""
    machine.file(
        "/etc/gpuaas/enrolment.env", "GPUAAS_API_URL=https://api.lab\nGPUAAS_API_NAME=api.lab\n"
    )
    monkeypatch.setattr(_api_names, "addresses", lambda _name: ["192.0.2.1", "192.0.2.2"])
    silent = {"192.0.2.1", "192.0.2.2"}
    monkeypatch.setattr(
        _api_names, "unreachable", lambda a, port: f"no {a}:{port}" if a in silent else ""
    )
    result = _checks_platform.name_resolution(parity.facts())
    assert result == _check.failed("api.lab: no 192.0.2.1:443; no 192.0.2.2:443")
    # A single working address is enough.
    silent.clear()
    assert _checks_platform.name_resolution(parity.facts()).status == "PASS"


@pytest.mark.covers("HOST-14")
def test_an_unresolved_name_fails_and_an_address_passes(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_a: Any, **_k: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        assert _checks_platform.name_resolution(parity.facts()).status == "FAIL"
        machine.file("/etc/gpuaas/enrolment.env", "GPUAAS_API_NAME=api.lab\n")
        assert "not known" in _checks_platform.name_resolution(parity.facts()).detail
    # This machine: nothing listens there, and a refused connection counts as an answer.
    machine.file("/etc/gpuaas/enrolment.env", "GPUAAS_API_URL=http://127.0.0.1:1\n")
    assert _checks_platform.name_resolution(parity.facts()).status == "PASS"


@pytest.mark.parametrize(
    ("tags", "status"),
    [
        (None, "WARN"),
        ([], "FAIL"),
        (["virtual", "gpuaas-profile-slice-vm"], "PASS"),
        (["gpuaas-profile-baremetal"], "FAIL"),
        (["gpuaas-profile-baremetal", "gpuaas-profile-slice-vm"], "FAIL"),
    ],
)
def test_intent_of_the_machine(parity: Any, tags: list[str] | None, status: str) -> None:
    request = _host_facts.Request(profile=parity.profile, maas_tags=tags)
    result = _checks_platform.maas_intent(_host_facts.Facts(request))
    assert result.status == status


@pytest.mark.parametrize(
    ("cpuinfo", "status"),
    [("flags : fpu vmx", "PASS"), ("flags : svm", "PASS"), ("flags : fpu", "FAIL"), ("", "FAIL")],
)
def test_firmware_virtualization(parity: Any, machine: Any, cpuinfo: str, status: str) -> None:
    machine.file("/proc/cpuinfo", cpuinfo)
    assert _checks_platform.firmware_virtualization(parity.facts()).status == status


def kvm(parity: Any) -> dict[str, str]:
    """Return the outcome as in the report: a check that cannot read its subject has failed."""
    (check,) = (check for check in _slice_parity.CHECKS if check.name == "kvm")
    facts = parity.facts()
    before = set(Path("/proc/self/fd").iterdir())
    (result,) = _check.evaluate([check], facts, intent="slice", not_applicable=())
    assert set(Path("/proc/self/fd").iterdir()) <= before, "nothing stays open"
    return result


def answering(
    monkeypatch: pytest.MonkeyPatch, *, version: int = 12, refusal: OSError | None = None
) -> None:
    """The kernel's side of /dev/kvm: its API version, and a new VM or the reason for a refusal."""

    def ioctl(_descriptor: int, request: int) -> int:
        if request == 0xAE00:
            return version
        assert request == 0xAE01
        if refusal is not None:
            raise refusal
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda _machine: None, "FileNotFoundError"),
        # This path cannot be opened for writing.
        (lambda machine: machine.folder("/dev/kvm"), "IsADirectoryError"),
        (lambda machine: machine.file("/dev/kvm"), "Inappropriate ioctl for device"),
    ],
)
def test_a_file_of_kvms_name_is_no_kvm(parity: Any, machine: Any, make: Any, why: str) -> None:
    make(machine)
    result = kvm(parity)
    assert (result["status"], why in result["detail"]) == ("FAIL", True), result


def test_kvm_is_proven_by_a_machine_that_it_makes(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VMX in the firmware, or under another hypervisor, the file exists all the same."""
    machine.file("/dev/kvm")
    answering(monkeypatch, refusal=OSError(errno.EBUSY, "Device or resource busy"))
    result = kvm(parity)
    assert (result["status"], "Device or resource busy" in result["detail"]) == ("FAIL", True)
    answering(monkeypatch, version=11)
    result = kvm(parity)
    assert (result["status"], result["detail"]) == ("FAIL", "KVM API 11, not 12")
    answering(monkeypatch)
    result = kvm(parity)
    assert (result["status"], result["detail"]) == ("PASS", "a VM can be created")


@pytest.mark.covers("HOST-1")
def test_beside_the_firmware_stands_what_the_first_boot_found(parity: Any, machine: Any) -> None:
    machine.file("/proc/cpuinfo", "flags : fpu vmx")

    def detail() -> str:
        result = _checks_platform.firmware(parity.facts())
        assert result.status == "PASS", "what was found once does not decide for ever"
        return result.detail

    assert detail() == "vmx; no report of the first boot"
    log = "/var/log/gpuaas-slice-firmware.log"
    rows = [
        "GPUAAS_SLICE_FIRMWARE status=FAIL check=bios_settings detail=x remediation=y",
        "GPUAAS_SLICE_FIRMWARE status=PASS check=kvm detail=x",
        "GPUAAS_SLICE_FIRMWARE status=FAIL check=sriov detail=x remediation=y",
    ]
    machine.file(log, "\n".join(rows))
    assert detail() == f"vmx; first boot: no summary in {log}"
    rows.append("GPUAAS_SLICE_FIRMWARE_SUMMARY status=FAIL checks=8 failures=2 warnings=0")
    machine.file(log, "\n".join(rows))
    assert detail() == f"vmx; first boot: FAIL (bios_settings, sriov), see {log}"
    machine.file("/proc/cpuinfo", "flags : fpu")
    assert _checks_platform.firmware(parity.facts()).status == "FAIL"


def test_kernel_arguments_and_modules(parity: Any, machine: Any) -> None:
    machine.file("/proc/cmdline", "quiet iommu=pt")
    result = _checks_platform.kernel_cmdline(parity.facts())
    assert result.status == "FAIL"
    assert result.detail.startswith("intel_iommu=on is not in /proc/cmdline; ")
    assert _checks_platform.reboot_required(parity.facts()).status == "FAIL"
    for name in ("vfio", "vfio_iommu_type1", "vfio_pci"):
        machine.folder(f"/sys/module/{name}")
    result = _checks_platform.vfio_modules(parity.facts())
    assert "/etc/modules-load.d/gpuaas-vfio.conf is missing" in result.detail
    parity.boots()
    assert _checks_platform.vfio_modules(parity.facts()).status == "PASS"
    machine.file("/proc/cmdline", "intel_iommu=on iommu=pt")
    assert _checks_platform.kernel_cmdline(parity.facts()).status == "PASS"


def record(parity: Any, machine: Any, *addresses: str) -> None:
    """Write the record that the binding's service reads at boot."""
    ids = {"0000:25:10.0": "8086:10ca", "0000:25:10.2": "8086:10ca"}
    devices = {address: ids.get(address, "1234:11e8") for address in addresses}
    for unit in (_boot_units.BINDING, _boot_units.CLAIM):
        parity.installed(unit, devices=devices)
    parity.units(**dict.fromkeys(("binding", "claim"), "loaded/active/enabled/success"))


def test_binding_means_bound_and_answering(parity: Any, machine: Any) -> None:
    assert _checks_platform.vfio_binding(parity.facts()).status == "WARN"
    record(parity, machine, "0000:23:00.0", "0000:25:10.0")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    machine.pci("0000:23:00.0", "1234:11e8", group=1, driver="vfio-pci", config="\x34\x12")
    machine.pci("0000:25:10.0", "8086:10ca", group=2, driver="igbvf")
    result = _checks_platform.vfio_binding(parity.facts(parity.slot))
    assert result.detail == "0000:25:10.0 is on igbvf"
    record(parity, machine, "0000:23:00.0", "0000:99:00.0")
    silent = parity.slot | {"fabric_vf_pci_address": "0000:99:00.0"}
    (machine.root / "sys/bus/pci/devices/0000:23:00.0/config").write_bytes(b"\xff\xff")
    result = _checks_platform.vfio_binding(parity.facts(silent))
    assert result.detail == "0000:23:00.0 does not answer; 0000:99:00.0 is not there"


@pytest.mark.parametrize("silent", [False, True])
def test_a_dead_gpu_is_a_doubt_beside_one_that_works(
    parity: Any, machine: Any, silent: bool
) -> None:
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    record(parity, machine, "0000:23:00.0", "0000:25:10.0", "0000:43:00.0", "0000:25:10.2")
    machine.pci("0000:23:00.0", "1234:11e8", group=1, driver="vfio-pci")
    for number, address in enumerate(("0000:25:10.0", "0000:25:10.2")):
        machine.pci(address, "8086:10ca", group=2 + number, driver="vfio-pci")
    if silent:
        machine.pci("0000:43:00.0", "1234:11e8", group=9)
        (machine.root / "sys/bus/pci/devices/0000:43:00.0/config").write_bytes(b"\xff" * 64)
    second = {"gpu_pci_address": "0000:43:00.0", "fabric_vf_pci_address": "0000:25:10.2"}
    facts = parity.facts(parity.slot, parity.slot | second)
    result = _checks_platform.vfio_binding(facts)
    assert result == _check.warned("0000:43:00.0 is missing or silent: its slot is blocked")
    assert facts.dead_gpus == ["0000:43:00.0"]


def test_a_lost_fabric_function_is_a_doubt_beside_one_that_works(parity: Any, machine: Any) -> None:
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    record(parity, machine, "0000:23:00.0", "0000:25:10.0", "0000:43:00.0", "0000:25:10.2")
    machine.pci("0000:23:00.0", "1234:11e8", group=1, driver="vfio-pci")
    machine.pci("0000:25:10.0", "8086:10ca", group=2, driver="vfio-pci")
    machine.pci("0000:43:00.0", "1234:11e8", group=3, driver="vfio-pci")
    second = {"gpu_pci_address": "0000:43:00.0", "fabric_vf_pci_address": "0000:25:10.2"}
    facts = parity.facts(parity.slot, parity.slot | second)
    result = _checks_platform.vfio_binding(facts)
    assert result.status == "WARN"
    assert "0000:25:10.2 is missing or silent: its slot is blocked" in result.detail
    assert "0000:25:10.2" in facts.missing_devices


@pytest.mark.covers("I18")
def test_a_gpu_that_was_used_since_its_reset_is_a_doubt(parity: Any, machine: Any) -> None:
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    record(parity, machine, "0000:23:00.0", "0000:25:10.0")
    machine.pci("0000:23:00.0", "1234:11e8", group=1, driver="vfio-pci")
    machine.pci("0000:25:10.0", "8086:10ca", group=2, driver="vfio-pci")
    assert parity.facts(parity.slot).reset_gpus == ["0000:23:00.0"]
    _ledger.mark_gpu_used("slot-0", fence=1)
    facts = parity.facts(parity.slot)
    doubt = "0000:23:00.0 was not reset since its last use: its slot is blocked"
    assert _checks_platform.vfio_binding(facts) == _check.warned(doubt)
    assert facts.reset_gpus == []
    # A tenant has it now.
    _ledger.hold("slot-0", fence=1, allocation_id="a", disk_identity="d")
    assert _checks_platform.vfio_binding(parity.facts(parity.slot)).status == "PASS"
    # An entry that cannot be read proves nothing, and is no fault of the other checks.
    machine.file("/var/lib/gpuaas/ledger/slot-0.json", "{")
    assert parity.facts(parity.slot).reset_gpus == []


def test_a_binding_outside_slice_mode_would_not_last(parity: Any, machine: Any) -> None:
    machine.pci("0000:23:00.0", "1234:11e8", driver="vfio-pci", config="\x34\x12")
    machine.pci("0000:25:10.0", "8086:10ca", driver="vfio-pci", config="\x86\x80")
    record(parity, machine, "0000:23:00.0", "0000:25:10.0")
    result = _checks_platform.vfio_binding(parity.facts(parity.slot))
    assert result == _check.failed("the host is not in slice mode: nothing would be bound at boot")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    assert _checks_platform.vfio_binding(parity.facts(parity.slot)).status == "PASS"
    record(parity, machine, "0000:23:00.0")
    parity.units(binding="loaded/active/disabled/success", claim="not-found/inactive//")
    assert _checks_platform.vfio_binding(parity.facts(parity.slot)).detail == (
        "gpuaas-slice-vfio.service is disabled: it would not start at boot; "
        "gpuaas-slice-vfio-claim.service is not-found; "
        "0000:25:10.0 is not in /etc/gpuaas/vfio-binding.json"
    )


def test_a_claim_that_failed_at_boot_is_a_doubt(parity: Any, machine: Any) -> None:
    """The devices are bound all the same, because the binding took them from their drivers."""
    machine.pci("0000:23:00.0", "1234:11e8", driver="vfio-pci", config="\x34\x12")
    machine.pci("0000:25:10.0", "8086:10ca", driver="vfio-pci", config="\x86\x80")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    record(parity, machine, "0000:23:00.0", "0000:25:10.0")
    parity.units(binding="loaded/active/enabled/success", claim="loaded/failed/enabled/exit-code")
    result = _checks_platform.vfio_binding(parity.facts(parity.slot))
    assert result == _check.warned("gpuaas-slice-vfio-claim.service is failed")


def test_groups_of_approved_devices_must_be_viable(parity: Any, machine: Any) -> None:
    assert _checks_platform.iommu_groups(parity.facts()).status == "FAIL"
    machine.pci("0000:23:00.0", "1234:11e8", group=1)
    assert _checks_platform.iommu_groups(parity.facts(parity.slot)).status == "PASS"
    machine.pci("0000:24:00.0", "8086:1533", group=1, driver="igb")
    assert "driven by igb" in _checks_platform.iommu_groups(parity.facts(parity.slot)).detail


def test_gpu_services_must_be_quiet_now_and_at_boot(parity: Any, machine: Any, script: Any) -> None:
    parity.units(nvidia="loaded/active/enabled/success")
    assert _checks_platform.gpu_services_quiesced(parity.facts()).detail == (
        "nvidia-persistenced.service is active; nvidia-persistenced.service is started at boot"
    )
    parity.units(nvidia="loaded/inactive/static/success")
    assert _checks_platform.gpu_services_quiesced(parity.facts()).detail == (
        "nvidia-persistenced.service is not masked"
    )
    parity.units(nvidia="masked/inactive/masked/success")
    assert _checks_platform.gpu_services_quiesced(parity.facts()).status == "PASS"
    machine.file("/dev/nvidia0")
    holder = machine.folder("/proc/99/fd")
    machine.file("/proc/99/comm", "python3")
    parity.units()
    (holder / "2").symlink_to("/dev/nvidia-nvswitchctl")
    assert _checks_platform.gpu_services_quiesced(parity.facts()).status == "PASS"
    (holder / "3").symlink_to("/dev/nvidia0")
    result = _checks_platform.gpu_services_quiesced(parity.facts())
    assert result.detail == "process 99 (python3) holds a GPU"


@pytest.mark.parametrize(
    ("evidence", "status"),
    [
        (None, "WARN"),
        ({}, "WARN"),
        ({"completed": True, "blockers": []}, "PASS"),
        ({"completed": True, "blockers": ["missing_nat"]}, "FAIL"),
        ({"completed": False}, "FAIL"),
        ({"completed": True, "blockers": [], "boot_id": "b-2"}, "PASS"),
        ({"completed": True, "blockers": [], "boot_id": "b-1"}, "FAIL"),
    ],
)
def test_topology_evidence(
    parity: Any, machine: Any, evidence: dict[str, Any] | None, status: str
) -> None:
    machine.file("/proc/sys/kernel/random/boot_id", "b-2\n")
    request = _host_facts.Request(profile=parity.profile, api_topology=evidence)
    result = _checks_platform.api_topology(_host_facts.Facts(request))
    assert result.status == status
