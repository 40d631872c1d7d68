"""Client of QEMU's control socket (QMP), for the few commands that the lab uses."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.command import LabError


def execute(
    path: Path, command: str, arguments: Mapping[str, Any] | None = None, *, timeout: float = 10
) -> dict[str, Any]:
    """Send a command and return its answer; `quit` may end without an answer."""
    message = {"execute": command, **({"arguments": arguments} if arguments else {})}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            stream = connection.makefile("rw", encoding="utf-8", newline="\n")
            stream.readline()
            for request in ({"execute": "qmp_capabilities"}, message):
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                answer = _answer(stream)
    except OSError as error:
        raise LabError(f"QEMU does not answer on {path}: {error}") from error
    if "error" in answer:
        raise LabError(f"QEMU refused {command}: {answer['error'].get('desc')}")
    return answer


def _answer(stream: Any) -> dict[str, Any]:
    # Events may come first; an answer has `return` or `error`.
    for line in stream:
        message: dict[str, Any] = json.loads(line)
        if "return" in message or "error" in message:
            return message
    return {"return": {}}
