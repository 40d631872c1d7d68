"""Processor time and memory of a process, from the kernel's counters."""

from __future__ import annotations

import os
from pathlib import Path

_KIB = 1024
# In /proc/PID/stat behind the name: own time, as user and in the kernel, then ended children's.
_TIMES = slice(11, 15)


def cpu_s(pid: int) -> float:
    """Return seconds of processor time, including those of ended child processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[_TIMES])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> dict[str, float]:
    """rss: resident or swapped out. pss: shared pages in part. peak: largest resident size."""
    current = _sizes(Path(f"/proc/{pid}/smaps_rollup").read_text())
    peak = _sizes(Path(f"/proc/{pid}/status").read_text())["VmHWM"]
    sizes = {
        "rss": current["Rss"] + current["Swap"],
        "pss": current["Pss"] + current["SwapPss"],
        "peak": peak,
    }
    return {name: round(kib / _KIB, 1) for name, kib in sizes.items()}


def _sizes(text: str) -> dict[str, int]:
    """Parse lines like `Rss: 1234 kB`."""
    words = [line.split() for line in text.splitlines()]
    return {word[0].rstrip(":"): int(word[1]) for word in words if word[-1:] == ["kB"]}
