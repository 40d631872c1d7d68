"""Models of drills, and a worker of their own that a drill may kill.

That worker serves all projects for as long as the drill lasts, without the memory limit of a pool.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def worker(model: str, function: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of this machine that serves one function of this module under a name."""
    command = [sys.executable, "-m", "reconciler.cli.main", "jobs", "worker"]
    command += ["--model", f"{model}={__name__}:{function}"]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
