"""Disk probe: fio with reads only. All options of fio are fixed, so none can make it write."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from reconciler.benchmark.harness import probe
from reconciler.benchmark.harness.probe import Failed, Request, Skipped, Unavailable, metric

# All read, and fail where fio would have to create a file.
_FIO = (
    "--readonly",
    "--output-format=json",
    "--name=gpuaas",
    "--ioengine=libaio",
    "--direct=1",
    "--allow_file_create=0",
    "--time_based",
)
# pattern: block size, queue depth
READS = {"read": ("1m", 32), "randread": ("4k", 64)}


def deadline_s(request: Request) -> float:
    return 60 + 2 * request.repetitions * (request.seconds + 30)


def measure(request: Request) -> dict[str, Any]:
    """Sequential bandwidth, random reads per second, and their 99th percentile latency."""
    if not request.fio_target:
        raise Skipped(
            "not_requested",
            expected="--fio-target with an approved benchmark target",
            found="no target",
            remedy="name a device or a file, which is only read",
        )
    fio = probe.find_tool("fio", "fio")
    subject = target(request.fio_target)
    sequential, random = (
        [_run(fio, request, pattern) for _ in range(request.repetitions)] for pattern in READS
    )
    latencies = [job["clat_ns"]["percentile"]["99.000000"] / 1e3 for job in random]
    return {
        "tool": {"name": "fio", "version": probe.tool_version(fio)},
        "subject": subject,
        "workload": {
            "patterns": {name: {"block": size, "depth": n} for name, (size, n) in READS.items()},
            "seconds": request.seconds,
            "repetitions": request.repetitions,
        },
        "metrics": [
            metric("disk.read", "MB/s", [job["bw_bytes"] / 1e6 for job in sequential]),
            metric("disk.read_random", "IOPS", [job["iops"] for job in random]),
            metric("disk.read_random_p99", "us", latencies, better="lower"),
        ],
    }


def target(name: str) -> str:
    """The real path of an existing disk or file. fio would create a missing file."""
    expected = "the absolute path of an existing block device or regular file"
    remedy = "name the approved benchmark target, by its identity under /dev/disk/by-id"
    if not name.startswith("/") or not name.isprintable():
        raise Failed("target_invalid", expected=expected, found=repr(name), remedy=remedy)
    real = os.path.realpath(name)
    try:
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        mode = os.fstat(handle).st_mode
        os.close(handle)
    except PermissionError as error:
        raise Unavailable(
            "target_unreadable",
            expected=f"permission to read {real}",
            found=str(error),
            remedy="capture as root, or with --sudo",
        ) from error
    except OSError as error:
        raise Unavailable(
            "target_missing", expected=expected, found=str(error), remedy=remedy
        ) from error
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        raise Failed("target_invalid", expected=expected, found=real, remedy=remedy)
    return real


def arguments(fio: str, path: str, pattern: str, seconds: int) -> list[str]:
    """Arguments of a read-only job. Failed `write_refused` for a pattern that is not a read."""
    if pattern not in READS:
        raise Failed(
            "write_refused",
            expected=f"a read pattern: {', '.join(READS)}",
            found=pattern,
            remedy="a benchmark never writes; nothing was run",
        )
    size, depth = READS[pattern]
    # fio separates file names by colons, and names in /dev/disk/by-path contain colons.
    escaped = path.replace("\\", "\\\\").replace(":", "\\:")
    argv = [fio, *_FIO, f"--filename={escaped}", f"--rw={pattern}", f"--runtime={seconds}"]
    return [*argv, f"--bs={size}", f"--iodepth={depth}"]


def parse(text: str) -> dict[str, Any]:
    """The `read` part of fio's JSON; Failed after a write, a trim or an error."""
    # Warnings may precede the document.
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        written = job["write"]["io_bytes"] + job["trim"]["io_bytes"]
        error = job["error"]
        read: dict[str, Any] = job["read"]
    except (ValueError, LookupError, TypeError) as strange:
        raise Failed(
            "output_unreadable",
            expected="fio's JSON with one job",
            found=repr(text[:300]),
            remedy="use fio 3.x",
        ) from strange
    if written:
        raise Failed(
            "target_written",
            expected="0 bytes written and trimmed",
            found=f"{written} bytes",
            remedy="treat the target as damaged, and report this fio",
        )
    if error:
        raise Failed(
            "tool_failed",
            expected="fio to read without errors",
            found=f"error {error}",
            remedy="check the kernel log of the machine",
        )
    return read


def _run(fio: str, request: Request, pattern: str) -> dict[str, Any]:
    # Resolve the path for each run, because the name may point to another device by now.
    argv = arguments(fio, target(request.fio_target), pattern, request.seconds)
    return parse(probe.run_tool(argv, timeout=request.seconds + 30))
