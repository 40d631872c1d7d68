"""Runs each script that arrives on the virtio port `gpuaas.userdata`, once per delivery.

A delivery is one line of JSON {"id", "script"}; the answer one line {"id", "exit", "output"}.
A delivery repeated under the same id (its answer was lost) gets the recorded answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PORT = Path("/dev/virtio-ports/gpuaas.userdata")
ANSWERS = Path("/var/lib/lab-userdata")


def execute(script: str) -> tuple[int, str]:
    """Run the script (by its own #! line) and return exit code and output."""
    with tempfile.TemporaryDirectory(prefix="userdata.") as folder:
        path = Path(folder) / "script"
        path.write_text(script)
        path.chmod(0o700)
        # Files, not pipes: a service that the script starts must not keep the delivery open.
        with (Path(folder) / "output").open("w+b") as output:
            done = subprocess.run(
                [str(path)], stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
            output.seek(0)
            return done.returncode, output.read().decode(errors="replace")


def answer(line: bytes) -> bytes:
    """Run or recall one delivery."""
    delivery = json.loads(line)
    record = ANSWERS / f"{delivery['id']}.json"
    if not record.exists():
        code, output = execute(delivery["script"])
        sys.stdout.write(f"delivery {delivery['id']}: exit {code}\n{output}\n")
        sys.stdout.flush()
        body = json.dumps({"id": delivery["id"], "exit": code, "output": output})
        half = record.with_suffix(".partial")
        half.write_text(body)
        half.rename(record)
    return record.read_bytes() + b"\n"


def main() -> None:
    """Serve deliveries until stopped."""
    ANSWERS.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = os.open(PORT, os.O_RDWR)
    pending = b""
    while True:
        chunk = os.read(port, 65536)
        if not chunk:
            # Nobody is at the other end; half a delivery of a client that left is worthless.
            pending = b""
            time.sleep(0.3)
            continue
        pending += chunk
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            try:
                reply = memoryview(answer(line))
                while reply:
                    reply = reply[os.write(port, reply) :]
            except (OSError, ValueError, KeyError) as error:
                sys.stdout.write(f"delivery dropped: {error}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
