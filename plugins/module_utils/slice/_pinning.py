"""CPU and memory pinning of a slice on its host, and its record.

A physical core is never split between two slices, and no memory is promised twice. The record is a
file per allocation, so that a second plan sees it before the first domain exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt

DIRECTORY = f"{_host.STATE_DIRECTORY}/plans"

# A physical core, as its hardware threads.
Core = tuple[int, ...]

_NODES = "/sys/devices/system/node"
_CPUS = "/sys/devices/system/cpu"
_GIB_PAGES = "hugepages/hugepages-1048576kB/free_hugepages"


def cores(node: int | None) -> list[Core]:
    """The physical cores of a NUMA node, each as its hardware threads; of the whole host without a
    node.
    """
    place = f"{_CPUS}/online" if node is None else f"{_NODES}/node{node}/cpulist"
    groups: dict[tuple[int, ...], None] = {}
    for cpu in _host.numbers(_host.read(place) or ""):
        siblings = _host.read(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list")
        groups[tuple(_host.numbers(siblings or str(cpu)))] = None
    return list(groups)


def reserve(available: list[Core], count: int) -> tuple[list[Core], list[Core]]:
    """The first cores with at least `count` CPUs, for the host, and the rest, for guests.

    The first, because a kernel argument (`irqaffinity=`) can keep interrupts on them, and most
    daemons of a host start there.
    """
    kept = 0
    while kept < len(available) and sum(map(len, available[:kept])) < count:
        kept += 1
    return available[:kept], available[kept:]


def choose(available: list[Core], taken: set[int], count: int) -> list[int]:
    """`count` CPUs of cores without threads of other slices, threads of a core together; [] when
    there are not enough.
    """
    free = [cpu for core in available if not taken.intersection(core) for cpu in core]
    return free[:count] if len(free) >= count else []


def threads(available: list[Core], cpus: list[int]) -> int:
    """Threads per core that the guest sees; 1 when it has different parts of its cores.

    `cpus` has the threads of a core together, as `choose` gives them.
    """
    parts = [sum(cpu in core for cpu in cpus) for core in available]
    widths = {width for width in parts if width}
    return widths.pop() if len(widths) == 1 else 1


def shares(total: int, weights: list[int]) -> list[int]:
    """`total` divided by weight, without a remainder."""
    ends = [total * sum(weights[: end + 1]) // sum(weights) for end in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def memory_free_mib(node: int | None, *, hugepages: bool) -> int:
    """Memory available to a new guest: free and reclaimable memory, or free 1 GiB pages."""
    if hugepages:
        places = [f"{_NODES}/node{node}/{_GIB_PAGES}"]
        if node is None:
            places = [f"/sys/kernel/mm/{_GIB_PAGES}"]
        return 1024 * sum(int(_host.read(place) or 0) for place in places)
    if node is None:
        return _mebibytes(_host.read("/proc/meminfo") or "", "MemAvailable")
    text = _host.read(f"{_NODES}/node{node}/meminfo") or ""
    # The kernel reports no MemAvailable per node: page cache can be reclaimed, except shared
    # memory.
    cache = _mebibytes(text, "FilePages") - _mebibytes(text, "Shmem")
    return _mebibytes(text, "MemFree") + max(cache, 0) + _mebibytes(text, "SReclaimable")


def memory_promised_mib(node: int | None, *, hugepages: bool, except_for: str) -> int:
    """Memory that is promised to other allocations and that their QEMU has not taken yet.

    Read it before `memory_free_mib`. Memory that a starting guest takes in between is then counted
    twice, which refuses; in the other order it would be missing from both. A plan without a node
    may take its memory from any node, so it counts on every node.
    """
    total = 0
    for allocation_id, plan in _plans(except_for):
        if bool(plan.get("hugepages")) != hugepages:
            continue
        # A plan of an earlier version has a single part, and no cells.
        parts = [
            int(part.get("memory_mib", 0))
            for part in plan.get("cells") or [plan]
            if node is None or part.get("numa_node", -1) in (node, -1)
        ]
        if parts:
            pids = _libvirt.processes(_object_names.domain_name(allocation_id))
            resident = sum(_resident_mib(pid, hugepages) for pid in pids)
            # QEMU takes all memory at its start, each part on its own node.
            whole = int(plan.get("memory_mib", 0)) or 1
            total += max(sum(parts) - resident * sum(parts) // whole, 0)
    return total


def recorded(allocation_id: str) -> dict[str, Any] | None:
    """This allocation's earlier record."""
    return _host.document(
        _file(allocation_id),
        code="host_plan_unreadable",
        remedy="its CPUs and memory count as taken: remove the file once its machine is gone",
    )


def taken(except_for: str) -> set[int]:
    """CPUs that are pinned for other allocations."""
    return {cpu for _holder, plan in _plans(except_for) for cpu in plan.get("cpus", [])}


def _plans(except_for: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every other allocation with its record."""
    for name in _host.matching(DIRECTORY, "*.json"):
        holder = name.removesuffix(".json")
        plan = None if holder == except_for else recorded(holder)
        if plan is not None:
            yield holder, plan


def record(allocation_id: str, plan: dict[str, Any]) -> None:
    text = json.dumps(plan, sort_keys=True) + "\n"
    _host.write(_file(allocation_id), text, mode=0o600)


def forget(allocation_id: str) -> None:
    _host.remove(_file(allocation_id))


def locked() -> AbstractContextManager[None]:
    """One planner at a time on this host, from reading the free resources to writing the record."""
    return _host.locked(DIRECTORY, mode=0o755)


def _file(allocation_id: str) -> str:
    _object_names.hexadecimal(allocation_id)
    return f"{DIRECTORY}/{allocation_id}.json"


def _mebibytes(text: str, key: str) -> int:
    match = re.search(rf"\b{key}:\s+(\d+) kB", text)
    return int(match.group(1)) // 1024 if match else 0


def _resident_mib(pid: int, hugepages: bool) -> int:
    """Current memory of this kind in a process."""
    text = _host.read(f"/proc/{pid}/status") or ""
    return _mebibytes(text, "HugetlbPages" if hugepages else "VmRSS")
