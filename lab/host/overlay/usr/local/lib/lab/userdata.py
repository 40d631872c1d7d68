"""Service that runs each script from the virtio port `gpuaas.userdata`, once per delivery.

A delivery is a line of JSON {"id", "script"}; the answer is a line {"id", "exit", "output"}. A
repeated delivery with the same id (its answer was lost) gets the recorded answer.
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
    """Run the script by its own #! line and return its exit code and output."""
    with tempfile.TemporaryDirectory(prefix="userdata.") as folder:
        path = Path(folder) / "script"
        path.write_text(script)
        path.chmod(0o700)
        # Files instead of pipes: a service that the script starts must not keep the delivery open.
        with (Path(folder) / "output").open("w+b") as output:
            done = subprocess.run(
                [str(path)], stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
            output.seek(0)
            return done.returncode, output.read().decode(errors="replace")


def answer(line: bytes) -> bytes:
    """Run a delivery, or return its recorded answer."""
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
            # No client is connected. Half a delivery from a client that has left is worthless.
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
