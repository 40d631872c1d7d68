"""Differences, figures that are not comparable, and the gate for tuning."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from reconciler.benchmark import chart, document
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


def test_the_losses_of_the_prototype() -> None:
    differences = rows(BARE, SLICE)
    assert differences["gpu.fp64"] == (-2.1, "worse", "")
    assert differences["gpu.hbm_copy"] == (0.0, "same", "")
    assert differences["rdma.write"] == (-43.0, "worse", "")
    assert differences["vllm.throughput"] == (-17.0, "worse", "")
    assert differences["disk.read_random_p99"] == (25.0, "worse", ""), "lower is better"
    assert differences["cpu.integer"] == (0.0, "unclear", "spread 30 %"), "too noisy for a verdict"
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


def test_a_missing_figure_has_no_difference() -> None:
    bare = made("a", {"gpu.fp64": [30.0]})
    empty = made("b", {})
    assert rows(bare, empty)["gpu.fp64"] == (None, "missing", "unavailable: tool_missing")
    assert rows(empty, bare)["gpu.fp64"] == (None, "incomparable", "the baseline has no figure")


def test_no_figure_of_a_machine_ends_a_comparison() -> None:
    """A capture is refused, or compared, named and drawn with any other."""
    odd = made("a", {"gpu.fp64": [1e-18]})
    odd["probes"][0] |= made("a", {"cpu.integer": [1e18]})["probes"][0]
    odd["probes"][0]["metrics"][0]["metric"] = "of.another"
    whole = compare([document.check(odd, "a"), made("b", {"gpu.fp64": [1e18]})])
    assert "of.another" in chart.html(whole)
    assert {row["cells"][1]["note"] for row in whole["rows"]} >= {"not measured"}
    for figure in (10**400, 1e308, 5e-324):
        with pytest.raises(Problem, match="capture_invalid"):
            document.check(made("c", {"gpu.fp64": [figure]}), "c")


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


def test_notes_name_different_conditions() -> None:
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


def test_a_profile_with_gains_passes() -> None:
    captures = [
        vm("off", 12),
        vm("network", 12),
        vm("off"),
        vm("network", rdma__write=[380.0, 385.0]),
    ]
    (verdict,) = gate(captures)
    assert (verdict["tuning"], verdict["passes"]) == ("network", True)
    assert [cell["verdict"] for cell in verdict["cells"]] == ["same", "better"]
    assert verdict["cells"][1]["better"] == ["rdma.write"]


def test_a_profile_with_a_loss_fails() -> None:
    (verdict,) = gate([vm("off"), vm("a+b", rdma__write=[380.0], vllm__throughput=[7000.0])])
    assert not verdict["passes"]
    assert verdict["cells"][0]["verdict"] == "worse"
    assert verdict["cells"][0]["worse"] == ["vllm.throughput"]


def test_a_profile_without_gains_fails() -> None:
    (verdict,) = gate([vm("off"), vm("network")])
    assert (verdict["passes"], verdict["cells"][0]["verdict"]) == (False, "same")


def test_unproven_figures_fail() -> None:
    noisy = vm("network", rdma__write=[380.0], memory__copy=[5.0, 20.0])
    (verdict,) = gate([vm("off"), noisy])
    assert (verdict["passes"], verdict["cells"][0]["open"]) == (False, ["memory.copy"])
    blind = [
        made(name, {"rdma.write": samples}, tuning=name)
        for name, samples in (("off", [200.0]), ("network", [300.0]))
    ]
    blind[1]["host"]["sysctls"] = {"net.core.rmem_max": "268435456"}
    (verdict,) = gate(blind)
    assert verdict["cells"][0]["verdict"] == "incomplete"
    assert verdict["cells"][0]["open"] == ["cpu", "memory", "disk", "gpu", "vllm"]
    (verdict,) = gate(blind, ["cpu", "memory", "disk", "gpu", "vllm"])
    assert verdict["passes"], "waived by name"


@pytest.mark.parametrize(
    ("rate", "direction"), [(8310.0, "same"), (8500.0, "unclear"), (9500.0, "better")]
)
def test_a_single_run_proves_large_differences_only(rate: float, direction: str) -> None:
    """Two runs of vLLM on the same machine differ by a percent or two."""
    off, on = vm("off"), vm("network", vllm__throughput=[rate])
    assert rows(off, on)["vllm.throughput"][1] == direction
    (verdict,) = gate([off, on])
    assert verdict["passes"] is (direction == "better")


def test_captures_that_differ_in_more_than_the_tuning_fail() -> None:
    def judged(**host: object) -> tuple[bool, str, list[str]]:
        tuned = vm("network", rdma__write=[380.0])
        tuned["host"] |= host
        (verdict,) = gate([vm("off"), tuned])
        return verdict["passes"], verdict["cells"][0]["verdict"], verdict["cells"][0]["open"]

    assert judged() == (True, "better", [])
    passes, verdict, (why,) = judged(cpu_model="EPYC")
    assert (passes, verdict) == (False, "incomplete")
    assert "EPYC" in why
    # A label is not a setting: on bare metal the machine shows whether it is tuned.
    host = [made(name, FULL, tuning=name) for name in ("off", "network")]
    host[1]["probes"][3]["metrics"][0] |= {"samples": [380.0], "median": 380.0}
    (verdict,) = gate(host)
    assert not verdict["passes"]
    assert "no setting of the machine differs" in verdict["cells"][0]["open"][0]
    host[1]["host"]["sysctls"] = {"net.core.rmem_max": "268435456"}
    (verdict,) = gate(host)
    assert verdict["passes"]


def test_the_matrix_has_the_requested_counts() -> None:
    captures = [vm("off"), vm("network", rdma__write=[380.0])]
    (verdict,) = gate(captures, counts=[24])
    assert verdict["passes"]
    (verdict,) = gate(captures, counts=[12, 24])
    assert not verdict["passes"]
    assert [(cell["vcpus"], cell["verdict"]) for cell in verdict["cells"]] == [
        (12, "missing"),
        (24, "better"),
    ]
    assert verdict["cells"][0]["open"] == [
        "no capture with tuning off",
        "no capture with tuning network",
    ]


def test_missing_captures_fail() -> None:
    (verdict,) = gate([vm("off"), vm("network", rdma__write=[380.0]), vm("off", 12)])
    assert not verdict["passes"]
    assert [cell["verdict"] for cell in verdict["cells"]] == ["missing", "better"]
    assert verdict["cells"][0]["open"] == ["no capture with tuning network"]
    assert gate([vm("off")]) == []
    with pytest.raises(Problem, match="capture_twice"):
        gate([vm("off"), vm("off")])
