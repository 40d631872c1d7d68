"""Deadline of a probe: it runs in a separate session, which is killed when its time is up."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from reconciler.benchmark.harness.reasons import Failed, Reason

# A process that waits for a dead device may never die. The capture continues without it.
_GRACE_S = 5.0


def within(seconds: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The document of `work()`, or {"status", "reason"} after a timeout or a failure."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(writer, work)
    os.close(writer)
    try:
        output = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        ended = _end(pid)
    if output is None:
        state = "it was killed" if ended else "it cannot be killed; a device may hang"
        return _without(
            Failed(
                "probe_deadline",
                expected=f"the probe to end within {seconds:g} s",
                found=f"still running; {state}",
                remedy="check the device and the other load of the machine",
            )
        )
    try:
        document: dict[str, Any] = json.loads(output)
    except ValueError:
        return _without(
            Failed(
                "probe_died",
                expected="the probe to report",
                found="its process ended without a report",
                remedy="check the kernel log of the machine",
            )
        )
    return document


def _child(writer: int, work: Callable[[], dict[str, Any]]) -> None:
    """Run the work and exit in any case: this process must not continue as a second harness."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # Standard output is for the capture only, and libraries may print.
        os.dup2(2, 1)
        with os.fdopen(writer, "w") as pipe:
            json.dump(_outcome(work), pipe)
    finally:
        os._exit(0)


def _outcome(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"status": "ok", "reason": None, **work()}
    except Reason as reason:
        return _without(reason)
    except Exception as error:
        return _without(
            Failed(
                "probe_crashed",
                expected="the probe to measure, or to report a reason",
                found=f"{type(error).__name__}: {error}",
                remedy="report it with this capture",
            )
        )


def _without(reason: Reason) -> dict[str, Any]:
    return {"status": reason.status, "reason": reason.document()}


def _read(reader: int, end: float) -> str | None:
    """Output of the probe; None after a timeout."""
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
    """Kill the probe's session and return whether its process has ended."""
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
