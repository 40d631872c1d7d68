"""Models for drills of jobs: calls that wait, take memory, or fail.

All but `take` run in workers without the memory limit of a pool.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_MIB = 1 << 16


def wait(call: Mapping[str, Any]) -> dict[str, Any]:
    """Take as much time as the input says."""
    time.sleep(min(float(call["seconds"]), 60.0))
    return {"seconds": call["seconds"]}


def take(call: Mapping[str, Any]) -> dict[str, Any]:
    """As `wait`, with as much memory as the input says. For pools only."""
    mib = min(int(call.get("mib", 0)), _MOST_MIB)
    # Shared, because only the limit of the worker's group counts such memory.
    with mmap.mmap(-1, max(mib, 1) << 20) as taken:
        for _ in range(mib):
            taken.write(bytes(1 << 20))
        return wait(call)


def fail(call: Mapping[str, Any]) -> dict[str, Any]:
    """Fail while a file `broken` exists, as a model does whose weights cannot be read."""
    cause = Path(str(call["broken"]))
    # No other file, or an input could ask for any.
    if cause.name == "broken" and cause.exists():
        raise RuntimeError("the drill's fault")
    return {}
