"""Trusted channel into a lab host: runs scripts as root, directly or as cloud-init userdata."""

from __future__ import annotations

import base64
import json
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from lab.command import LabError

# cloud-init's stages in the order of a boot. Their output is kept in the file that a machine
# deployed by MAAS uses. The userdata's output and exit code are in the answer.
BY_CLOUD_INIT = """#!/bin/sh
set -eu
umask 077
seed=/var/lib/cloud/seed/nocloud
log=/var/log/cloud-init-output.log
mkdir -p "$seed"
echo 'instance-id: {instance}' > "$seed/meta-data"
base64 -d > "$seed/user-data" <<'DATA'
{data}
DATA
umask 022
cloud-init init --local >> "$log" 2>&1
cloud-init init >> "$log" 2>&1
cloud-init modules --mode=final
"""


@dataclass(frozen=True)
class Answer:
    """Output and exit code of a script."""

    exit_code: int
    output: str


def deliver(path: Path, script: str, *, timeout: float = 600) -> Answer:
    """Deliver a script and wait until the host has run it.

    The script runs once, even if the connection is lost meanwhile, because the host records
    deliveries by id.
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
            answer = _exchange(path, line, delivery, left)
        except (ConnectionError, FileNotFoundError) as error:
            raise LabError(
                f"the lab's channel {path} is closed: is the lab up? ({error})"
            ) from error
        if answer is not None:
            return answer


def by_cloud_init(data: str) -> str:
    """Return a channel script that gives `data` to the host's cloud-init as a new deployment."""
    encoded = base64.encodebytes(data.encode()).decode().strip()
    return BY_CLOUD_INIT.format(instance=uuid.uuid4(), data=encoded)


def _exchange(path: Path, line: bytes, delivery: str, timeout: float) -> Answer | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        try:
            # QEMU holds the bytes back until the host has opened its end, so polling is not needed.
            connection.sendall(line)
            for text in connection.makefile("rb"):
                answer = _parse(text)
                if answer is not None and answer.get("id") == delivery:
                    return Answer(int(str(answer["exit"])), str(answer["output"]))
        except TimeoutError:
            pass
    return None


def _parse(text: bytes) -> dict[str, object] | None:
    # The first line after a connection can be the rest of an answer to an earlier client.
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
