"""Slot holds: validated against the host, fenced, and unchanged by a repetition."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_mode,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _proof
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _slice_network
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt, _pinning, _slots
from ansible_collections.gpuaas.slice.plugins.modules import slice_lease as module

from tests.unit.plugins.fabric_manager import FabricManager, manager

__all__ = ["manager"]
pytestmark = pytest.mark.covers("SLICE-1")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
TWO = "33bd713b-6073-4ef7-8a51-2897e902365d"
PASSTHROUGH = _slots.passthrough
GPU = "0000:43:00.0"
BOOT = "0b0f3b4e-4f0e-4d6a-8f0c-2f6d1f1f7a51"
BY_ID = "/dev/disk/by-id/nvme-eui.5e0000000000a003"
DISK = _block.Disk("eui.5e0000000000a003", BY_ID, "nvme2n1", "LABNVME3", "", "", 4096, "", "259:0")
SLOT = {
    "slot_id": "slot-3",
    "slot_index": 3,
    "fence": 7,
    "gpu_pci_address": GPU,
    "fabric_vf_pci_address": "",
    "nvme_device": BY_ID,
    "nvme_serial": "LABNVME3",
    "management_mac": "52:54:00:64:00:0d",
    "private_ip": "10.100.0.13",
}
PARAMS: dict[str, Any] = {
    "allocation_id": ONE,
    "slots": [SLOT],
    "state": "held",
    "boot_id": BOOT,
    "requirements": {
        "vcpus": 1,
        "memory_mib": 768,
        "hugepages": False,
        "bridge": "ovsbr0",
        "host_cpus": 0,
        "shared_cpus": False,
    },
}
RELEASED = {**PARAMS, "state": "released", "boot_id": None, "requirements": None}
SECOND = {**PARAMS, "allocation_id": TWO, "slots": [{**SLOT, "slot_id": "slot-4"}]}

# Its memory is in pages of the usual size.
RUNNING = "<domain><memory>1</memory><devices/></domain>"


def proof_of(disk: _block.Disk) -> dict[str, Any]:
    return {"disk": disk.disk_identity, "verified": True, "finished_at": "2026-01-01"}


@pytest.fixture
def host(pci: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a free slot on its only NUMA-less CPU pair."""
    boot = tree / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(f"{BOOT}\n")
    _host.write(_host_mode.MARKER, json.dumps({"mode": "slice", "profile": "lab"}))
    _proof.record(DISK.disk_identity, proof_of(DISK))
    pci.add(GPU, "1234:11e8", driver="vfio-pci", group=12)
    monkeypatch.setattr(_slots, "passthrough", lambda *_, **__: [])
    monkeypatch.setattr(_block, "of_slot", lambda _slot: DISK)
    monkeypatch.setattr(_block, "usage", lambda _disk: _block.Usage())
    monkeypatch.setattr(_slice_network, "bridges", lambda: ["ovsbr0"])
    monkeypatch.setattr(_libvirt, "states", dict)
    monkeypatch.setattr(_libvirt, "state", lambda _name: None)
    monkeypatch.setattr(_pinning, "cores", lambda _node: [(0,), (1,)])
    monkeypatch.setattr(_pinning, "memory_free_mib", lambda *_, **__: 1024)
    return tree


def drive(params: dict[str, Any], *, check_mode: bool = False) -> _change.Outcome:
    return _change.drive(module.SUBJECT, params, check_mode=check_mode)


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code if outcome.failure else ""


def params_with(**changes: Any) -> dict[str, Any]:
    return {**PARAMS, "requirements": {**PARAMS["requirements"], **changes}}


def test_take_and_take_again(host: Path) -> None:
    before = sorted(host.rglob("*"))
    planned = drive(PARAMS, check_mode=True)
    assert planned.changed
    assert sorted(host.rglob("*")) == before, "check mode leaves nothing behind"
    assert _ledger.load("slot-3").allocation_id == ""
    outcome = drive(PARAMS)
    assert (outcome.done, code(outcome)) == (["record_plan", "hold_slot"], "")
    entry = _ledger.load("slot-3")
    assert (entry.allocation_id, entry.fence, entry.disk_identity) == (
        ONE,
        7,
        "eui.5e0000000000a003",
    )
    bundle = outcome.facts["bundle"]
    assert (bundle["cpus"], bundle["gpus"], bundle["disks"]) == ([0], [GPU], [BY_ID])
    assert bundle["slots"][0]["kernel_device"] == "/dev/nvme2n1"
    again = drive(PARAMS)
    assert not again.changed
    assert again.facts["bundle"] == bundle


@pytest.mark.parametrize("proven", ["7d3f0a52-0000-4d6a-8f0c-2f6d1f1f7a51", "", None])
def test_under_another_boot_nothing_is_done(
    host: Path, monkeypatch: pytest.MonkeyPatch, proven: str | None
) -> None:
    monkeypatch.delattr(_libvirt, "state")  # no state is even read
    with pytest.raises(_change.Refusal) as refused:
        drive({**PARAMS, "boot_id": proven})
    assert (refused.value.code, refused.value.found) == ("boot_changed", f"boot {BOOT}")
    assert _ledger.entries() == []


def test_a_host_that_does_not_say_its_boot_is_refused(host: Path) -> None:
    (host / "proc/sys/kernel/random/boot_id").unlink()
    with pytest.raises(_change.Refusal, match="boot_changed"):
        drive({**PARAMS, "boot_id": ""})


def test_giving_back_needs_no_boot(host: Path) -> None:
    drive(PARAMS)
    (host / "proc/sys/kernel/random/boot_id").write_text("another\n")
    assert drive(RELEASED).done == ["release_slot", "forget_plan"]


def test_a_plan_that_hangs_holds_up_no_fence(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch waits for a dead disk. Releases of other slices can still refuse late runs."""
    drive(SECOND)
    monkeypatch.setattr(_host, "LOCK_S", 0.1)
    with _pinning.locked():
        fenced = drive({**SECOND, "state": "fenced", "slots": [{**SECOND["slots"][0], "fence": 8}]})
        assert (fenced.done, code(fenced)) == (["raise_fence"], "")
        with pytest.raises(_change.Refusal, match="lock_held"):
            drive(PARAMS)


@pytest.mark.covers("I10")
def test_a_newer_fence_of_the_same_allocation_is_written_down(host: Path) -> None:
    drive(PARAMS)
    newer = {**PARAMS, "slots": [{**SLOT, "fence": 8}]}
    assert drive(newer).done == ["hold_slot"]
    assert code(drive(PARAMS)) == "stale_fence"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (params_with(vcpus=3), "cpus_unavailable"),
        (params_with(memory_mib=2048), "memory_unavailable"),
        (params_with(memory_mib=2048, hugepages=True), "hugepages_unavailable"),
        # Otherwise the domain would refuse it after the clone, which leaves a blocked slot.
        (params_with(memory_mib=1000, hugepages=True), "spec_invalid"),
        (params_with(bridge="br0"), "bridge_missing"),
    ],
)
def test_what_the_host_lacks(host: Path, params: dict[str, Any], expected: str) -> None:
    outcome = drive(params)
    assert (code(outcome), outcome.changed) == (expected, False)
    assert _ledger.entries() == []


def defined(monkeypatch: pytest.MonkeyPatch, xml: str) -> None:
    """Define another domain."""
    monkeypatch.setattr(_libvirt, "states", lambda: {"other": _libvirt.State("shut off")})
    monkeypatch.setattr(_libvirt, "definition", lambda _name: xml)


def test_libvirt_is_asked_once_for_each_look(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of virsh takes longer than reading all the files of a look."""
    looks: list[int] = []
    monkeypatch.delattr(_libvirt, "state")
    monkeypatch.setattr(_libvirt, "states", lambda: looks.append(1) or {})
    assert code(drive(PARAMS)) == ""
    assert len(looks) == len(("observe", "verify"))


def test_what_another_domain_names_is_taken(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = f"<disk type='block'><source dev='{BY_ID}'/></disk>"
    defined(monkeypatch, f"<domain><devices>{disk}</devices></domain>")
    outcome = drive(PARAMS)
    assert code(outcome) == "device_in_use"
    assert outcome.failure is not None and "other" in outcome.failure.found


def test_a_slice_that_another_run_removes_meanwhile_is_no_obstacle(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its domain is listed, and undefined before its definition is read."""

    def gone(_name: str) -> str:
        raise _change.Refusal("command_failed", expected="", found="no domain", remedy="")

    monkeypatch.setattr(_libvirt, "states", lambda: {"other": _libvirt.State("shut off")})
    monkeypatch.setattr(_libvirt, "definition", gone)
    assert code(drive(PARAMS)) == ""


def test_cpus_of_others_are_not_given_twice(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pinning.record(TWO, {"cpus": [0]})
    assert drive(PARAMS).facts["bundle"]["cpus"] == [1]
    pins = "".join(f"<vcpupin cpuset='{cpus}'/>" for cpus in ("0", "1-2"))
    defined(monkeypatch, f"<domain><cputune>{pins}</cputune></domain>")
    _pinning.forget(ONE)
    assert code(drive(PARAMS)) == "cpus_unavailable"


def _lease_at_once(params: dict[str, Any], ready: Any, place: Path) -> None:
    ready.wait(30)
    outcome = drive(params)
    place.write_text(json.dumps([code(outcome), outcome.facts["bundle"]["cpus"]]))


@pytest.mark.parametrize(
    ("memory_mib", "codes", "cpus"),
    [(512, ["", ""], [[0], [1]]), (768, ["", "memory_unavailable"], None)],
)
def test_two_leases_at_once_share_neither_cpu_nor_memory(
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memory_mib: int,
    codes: list[str],
    cpus: list[list[int]] | None,
) -> None:
    """Two processes; the time from read to record is so long that both see the same state."""
    look = _slice_network.bridges
    monkeypatch.setattr(_slice_network, "bridges", lambda: (time.sleep(0.3), look())[1])
    started = multiprocessing.get_context("fork")
    ready = started.Barrier(2)
    processes = []
    for number, params in enumerate((PARAMS, SECOND)):
        request = {**params, "requirements": {**PARAMS["requirements"], "memory_mib": memory_mib}}
        words = (request, ready, tmp_path / f"{number}.json")
        processes.append(started.Process(target=_lease_at_once, args=words))
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    outcomes = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert sorted(code for code, _ in outcomes) == codes
    assert cpus is None or sorted(given for _, given in outcomes) == cpus


def test_what_others_were_promised_is_not_free(host: Path) -> None:
    _pinning.record(TWO, {"cpus": [1], "memory_mib": 512, "hugepages": False, "numa_node": -1})
    outcome = drive(PARAMS)
    assert code(outcome) == "memory_unavailable"
    assert outcome.failure.found == "1024 MiB, of which 512 MiB are promised to other slices"
    _pinning.forget(TWO)
    assert code(drive(PARAMS)) == ""


def test_shared_cpus_are_not_pinned(host: Path) -> None:
    assert drive(params_with(vcpus=64, shared_cpus=True)).facts["bundle"]["cpus"] == []


@pytest.mark.covers("I2")
@pytest.mark.parametrize("given", [False, True])
def test_a_machine_that_a_tenant_has_as_a_whole_leases_no_slot(host: Path, given: bool) -> None:
    """The bare-metal claim is older here: fences of node and slot are not comparable."""
    _ledger.hold("machine", fence=1, allocation_id=TWO, disk_identity="")
    if given:
        _ledger.mark_dirty("machine", fence=1, disk_identity="")
    before = _ledger.entries()
    outcome = drive(PARAMS)
    assert (code(outcome), outcome.done) == ("machine_leased", [])
    assert outcome.failure is not None and TWO in outcome.failure.found
    assert (_ledger.entries(), _pinning.recorded(ONE)) == (before, None)
    # An ending claim can still do its work.
    fenced = {**RELEASED, "state": "fenced"}
    assert (code(drive(fenced)), code(drive(RELEASED))) == ("", "")
    _ledger.mark_clean("machine", fence=1, disk_identity="", proof={})
    _ledger.release("machine", fence=1)
    assert code(drive(PARAMS)) == ""


@pytest.mark.covers("I2")
def test_a_name_taken_out_of_the_ledger_frees_no_machine(host: Path) -> None:
    _ledger.hold("machine", fence=1, allocation_id=TWO, disk_identity="")
    _ledger.mark_dirty("machine", fence=1, disk_identity="")
    _ledger.release("machine", fence=1)
    assert code(drive(PARAMS)) == "machine_leased"


@pytest.mark.covers("I2")
def test_a_machine_taken_between_look_and_lease_is_refused_by_the_ledger(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = _pinning.record

    def overtaken(allocation: str, given: dict[str, Any]) -> None:
        record(allocation, given)
        _ledger.hold("machine", fence=1, allocation_id=TWO, disk_identity="")

    monkeypatch.setattr(_pinning, "record", overtaken)
    outcome = drive(PARAMS)
    assert (code(outcome), outcome.failed_step) == ("machine_leased", "hold_slot")
    assert _ledger.load("slot-3").allocation_id == ""


def test_a_host_in_conversion_leases_no_slot(host: Path) -> None:
    """The way to bare metal removes the slice-mode file before anything else."""
    _host.remove(_host_mode.MARKER)
    outcome = drive(PARAMS)
    assert (code(outcome), outcome.done) == ("not_slice_mode", [])
    assert _ledger.entries() == []


def test_a_used_or_swapped_disk_is_refused(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_block, "usage", lambda _disk: _block.Usage(mounts=["/share0"]))
    assert code(drive(PARAMS)) == "disk_in_use"


SPARE = _block.Disk("eui.5e0000000000a004", "", "nvme3n1", "LABNVME4", "", "", 4096, "", "259:1")
TWO_SLOTS = [
    SLOT,
    {**SLOT, "slot_id": "slot-4", "gpu_pci_address": "0000:44:00.0", "nvme_serial": "LABNVME4"},
]


THIRD = _block.Disk("eui.5e0000000000a005", "", "nvme4n1", "LABNVME5", "", "", 4096, "", "259:2")
GPUS = ("0000:43:00.0", "0000:44:00.0", "0000:83:00.0")
VFS = ("0000:45:00.1", "0000:46:00.1", "0000:85:00.1")


@pytest.fixture
def two_nodes(host: Path, pci: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a slice with three GPUs: two on NUMA node 0, the third on node 1.

    One of the two shares a switch with its function. Every node has four cores of two threads.
    """
    disks = {disk.serial: disk for disk in (DISK, SPARE, THIRD)}
    monkeypatch.setattr(_block, "of_slot", lambda slot: disks[slot["nvme_serial"]])
    for disk in disks.values():
        _proof.record(disk.disk_identity, proof_of(disk))
    for group, (address, node) in enumerate(zip((*GPUS, *VFS), (0, 0, 1) * 2, strict=True), 20):
        if address != GPU:
            pci.add(address, "1234:11e8", driver="vfio-pci", group=group, numa=node)
    for address, port in ((GPUS[0], "0000:42:00.0"), (VFS[0], "0000:42:01.0")):
        place = tree / "sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0" / port
        place.mkdir(parents=True)
        link = tree / "sys/bus/pci/devices" / address
        link.resolve().rename(place / address)
        link.unlink()
        link.symlink_to(place / address)
    cores = {0: [(0, 8), (1, 9), (2, 10), (3, 11)], 1: [(4, 12), (5, 13), (6, 14), (7, 15)]}
    monkeypatch.setattr(_pinning, "cores", cores.__getitem__)
    slots = [
        {
            **SLOT,
            "slot_id": f"slot-{number}",
            "gpu_pci_address": gpu,
            "fabric_vf_pci_address": function,
            "nvme_serial": disk.serial,
        }
        for number, (gpu, function, disk) in enumerate(
            zip(GPUS, VFS, disks.values(), strict=True), 3
        )
    ]
    needed = {"vcpus": 6, "memory_mib": 1200, "host_cpus": 1}
    return {**PARAMS, "slots": slots, "requirements": {**PARAMS["requirements"], **needed}}


@pytest.mark.parametrize(("flags", "topoext"), [("fpu svm topoext", True), ("fpu vmx", False)])
def test_a_slice_gets_its_part_on_each_numa_node(
    two_nodes: dict[str, Any], tree: Path, flags: str, topoext: bool
) -> None:
    (tree / "proc").mkdir(exist_ok=True)
    (tree / "proc/cpuinfo").write_text(f"flags\t\t: {flags}\n")
    outcome = drive(two_nodes)
    assert code(outcome) == ""
    bundle = outcome.facts["bundle"]
    assert bundle["cells"] == [
        {
            "numa_node": 0,
            "vcpus": 4,
            "memory_mib": 800,
            "devices": [GPUS[0], VFS[0], GPUS[1], VFS[1]],
            "cpus": [1, 9, 2, 10],
        },
        {
            "numa_node": 1,
            "vcpus": 2,
            "memory_mib": 400,
            "devices": [GPUS[2], VFS[2]],
            "cpus": [5, 13],
        },
    ]
    assert (bundle["cpus"], bundle["numa_node"]) == ([1, 9, 2, 10, 5, 13], -1)
    assert bundle["layout"] == {
        "threads": 2,
        "topoext": topoext,
        "emulator_cpus": [0, 8, 4, 12],
        "switches": [[GPUS[0], VFS[0]]],
        "disk_io": "io_uring",
    }
    assert [entry.allocation_id for entry in _ledger.entries()] == [ONE] * 3
    again = drive(two_nodes)
    assert (again.changed, again.facts["bundle"]) == (False, bundle)


def test_what_one_node_lacks_the_other_does_not_give(
    two_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requirements = {**two_nodes["requirements"], "vcpus": 15}
    outcome = drive({**two_nodes, "requirements": requirements})
    assert (code(outcome), _ledger.entries()) == ("cpus_unavailable", [])
    assert outcome.failure is not None and "NUMA node 0" in outcome.failure.expected
    free = {0: 799, 1: 9000}
    monkeypatch.setattr(_pinning, "memory_free_mib", lambda node, **_: free[node])
    assert code(drive(two_nodes)) == "memory_unavailable"
    free[0] = 800
    assert code(drive(two_nodes)) == ""
    # A second slice sees the first slice's reservation on each node.
    other = {**two_nodes, "allocation_id": TWO, "slots": two_nodes["slots"][2:]}
    other["requirements"] = {**requirements, "vcpus": 1, "memory_mib": 8600}
    assert "memory_unavailable" not in _codes(other), "400 of 9000 are promised"
    other["requirements"]["memory_mib"] = 8601
    assert "memory_unavailable" in _codes(other)


def _codes(params: dict[str, Any]) -> list[str]:
    return [blocker.code for blocker in drive(params, check_mode=True).plan.blockers]


def test_pages_of_one_gib_are_not_divided(
    two_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pinning, "memory_free_mib", lambda *_, **__: 8192)
    requirements = {**two_nodes["requirements"], "hugepages": True, "memory_mib": 5 * 1024}
    cells = drive({**two_nodes, "requirements": requirements}).facts["bundle"]["cells"]
    assert [cell["memory_mib"] for cell in cells] == [3 * 1024, 2 * 1024]


@pytest.mark.parametrize(
    ("modules", "state", "expected"),
    [
        ([1, 3], {}, ""),
        ([1, 3], {"active": [3]}, ""),
        ([1, 4], {}, "nvlink_partition_missing"),
        ([1, 3], {"active": [1]}, "nvlink_partition_overlap"),
        ([1, 3], {"faults": {"-l": "down"}}, "fabric_manager_unreachable"),
    ],
)
def test_a_partition_that_cannot_be_had_is_known_before_the_clone(
    host: Path, manager: FabricManager, modules: list[int], state: dict[str, Any], expected: str
) -> None:
    """Until it can, the release of a slice whose disk was written would fail, too."""
    manager.set(**state)
    active = manager.active
    outcome = drive(params_with(nvlink_partition={"modules": modules, "address": "192.0.2.9"}))
    assert (code(outcome), outcome.changed) == (expected, not expected)
    assert manager.active == active


@pytest.mark.parametrize(
    ("setting", "expected"), [("0", "io_uring"), ("1", "native"), ("2", "native")]
)
def test_io_uring_is_left_where_an_administrator_turned_it_off(
    host: Path, setting: str, expected: str
) -> None:
    file = host / "proc/sys/kernel/io_uring_disabled"
    file.write_text(f"{setting}\n")
    assert drive(PARAMS).facts["bundle"]["layout"]["disk_io"] == expected


@pytest.mark.covers("I5")
def test_every_disk_of_the_slice_needs_a_proof_that_stands(
    host: Path, pci: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second disk gets no image, so the guest receives it as it is."""
    pci.add("0000:44:00.0", "1234:11e8", driver="vfio-pci", group=13)
    by_serial = {disk.serial: disk for disk in (DISK, SPARE)}
    monkeypatch.setattr(_block, "of_slot", lambda slot: by_serial[slot["nvme_serial"]])
    params = {**PARAMS, "slots": TWO_SLOTS}
    outcome = drive(params)
    assert (code(outcome), outcome.done) == ("not_clean", [])
    assert outcome.failure is not None and SPARE.disk_identity in outcome.failure.expected
    assert _ledger.entries() == []
    _proof.record(SPARE.disk_identity, proof_of(SPARE))
    assert drive(params).done == ["record_plan", "hold_slot", "hold_slot"]


@pytest.mark.covers("I5")
def test_a_proof_from_before_the_last_mark_does_not_stand(host: Path) -> None:
    _ledger.mark_dirty("slot-9", fence=1, disk_identity=DISK.disk_identity)
    assert code(drive(PARAMS)) == "not_clean"


def test_what_the_allocation_itself_wrote_is_no_obstacle(host: Path) -> None:
    """A repeated provision meets its own image on the disk."""
    drive(PARAMS)
    _ledger.mark_dirty("slot-3", fence=7, disk_identity=DISK.disk_identity)
    outcome = drive(PARAMS)
    assert (code(outcome), outcome.changed) == ("", False)


def test_every_finding_is_listed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slice_network, "bridges", list)
    monkeypatch.setattr(_block, "usage", lambda _disk: _block.Usage(mounts=["/share0"]))
    blockers = drive(PARAMS).plan.blockers
    assert [blocker.code for blocker in blockers] == ["disk_in_use", "bridge_missing"]


def test_the_own_running_vm_is_no_obstacle(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive(PARAMS)
    own = _object_names.domain_name(ONE)
    monkeypatch.setattr(_libvirt, "states", lambda: {own: _libvirt.State("running")})
    monkeypatch.setattr(_libvirt, "definition", lambda _name, **_: RUNNING)
    monkeypatch.setattr(_libvirt, "processes", lambda _marker: {9: "qemu-system-x86_64"})
    monkeypatch.setattr(_block, "usage", lambda _disk: _block.Usage(qemu_pids=[9]))
    monkeypatch.setattr(_pinning, "memory_free_mib", lambda *_, **__: 0)
    outcome = drive(PARAMS)
    assert (code(outcome), outcome.changed) == ("", False)


def test_give_back_and_give_back_again(host: Path) -> None:
    drive(PARAMS)
    assert drive(RELEASED).done == ["release_slot", "forget_plan"]
    assert _ledger.load("slot-3").allocation_id == ""
    assert _pinning.recorded(ONE) is None
    assert not drive(RELEASED).changed


def test_nothing_is_given_back_while_a_domain_is_there(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    monkeypatch.setattr(_libvirt, "state", lambda _name: _libvirt.State("shut off"))
    assert code(drive(RELEASED)) == "domain_present"
    assert _ledger.load("slot-3").allocation_id == ONE


def test_nothing_is_given_back_while_a_qemu_without_a_domain_runs(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    monkeypatch.setattr(_libvirt, "processes", lambda _name: {9: "qemu-system-x86_64"})
    assert code(drive(RELEASED)) == "domain_present"
    assert _ledger.load("slot-3").allocation_id == ONE


@pytest.mark.covers("I10")
def test_a_late_release_is_refused(host: Path) -> None:
    drive({**PARAMS, "slots": [{**SLOT, "fence": 9}]})
    assert code(drive(RELEASED)) == "stale_fence"


def test_the_lease_of_another_is_left_alone(host: Path) -> None:
    _ledger.hold("slot-3", fence=7, allocation_id=TWO, disk_identity="d")
    assert not drive(RELEASED).changed
    assert _ledger.load("slot-3").allocation_id == TWO


@pytest.mark.covers("I10")
def test_fencing_shuts_out_the_older_run_and_keeps_the_lease(host: Path) -> None:
    assert drive(PARAMS).changed
    fenced = {**RELEASED, "state": "fenced", "slots": [{"slot_id": "slot-3", "fence": 8}]}
    assert drive(fenced).done == ["raise_fence"]
    assert not drive(fenced).changed
    assert _ledger.load("slot-3").allocation_id == ONE
    assert code(drive(RELEASED)) == "stale_fence"


@pytest.mark.covers("I10")
def test_the_release_of_a_slot_ends_its_runs_of_power(host: Path) -> None:
    drive(PARAMS)
    _ledger.raise_power_fence("slot-3", fence=7, power_fence=5)
    assert not drive({**PARAMS, "state": "kept"}).changed, "a run of power keeps its number"
    fenced = {**RELEASED, "state": "fenced"}
    assert drive(fenced).done == ["raise_fence"] and not drive(fenced).changed
    late = [{"slot_id": "slot-3", "fence": 7, "power_fence": 6}]
    with pytest.raises(_change.Refusal, match="stale_fence"):
        _ledger.check_each(late)
    assert not drive({**PARAMS, "state": "kept"}).changed
    assert _ledger.load("slot-3").power_fence == _ledger.NO_POWER
    # The next tenant's runs begin anew.
    drive(RELEASED)
    drive({**PARAMS, "allocation_id": TWO, "slots": [{**SLOT, "fence": 8}]})
    _ledger.check_each([{**late[0], "fence": 8, "power_fence": 1}])


@pytest.mark.parametrize(("pages", "lacking"), [(False, ""), (True, "hugepages_unavailable")])
def test_the_memory_of_a_guest_that_runs_is_its_own_but_not_of_another_kind(
    host: Path, monkeypatch: pytest.MonkeyPatch, pages: bool, lacking: str
) -> None:
    """If its profile has changed the kind of memory, its restart is refused before it stops."""
    drive(PARAMS)
    own = _object_names.domain_name(ONE)
    monkeypatch.setattr(_libvirt, "states", lambda: {own: _libvirt.State("running")})
    monkeypatch.setattr(_libvirt, "definition", lambda _name, **_: RUNNING)
    monkeypatch.setattr(_pinning, "memory_free_mib", lambda *_, **__: 0)
    kept = {**params_with(hugepages=pages, memory_mib=1024 if pages else 768), "state": "kept"}
    outcome = drive(kept)
    assert code(outcome) == lacking
    assert outcome.facts["domain"] == {"state": "running"}


@pytest.mark.covers("I7", "I13")
def test_no_clean_up_begins_on_what_another_allocation_holds(host: Path) -> None:
    """The records are older than the host's ledger, and contain only the earlier tenant."""
    assert drive({**PARAMS, "allocation_id": TWO}).changed
    _ledger.mark_dirty("slot-3", fence=7, disk_identity=DISK.disk_identity)
    for fence in (7, 8):
        slots = [{"slot_id": "slot-3", "fence": fence}]
        outcome = drive({**RELEASED, "state": "fenced", "slots": slots})
        assert (code(outcome), outcome.changed) == ("slot_leased", False)
        assert outcome.failure is not None and TWO in outcome.failure.found
    # Its holder, by allocation id.
    named = {**RELEASED, "allocation_id": TWO, "state": "fenced", "slots": slots}
    assert drive(named).done == ["raise_fence"]


@pytest.mark.covers("I18")
def test_no_start_has_a_device_that_does_not_answer(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This can happen after a restart of the host. The lease stays, and the device is named."""
    drive(PARAMS)
    monkeypatch.setattr(_slots, "passthrough", PASSTHROUGH)
    (host / "sys/bus/pci/devices" / GPU / "config").write_bytes(b"\xff" * 64)
    outcome = drive({**PARAMS, "state": "kept"})
    assert (code(outcome), outcome.changed) == ("device_not_answering", False)
    assert outcome.failure is not None and GPU in outcome.failure.expected
    assert _ledger.load("slot-3").allocation_id == ONE


def test_a_kept_lease_is_taken_from_no_release(host: Path) -> None:
    kept = {**PARAMS, "state": "kept"}
    assert code(drive(kept)) == "lease_missing"
    drive(PARAMS)
    outcome = drive(kept)
    assert (outcome.changed, outcome.facts["bundle"]["cpus"]) == (False, [0])
    assert code(drive({**kept, "slots": [{**SLOT, "fence": 8}]})) == "lease_missing"
    drive(RELEASED)
    late = drive(kept)
    assert (code(late), late.changed, _ledger.load("slot-3").allocation_id) == (
        "lease_missing",
        False,
        "",
    )
