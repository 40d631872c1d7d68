"""Memory probe: bandwidth of libc's memmove, a tool that every machine has."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reconciler.benchmark.harness.parallel import on_all_cpus
from reconciler.benchmark.harness.reasons import Failed, Unavailable
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.harness.series import metric

_FILL = 0xA5
# Passes per sample. A single pass over a small buffer is too short to measure.
_PASSES = 4


def deadline_s(request: Request) -> float:
    # For 0.5 GB/s per CPU on a shared slow memory; the preparation writes the buffers once.
    return 30 + 2 * (request.repetitions + 2) * _PASSES * request.memory_bytes / 5e8


def measure(request: Request) -> dict[str, Any]:
    """Bytes copied per second, counted once, by a single CPU and by all usable CPUs."""
    size, rounds = request.memory_bytes, request.repetitions
    cpus = len(os.sched_getaffinity(0))
    _ensure_room(2 * size * cpus)
    moved = _PASSES * size / 1e9
    copy = warm(size)
    single = []
    for _ in range(rounds):
        began = time.perf_counter()
        copy()
        single.append(moved / (time.perf_counter() - began))
    del copy
    shared = on_all_cpus(lambda: warm(size), rounds)
    return {
        "tool": {"name": "libc memmove", "version": " ".join(platform.libc_ver()) or "unknown"},
        "subject": "",
        "workload": {"buffer_bytes": size, "passes": _PASSES, "repetitions": rounds},
        "metrics": [
            metric("memory.copy", "GB/s", single),
            metric(
                "memory.copy_all",
                "GB/s",
                [cpus * moved / seconds for seconds in shared],
                workers=cpus,
            ),
        ],
    }


def warm(size: int) -> Callable[[], None]:
    """A copier after a first pass, which sets up page tables and raises the clock speed."""
    copy = copier(size)
    copy()
    return copy


def copier(size: int) -> Callable[[], None]:
    """A function that copies between two populated buffers of `size` bytes."""
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    source_address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    target_address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    ctypes.memset(source_address, _FILL, size)
    ctypes.memset(target_address, 0, size)

    def copy() -> None:
        for _ in range(_PASSES):
            ctypes.memmove(target_address, source_address, size)
        # These references keep both buffers mapped while this function exists.
        if target[0] != source[0] or target[size - 1] != source[size - 1]:
            raise Failed(
                "result_wrong",
                expected="the target to hold what was copied",
                found="other bytes",
                remedy="test the memory of this machine",
            )

    return copy


def _ensure_room(size: int) -> None:
    """Use at most half of the available memory, so that the measurement causes no swapping."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else 0
    if size > available // 2:
        raise Unavailable(
            "memory_short",
            expected=f"{2 * size} bytes of available memory",
            found=f"{available} bytes",
            remedy="capture on an idle machine, or use a smaller size for all captures",
        )
