"""Slices with two and with four GPUs, whose memory is pages of 1 GiB.

They play on a lab host of their own. It has three processors on each NUMA node, one of which is
kept for the host, so that all four of its GPUs are slots. It has more memory than the host of the
other tests.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names

from lab import canary
from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.lab import prepared
from tests.lab.proof import differences

PAGES = {0: 2, 1: 2}


@pytest.fixture(scope="module")
def large() -> Iterator[Stage]:
    """A host with four available slots, two on each NUMA node."""
    # The first node has 4 GiB in one piece. Of these the kernel's image, which lies anywhere, and
    # its tables may take a page each.
    size = {"GPUAAS_LAB_CPUS_PER_NODE": "3", "GPUAAS_LAB_MEMORY_MIB": "12288"}
    with prepared.alone("large", size, slots=(0, 1, 2, 3)) as stage:
        enrol, *rest = prepared.STEPS
        enrol(stage)
        stage.use_vm(hugepages=True, memory_mib_per_gpu=1024, host_cpus=1)
        pages = {"pages": sum(PAGES.values()), "reserve_mib": 2048}
        stage.use(tuning=["hugepages-1g"], hugepages_1g=pages)
        for step in rest:
            step(stage)
        yield stage


@pytest.mark.covers("SLICE-3", "SLICE-4", "SLICE-6", "P11")
@pytest.mark.parametrize(
    ("count", "cpus", "gpu_nodes"),
    # Linux reports no node for a device in a guest that has one node only.
    [(2, {"0": "0-1"}, [-1, -1]), (4, {"0": "0-1", "1": "2-3"}, [0, 0, 1, 1])],
    ids=["two in one NUMA node", "four in two NUMA nodes"],
)
def test_a_slice_has_its_gpus_where_they_are_and_leaves_all_slots_clean(
    large: Stage, count: int, cpus: dict[str, str], gpu_nodes: list[int]
) -> None:
    assert _free_pages(large) == PAGES
    allocation = slice_steps.launch(large, gpu_count=count)
    allocation = slice_steps.wait_for(large, allocation["id"], {"active", "failed"})
    assert allocation["state"] == "active", slice_steps.why(large, allocation)
    large.facts["allocation"] = allocation
    assert [claim["position"] for claim in allocation["claims"]] == [*range(count)]
    slots = {slot["id"]: slot for slot in _slots(large)}
    held = [slots[claim["slot_id"]] for claim in allocation["claims"]]
    nodes = sorted(slot["numa_node"] for slot in held)
    assert nodes == [0, 0, 1, 1] if count == 4 else len(set(nodes)) == 1
    assert _free_pages(large) == {node: PAGES[node] - nodes.count(node) for node in PAGES}
    _require_pinned(large, set(nodes))

    proof = json.loads(slice_steps.in_guest(large, "sudo python3 -", slice_steps.PROOF.read_text()))
    assert (len(proof["gpus"]), proof["ok"]) == (count, True), proof
    guest = json.loads(slice_steps.in_guest(large, "sudo python3 -", SEEN))
    assert (guest["nodes"], guest["gpu_nodes"]) == (cpus, gpu_nodes)
    assert len(set(guest["disks"].values())) == count
    assert min(guest["memory_mib"].values()) > 0.8 * 2048

    marks = {position: secrets.token_hex(32) for position in range(1, count)}
    for position, mark in marks.items():
        disk = f"/dev/disk/by-id/virtio-data{position}"
        slice_steps.in_guest(large, f"echo {mark} | sudo dd of={disk} seek=9 conv=fsync 2>&1")
        assert canary.count(slice_steps.disk_file(large, position), mark) == 1
    assert differences(large) == set()

    evidence = slice_steps.release(large)
    assert (evidence["allocation"], evidence["shutdown"]) == ("released", "graceful")
    for position, mark in marks.items():
        assert canary.count(slice_steps.disk_file(large, position), mark) == 0
    ids = {slot["id"] for slot in held}
    for slot in [slot for slot in _slots(large) if slot["id"] in ids]:
        assert slot["status"] == "available"
        assert slot["last_proof"]["kind"] == "wipe"
        assert slot["last_proof"]["allocation_id"] == allocation["id"]
        assert slot["last_proof"]["document"]["gpu"]["verified"]
        words = ("python3", "-", "--remains", slot["gpu_pci_address"])
        left = json.loads(large.on_host(*words, stdin=slice_steps.PROOF.read_text()))
        assert left["ok"], left
    assert differences(large) == set()
    assert _free_pages(large) == PAGES


# Run in the guest: NUMA nodes of its GPUs, CPUs and memory of its nodes, and its disks by role.
SEEN = """
import glob, json, os, re
def text(path):
    with open(path) as file:
        return file.read().strip()
gpus = [p for p in glob.glob("/sys/bus/pci/devices/*") if text(p + "/device") == "0x11e8"]
nodes = {p[-1]: p for p in glob.glob("/sys/devices/system/node/node[0-9]")}
total = {n: re.search(r"MemTotal:\\s+(\\d+) kB", text(p + "/meminfo")) for n, p in nodes.items()}
disks = glob.glob("/dev/disk/by-id/virtio-data?") + ["/dev/disk/by-id/virtio-root"]
print(json.dumps({
    "gpu_nodes": sorted(int(text(p + "/numa_node")) for p in gpus),
    "nodes": {n: text(p + "/cpulist") for n, p in sorted(nodes.items())},
    "memory_mib": {n: int(found.group(1)) // 1024 for n, found in total.items()},
    "disks": {p: os.path.realpath(p) for p in disks},
}))
"""


# Run on the host: each thread of a domain's QEMU with the processors on which it may run.
THREADS = """
import json, pathlib, re, subprocess, sys
find = ["pgrep", "-f", f"qemu.*guest={sys.argv[1]}"]
(pid,) = subprocess.check_output(find, text=True).split()
rows = []
for task in pathlib.Path("/proc", pid, "task").iterdir():
    try:
        status, comm = (task / "status").read_text(), (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        continue  # QEMU ends idle threads of its pool.
    allowed = re.search(r"Cpus_allowed_list:\\s+(\\S+)", status)
    name = "main" if task.name == pid else comm.split()[0]
    rows.append((name, allowed[1]))
print(json.dumps(rows))
"""


def _require_pinned(stage: Stage, nodes: set[int]) -> None:
    """The guest's processors leave the first one of each node to the host and to QEMU's own threads
    and those of disks.
    """
    lists = {n: stage.on_host("cat", f"/sys/devices/system/node/node{n}/cpulist") for n in nodes}
    cpus = {node: _host.numbers(text) for node, text in lists.items()}
    kept = {node_cpus[0] for node_cpus in cpus.values()}
    guests = {cpu for node_cpus in cpus.values() for cpu in node_cpus} - kept
    domain = _object_names.domain_name(stage.facts["allocation"]["id"])
    allowed: dict[str, set[int]] = {"CPU": set(), "IO": set(), "main": set()}
    for name, text in json.loads(stage.on_host("python3", "-", domain, stdin=THREADS)):
        allowed.get(name, set()).update(_host.numbers(text))
    assert allowed == {"CPU": guests, "IO": kept, "main": kept}


def _slots(stage: Stage) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = stage.api().get(stage.path("/resource-slots"))["items"]
    return items


def _free_pages(stage: Stage) -> dict[int, int]:
    """Free pages of 1 GiB on each NUMA node of the host."""
    pages = "/sys/devices/system/node/node{}/hugepages/hugepages-1048576kB/free_hugepages"
    return {node: int(stage.on_host("cat", pages.format(node))) for node in PAGES}
