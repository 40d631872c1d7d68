"""The benches of the reconciler still run, and print the figures of docs/figures.md.

Their figures are worth nothing at this size, on a machine that runs tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Far more than they take: a bench that hangs must not hang the tests.
LIMIT_S = 600

pytestmark = [pytest.mark.postgres, pytest.mark.long]


def bench(output: Path, name: str, *words: str) -> dict[str, Any]:
    """Figures that a bench of a very small site adds to the existing figures."""
    output.write_text('{"clone": {"ratio": 0.84}}')
    command = [sys.executable, "-m", f"tests.bench.{name}", "--output", str(output), *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(output.read_text())
    assert results.pop("clone") == {"ratio": 0.84}
    return results


def test_tasks(tmp_path: Path) -> None:
    words = ("--nodes", "3", "--processes", "1", "--at-once", "2")
    counts = ("--noop", "6", "--runner", "2", "--profile", "3")
    rates = bench(tmp_path / "bench.json", "tasks", *words, *counts)["tasks"]
    assert (rates["noop_tasks"], rates["runner_tasks"]) == (6, 2)
    # Without a process of its run a task is quicker, and every part of it is measured.
    assert rates["noop_per_s"] > rates["runner_per_s"] > 0
    assert all(milliseconds > 0 for milliseconds in rates["where_ms"].values())
    # Each task is leased, begun and ended, and nothing of its run is lost with the machine.
    assert rates["inside_calls"]["commits"] >= 3
    assert rates["inside_calls"]["fsync"] >= 1
    parts = rates["runner_where_s"]
    assert parts["play"] > 0
    # Of two tasks the median is the mean: the parts are the whole, but for their rounding.
    assert sum(parts.values()) == pytest.approx(rates["runner_p50_s"], abs=0.05)


def test_claims(tmp_path: Path) -> None:
    words = ("--small", "4", "--large", "8", "--claims", "12", "--no-peer")
    counts = ("--profile", "4", "--pgbench-s", "1")
    results = bench(tmp_path / "bench.json", "claims", *words, *counts)
    assert set(results) == {"claims_store", "claims_http_32", "claims_http_64"}
    small, large = results["claims_http_32"], results["claims_http_64"]
    store = results["claims_store"]
    for figures in (store, store["slots_64"], small, large):
        assert figures["claims"] == 12 and figures["ours_per_s"] > 0
    assert store["ratio"] == pytest.approx(store["ours_per_s"] / store["pgbench_per_s"], abs=0.001)
    assert large["p50_growth"] == pytest.approx(large["p50_ms"] / small["p50_ms"], abs=0.01)
    for figures in (small, large):
        assert set(figures["where_ms"]) == {"http", "launch", "statements", "commits", "wire"}
        # Parts do not overlap: otherwise the server's parts would exceed the client's time.
        assert all(milliseconds > 0 for milliseconds in figures["where_ms"].values())


def test_console(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--pages", "8")
    figures = bench(tmp_path / "bench.json", "console", *words)["console"]
    assert figures["slots"] == 16
    assert figures["pages_per_s"] > 0
    # The processor time of sequential requests is a part of their time.
    assert 0 < figures["fleet_page_ms"] <= figures["fleet_page_wall_ms"] + 10


def test_gateway(tmp_path: Path) -> None:
    words = ("--logins", "2", "--mib", "4", "--transfers", "1")
    figures = bench(tmp_path / "bench.json", "gateway", *words)["gateway"]
    ours, peer = figures["ours_login_ms"], figures["peer_login_ms"]
    assert figures["login_ratio"] == pytest.approx(ours / peer, abs=0.01)
    assert figures["throughput_ratio"] > 0 and figures["mib"] == 4


def test_jobs(tmp_path: Path) -> None:
    words = ("--jobs", "40", "--rounds", "1", "--seconds", "1", "--depth", "4000", "--workers", "1")
    words += ("--peers",)
    results = bench(tmp_path / "bench.json", "jobs", *words)
    jobs, runs = results["jobs"], results["jobs_runs"]
    ours = ("redis", "embedded", "postgresql")
    depths = ("depth_slowdown", "depth_slowdown_postgresql")
    assert set(jobs) == {*ours, *depths}
    for name, database in zip(depths, ("sqlite", "postgresql"), strict=True):
        of_size = runs["claim_and_finish_ms"][database]
        assert set(of_size) == {"40", "4000"} and len(of_size["40"]) == len(of_size["4000"])
        assert jobs[name] > -1
    for name in ours:
        assert jobs[name]["ours_per_s"] > 0
        assert jobs[name]["p99_ms"] >= runs["p50_ms"][name] > 0
    # Peers are installed for a real run only.
    of_peers = ("best_peer", "ratio", "peer_p99_ms", "peer_durable_p99_ms")
    assert {jobs["redis"][name] for name in of_peers} == {None}
    assert {name: set(of) for name, of in runs["per_s"].items()} == {name: {"1"} for name in ours}
    assert all(mib > 10 for mib in runs["memory_mib"].values())


def test_memory(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--settle", "0")
    sizes = bench(tmp_path / "bench.json", "memory", *words)["memory_mib"]
    names = ("rest", "slots_16_loops", "slots_16")
    assert set(sizes) == {f"{name}{end}" for name in names for end in ("", "_pss", "_peak")}
    # At least a Python process with the service's libraries, at most the kernel's peak.
    for name in names:
        assert 30 < sizes[f"{name}_pss"] <= sizes[name] <= sizes[f"{name}_peak"] + 1


def test_clone(tmp_path: Path) -> None:
    image = tmp_path / "image.raw"
    image.write_bytes(b"data" * (3 << 20) + bytes(8 << 20) + b"end" * 100)
    output, words = tmp_path / "bench.json", ("--image", str(image), "--folder", str(tmp_path))
    output.write_text('{"clone": {"ratio": 0.84}}')
    command = [sys.executable, "-m", "tests.bench.clone", "--output", str(output), *words]
    done = subprocess.run(
        [*command, "--runs", "1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(output.read_text())["clone"]
    assert figures["ratio"] == 0.84, "the figure of the lab host stays"
    assert figures["native_zero_share"] == pytest.approx(2 / 6, abs=0.001)
    ratio = figures["native_ours_mib_s"] / figures["native_dd_mib_s"]
    assert figures["native_ratio"] == pytest.approx(ratio, rel=0.05)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bench.json", "image.raw"]
