"""A probe runs in a session of its own and is ended, tools included, when its time is up."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from reconciler.benchmark.harness.reasons import Failed, Reason

# A process that waits for a dead device does not die at once, or ever; the capture goes on.
_GRACE_S = 5.0


def within(seconds: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work()` as a document, or {"status", "reason"} when it gives none in time."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(writer, work)
    os.close(writer)
    try:
        said = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        gone = _end(pid)
    if said is None:
        late = "it was killed" if gone else "it does not die; a device may hang"
        return _without(
            Failed(
                "probe_deadline",
                expected=f"the probe to end within {seconds:g} s",
                found=f"still running; {late}",
                remedy="look at the device and at what else runs on the machine",
            )
        )
    try:
        document: dict[str, Any] = json.loads(said)
    except ValueError:
        return _without(
            Failed(
                "probe_died",
                expected="the probe to report",
                found="its process ended without a word",
                remedy="look at the kernel's log of the machine",
            )
        )
    return document


def _child(writer: int, work: Callable[[], dict[str, Any]]) -> None:
    """Never returns: whatever happens, this process must not run on as a second harness."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # The capture is the only thing on standard output; libraries like to print.
        os.dup2(2, 1)
        with os.fdopen(writer, "w") as pipe:
            json.dump(_tried(work), pipe)
    finally:
        os._exit(0)


def _tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"status": "ok", "reason": None, **work()}
    except Reason as reason:
        return _without(reason)
    except Exception as error:
        return _without(
            Failed(
                "probe_crashed",
                expected="the probe to measure or to say why not",
                found=f"{type(error).__name__}: {error}",
                remedy="report it with this capture",
            )
        )


def _without(reason: Reason) -> dict[str, Any]:
    return {"status": reason.status, "reason": reason.document()}


def _read(reader: int, end: float) -> str | None:
    """What the probe said; None when time ran out first."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 65536)
        if not part:
            return b"".join(parts).decode(errors="replace")
        parts.append(part)


def _end(pid: int) -> bool:
    """Kill the probe's session; whether its process is gone."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    return False
