"""RDMA probe: ib_write_bw to a peer that runs ib_write_bw as the server."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from reconciler.benchmark.harness import program
from reconciler.benchmark.harness.reasons import Failed, Skipped, Unavailable
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.harness.series import metric

DEVICES = Path("/sys/class/infiniband")

_PEER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:%_-]{0,252}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# #bytes, #iterations, peak, average, message rate
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+", re.MULTILINE)
# perftest's server ends after each run, and a peer that restarts it in a loop needs a moment.
_SERVER_BACK_S = 15.0


def deadline_s(request: Request) -> float:
    return 30 + request.repetitions * (request.seconds + 30 + _SERVER_BACK_S)


def measure(request: Request) -> dict[str, Any]:
    """Average bandwidth of RDMA writes from this machine to the peer."""
    if not request.rdma_peer:
        raise Skipped(
            "not_requested",
            expected="--rdma-peer with a machine that runs ib_write_bw as the server",
            found="no peer",
            remedy="name a peer on the fabric",
        )
    _ensure_name("--rdma-peer", request.rdma_peer, _PEER)
    if request.rdma_device:
        _ensure_name("--rdma-device", request.rdma_device, _DEVICE)
    tool = program.find("ib_write_bw", "perftest")
    present = sorted(path.name for path in DEVICES.glob("*"))
    if not present or (request.rdma_device and request.rdma_device not in present):
        raise Unavailable(
            "device_missing",
            expected=f"the RDMA device {request.rdma_device}".rstrip(),
            found=", ".join(present) or "no RDMA device",
            remedy="pass the fabric function to the VM, or use a device of this list",
        )
    argv = [tool, "-F", "--report_gbits", "-D", str(request.seconds)]
    if request.rdma_device:
        argv += ["-d", request.rdma_device]
    argv.append(request.rdma_peer)
    rates = [parse(_run(argv, request.seconds)) for _ in range(request.repetitions)]
    return {
        # It prints its version and exits with 1.
        "tool": {"name": "ib_write_bw", "version": program.version(tool, "--version", ok=(0, 1))},
        "subject": f"{request.rdma_device or present[0]} to {request.rdma_peer}",
        "workload": {"seconds": request.seconds, "repetitions": request.repetitions},
        "metrics": [metric("rdma.write", "Gb/s", rates)],
    }


def _run(argv: list[str], seconds: int) -> str:
    """Output of a run. Repeat only a run that ended too early to measure: the server was away."""
    until = time.monotonic() + _SERVER_BACK_S
    while True:
        began = time.monotonic()
        try:
            return program.run(argv, timeout=seconds + 30)[0]
        except Failed as failed:
            now = time.monotonic()
            if failed.code != "tool_failed" or now - began >= seconds or now > until:
                raise
        time.sleep(0.5)


def parse(text: str) -> float:
    """Average Gb/s of the last row."""
    rows = _ROW.findall(text)
    if "BW average[Gb/sec]" not in text or not rows:
        raise Failed(
            "output_unreadable",
            expected="ib_write_bw's table in Gb/sec",
            found=repr(text[-300:]),
            remedy="use perftest 4.5 or newer",
        )
    return float(rows[-1])


def _ensure_name(flag: str, name: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(name):
        raise Failed(
            "name_invalid",
            expected=f"a plain name for {flag}",
            found=repr(name),
            remedy="use the address or name in the form that the tools print",
        )
