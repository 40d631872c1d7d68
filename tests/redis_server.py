"""A real Redis of a test's own, which may be killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis


class RedisServer:
    """folder: holds its socket. options: further arguments. program: or valkey-server."""

    def __init__(self, folder: Path, *options: str, program: str = "redis-server") -> None:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        self._program = program
        self._socket = folder / "redis.sock"
        self._options = options
        self.url = f"unix://{self._socket}"
        self.client: Any = redis.Redis.from_url(self.url, decode_responses=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [self._program, "--port", "0", "--unixsocket", str(self._socket)]
        command += ["--save", "", "--appendonly", "no", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < end, f"{self._program} did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """Without AOF, all of its content is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self.client.close()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError:
                return False
        return bool(self.client.ping())
