"""A pool over the end of its service: adopted by the next, and ended without any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db.engine import open_engine, reading, retrying, transaction
from reconciler.db.migrations import program_version
from reconciler.db.schema import jobs, pool_workers
from reconciler.model.states import Role
from reconciler.pools.jobs import NewJob, enqueue
from reconciler.records import projects, tokens
from reconciler.settings import Settings
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.pools.load import Load
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


@pytest.mark.covers("ORCH-5")
def test_an_upgrade_of_the_service_under_load_fails_no_job(tmp_path: Path) -> None:
    """The workers of its pool are of the version before, and go on until each is replaced."""
    with serving(tmp_path) as service, closing_engine(tmp_path) as engine:
        service.start()
        until(service.ready)
        until(lambda: pools(service, "hosts"))
        start = ("start", "a", "--model", "digits", "--memory", "512", "--replicas", "2", "--wait")
        former = {worker["id"] for worker in pools(service, *start)["workers"]}
        with transaction(engine) as conn:
            projects.create(conn, "demo", ADMIN, id="demo")
        job = NewJob("digits", {"segments": [[0, 1, 1, 0, 0, 0, 0]]}, max_attempts=1)

        def send(_number: int) -> list[str]:
            return retrying(engine, lambda conn: enqueue(conn, "demo", [job], ADMIN))

        def done() -> int:
            query = sa.select(sa.func.count()).where(jobs.c.status == "done")
            with reading(engine) as conn:
                return int(conn.execute(query).scalar_one())

        load = Load(send, 0.05)
        until(lambda: done() > 10)
        service.kill()
        with transaction(engine) as conn:
            conn.execute(sa.update(pool_workers).values(version=""))
        ran = done()
        until(lambda: done() > ran + 10)
        service.start("worker")

        def replaced() -> bool:
            (pool,) = pools(service, "list")
            loaded = [worker for worker in pool["workers"] if worker["models"]]
            assert loaded, "the jobs go on"
            versions = {worker["version"] for worker in loaded}
            others = {worker["id"] for worker in loaded} - former
            return len(others) == 2 and versions == {program_version()}

        until(replaced)
        ran = done()
        until(lambda: done() > ran + 10)
        load.stop()
        until(lambda: done() == len(load.sent))
        with reading(engine) as conn:
            ended = conn.execute(sa.select(jobs.c.attempts, jobs.c.lost).distinct()).all()
        assert ended == [(1, 0)]
        pools(service, "stop", "a")
        service.check()


@contextmanager
def closing_engine(folder: Path) -> Iterator[sa.Engine]:
    engine = open_engine(Settings(state_dir=folder).database)
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.mark.covers("ORCH-2")
def test_a_member_s_job_is_answered_by_the_shipped_model(tmp_path: Path) -> None:
    """By the path that needs no name of a project."""
    with serving(tmp_path) as service:
        service.start()
        until(service.ready)
        with closing_engine(tmp_path) as engine, transaction(engine) as conn:
            projects.create(conn, "demo", ADMIN, id="demo")
            given = {"role": Role.PROJECT_MEMBER, "project_id": "demo"}
            _, secret = tokens.issue(conn, ADMIN, name="member", **given)
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
    """Whether a process has ended. The test's machine may have no process that reaps it."""
    try:
        return not Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return not alive(pid)
