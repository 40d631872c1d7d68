"""`gpuaas serve` as a separate process, and a client that launches slices from it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.bench.fleet import records
from tests.bench.fleet.wire import Wire, expect

_START_S = 60


@dataclass(frozen=True)
class Service:
    """A running service. pid: its process id, for the kernel's counters."""

    address: str
    pid: int


@contextlib.contextmanager
def serving(database_url: str) -> Iterator[str]:
    """Run the API without workers, so that queued tasks stay queued."""
    with running(database_url, "--api-only") as service:
        yield service.address


@contextlib.contextmanager
def running(
    database_url: str, *words: str, module: str = "reconciler.cli.main", **settings: str
) -> Iterator[Service]:
    """Run `gpuaas serve` with these words and settings over this database; "" means its own SQLite.

    module: runs in its place, with the same words.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="gpuaas-bench-") as folder:
        environment = {
            **os.environ,
            "GPUAAS_DATABASE_URL": database_url,
            "GPUAAS_STATE_DIR": folder,
            "GPUAAS_LISTEN": f"127.0.0.1:{port}",
            **settings,
        }
        command = [sys.executable, "-m", module, "serve", *words]
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            wait(f"http://127.0.0.1:{port}/healthz", process, log)
            yield Service(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def launch(address: str, secret: str, client: int, claims: int) -> list[float]:
    """Launch as a single client; return the seconds of each launch."""
    times = []
    path = f"/api/v1/projects/{records.PROJECT}/allocations"
    body = {
        "capacity_shape": "gpu_slice",
        "gpu_count": 1,
        "username": "bench",
        "ssh_keys": [records.KEY],
        "hostname": f"bench-{client}",
        "image": records.IMAGE,
    }
    with Wire(address, {"Authorization": f"Bearer {secret}"}) as wire:
        for _ in range(claims):
            key = {"Idempotency-Key": str(uuid.uuid4())}
            began = time.perf_counter()
            answer = wire.ask("POST", path, body, key)
            times.append(time.perf_counter() - began)
            expect(answer, 201)
    return times


def free_port() -> int:
    """Return a port on which no process listens now.

    The kernel gives it to no client either, not even while its server is being restarted.
    """
    clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(max(clients - 20_000, 1024), clients))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code < 500:
                return
        time.sleep(0.2)
    raise RuntimeError(f"no answer on {url}:\n{log.read_text()[-3000:]}")
