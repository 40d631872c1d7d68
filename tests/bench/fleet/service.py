"""`gpuaas serve` as a process of its own, and a client that launches slices from it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.bench.fleet import records

_START_S = 60


@contextlib.contextmanager
def serving(database_url: str) -> Iterator[str]:
    """The API without workers: what is queued stays queued."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="gpuaas-bench-") as folder:
        environment = {
            **os.environ,
            "GPUAAS_DATABASE_URL": database_url,
            "GPUAAS_STATE_DIR": folder,
            "GPUAAS_LISTEN": f"127.0.0.1:{port}",
        }
        words = [sys.executable, "-m", "reconciler.cli.main", "serve", "--api-only"]
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        try:
            wait(f"http://127.0.0.1:{port}/healthz", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def launch(address: str, secret: str, client: int, claims: int) -> list[float]:
    """One client: seconds of each launch."""
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
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as http:
        for _ in range(claims):
            key = {"Idempotency-Key": str(uuid.uuid4())}
            began = time.perf_counter()
            answer = http.post(path, json=body, headers=key)
            times.append(time.perf_counter() - began)
            answer.raise_for_status()
    return times


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code < 500:
                return
        time.sleep(0.2)
    raise RuntimeError(f"no answer on {url}:\n{log.read_text()[-3000:]}")
