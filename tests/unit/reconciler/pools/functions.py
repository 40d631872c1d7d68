"""Functions that workers of the tests serve. Each notes that it ran, as a real effect would."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reconciler.pools import runner
from reconciler.pools.runner import InputError

Input = Mapping[str, Any]


def _note(call: Input) -> None:
    # O_APPEND keeps lines of several processes whole.
    with Path(call["file"]).open("a") as file:
        file.write(f"{call['number']}\n")


def double(call: Input) -> dict[str, Any]:
    """Twice the number, after `seconds` and once the file `until` exists. Prints like a library."""
    print("a library's banner", flush=True)
    _note(call)
    time.sleep(call.get("seconds", 0))
    while "until" in call and not Path(call["until"]).exists():
        time.sleep(0.01)
    return {"twice": call["number"] * 2}


def misbehave(call: Input) -> Any:
    """Fail in the way that the input names."""
    _note(call)
    how = call["how"]
    if how == "start":
        program = subprocess.Popen(["sleep", "600"])
        _note({**call, "number": program.pid})
        how = call["then"]
    if how == "move":
        os.setpgid(0, os.getpgid(os.getppid()))
        time.sleep(20)
        os._exit(0)
    if how == "refuse":
        raise InputError("a word", call["number"])
    if how == "raise":
        raise RuntimeError("secret of the operators")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "kill_worker":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if how == "eat":
        return {"size": len(bytearray(1 << 30))}
    if how == "hang":
        time.sleep(600)
    if how == "huge":
        return {"text": "x" * (1 << 17)}
    if how == "lose":
        runner._gpu_is_lost = lambda: True  # As in a process with a CUDA error.
        raise RuntimeError("device-side assert triggered")
    return {"nan": float("nan")} if how == "nan" else [how]


def environment(_call: Input) -> dict[str, Any]:
    """Names of the variables that the function can see."""
    return {"names": sorted(os.environ)}
