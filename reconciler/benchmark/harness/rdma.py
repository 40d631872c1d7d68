"""RDMA probe: ib_write_bw to a peer that runs ib_write_bw as the server."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from reconciler.benchmark.harness import probe
from reconciler.benchmark.harness.probe import Failed, Request, Skipped, Unavailable, metric

DEVICES = Path("/sys/class/infiniband")

_PEER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:%_-]{0,252}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# The last row (#bytes, #iterations, peak, average, message rate) below a head that names the unit.
_ROW = re.compile(
    r"BW average\[Gb/sec\](?s:.*)^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+", re.MULTILINE
)
# perftest's server ends after each run, and a peer that restarts it in a loop needs a moment.
_SERVER_BACK_S = 15.0


def deadline_s(request: Request) -> float:
    return 30 + request.repetitions * (request.seconds + 30 + _SERVER_BACK_S)


def measure(request: Request) -> dict[str, Any]:
    """Average bandwidth of RDMA writes from this machine to the peer."""
    peer, device = request.rdma_peer, request.rdma_device
    if not peer:
        raise Skipped(
            "not_requested",
            expected="--rdma-peer with a machine that runs ib_write_bw as the server",
            found="no peer",
            remedy="name a peer on the fabric",
        )
    remedy = "use the address or name in the form that the tools print"
    probe.ensure_name(peer, _PEER, expected="a plain name for --rdma-peer", remedy=remedy)
    if device:
        probe.ensure_name(device, _DEVICE, expected="a plain name for --rdma-device", remedy=remedy)
    tool = probe.find_tool("ib_write_bw", "perftest")
    present = sorted(path.name for path in DEVICES.glob("*"))
    if not present or (device and device not in present):
        raise Unavailable(
            "device_missing",
            expected=f"the RDMA device {device}".rstrip(),
            found=", ".join(present) or "no RDMA device",
            remedy="pass the fabric function to the VM, or use a device of this list",
        )
    argv = [tool, "-F", "--report_gbits", "-D", str(request.seconds)]
    argv += [*(["-d", device] if device else []), peer]
    rates = [parse(_run(argv, request.seconds)) for _ in range(request.repetitions)]
    return {
        # It prints its version and exits with 1.
        "tool": {"name": "ib_write_bw", "version": probe.tool_version(tool, ok=(0, 1))},
        "subject": f"{device or present[0]} to {peer}",
        "workload": {"seconds": request.seconds, "repetitions": request.repetitions},
        "metrics": [metric("rdma.write", "Gb/s", rates)],
    }


def _run(argv: list[str], seconds: int) -> str:
    """Output of a run. Repeat only a run that ended too early to measure: the server was away."""
    until = time.monotonic() + _SERVER_BACK_S
    while True:
        began = time.monotonic()
        try:
            return probe.run_tool(argv, timeout=seconds + 30)
        except Failed as failed:
            now = time.monotonic()
            if failed.code != "tool_failed" or now - began >= seconds or now > until:
                raise
        time.sleep(0.5)


def parse(text: str) -> float:
    """Average Gb/s of the last row."""
    expected = "ib_write_bw's table in Gb/sec"
    return probe.last_figure(text, _ROW, expected=expected, remedy="use perftest 4.5 or newer")
