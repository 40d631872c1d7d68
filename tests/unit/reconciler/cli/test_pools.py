"""`gpuaas pools` against a real service, and on a database without a running service."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.engine import transaction
from reconciler.db.schema import Job, PoolWorker
from reconciler.db.schema import pools as table
from reconciler.pools import memory, processes, workers
from reconciler.records import projects
from reconciler.runs import lock
from reconciler.runs.paths import runner_id
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.api.test_pools import HOST, with_host
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-3")


def run(gpuaas: Gpuaas, *words: str) -> Any:
    return json.loads(gpuaas("pools", *words, "--output", "json") or "null")


def test_the_life_of_a_pool(new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> None:
    gpuaas.at(new)
    with_host(new)
    pool = run(gpuaas, "start", "a", "--model", "digits", "--device", "GPU-0", "--kill-on-oom")
    assert (pool["state"], pool["kill_on_oom"]) == ("requested", True)
    assert run(gpuaas, "show", "a") == pool
    assert [each["id"] for each in run(gpuaas, "list")] == [pool["id"]]
    assert run(gpuaas, "leases")[0]["device"] == "GPU-0"
    assert run(gpuaas, "hosts")[0]["name"] == "control"
    run(gpuaas, "start", "b", "--model", "none")
    assert (gpuaas.status, "model_unknown" in gpuaas.err) == (1, True)
    with transaction(new.engine) as conn:
        conn.execute(sa.update(table).values(state="running"))

    def end(_seconds: float) -> None:
        with transaction(new.engine) as conn:
            conn.execute(sa.update(table).values(state="evicted"))

    monkeypatch.setattr(time, "sleep", end)
    assert run(gpuaas, "evict", "a", "--wait")["state"] == "evicted"
    assert run(gpuaas, "list") == []
    assert len(run(gpuaas, "list", "--all")) == 1
    for words in ((), ("a", "--all")):
        gpuaas("pools", "stop", *words)
        assert (gpuaas.status, "request_invalid" in gpuaas.err) == (1, True)
    assert run(gpuaas, "stop", "--all") == []

    def ends(_seconds: float) -> None:
        with transaction(new.engine) as conn:
            conn.execute(sa.update(table).where(table.c.name == "c").values(state="failed"))

    monkeypatch.setattr(time, "sleep", ends)
    assert run(gpuaas, "start", "c", "--model", "digits", "--wait")["state"] == "failed"
    assert gpuaas.status == 1, "a script must not go on as if it ran"


def test_the_largest_pool_is_the_first(new: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)
    with_host(new)
    sizes = {"small": 1, "large": 3, "middle": 2}
    for name, size in sizes.items():
        pool = run(gpuaas, "start", name, "--model", "digits", "--memory", "256")
        values = {"id": name, "pool_id": pool["id"], "pid": 1, "models": ["digits"]}
        values |= {"host": "control", "boot_id": "b", "memory_bytes": size << 20}
        with transaction(new.engine) as conn:
            rows.add(conn, PoolWorker, values)
    assert [pool["name"] for pool in run(gpuaas, "list")] == ["large", "middle", "small"]


@pytest.mark.parametrize("direct", [False, True])
def test_a_project_may_be_named(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, *, direct: bool
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    monkeypatch.setenv("GPUAAS_DATABASE_URL", new.settings.database)
    if not direct:
        gpuaas.at(new)
    with transaction(new.engine) as conn:
        project = projects.create(conn, "research", ADMIN)
    flags = ["--direct"] if direct else []
    words = ("start", "c", "--model", "m", "--target", "remote", "--project")
    assert run(gpuaas, *words, "research", *flags)["project_id"] == project.id
    of_project = ("list", *flags, "--project")
    (pool,) = run(gpuaas, *of_project, project.id)
    assert (pool["name"], pool["target"], pool["workers"]) == ("c", "remote", 0)
    assert run(gpuaas, *of_project, "demo") == []
    run(gpuaas, *of_project, "none")
    assert (gpuaas.status, "project_not_found" in gpuaas.err) == (1, True), gpuaas.err
    if direct:
        assert run(gpuaas, *of_project, "research") == [pool]
    with transaction(new.engine) as conn:
        conn.execute(sa.update(table).values(state="stopped"))
    assert run(gpuaas, *of_project, project.id) == []
    assert len(run(gpuaas, *of_project, project.id, "--all")) == 1


def test_without_a_service_it_works_on_the_database(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    monkeypatch.setenv("GPUAAS_DATABASE_URL", new.settings.database)
    monkeypatch.setattr(memory, "gpus", list)
    here = {**HOST, "id": runner_id(new.settings.state_dir)}
    with transaction(new.engine) as conn:
        workers.report(conn, here, {})
        workers.report(conn, {**HOST, "id": "far", "name": "far"}, {})
    start = ("start", "--model", "digits", "--direct")
    pool = run(gpuaas, *start, "a", "--host", here["id"])
    run(gpuaas, *start, "b", "--host", "far")
    with transaction(new.engine) as conn:
        conn.execute(sa.update(table).values(state="running"))
        values = {"id": "w1", "pool_id": pool["id"], "pid": 1, "models": ["digits"]}
        rows.add(conn, PoolWorker, {**values, "host": "control", "boot_id": "old"})
    assert {each["state"] for each in run(gpuaas, "list", "--direct")} == {"running"}
    # As the API refuses it.
    for words in (("a b",), ("c", "--grace", "601"), ("c", "--target", "remote")):
        run(gpuaas, *start, *words)
        assert (gpuaas.status, "request_invalid" in gpuaas.err) == (1, True), gpuaas.err
    assert processes.scan(here["id"]) == {}
    assert run(gpuaas, "stop", "a", "--direct")["state"] == "stopped"
    run(gpuaas, "evict", "b", "--host-lost", "--direct")
    assert (gpuaas.status, "reason_required" in gpuaas.err) == (1, True), gpuaas.err
    assert run(gpuaas, "evict", "b", "--direct")["state"] == "stopping"
    assert "ended by the service on its host far" in gpuaas.err
    apart = ("start", "r", "--model", "m", "--target", "remote", "--project", "demo", "--direct")
    id = run(gpuaas, *apart)["id"]
    with transaction(new.engine) as conn:
        values = {"id": "w2", "pool_id": id, "pid": 1, "models": ["m"], "host": "far"}
        rows.add(conn, PoolWorker, values)
        held = {"model": "m", "input": {}, "status": "running", "worker": "w2", "token": "t"}
        held |= {"project_id": "demo", "error": {}, "requested_by": "x", "lease_expires_at": 1e10}
        rows.add(conn, Job, {**held, "id": "j1"})
    assert run(gpuaas, "stop", "r", "--direct")["state"] == "draining"
    assert "its workers may end their jobs" in gpuaas.err
    assert run(gpuaas, "evict", "r", "--direct")["state"] == "evicted"


def test_without_a_leader_a_drain_ends_at_its_deadline(
    new: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that hangs with a job: nothing else has a look at the deadline."""
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(new.settings.state_dir))
    monkeypatch.setenv("GPUAAS_DATABASE_URL", new.settings.database)
    monkeypatch.setattr(memory, "gpus", list)
    here = {**HOST, "id": runner_id(new.settings.state_dir)}
    with transaction(new.engine) as conn:
        workers.report(conn, here, {})
    pool = run(gpuaas, "start", "a", "--model", "digits", "--grace", "1", "--direct")
    looks, sleep = iter(range(300)), time.sleep

    def look(seconds: float) -> None:
        if next(looks) == 0:
            with transaction(new.engine) as conn:
                conn.execute(sa.update(table).values(deadline_at=1.0))
        sleep(seconds)

    mark = {processes.MARK: f"{here['id']}/w1"}
    with subprocess.Popen(["sleep", "600"], env=mark) as process:
        try:
            (started,) = until(lambda: processes.scan(here["id"]).get("w1"))
            process.send_signal(signal.SIGSTOP)
            with transaction(new.engine) as conn:
                conn.execute(sa.update(table).values(state="running"))
                worker = {"id": "w1", "pool_id": pool["id"], "host": "control", "models": ["m"]}
                worker |= {**vars(started), "boot_id": lock.boot_id()}
                rows.add(conn, PoolWorker, worker)
                held = {"model": "m", "input": {}, "status": "running", "worker": "w1"}
                held |= {"project_id": "demo", "error": {}, "requested_by": "x", "token": "t"}
                rows.add(conn, Job, {**held, "id": "j1", "lease_expires_at": 1e10})
            monkeypatch.setattr(time, "sleep", look)
            assert run(gpuaas, "stop", "a", "--direct")["state"] == "stopped"
            assert process.wait() == -signal.SIGKILL
        finally:
            process.kill()
    draining, stopping = gpuaas.err.splitlines()
    assert draining.startswith("pool a is draining: until 20")
    assert draining.endswith("jobs that it runs: 1")
    assert stopping == "pool a is stopping: SIGKILL follows SIGTERM in 1 s"
