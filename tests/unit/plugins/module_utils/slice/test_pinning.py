"""CPUs and memory for a slice, and the record of the pinned resources."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _pinning
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("SLICE-4")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
TWO = "33bd713b-6073-4ef7-8a51-2897e902365d"


def write_file(tree: Path, path: str, text: str) -> None:
    file = tree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cores_keep_the_threads_of_one_together(tree: Path) -> None:
    write_file(tree, "sys/devices/system/node/node1/cpulist", "2-3,6-7")
    for cpu, siblings in {2: "2,6", 3: "3,7", 6: "2,6", 7: "3,7"}.items():
        write_file(tree, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert _pinning.cores(1) == [(2, 6), (3, 7)]


def test_without_a_node_all_cpus_count(tree: Path) -> None:
    write_file(tree, "sys/devices/system/cpu/online", "0-1")
    assert _pinning.cores(None) == [(0,), (1,)]


@given(st.integers(1, 8), st.sets(st.integers(0, 15)), st.integers(1, 16))
def test_no_core_is_split_between_two_slices(width: int, taken: set[int], count: int) -> None:
    cores = [tuple(range(first, first + width)) for first in range(0, 16, width)]
    chosen = _pinning.choose(cores, taken, count)
    assert len(chosen) in (0, count)
    assert not any(taken.intersection(core) for core in cores if set(core) & set(chosen))


NODE = """Node 0 MemTotal: 3000000 kB
Node 0 MemFree:        1024000 kB
Node 0 FilePages:       512000 kB
Node 0 Shmem:           102400 kB
Node 0 SReclaimable:    102400 kB
"""


def test_memory_of_a_node_counts_what_can_be_had_back(tree: Path) -> None:
    write_file(tree, "sys/devices/system/node/node0/meminfo", NODE)
    assert _pinning.memory_free_mib(0, hugepages=False) == 1000 + 400 + 100


def test_memory_of_the_host(tree: Path) -> None:
    write_file(tree, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    2048000 kB\n")
    assert _pinning.memory_free_mib(None, hugepages=False) == 2000


def test_hugepages(tree: Path) -> None:
    pages = "hugepages/hugepages-1048576kB/free_hugepages"
    write_file(tree, f"sys/devices/system/node/node0/{pages}", "3\n")
    write_file(tree, f"sys/kernel/mm/{pages}", "7\n")
    assert _pinning.memory_free_mib(0, hugepages=True) == 3072
    assert _pinning.memory_free_mib(None, hugepages=True) == 7168
    assert _pinning.memory_free_mib(5, hugepages=True) == 0


def qemu(tree: Path, pid: int, allocation_id: str, resident_mib: int, huge_mib: int = 0) -> None:
    name = f"guest=gpuaas-slice-{allocation_id.replace('-', '')},debug-threads=on"
    write_file(tree, f"proc/{pid}/cmdline", f"/usr/bin/qemu-system-x86_64\0-name\0{name}\0")
    status = f"VmRSS:\t{resident_mib * 1024} kB\nHugetlbPages:\t{huge_mib * 1024} kB\n"
    write_file(tree, f"proc/{pid}/status", status)


def promised(node: int | None, *, hugepages: bool = False) -> int:
    return _pinning.memory_promised_mib(node, hugepages=hugepages, except_for=ONE)


def test_what_a_guest_has_not_taken_yet_is_promised(tree: Path) -> None:
    plan = {"cpus": [], "memory_mib": 4096, "hugepages": False, "numa_node": 0}
    _pinning.record(ONE, plan)
    assert promised(0) == 0
    _pinning.record(TWO, plan)
    assert (promised(0), promised(None), promised(1), promised(0, hugepages=True)) == (
        (4096, 4096, 0, 0)
    )
    qemu(tree, 70, TWO, 1000)
    assert promised(0) == 3096
    qemu(tree, 70, TWO, 4300)
    assert promised(0) == 0


def test_promised_pages_are_counted_by_what_is_taken_of_them(tree: Path) -> None:
    plan = {"cpus": [], "memory_mib": 4096, "hugepages": True, "numa_node": 1}
    _pinning.record(TWO, plan)
    qemu(tree, 70, TWO, 9000, huge_mib=1024)
    assert (promised(1, hugepages=True), promised(1)) == (3072, 0)


def test_a_plan_of_several_nodes_is_promised_on_each(tree: Path) -> None:
    cells = [{"numa_node": 0, "memory_mib": 3000}, {"numa_node": 1, "memory_mib": 1000}]
    plan = {"cpus": [], "memory_mib": 4000, "hugepages": False, "numa_node": -1, "cells": cells}
    _pinning.record(TWO, plan)
    assert (promised(0), promised(1), promised(2), promised(None)) == (3000, 1000, 0, 4000)
    qemu(tree, 70, TWO, 2000)
    assert (promised(0), promised(1), promised(None)) == (1500, 500, 2000)


@given(st.integers(0, 9), st.integers(1, 3))
def test_the_host_keeps_whole_cores_and_no_more_than_it_needs(count: int, width: int) -> None:
    cores = [tuple(range(first, first + width)) for first in range(0, 4 * width, width)]
    kept, rest = _pinning.reserve(cores, count)
    assert kept + rest == cores
    assert sum(map(len, kept)) >= min(count, 4 * width)
    assert sum(map(len, kept[:-1])) < count or not kept


@pytest.mark.parametrize(
    ("cpus", "threads"), [([0, 4, 1, 5], 2), ([0, 4, 1], 1), ([0, 1], 1), ([], 1), ([2, 6], 2)]
)
def test_siblings_are_shown_when_every_core_is_whole(cpus: list[int], threads: int) -> None:
    assert _pinning.threads([(0, 4), (1, 5), (2, 6)], cpus) == threads


@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_shares_are_the_whole_and_even(total: int, weights: list[int]) -> None:
    shares = _pinning.shares(total, weights)
    assert sum(shares) == total
    exact = [total * weight / sum(weights) for weight in weights]
    assert all(abs(share - part) < 1 for share, part in zip(shares, exact, strict=True))


def test_a_plan_without_a_node_may_take_its_memory_anywhere(tree: Path) -> None:
    _pinning.record(TWO, {"cpus": [], "memory_mib": 4096, "hugepages": False, "numa_node": -1})
    assert (promised(0), promised(1), promised(None)) == (4096, 4096, 4096)


def test_what_was_given_is_seen_by_the_next_plan_only(tree: Path) -> None:
    with _pinning.locked():
        _pinning.record(ONE, {"cpus": [2, 3]})
    assert _pinning.recorded(ONE) == {"cpus": [2, 3]}
    assert _pinning.taken(TWO) == {2, 3}
    assert _pinning.taken(ONE) == set()
    _pinning.forget(ONE)
    _pinning.forget(ONE)
    assert _pinning.taken(TWO) == set()
