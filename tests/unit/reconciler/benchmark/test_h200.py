"""The capture of a real H200 (tests/data/h200): valid, and as fast as PyTorch on that GPU."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
import yaml

from reconciler.benchmark import document
from reconciler.benchmark.compare import compare

pytestmark = pytest.mark.covers("HOST-12")

ROOT = Path(__file__).resolve().parents[4]
DATA = ROOT / "tests" / "data" / "h200"


def test_the_capture_is_valid_and_names_the_probes_without_a_tool() -> None:
    capture = document.load(DATA / "capture.json")
    status = {probe["probe"]: probe["status"] for probe in capture["probes"]}
    assert status == {
        "cpu": "ok",
        "memory": "ok",
        "disk": "unavailable",
        "rdma": "skipped",
        "gpu": "ok",
        "vllm": "unavailable",
    }
    assert capture["kind"] == "vm", "the H200 was passed through to a VM"


def test_the_copy_is_as_fast_as_pytorchs() -> None:
    capture = document.load(DATA / "capture.json")
    metrics = {each["metric"]: each for probe in capture["probes"] for each in probe["metrics"]}
    peer = [
        float(rate)
        for rate in re.findall(r"copy GB/s ([0-9.]+)", (DATA / "pytorch.txt").read_text())
    ]
    assert metrics["gpu.hbm_copy"]["median"] / statistics.median(peer) > 0.99
    # NVIDIA states 33.5 TFLOP/s for the H200 without tensor cores, at its boost clock.
    assert 30 < metrics["gpu.fp64"]["median"] < 33.6


def test_it_can_be_compared() -> None:
    capture = document.load(DATA / "capture.json")
    rows = compare([capture, capture])["rows"]
    assert {row["metric"] for row in rows} >= {"gpu.fp64", "gpu.hbm_copy", "cpu.integer"}
    assert {row["cells"][1]["direction"] for row in rows if row["metric"] == "gpu.fp64"} == {"same"}


def test_the_shipped_profile_names_this_gpu() -> None:
    profile = yaml.safe_load((ROOT / "profiles" / "xe9680l-h200.yml").read_text())
    vendor, device = re.findall(
        r"0000:00:06\.0 0x(\w+) 0x(\w+)", (DATA / "machine.txt").read_text()
    )[0]
    assert f"{vendor}:{device}" in profile["gpu"]["ids"]
