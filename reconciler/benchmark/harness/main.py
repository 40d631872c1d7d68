"""Capture of a machine: its facts and the results of all probes in a JSON document."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reconciler.benchmark.harness import cpu, disk, facts, gpu, memory, rdma, vllm
from reconciler.benchmark.harness.deadline import within
from reconciler.benchmark.harness.reasons import Failed
from reconciler.benchmark.harness.request import Request

SCHEMA = 1

if TYPE_CHECKING:  # Python 3.8 cannot subscript it
    Measure = Callable[[Request], dict[str, Any]]

# In this order, because the CPU should be cool for its probe, and vLLM causes the highest load.
PROBES: tuple[tuple[str, Callable[[Request], float], Measure], ...] = (
    ("cpu", cpu.deadline_s, cpu.measure),
    ("memory", memory.deadline_s, memory.measure),
    ("disk", disk.deadline_s, disk.measure),
    ("rdma", rdma.deadline_s, rdma.measure),
    ("gpu", gpu.deadline_s, gpu.measure),
    ("vllm", vllm.deadline_s, vllm.measure),
)


def longest_s(request: Request) -> float:
    """Duration of a capture in which every probe reaches its deadline."""
    return sum(deadline(request) for _, deadline, _ in PROBES)


def main(arguments: dict[str, Any]) -> int:
    """Print the capture, or {"refusal"}. Progress goes to standard error."""
    # SystemExit unwinds through `within`, which kills the probe of a canceled capture.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    request = Request(**arguments)
    refusal = refused(request)
    document = {"refusal": refusal.document()} if refusal else capture(request)
    sys.stdout.write(json.dumps(document) + "\n")
    return 3 if refusal else 0


def refused(request: Request) -> Failed | None:
    """Refusal of a label that does not match the machine, or None."""
    usable = len(os.sched_getaffinity(0))
    if request.vcpus in (0, usable):
        return None
    return Failed(
        "vcpus_differ",
        expected=f"{request.vcpus} usable CPUs, as the label says",
        found=str(usable),
        remedy="correct --vcpus, or the machine",
    )


def capture(request: Request) -> dict[str, Any]:
    """The document of contracts/benchmark.schema.json."""
    began = _now()
    host = facts.collect()
    detected = "vm" if host["hypervisor"] else "host"
    probes = [_probe(request, *probe) for probe in PROBES]
    return {
        "schema": SCHEMA,
        "label": request.label,
        "kind": detected if request.kind == "auto" else request.kind,
        "tuning": request.tuning,
        "vcpus": host["cpus_usable"],
        "harness": {"digest": request.harness, "python": sys.version.split()[0]},
        "started_at": began,
        "finished_at": _now(),
        "host": host,
        "probes": probes,
    }


def _probe(
    request: Request, name: str, deadline_s: Callable[[Request], float], measure: Measure
) -> dict[str, Any]:
    limit = round(deadline_s(request))
    sys.stderr.write(f"{name}: at most {limit} s\n")
    began = time.monotonic()
    outcome = within(limit, lambda: measure(request))
    sys.stderr.write(f"{name}: {outcome['status']}\n")
    without: dict[str, Any] = {"tool": None, "subject": "", "workload": {}, "metrics": []}
    return {
        "probe": name,
        **without,
        **outcome,
        "deadline_s": limit,
        "seconds": round(time.monotonic() - began, 3),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
