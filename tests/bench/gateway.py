"""Benchmark of the SSH gateway: `python -m tests.bench.gateway`; key `gateway`.

The peer is OpenSSH's own jump host (`ssh -J`) before the same guest, measured in turns with ours. A
login is a whole `ssh` that runs `true` in the guest. Throughput is zeros that the guest sends; both
ways are encrypted twice. The gateway has one hop more than its peer, because it reaches the guest
through its host. Client, gateway, host and guest share this machine. `plain`: the same without the
order of ciphers of `gpuaas ssh-config`, as a client with settings of its own has it.

The site is that of the gateway's tests, with real SSH servers, so pytest builds it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench import document

MEASUREMENT = Path(__file__).parent / "fleet" / "jumps.py"
# Environment variable with the options of the measurement, as JSON.
OPTIONS = "BENCH_GATEWAY"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway")
    parser.add_argument("--logins", type=int, default=20, help="of each side")
    parser.add_argument("--mib", type=int, default=256, help="of each transfer")
    parser.add_argument("--transfers", type=int, default=5, help="of each side")
    parser.add_argument("--output", type=Path, default=document.PATH)
    options = vars(parser.parse_args())
    environment = {**os.environ, OPTIONS: json.dumps(options, default=str)}
    words = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", MEASUREMENT]
    return subprocess.run(words, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
