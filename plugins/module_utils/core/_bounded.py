"""Access to hardware in a child process with a deadline.

A reset or a read of configuration space may never return: the kernel then waits for the device and
ignores every signal. The caller goes on at the deadline, and the child stays behind until the host
restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_CHUNK = 65536


class Overdue(Exception):
    """The deadline passed; the effect of the call is unknown."""


def call(action: Callable[[], Any], *, deadline: float) -> Any:
    """Return the value of `action`, a JSON value, or raise its Refusal or OSError.

    deadline: seconds. Raises Overdue after it. Other failures of the child are an OSError.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(action, writer)
    os.close(writer)
    try:
        text = _read(reader, monotonic() + deadline)
    except Overdue:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, os.WNOHANG)
        raise
    finally:
        os.close(reader)
    os.waitpid(child, 0)
    try:
        answer = json.loads(text)
    except ValueError as broken:
        raise OSError("the child process ended without an answer") from broken
    if "refusal" in answer:
        raise Refusal(**answer["refusal"])
    if "error" in answer:
        raise OSError(answer["error"])
    return answer["value"]


def _read(reader: int, end: float) -> bytes:
    """Everything up to the end of the child's answer."""
    parts: list[bytes] = []
    while True:
        left = end - monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise Overdue
        part = os.read(reader, _CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _answer(action: Callable[[], Any], writer: int) -> None:
    """Run in the child, which never returns."""
    try:
        _detach(writer)
        answer: dict[str, Any] = {"value": action()}
    except Refusal as refusal:
        answer = {"refusal": refusal.document()}
    except Exception as problem:  # the parent must learn of any failure
        answer = {"error": f"{type(problem).__name__}: {problem}"}
    with contextlib.suppress(OSError), os.fdopen(writer, "wb") as pipe:
        pipe.write(json.dumps(answer).encode())
    os._exit(0)


def _detach(writer: int) -> None:
    """Leave the session and close every other descriptor.

    A child that hangs must hold neither the output that the caller's caller waits for, nor a lock.
    """
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != writer:
            with contextlib.suppress(OSError):
                os.close(descriptor)
