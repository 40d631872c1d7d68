"""The trusted channel into a lab host: scripts run there as root, as MAAS userdata would."""

from __future__ import annotations

import json
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from lab.command import LabError


@dataclass(frozen=True)
class Answer:
    """What the script said and how it ended."""

    exit_code: int
    output: str


def deliver(path: Path, script: str, *, timeout: float = 600) -> Answer:
    """Deliver a script and wait until the host has run it.

    Delivered once, also when the connection is lost meanwhile: the host knows deliveries by id.
    """
    if not script.startswith("#!"):
        raise LabError("a userdata script begins with #! (for example #!/bin/sh)")
    delivery = str(uuid.uuid4())
    line = json.dumps({"id": delivery, "script": script}).encode() + b"\n"
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise LabError(f"the host did not answer on {path} within {timeout:.0f} s")
        try:
            found = _exchange(path, line, delivery, left)
        except (ConnectionError, FileNotFoundError) as error:
            raise LabError(
                f"the lab's channel {path} is closed: is the lab up? ({error})"
            ) from error
        if found is not None:
            return found


def _exchange(path: Path, line: bytes, delivery: str, timeout: float) -> Answer | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        try:
            # QEMU holds the bytes back until the host has opened its end: no need to poll.
            connection.sendall(line)
            for text in connection.makefile("rb"):
                answer = _parse(text)
                if answer is not None and answer.get("id") == delivery:
                    return Answer(int(str(answer["exit"])), str(answer["output"]))
        except TimeoutError:
            pass
    return None


def _parse(text: bytes) -> dict[str, object] | None:
    # The first line after a connection can be the rest of an answer to somebody who left.
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
