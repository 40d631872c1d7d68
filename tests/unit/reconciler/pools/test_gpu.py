"""Pools on a real GPU: functions in PyTorch, errors of CUDA, and an empty GPU after each end.

`python -m pytest -m gpu` on a machine with nvidia-smi and PyTorch. Its first GPU must be free
meanwhile; the tests fill half of its memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from reconciler.client import Client
from reconciler.pools import memory
from tests.unit.reconciler.service.service import Service, serving, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (shutil.which("nvidia-smi") and find_spec("torch")), reason="no GPU, or no PyTorch"
    ),
    pytest.mark.covers("ORCH-3"),
]

MODEL = """
import torch

def run(call):
    numbers = torch.arange(1000.0, dtype=torch.float64, device="cuda")
    if "index" in call:
        return {"number": numbers[torch.tensor([call["index"]], device="cuda")].item()}
    if call.get("seconds"):
        held = torch.ones(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(call["seconds"] * 2_000_000_000)  # Cycles of at most 2 GHz.
        torch.cuda.synchronize()
    return {"sum": (numbers * call["factor"]).sum().item()}
"""
SUM = sum(range(1000))
JOBS = "/projects/gpu/jobs"


class Gpu:
    """The first GPU, and a pool on it."""

    def __init__(self, site: Service) -> None:
        self.site = site
        self.id = memory.gpus()[0]["id"]
        self.idle = self.use()
        self._api = Client(site.url, (site.folder / "token").read_text().strip())

    def use(self) -> tuple[int, str]:
        """Bytes of its memory in use, and its processes."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", f"--id={self.id}"]
        apps = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, check=True)
        (used,) = (gpu["memory_used_bytes"] for gpu in memory.gpus() if gpu["id"] == self.id)
        return int(used), apps.stdout.decode()

    def pool(self, *words: str) -> dict[str, Any]:
        answer = self.site.gpuaas("--output", "json", "pools", *words, "--wait")
        assert answer.returncode == 0, answer.stderr
        pool: dict[str, Any] = json.loads(answer.stdout)
        return pool

    def submit(self, *calls: dict[str, Any]) -> list[str]:
        wishes = [{"model": "m", "input": call, "max_attempts": 1} for call in calls]
        ids: list[str] = []
        for at in range(0, len(wishes), 100):
            ids += self._api.post(f"{JOBS}/batch", {"jobs": wishes[at : at + 100]})["ids"]
        return ids

    def job(self, id: str) -> dict[str, Any]:
        return self._api.get(f"{JOBS}/{id}")

    def ended(self, id: str) -> dict[str, Any]:
        until(lambda: self.job(id)["status"] in ("done", "dead_letter", "canceled"))
        return self.job(id)

    def close(self) -> None:
        self._api.close()


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Iterator[Gpu]:
    """A service on SQLite, with a model, an operator and a project."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(template, folder / "reconciler.db")
    (folder / "models").mkdir()
    (folder / "models" / "m.py").write_text(MODEL)
    with serving(folder) as site:
        site.start()
        until(site.ready)
        site.gpuaas("token", "create", "--role", "platform-admin", "--name", "op", "--save")
        site.gpuaas("projects", "add", "gpu", "--id", "gpu")
        gpu = Gpu(site)
        yield gpu
        gpu.close()


@pytest.fixture
def pool(gpu: Gpu) -> Iterator[str]:
    """A pool that has the GPU; evicted unless the test has ended it."""
    words = ["--model", "m", "--memory", "4096", "--grace", "5", "--device", gpu.id]
    started = gpu.pool("start", "a", *words)
    assert started["state"] == "running", started
    yield started["id"]
    gpu.site.gpuaas("pools", "evict", started["id"], "--wait")


def test_jobs_compute_and_a_stopped_pool_leaves_nothing(gpu: Gpu, pool: str) -> None:
    ids = gpu.submit(*({"factor": factor} for factor in range(1000)))
    results = [gpu.ended(id)["result"] for id in ids]
    assert results == [{"sum": float(SUM * factor)} for factor in range(1000)]
    (held,) = gpu.submit({"factor": 1, "seconds": 3})
    until(lambda: gpu.use()[0] > gpu.idle[0] + (1 << 30))
    assert gpu.pool("stop", pool)["state"] == "stopped"
    assert gpu.use() == gpu.idle
    job = gpu.job(held)
    assert (job["status"], job["attempts"], job["lost"]) == ("done", 1, 0)


def test_an_index_out_of_bounds_costs_its_own_job_only(gpu: Gpu, pool: str) -> None:
    """After it CUDA refuses all further work of the process."""
    calls: list[dict[str, Any]] = [{"factor": 1} for _ in range(40)]
    bad, *others = gpu.submit({"index": 10**6}, *calls)
    assert gpu.ended(bad)["failure"]["code"] == "function_failed"
    assert {(gpu.ended(id)["status"], gpu.job(id)["attempts"]) for id in others} == {("done", 1)}


def test_an_evicted_pool_leaves_nothing_of_a_call_that_hangs_in_a_kernel(
    gpu: Gpu, pool: str
) -> None:
    (held,) = gpu.submit({"factor": 1, "seconds": 10**6})
    until(lambda: gpu.use()[0] > gpu.idle[0] + (1 << 30))
    assert gpu.pool("evict", pool)["state"] == "evicted"
    assert gpu.use() == gpu.idle
    assert gpu.job(held)["status"] == "pending"
