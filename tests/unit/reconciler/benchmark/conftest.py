"""Captures in the form of the harness, and tools that answer from recordings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from reconciler.benchmark import document
from reconciler.benchmark.capture import digest

DATA = Path(__file__).resolve().parents[3] / "data" / "benchmark"
PROBES = ("cpu", "memory", "disk", "rdma", "gpu", "vllm")
UNITS = {"cpu": "Mstep/s", "rdma": "Gb/s", "vllm": "token/s", "memory": "GB/s", "disk": "us"}


def tree(text: str) -> ET.Element:
    """The root of a well-formed document."""
    parser = ET.XMLPullParser(["start"])
    parser.feed(text)
    parser.close()
    root: ET.Element = next(iter(parser.read_events()))[1]
    return root


Samples = dict[str, list[float]]


def metric(name: str, samples: list[float]) -> dict[str, Any]:
    middle = sorted(samples)[len(samples) // 2]
    return {
        "metric": name,
        "unit": UNITS.get(name.partition(".")[0], "GB/s"),
        "better": "lower" if name.endswith("_p99") else "higher",
        "workers": 1,
        "median": middle,
        "spread_percent": round(100 * (max(samples) - min(samples)) / middle, 2),
        "samples": samples,
    }


def probe(name: str, figures: Samples) -> dict[str, Any]:
    metrics = [
        metric(each, samples) for each, samples in figures.items() if each.startswith(f"{name}.")
    ]
    reason = {"code": "tool_missing", "expected": "a tool", "found": "none", "remedy": "install it"}
    return {
        "probe": name,
        "status": "ok" if metrics else "unavailable",
        "reason": None if metrics else reason,
        "tool": {"name": f"{name}-tool", "version": "1"} if metrics else None,
        "subject": "",
        "workload": {"steps": 1} if metrics else {},
        "metrics": metrics,
        "deadline_s": 10,
        "seconds": 1.5,
    }


def made(
    label: str, figures: Samples, *, kind: str = "host", tuning: str = "off", vcpus: int = 24
) -> dict[str, Any]:
    """A valid capture with these samples by metric; probes without samples were unavailable."""
    text = dict.fromkeys(
        ("kernel", "kernel_arguments", "system", "governor", "transparent_hugepages"), ""
    )
    capture = {
        "schema": 1,
        "label": label,
        "kind": kind,
        "tuning": tuning,
        "vcpus": vcpus,
        "harness": {"digest": digest(), "python": "3.12.3"},
        "started_at": "2026-04-24T10:00:00Z",
        "finished_at": "2026-04-24T10:05:00Z",
        "host": {
            **text,
            "hostname": "j22u15",
            "machine": "x86_64",
            "cpu_model": "INTEL(R) XEON(R) PLATINUM 8570",
            "cpus": vcpus,
            "cpus_usable": vcpus,
            "sockets": 2,
            "threads_per_core": 2,
            "hypervisor": kind == "vm",
            "numa_nodes": [],
            "memory_bytes": 1 << 36,
            "hugepages": [],
            "tuned_profile": "",
            "memlock_bytes": None,
            "sysctls": {},
        },
        "probes": [probe(name, figures) for name in PROBES],
    }
    return document.check(capture, "the test's capture")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a shell script on PATH; it also writes its arguments to <name>.arguments beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        path = folder / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>"$0.arguments"\n{body}\n')
        path.chmod(0o755)
        return path.with_name(f"{name}.arguments")

    return make
