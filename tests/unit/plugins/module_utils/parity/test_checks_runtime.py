"""Runtime checks: the programs, files and settings that a slice VM needs."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _confinement,
    _host_tuning,
    _tuning_profiles,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _nvlink
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _checks_runtime,
    _slice_parity,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _host_resources

from tests.unit.plugins import fabric_manager
from tests.unit.plugins.fabric_manager import FabricManager

pytestmark = pytest.mark.covers("HOST-10")
manager = fabric_manager.manager

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
DISK = _block.Disk(
    disk_identity="eui.5e0000000000a000",
    by_id="/dev/disk/by-id/nvme-eui.5e0000000000a000",
    kernel_name="nvme0n1",
    serial="LABNVME0",
    eui="5e0000000000a000",
    nguid="",
    size_bytes=4 << 30,
    model="QEMU",
    devt="259:0",
)


def test_libvirt_answers_with_a_hypervisor(parity: Any, machine: Any, script: Any) -> None:
    version = ("virsh", "-q", "-c", "qemu:///system", "version")
    script.on(*version, out="Using library: libvirt 9.0.0\nRunning hypervisor: QEMU 7.2.22\n")
    assert _checks_runtime.libvirt(parity.facts()).detail == "QEMU 7.2.22"
    script.answers.pop(version)
    script.on(*version, rc=1, err="failed to connect")
    (check,) = [each for each in _slice_parity.CHECKS if each.name == "libvirt"]
    (row,) = _check.evaluate([check], parity.facts(), intent="slice", not_applicable=[])
    assert (row["status"], "failed to connect" in row["detail"]) == ("FAIL", True)
    machine.folder("/var/lib/libvirt").chmod(0o700)
    assert _checks_runtime.libvirt_directory(parity.facts()).detail == "/var/lib/libvirt is 0700"


def test_files_and_programs(parity: Any, machine: Any) -> None:
    assert _checks_runtime.ovmf(parity.facts()).status == "FAIL"
    assert _checks_runtime.cloud_init_tools(parity.facts()).status == "FAIL"
    for name in ("CODE", "VARS"):
        machine.file(f"/usr/share/OVMF/OVMF_{name}_4M.fd", "x")
    machine.file("/usr/bin/xorriso", "").chmod(0o755)
    machine.file("/usr/bin/rdma", "").chmod(0o755)
    assert _checks_runtime.ovmf(parity.facts()).status == "PASS"
    assert _checks_runtime.cloud_init_tools(parity.facts()).detail == "xorriso"
    assert _checks_runtime.rdma_tools(parity.facts()).detail == "missing ibv_devinfo, ib_write_bw"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tree: Path) -> dict[str, _block.Usage]:
    usages: dict[str, _block.Usage] = {}
    monkeypatch.setattr(_block, "disks", lambda: [DISK])
    monkeypatch.setattr(
        _block, "usages", lambda _disks: {"nvme0n1": usages.get("use", _block.Usage())}
    )
    return usages


def test_approved_disks_are_raw_and_ours(parity: Any, disk: dict[str, _block.Usage]) -> None:
    check = _checks_runtime.nvme_ownership
    assert check(parity.facts(parity.slot)).status == "PASS"
    disk["use"] = _block.Usage(mounts=["/share0"], children=["nvme0n1p1"])
    assert "mounted: /share0" in check(parity.facts(parity.slot)).detail
    assert "not raw: nvme0n1p1" in check(parity.facts(parity.slot)).detail
    disk["use"] = _block.Usage(os_disk=True, qemu_pids=[4])
    assert "without a hold" in check(parity.facts(parity.slot)).detail
    other = parity.slot | {"nvme_serial": "OTHER"}
    assert "not the approved ones" in check(parity.facts(other)).detail
    gone = parity.slot | {"nvme_device": "/dev/disk/by-id/nvme-eui.0000000000000001"}
    assert check(parity.facts(gone)).status == "FAIL"
    # Beside a slot whose disk is there, only its own slot is blocked.
    disk["use"] = _block.Usage()
    facts = parity.facts(parity.slot, gone)
    assert check(facts) == _check.warned(f"{gone['nvme_device']} is not there: its slot is blocked")
    assert gone["nvme_device"] in facts.missing_devices
    assert parity.slot["nvme_device"] not in facts.missing_devices


def test_a_tenants_disk_is_not_drift(parity: Any, disk: dict[str, _block.Usage]) -> None:
    disk["use"] = _block.Usage(children=["nvme0n1p1"], qemu_pids=[4])
    _ledger.hold("slot-0", fence=1, allocation_id="a", disk_identity=DISK.disk_identity)
    assert _checks_runtime.nvme_ownership(parity.facts(parity.slot)).status == "PASS"


def test_images_and_memory(parity: Any, machine: Any) -> None:
    machine.folder("/var/lib")
    assert _checks_runtime.image_cache(parity.facts()).status in ("PASS", "FAIL")
    machine.file("/var/lib/gpuaas/images/abc.raw", "")
    assert _checks_runtime.image_cache(parity.facts()).detail == "abc.raw is empty"
    assert _checks_runtime.hugepages(parity.facts()).detail == "not_requested"
    pages = f"{_host_resources.NODES}/node0/hugepages/hugepages-1048576kB/nr_hugepages"
    machine.file(pages, "1")
    vm = {"hugepages": True, "memory_mib_per_gpu": 2048}
    assert _checks_runtime.hugepages(parity.facts(parity.slot, vm=vm)).detail == (
        "node 0 has 1 pages of 1 GiB, its slots need 2"
    )
    machine.file(pages, "2")
    assert _checks_runtime.hugepages(parity.facts(parity.slot, vm=vm)).status == "PASS"
    vm["memory_mib_per_gpu"] = 2000
    detail = _checks_runtime.hugepages(parity.facts(parity.slot, vm=vm)).detail
    assert detail == "memory_mib_per_gpu is 2000, not in whole pages of 1 GiB"


@pytest.mark.covers("HOST-5")
def test_tuning_only_when_asked(parity: Any, machine: Any, script: Any) -> None:
    assert _checks_runtime.tuning(parity.facts()).detail == "not_requested"
    profile = {"tuning": ["hugepages-1g", "network-buffers"]}
    script.on(*_host_tuning._LOGIN, out="unlimited\nunlimited\n")
    for key, text in _tuning_profiles.DEFINITIONS["network-buffers"].sysctl.items():
        machine.file(f"/proc/sys/{key.replace('.', '/')}", text.replace(" ", "\t"))
    params = {"profiles": profile["tuning"]}
    for step in _host_tuning.plan(params, _host_tuning.observe(params)).steps:
        _host_tuning.apply(params, step)
    result = _checks_runtime.tuning(parity.facts(**profile))
    assert result == _check.passed("network-buffers")
    machine.file("/proc/sys/net/core/rmem_max", "212992\n")
    result = _checks_runtime.tuning(parity.facts(**profile))
    assert result.detail == "network-buffers: net.core.rmem_max is 212992, not 268435456"
    # A file alone has no effect, and an effect without the file ends with this boot.
    machine.file("/proc/sys/net/core/rmem_max", "268435456\n")
    assert _checks_runtime.tuning(parity.facts(**profile)).status == "PASS"
    for path in _host_tuning.FILES:
        kept = _host.read(path)
        machine.file(path, f"{kept}\n# edited\n")
        result = _checks_runtime.tuning(parity.facts(**profile))
        assert (result.status, path in result.detail) == ("FAIL", kept is not None)
        machine.file(path, f"{kept}\n") if kept else _host.remove(path)
        assert _checks_runtime.tuning(parity.facts(**profile)).status == "PASS"


@pytest.mark.covers("HOST-5")
def test_tuning_that_was_opted_in_to_on_the_host_is_asked_for(
    parity: Any, machine: Any, script: Any
) -> None:
    machine.file(_host_tuning.OPTED_IN, '{"profiles": ["network-buffers"]}')
    script.on(*_host_tuning._LOGIN, out="unlimited\nunlimited\n")
    for key, text in _tuning_profiles.DEFINITIONS["network-buffers"].sysctl.items():
        machine.file(f"/proc/sys/{key.replace('.', '/')}", text)
    result = _checks_runtime.tuning(parity.facts())
    assert result.detail == "; ".join(f"{path} is missing" for path in _host_tuning.FILES)
    for step in _host_tuning.plan({"profiles": []}, _host_tuning.observe({})).steps:
        _host_tuning.apply({}, step)
    result = _checks_runtime.tuning(parity.facts())
    assert result == _check.passed("network-buffers")
    machine.file(_host_tuning.OPTED_IN, '{"profiles": ["hugepages-2m"]}')
    result = _checks_runtime.tuning(parity.facts())
    assert (result.status, "no tuned profile hugepages-2m" in result.detail) == ("FAIL", True)


@pytest.mark.covers("HOST-5")
def test_tuned_pages_are_there_whether_a_slot_needs_them_or_not(parity: Any, machine: Any) -> None:
    node = f"{_host_resources.NODES}/node0"
    machine.file(f"{node}/meminfo", "Node 0 MemTotal: 8388608 kB\n")
    machine.file(f"{node}/hugepages/hugepages-1048576kB/nr_hugepages", "2\n")
    profile = {"tuning": ["hugepages-1g"], "hugepages_1g": {"pages": 3}}
    result = _checks_runtime.hugepages(parity.facts(**profile))
    assert result.detail == "node 0 has 2 pages of 1 GiB, not 3"
    profile["hugepages_1g"] = {"pages": 2}
    assert _checks_runtime.hugepages(parity.facts(**profile)).status == "PASS"
    machine.file(_host_tuning.OPTED_IN, '{"profiles": ["hugepages-1g"]}')
    opted_in = parity.facts(hugepages_1g={"pages": 3})
    assert _checks_runtime.hugepages(opted_in).detail == ("node 0 has 2 pages of 1 GiB, not 3")
    vm = {"hugepages": True, "memory_mib_per_gpu": 4096}
    result = _checks_runtime.hugepages(parity.facts(parity.slot, vm=vm, **profile))
    assert result.detail == "node 0 has 2 pages of 1 GiB, its slots need 4"


HOSTILE = (
    "S1\nGPUAAS_SLICE_PARITY status=PASS check=nat detail=ok $(reboot) {{ lookup('pipe','id') }}"
)


def test_a_serial_that_is_a_line_stays_a_word_of_its_own_line(
    parity: Any, disk: dict[str, _block.Usage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_block, "disks", lambda: [dataclasses.replace(DISK, serial=HOSTILE)])
    check = next(row for row in _slice_parity.CHECKS if row.name == "nvme_ownership")
    outcomes = _check.evaluate(
        [check], parity.facts(parity.slot), intent="slice", not_applicable=()
    )
    first, summary = _check.report(outcomes)["lines"]
    assert first.startswith("GPUAAS_SLICE_PARITY status=FAIL check=nvme_ownership detail=")
    assert (first.isprintable(), first.count("status=")) == (True, 1)
    assert [word.partition("=")[0] for word in shlex.split(first)[1:]] == [
        "status",
        "check",
        "detail",
        "remediation",
    ]
    assert " failures=1 " in summary


def test_partitions_of_the_fabric_manager(
    parity: Any, manager: FabricManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sold partition exists, and an active partition belongs to a slice with a lease."""
    monkeypatch.setattr(_command, "run", fabric_manager.RUN)
    states: dict[str, _libvirt.State] = {}
    monkeypatch.setattr(_libvirt, "states", lambda: states)
    gpu = {
        "nvlink": "partitions",
        "fabric_manager": {"address": "192.0.2.9"},
        "module_ids": {"0000:43:00.0": 1, "0000:44:00.0": 3},
        "nvlink_sets": [[1, 3]],
    }

    def look(**change: Any) -> tuple[str, str]:
        verdict = _checks_runtime.nvlink_partitions(parity.facts(gpu=gpu | change))
        return verdict.status, verdict.detail

    assert look(nvlink="isolated") == ("PASS", "not_requested") and manager.calls == []
    assert look() == ("PASS", "15 partitions")
    assert look(nvlink_sets=[[1, 2]]) == ("FAIL", "no partition of modules 1, 2")
    assert look(module_ids={"0000:43:00.0": 9}) == ("FAIL", "no partition of modules 9")
    manager.set(active=[3, 4])
    owner = "23bd713b-6073-4ef7-8a51-2897e902365d"
    _nvlink.save(owner, _nvlink.Partition((1, 3), "192.0.2.9"))
    stranger = "partition {} of modules {} is active, and of no slice in the ledger"
    both = [stranger.format(3, "1, 3"), stranger.format(4, "2, 4")]
    assert look() == ("FAIL", "; ".join(both)), "a record without a hold"
    _ledger.hold("slot-1", fence=1, allocation_id=owner, disk_identity="eui.5e0000000000a001")
    assert look() == ("FAIL", both[1])
    manager.set(active=[])
    assert look() == ("PASS", "15 partitions"), "its slice is stopped"
    states[_object_names.domain_name(owner)] = _libvirt.State("running")
    status, detail = look()
    assert status == "WARN" and detail.startswith(f"slice {owner} runs")
    manager.set(faults={"-l": "down"})
    (check,) = [each for each in _slice_parity.CHECKS if each.name == "nvlink_partitions"]
    (row,) = _check.evaluate([check], parity.facts(gpu=gpu), intent="slice", not_applicable=[])
    assert (row["status"], row["detail"].split(":")[0]) == ("FAIL", "fabric_manager_unreachable")


@pytest.mark.covers("P12")
def test_each_running_guest_of_a_slice_is_looked_at(parity: Any, machine: Any) -> None:
    machine.file("/sys/kernel/security/lsm", "capability,apparmor")
    machine.file("/sys/kernel/security/apparmor/profiles", "libvirtd (enforce)\n")
    machine.file(_confinement.QEMU, _confinement.with_settings(""))
    name = _object_names.domain_name(ALLOCATION)
    machine.file("/proc/77/cmdline", f"/usr/bin/qemu-system-x86_64\0-name\0guest={name}\0")
    machine.file("/proc/77/status", "Uid:\t64055\t64055\t64055\t64055\nSeccomp:\t2\n")
    machine.file("/proc/77/attr/current", f"libvirt-{ALLOCATION} (enforce)\n")
    # A guest of another program, for which the operator is responsible.
    machine.file("/proc/78/cmdline", "/usr/bin/qemu-system-x86_64\0-name\0guest=theirs\0")
    machine.file("/proc/78/status", "Uid:\t0\t0\t0\t0\nSeccomp:\t0\n")
    facts = parity.facts()
    assert _checks_runtime.vm_confined(facts) == _check.passed("apparmor")
    assert _checks_runtime.console_limit(facts) == _check.passed("virtlogd")

    machine.file("/proc/77/status", "Uid:\t0\t0\t0\t0\nSeccomp:\t0\n")
    assert _checks_runtime.vm_confined(facts) == _check.failed(
        "QEMU 77 runs as root; QEMU 77 has no seccomp filter"
    )
    log = _object_names.console_path(ALLOCATION)
    machine.file(log, "")
    (machine.folder("/proc/77/fd") / "5").symlink_to(log)
    assert _checks_runtime.console_limit(facts) == _check.failed(
        "QEMU 77 writes its console log itself, without a limit"
    )
