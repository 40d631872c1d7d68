"""A site's processes for a test: started, killed, watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx

from tests.bench.fleet.service import free_port

# Far more than it takes: a busy machine is no failure.
LIMIT_S = 120.0
T = TypeVar("T")


class Forge:
    """Starts processes of `gpuaas`, as copies of a process in which everything is loaded."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.reconciler.service.scripted"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        output: Path | None = None,
        status: Path = Path(os.devnull),
    ) -> int:
        """The id of a new process. environment: beside that of the test. output: a file for its
        standard output, or the log. status: a file for its exit status.
        """
        request = {"words": words, "environment": {**os.environ, **environment}}
        files = {"log": log, "output": output or log, "status": status}
        self._process.stdin.write(f"{json.dumps(request | files, default=str)}\n")
        self._process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        return self._process.stdout.readline().strip()


@cache
def forge() -> Forge:
    """That of this session of tests, with which it ends: loading takes seconds."""
    return Forge()


class Service:
    """folder: where scripted hosts write and, unless told otherwise, where the state is."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.pids: list[int] = []
        self._environment = {"GPUAAS_STATE_DIR": str(folder), **environment}
        self._log = folder / "service.log"

    def start(self, *words: str, state_dir: Path | None = None) -> int:
        """The id of a new process of the service."""
        given = {
            "GPUAAS_LISTEN": f"127.0.0.1:{self.port}",
            "GPUAAS_POLL_S": "0.03",
            "SCRIPTED_FOLDER": str(self.folder),
            **self._environment,
        }
        if state_dir:
            given["GPUAAS_STATE_DIR"] = str(state_dir)
        self.pids.append(forge().start(words or ("serve",), given, self._log))
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
        """Whether the API answers, even if other processes are missing."""
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

    def gpuaas(self, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
        """The program itself, where this site is."""
        with TemporaryDirectory() as folder:
            log, output, status = (Path(folder) / name for name in ("log", "output", "status"))
            environment = {**self.environment(), **given}
            pid = forge().start(words, environment, log, output=output, status=status)
            until(lambda: not alive(pid))
            code = int(status.read_text())
            return subprocess.CompletedProcess(words, code, output.read_text(), log.read_text())

    def environment(self) -> dict[str, str]:
        """Variables for a program of this site."""
        return {**os.environ, "GPUAAS_API": self.url, **self._environment}

    def log(self) -> str:
        return self._log.read_text()


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[Service]:
    """A site whose processes end with the test."""
    service = Service(folder, environment)
    try:
        yield service
    finally:
        service.kill()


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
