"""Pairing of candidates: NUMA first, stable under any disk use, never a disk of the host."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _candidates
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("HOST-11")

NETWORK = {
    "subnet": "10.100.0.0/24",
    "address": "10.100.0.1/24",
    "mac_prefix": "52:54:00:64:00",
    "first_host": 10,
}


def gpu(number: int, node: int, path: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "address": f"0000:{number:02x}:00.0",
        "numa_node": node,
        "pci_path": list(path),
        "blockers": [],
    }


def disk(name: str, node: int, *codes: str, path: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "identity": f"eui.{name}",
        "by_id": f"/dev/disk/by-id/nvme-eui.{name}",
        "serial": f"S{name}",
        "eui": name,
        "nguid": "",
        "size_bytes": 4096,
        "numa_node": node,
        "pci_path": list(path),
        "blockers": [{"code": code, "detail": ""} for code in codes],
    }


def card(*functions: dict[str, Any]) -> dict[str, Any]:
    return {"address": "0000:c0:00.0", "vfs": list(functions)}


def suggest(
    gpus: list[dict[str, Any]],
    disks: list[dict[str, Any]],
    fabric: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    return _candidates.candidates(gpus, disks, fabric or [], NETWORK, "machine")


def bundles(candidates: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    keys = ("gpu_pci_address", "nvme_eui", "fabric_vf_pci_address")
    return [tuple(candidate["bundle"][key] for key in keys) for candidate in candidates]


def test_each_gpu_gets_a_disk_and_function_of_its_own_node() -> None:
    candidates = suggest(
        [gpu(0x23, 0), gpu(0x43, 1)],
        [disk("a1", 1), disk("a0", 0)],
        [card(gpu(0xC1, 1), gpu(0xC2, 0))],
    )
    assert bundles(candidates) == [
        ("0000:23:00.0", "a0", "0000:c2:00.0"),
        ("0000:43:00.0", "a1", "0000:c1:00.0"),
    ]
    assert [candidate["complete"] for candidate in candidates] == [True, True]
    assert candidates[0]["numa_matched"] == {"nvme": True, "fabric": True}
    assert candidates[0]["bundle"]["management_mac"] == "52:54:00:64:00:0a"
    assert candidates[1]["bundle"]["private_ip"] == "10.100.0.11"


def test_a_gpu_without_a_near_disk_takes_what_the_others_left() -> None:
    candidates = suggest([gpu(1, 0), gpu(2, 1)], [disk("a", 1), disk("b", 1)])
    assert [row[1] for row in bundles(candidates)] == ["b", "a"]
    assert [candidate["numa_matched"]["nvme"] for candidate in candidates] == [False, True]


def test_the_same_switch_wins_within_a_node() -> None:
    near, far = ("pci0000:20", "0000:20:01.0"), ("pci0000:20", "0000:20:00.0")
    candidates = suggest([gpu(1, 0, near)], [disk("a", 0, path=far), disk("b", 0, path=near)])
    assert bundles(candidates)[0][1] == "b"


def test_unknown_nodes_do_not_count_as_the_same_node() -> None:
    candidates = suggest([gpu(1, -1)], [disk("a", -1)])
    assert candidates[0]["numa_matched"]["nvme"] is False
    assert bundles(candidates)[0][1] == "a"


def test_use_does_not_move_the_pairing_but_is_told() -> None:
    gpus = [gpu(1, 0), gpu(2, 0)]
    before = suggest(gpus, [disk("a", 0, "mounted_child"), disk("b", 0)])
    after = suggest(gpus, [disk("a", 0), disk("b", 0)], [card(gpu(0xC1, 0), gpu(0xC2, 0))])
    assert [row[:2] for row in bundles(before)] == [row[:2] for row in bundles(after)]
    assert {b["code"] for b in before[0]["blockers"]} == {"mounted_child", "missing_fabric_vf"}
    assert after[0]["blockers"] == []


def test_the_hosts_own_disk_is_never_offered() -> None:
    candidates = suggest([gpu(1, 0)], [disk("a", 0, "os_disk"), disk("b", 0, "excluded_model")])
    assert candidates[0]["bundle"]["nvme_device"] == ""
    assert candidates[0]["complete"] is False
    assert [b["code"] for b in candidates[0]["blockers"]] == ["missing_nvme", "missing_fabric_vf"]


def test_two_disks_of_one_identity_are_both_left_out() -> None:
    twins = [disk("a", 0, "duplicate_identity"), disk("a", 0, "duplicate_identity")]
    assert bundles(suggest([gpu(1, 0)], twins))[0][1] == ""


def test_a_short_prefix_is_filled_from_the_machine_id() -> None:
    network = NETWORK | {"mac_prefix": "52:54:00"}
    mac = _candidates.suggestions(1, network, "one")[0]["management_mac"]
    two = _candidates.suggestions(1, network, "two")[0]["management_mac"]
    assert mac != two
    assert mac.startswith("52:54:00:")
    assert mac.endswith(":0a")


def test_the_subnet_ends_somewhere() -> None:
    network = NETWORK | {"subnet": "10.100.0.0/29", "first_host": 5}
    candidates = _candidates.suggestions(3, network, "m")
    assert [candidate["private_ip"] for candidate in candidates] == ["10.100.0.5", "", ""]


def test_the_bridges_own_address_is_not_suggested() -> None:
    candidates = _candidates.suggestions(2, NETWORK | {"first_host": 1}, "m")
    assert [candidate["private_ip"] for candidate in candidates] == ["", "10.100.0.2"]


NODES = st.integers(min_value=-1, max_value=2)


@given(st.lists(NODES, max_size=6), st.lists(NODES, max_size=6), st.randoms())
def test_pairing_is_unique_and_does_not_depend_on_the_order_found(
    gpu_nodes: list[int], disk_nodes: list[int], order: Any
) -> None:
    gpus = [gpu(index + 1, node) for index, node in enumerate(gpu_nodes)]
    disks = [disk(f"{index:x}", node) for index, node in enumerate(disk_nodes)]
    first = bundles(suggest(gpus, disks))
    order.shuffle(gpus)
    order.shuffle(disks)
    assert bundles(suggest(gpus, disks)) == first
    used = [row[1] for row in first if row[1]]
    assert len(used) == len(set(used)) == min(len(gpus), len(disks))
