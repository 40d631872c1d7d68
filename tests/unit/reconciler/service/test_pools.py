"""A pool over the end of its service: adopted by the next, and ended without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reconciler.service.service import Service, alive, serving, until

pytestmark = pytest.mark.covers("ORCH-1")


def pools(service: Service, *words: str) -> Any:
    answer = service.gpuaas("pools", *words, "--direct", "--output", "json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_workers_outlive_the_service_and_end_without_it(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        service.start()
        until(service.ready)
        until(lambda: pools(service, "hosts"))
        start = ("start", "a", "--model", "digits", "--memory", "512", "--grace", "5", "--wait")
        pool = pools(service, *start)
        assert pool["state"] == "running", service.log()
        (worker,) = pool["workers"]
        service.kill()
        assert alive(worker["pid"])

        second = service.start("worker")
        until(lambda: service.gpuaas("pools", "list", "--direct").stdout.count("running"))
        (same,) = pools(service, "list")
        assert [each["pid"] for each in same["workers"]] == [worker["pid"]]
        service.kill()
        assert not alive(second)

        (ended,) = [pools(service, "stop", "a")]
        assert (ended["state"], ended["workers"]) == ("stopped", [])
        until(lambda: is_gone(worker["pid"]))
        assert pools(service, "list") == []
        service.check()


def is_gone(pid: int) -> bool:
    """Whether a process has ended. The test's machine may have nobody who collects it."""
    try:
        return not Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return not alive(pid)
