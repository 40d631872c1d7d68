"""Memory bandwidth: libc's memmove, which is on every machine, so both sides use the same tool."""

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

from reconciler.benchmark.harness.crowd import together
from reconciler.benchmark.harness.reasons import Failed, Unavailable
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.harness.series import metric

_FILL = 0xA5
# Passes per sample: one is too short to time on small buffers.
_PASSES = 4


def deadline_s(request: Request) -> float:
    # 0.5 GB/s for one CPU of many that share a slow memory; preparing writes the buffers once.
    return 30 + 2 * (request.repetitions + 2) * _PASSES * request.memory_bytes / 5e8


def measure(request: Request) -> dict[str, Any]:
    """Bytes copied per second (counted once) by one CPU, and by all usable CPUs together."""
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
    crowd = together(lambda: warm(size), rounds)
    return {
        "tool": {"name": "libc memmove", "version": " ".join(platform.libc_ver()) or "unknown"},
        "subject": "",
        "workload": {"buffer_bytes": size, "passes": _PASSES, "repetitions": rounds},
        "metrics": [
            metric("memory.copy", "GB/s", single),
            metric(
                "memory.copy_all",
                "GB/s",
                [cpus * moved / seconds for seconds in crowd],
                workers=cpus,
            ),
        ],
    }


def warm(size: int) -> Callable[[], None]:
    """The same, done once: the first pass pays for page tables and clocks."""
    copy = copier(size)
    copy()
    return copy


def copier(size: int) -> Callable[[], None]:
    """A copy between two buffers of `size` bytes whose pages exist."""
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    here = ctypes.addressof(ctypes.c_char.from_buffer(source))
    there = ctypes.addressof(ctypes.c_char.from_buffer(target))
    ctypes.memset(here, _FILL, size)
    ctypes.memset(there, 0, size)

    def copy() -> None:
        for _ in range(_PASSES):
            ctypes.memmove(there, here, size)
        # Both buffers are named here, which keeps them mapped as long as this function lives.
        if target[0] != source[0] or target[size - 1] != source[size - 1]:
            raise Failed(
                "result_wrong",
                expected="the target to hold what was copied",
                found="other bytes",
                remedy="test this machine's memory",
            )

    return copy


def _ensure_room(wanted: int) -> None:
    """Half of what is available: a measurement must never push a tenant or a host into swap."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else 0
    if wanted > available // 2:
        raise Unavailable(
            "memory_short",
            expected=f"{2 * wanted} bytes of available memory",
            found=f"{available} bytes",
            remedy="capture on an idle machine, or choose a smaller size for both sides",
        )
