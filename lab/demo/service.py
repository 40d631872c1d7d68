"""Private reconciler of a demonstration or a test: a real process on a free port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx

from lab.command import LabError
from lab.paths import cache_folder

START_DEADLINE_S = 60


class Service:
    """`gpuaas serve` with SQLite in `folder`. Hosts reach it at the lab's gateway address."""

    def __init__(
        self,
        folder: Path,
        *,
        gateway: str,
        profiles: Path,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ssh = f"127.0.0.1:{_free_port()}"
        self.environment = {
            **os.environ,
            "GPUAAS_STATE_DIR": str(folder),
            # The processors of an emulated host share one: a comparison beside two launches makes
            # each too slow for its limits.
            "GPUAAS_WORKERS": "2",
            "GPUAAS_LISTEN": f"127.0.0.1:{self.port}",
            "GPUAAS_PUBLIC_URL": f"http://{gateway}:{self.port}",
            "GPUAAS_PROFILES_DIR": str(profiles),
            # The network between the lab host and this machine is a pair of sockets.
            "GPUAAS_ENROLMENT_INSECURE": "1",
            # The guest image of the lab, in the cache of built parts.
            "GPUAAS_IMAGES_DIR": str(cache_folder()),
            "GPUAAS_API": self.url,
            "GPUAAS_MEMBER_ADDRESS": self.ssh,
            "GPUAAS_GATEWAY_LISTEN": self.ssh,
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service and wait until it is ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "serve.log"
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*self.command, "serve"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        end = time.monotonic() + START_DEADLINE_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise LabError(f"the reconciler did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "reconciler.cli.main"]

    def cli(self, *words: str) -> str:
        """Run a command of the product against this service's database."""
        done = subprocess.run(
            [*self.command, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(
                f"gpuaas {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout.strip()

    @contextmanager
    def gateway(self) -> Iterator[None]:
        """Run the SSH gateway in this block."""
        with (self.folder / "gateway.log").open("ab") as sink:
            process = subprocess.Popen(
                [*self.command, "gateway"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        try:
            end = time.monotonic() + START_DEADLINE_S
            host, port = self.ssh.split(":")
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection((host, int(port)), timeout=5).close()
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise LabError("the gateway did not start: see gateway.log")
                time.sleep(0.3)
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)

    def kill(self) -> None:
        """Kill the process as a crash would, without any clean-up."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
