"""A pool over the end of its service: adopted by the next, and ended without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from reconciler.db.engine import open_engine, transaction
from reconciler.model.states import Role
from reconciler.records import projects, tokens
from reconciler.settings import Settings
from tests.unit.reconciler.conftest import ADMIN
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


@pytest.mark.covers("ORCH-2")
def test_a_member_s_job_is_answered_by_the_shipped_model(tmp_path: Path) -> None:
    """By the path that needs no name of a project."""
    with serving(tmp_path) as service:
        service.start()
        until(service.ready)
        engine = open_engine(Settings(state_dir=tmp_path).database)
        with transaction(engine) as conn:
            projects.create(conn, "demo", ADMIN, id="demo")
            given = {"role": Role.PROJECT_MEMBER, "project_id": "demo"}
            _, secret = tokens.issue(conn, ADMIN, name="member", **given)
        engine.dispose()
        until(lambda: pools(service, "hosts"))
        pools(service, "start", "a", "--model", "digits", "--memory", "512", "--wait")
        with httpx.Client(
            base_url=f"{service.url}/api/v1",
            headers={"Authorization": f"Bearer {secret}"},
            trust_env=False,
            timeout=30,
        ) as member:
            one, seven = [0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]
            body = {"model": "digits", "input": {"segments": [one, seven]}}
            answer = member.post("/jobs", json=body)
            assert answer.status_code == 201, answer.text
            path = f"/projects/demo/jobs/{answer.json()['id']}"

            def ended() -> Any:
                job = member.get(path).json()
                return job if job["status"] not in ("pending", "running") else None

            job = until(ended)
        assert (job["status"], job["failure"]) == ("done", None)
        assert job["result"]["digit"] == [1, 7]
        assert [round(sum(row), 3) for row in job["result"]["probability"]] == [1, 1]
        pools(service, "stop", "a", "--wait")
        service.check()


def is_gone(pid: int) -> bool:
    """Whether a process has ended. The test's machine may have nobody who collects it."""
    try:
        return not Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return not alive(pid)
