"""Differences with the seed's figures, what is not comparable, and the gate for tuning."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from reconciler.benchmark.compare import compare, gate
from reconciler.model.errors import Problem
from tests.unit.reconciler.benchmark.conftest import Samples, made

pytestmark = pytest.mark.covers("HOST-12")

BARE = made(
    "baremetal-j22u15",
    {
        "cpu.integer": [10.0, 10.1, 10.2],
        "disk.read_random_p99": [100.0],
        "rdma.write": [390.0, 392.0, 394.0],
        "gpu.fp64": [33.4, 33.5, 33.6],
        "gpu.hbm_copy": [4000.0, 4010.0, 4020.0],
        "vllm.throughput": [10000.0],
    },
)
SLICE = made(
    "slice-vm-j22u15-s01",
    {
        "cpu.integer": [9.0, 10.1, 12.0],
        "disk.read_random_p99": [125.0],
        "rdma.write": [222.0, 223.44, 225.0],
        "gpu.fp64": [32.79, 32.7965, 32.8],
        "gpu.hbm_copy": [4005.0, 4010.0, 4015.0],
        "vllm.throughput": [8300.0],
    },
    kind="vm",
)


def rows(*captures: dict[str, Any]) -> dict[str, tuple[Any, str, str]]:
    """Delta, direction and note of the second capture by metric."""
    return {
        row["metric"]: tuple(
            row["cells"][1][name] for name in ("delta_percent", "direction", "note")
        )
        for row in compare(captures)["rows"]
    }


def test_the_losses_of_the_seed() -> None:
    found = rows(BARE, SLICE)
    assert found["gpu.fp64"] == (-2.1, "worse", "")
    assert found["gpu.hbm_copy"] == (0.0, "same", "")
    assert found["rdma.write"] == (-43.0, "worse", "")
    assert found["vllm.throughput"] == (-17.0, "worse", "")
    assert found["disk.read_random_p99"] == (25.0, "worse", ""), "lower is better"
    assert found["cpu.integer"] == (0.0, "unclear", "spread 30 %"), "too noisy for a verdict"
    whole = compare([BARE, SLICE])
    assert {row["metric"]: row["reference_percent"] for row in whole["rows"]} == {
        "cpu.integer": None,
        "disk.read_random_p99": None,
        "rdma.write": -43.0,
        "gpu.fp64": -2.1,
        "gpu.hbm_copy": 0.0,
        "vllm.throughput": -17.0,
    }
    reverse = rows(SLICE, BARE)
    assert reverse["vllm.throughput"][1] == reverse["disk.read_random_p99"][1] == "better"
    assert all(row["reference_percent"] is None for row in compare([SLICE, BARE])["rows"])


def test_what_was_not_measured_has_no_difference() -> None:
    bare = made("a", {"gpu.fp64": [30.0]})
    empty = made("b", {})
    assert rows(bare, empty)["gpu.fp64"] == (None, "missing", "unavailable: tool_missing")
    assert rows(empty, bare)["gpu.fp64"] == (None, "incomparable", "the baseline has no figure")


@pytest.mark.parametrize(
    ("part", "change", "note"),
    [
        ("probe", {"workload": {"steps": 2}}, "other workload"),
        ("probe", {"tool": {"name": "stream", "version": "1"}}, "other tool"),
        ("metric", {"unit": "MB/s"}, "other unit"),
    ],
)
def test_unlike_measurements_are_not_compared(part: str, change: dict[str, Any], note: str) -> None:
    other = copy.deepcopy(BARE)
    probe = other["probes"][0]
    (probe if part == "probe" else probe["metrics"][0]).update(change)
    assert rows(BARE, other)["cpu.integer"] == (None, "incomparable", note)


def test_what_a_reader_must_know() -> None:
    other = copy.deepcopy(BARE) | {"label": "b", "tuning": "network"}
    other["probes"][0]["tool"]["version"] = "2"
    other["probes"][0]["metrics"][0]["workers"] = 24
    assert rows(BARE, other)["cpu.integer"][2] == "24 CPUs instead of 1, cpu-tool 2 instead of 1"
    (note,) = compare([BARE, other])["notes"]
    assert "no setting of the machine differs" in note
    other["host"]["sysctls"] = {"net.core.rmem_max": "268435456"}
    assert compare([BARE, other])["notes"] == []
    other["host"]["cpu_model"] = "EPYC"
    other["harness"] = {"digest": "another"}
    assert len(compare([BARE, other])["notes"]) == 2


FULL: Samples = {
    "cpu.integer": [10.0, 10.1],
    "memory.copy": [10.0, 10.1],
    "disk.read": [10.0, 10.1],
    "rdma.write": [220.0, 223.0],
    "gpu.fp64": [33.0, 33.1],
    "vllm.throughput": [8300.0],
}


def vm(tuning: str, vcpus: int = 24, **figures: list[float]) -> dict[str, Any]:
    named = {name.replace("__", "."): samples for name, samples in figures.items()}
    return made(f"{tuning}-{vcpus}", FULL | named, kind="vm", tuning=tuning, vcpus=vcpus)


def test_a_profile_that_gains_everywhere_it_counts() -> None:
    captures = [
        vm("off", 12),
        vm("network", 12),
        vm("off"),
        vm("network", rdma__write=[380.0, 385.0]),
    ]
    (found,) = gate(captures)
    assert (found["tuning"], found["passes"]) == ("network", True)
    assert [cell["verdict"] for cell in found["cells"]] == ["same", "better"]
    assert found["cells"][1]["better"] == ["rdma.write"]


def test_a_profile_that_loses_anywhere() -> None:
    (found,) = gate([vm("off"), vm("a+b", rdma__write=[380.0], vllm__throughput=[8000.0])])
    assert not found["passes"]
    assert found["cells"][0]["verdict"] == "worse"
    assert found["cells"][0]["worse"] == ["vllm.throughput"]


def test_nothing_gained_nothing_changed() -> None:
    (found,) = gate([vm("off"), vm("network")])
    assert (found["passes"], found["cells"][0]["verdict"]) == (False, "same")


def test_what_is_unproven_does_not_pass() -> None:
    noisy = vm("network", rdma__write=[380.0], memory__copy=[5.0, 20.0])
    (found,) = gate([vm("off"), noisy])
    assert (found["passes"], found["cells"][0]["open"]) == (False, ["memory.copy"])
    blind = [
        made(name, {"rdma.write": samples}, tuning=name)
        for name, samples in (("off", [200.0]), ("network", [300.0]))
    ]
    blind[1]["host"]["sysctls"] = {"net.core.rmem_max": "268435456"}
    (found,) = gate(blind)
    assert found["cells"][0]["verdict"] == "incomplete"
    assert found["cells"][0]["open"] == ["cpu", "memory", "disk", "gpu", "vllm"]
    (found,) = gate(blind, ["cpu", "memory", "disk", "gpu", "vllm"])
    assert found["passes"], "waived by name"


def test_two_captures_that_differ_in_more_than_the_tuning_prove_nothing() -> None:
    def judged(**host: object) -> tuple[bool, str, list[str]]:
        tuned = vm("network", rdma__write=[380.0])
        tuned["host"] |= host
        (found,) = gate([vm("off"), tuned])
        return found["passes"], found["cells"][0]["verdict"], found["cells"][0]["open"]

    assert judged() == (True, "better", [])
    passes, verdict, (why,) = judged(cpu_model="EPYC")
    assert (passes, verdict) == (False, "incomplete")
    assert "EPYC" in why
    # A label is not a setting: on bare metal the machine itself shows whether it is tuned.
    host = [made(name, FULL, tuning=name) for name in ("off", "network")]
    host[1]["probes"][3]["metrics"][0] |= {"samples": [380.0], "median": 380.0}
    (found,) = gate(host)
    assert not found["passes"]
    assert "no setting of the machine differs" in found["cells"][0]["open"][0]
    host[1]["host"]["sysctls"] = {"net.core.rmem_max": "268435456"}
    (found,) = gate(host)
    assert found["passes"]


def test_a_matrix_as_large_as_was_asked_for() -> None:
    captures = [vm("off"), vm("network", rdma__write=[380.0])]
    (found,) = gate(captures, counts=[24])
    assert found["passes"]
    (found,) = gate(captures, counts=[12, 24])
    assert not found["passes"]
    assert [(cell["vcpus"], cell["verdict"]) for cell in found["cells"]] == [
        (12, "missing"),
        (24, "better"),
    ]
    assert found["cells"][0]["open"] == [
        "no capture with tuning off",
        "no capture with tuning network",
    ]


def test_holes_in_the_matrix() -> None:
    (found,) = gate([vm("off"), vm("network", rdma__write=[380.0]), vm("off", 12)])
    assert not found["passes"]
    assert [cell["verdict"] for cell in found["cells"]] == ["missing", "better"]
    assert found["cells"][0]["open"] == ["no capture with tuning network"]
    assert gate([vm("off")]) == []
    with pytest.raises(Problem, match="capture_twice"):
        gate([vm("off"), vm("off")])
