"""A site's processes for a test: started, killed, watched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx

from tests.bench.fleet.service import free_port

# Far more than it takes: a busy machine is no failure.
LIMIT_S = 120.0
T = TypeVar("T")


class Service:
    """folder: where scripted hosts write and, unless told otherwise, where the state is."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pids: list[int] = []
        self._environment = {"GPUAAS_STATE_DIR": str(folder), **environment}
        self._log = (folder / "service.log").open("ab")
        self._forge = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.reconciler.service.scripted"],
            env={
                **os.environ,
                "GPUAAS_LISTEN": f"127.0.0.1:{self.port}",
                "GPUAAS_POLL_S": "0.03",
                "SCRIPTED_FOLDER": str(folder),
                **self._environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._line() == "ready"

    def start(self, what: str = "serve", state_dir: Path | None = None) -> int:
        """The id of a new process of the service."""
        assert self._forge.stdin is not None
        self._forge.stdin.write(f"{what} {state_dir or ''}\n")
        self._forge.stdin.flush()
        self.pids.append(int(self._line()))
        return self.pids[-1]

    def kill(self) -> None:
        """As a power cut or the kernel's memory killer does it, all of them."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            until(lambda gone=pid: not alive(gone))
        self.pids.clear()

    def ready(self) -> bool:
        """Whether the site can work."""
        return self._says_yes("/readyz")

    def alive(self) -> bool:
        """Whether the API answers, whoever else is missing."""
        return self._says_yes("/healthz")

    def _says_yes(self, path: str) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}{path}", timeout=5, trust_env=False).is_success
        return False

    def began(self) -> Counter[str]:
        """How often each run began on a host."""
        hosts = self.folder / "hosts"
        return Counter(hosts.read_text().split() if hosts.exists() else [])

    def check(self) -> None:
        """As operators ask whether all promises are kept."""
        answer = self.gpuaas("check")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert " 0 violations" in answer.stderr, answer.stderr

    def gpuaas(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The program itself, where this site is."""
        return subprocess.run(
            [str(Path(sys.executable).with_name("gpuaas")), *words],
            env={**self.environment(), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        """Variables for a program of this site."""
        return {**os.environ, "GPUAAS_API": self.url, **self._environment}

    def log(self) -> str:
        return (self.folder / "service.log").read_text()

    def close(self) -> None:
        self.kill()
        self._forge.kill()
        self._forge.wait()
        for stream in (self._forge.stdin, self._forge.stdout, self._log):
            if stream is not None:
                stream.close()

    def _line(self) -> str:
        assert self._forge.stdout is not None
        return self._forge.stdout.readline().strip()


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[Service]:
    """A site whose processes end with the test."""
    service = Service(folder, environment)
    try:
        yield service
    finally:
        service.close()


def pauses(many: int, shortest: float, longest: float, *, first: int = 0) -> Iterator[float]:
    """Seconds, spread evenly and in no order; the same every time, to find it again.

    first: go on where a test with so many pauses has ended.
    """
    golden = 0.6180339887498949
    for number in range(first + 1, first + many + 1):
        yield shortest + (longest - shortest) * (number * golden % 1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(look: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """The first answer that is not empty."""
    end = time.monotonic() + limit_s
    while not (answer := look()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
    return answer
