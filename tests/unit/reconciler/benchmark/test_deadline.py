"""Probes that hang, die or crash: no process of theirs is left."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.benchmark.harness.compute import time_on_all_cpus
from reconciler.benchmark.harness.main import within
from reconciler.benchmark.harness.probe import Failed, Skipped

# The forked processes use the main thread only.
pytestmark = [
    pytest.mark.covers("HOST-12"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def test_the_document_of_a_probe() -> None:
    assert within(10, lambda: {"metrics": [1]}) == {"status": "ok", "reason": None, "metrics": [1]}
    big = within(10, lambda: {"metrics": ["x" * 300_000]})
    assert len(big["metrics"][0]) == 300_000, "more than a pipe holds"


def test_cuda_keeps_no_kernels_in_a_home() -> None:
    outcome = within(10, lambda: {"subject": os.environ.get("CUDA_CACHE_DISABLE")})
    assert outcome["subject"] == "1"


def test_a_probe_that_hangs_is_ended_with_its_tools(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def hang() -> dict[str, Any]:
        tool = subprocess.Popen(["sleep", "60"])
        file.write_text(str(tool.pid))
        tool.wait()
        return {}

    # A busy machine may not get as far as the tool in a short time.
    for limit_s in (0.5, 5.0, 50.0):
        began = time.monotonic()
        outcome = within(limit_s, hang)
        assert outcome["reason"]["code"] == "probe_deadline"
        assert time.monotonic() - began < limit_s + 30
        if file.exists() and file.read_text():
            break
    # Its parent is dead too, so its new parent reaps it.
    end = time.monotonic() + 30
    while (state := _state(int(file.read_text()))) not in ("", "Z") and time.monotonic() < end:
        time.sleep(0.01)
    assert state in ("", "Z")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _raise(error: Exception) -> dict[str, Any]:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Skipped("not_requested", expected="a", found="b", remedy="c"), "skipped", "not_requested"),
        (ValueError("odd"), "failed", "probe_crashed"),
    ],
)
def test_a_probe_that_gives_up(error: Exception, status: str, code: str) -> None:
    outcome = within(10, lambda: _raise(error))
    assert (outcome["status"], outcome["reason"]["code"]) == (status, code)


def test_a_probe_that_dies() -> None:
    outcome = within(10, lambda: os._exit(1))
    assert outcome["reason"]["code"] == "probe_died"


def test_all_cpus_work_at_the_same_time() -> None:
    seconds = time_on_all_cpus(lambda: lambda: time.sleep(0.02), 2)
    assert len(seconds) == 2
    assert all(0.02 <= each < 60 for each in seconds)


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(Failed, match="worker_died"):
        time_on_all_cpus(lambda: lambda: os._exit(1), 1)
    with pytest.raises(Failed, match="worker_died"):
        time_on_all_cpus(lambda: _raise(MemoryError()), 1)
