"""Drills on a running service: each ends with a verdict that its evidence carries."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.cli import drill, session
from reconciler.cli.main import main
from reconciler.db import leader
from reconciler.db.engine import open_engine, reading, transaction
from reconciler.db.schema import PoolWorker
from reconciler.db.schema import jobs as table
from reconciler.model.errors import Problem
from reconciler.pools import jobs, pools
from reconciler.records import projects
from tests.unit.reconciler.service.service import Service, alive, serving, until

pytestmark = pytest.mark.covers("ORCH-7")

Gpuaas = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Iterator[Service]:
    """A service with two candidates for the lead, an operator and a project."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(template, folder / "reconciler.db")
    with serving(folder) as service:
        service.start()
        until(service.ready)
        service.start("worker")
        yield service


@pytest.fixture(scope="module")
def engine(site: Service) -> Iterator[sa.Engine]:
    engine = open_engine(f"sqlite:///{site.folder / 'reconciler.db'}")
    yield engine
    engine.dispose()


@pytest.fixture
def gpuaas(
    site: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Gpuaas:
    """The program in this process: the document that it prints, with its status."""
    for name, value in site.environment().items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main(["--output", "json", *words])
        if opened := vars(session.current()).get("client"):
            opened.close()
        output = capsys.readouterr()
        document: dict[str, Any] = json.loads(output.out or "{}")
        assert document or not ended.value.code, output.err
        return document | {"status": ended.value.code}

    if not (site.folder / "token").exists():
        run("token", "create", "--role", "platform-admin", "--name", "op", "--save")
        run("projects", "add", "drills")
    return run


def verdict(document: dict[str, Any]) -> str:
    """The verdict, which follows from the evidence and gives the exit status."""
    passed = all(row["holds"] for row in document["evidence"])
    assert passed == (document["verdict"] == "passed") == (document["status"] == 0), document
    return str(document["verdict"])


def steps(document: dict[str, Any]) -> dict[str, str]:
    return {row["step"]: row["found"] for row in document["evidence"]}


@pytest.fixture
def kept(gpuaas: Gpuaas, engine: sa.Engine) -> Iterator[None]:
    """The pool `kept` of one worker, and two candidates for the lead."""

    def candidates() -> int:
        with reading(engine) as conn:
            return leader.live_roles(conn).get("loops", 0)

    until(lambda: candidates() == 2 and hosts(engine))
    gpuaas("pools", "start", "kept", "--model", "drill", "--memory", "256", "--wait")
    yield
    gpuaas("pools", "stop", "kept", "--wait")


@pytest.mark.usefixtures("kept")
def test_leader(gpuaas: Gpuaas) -> None:
    document = gpuaas("drill", "leader")
    assert verdict(document) == "passed", document
    evidence = steps(document)["the workers of pools are known and serve as before"]
    assert evidence == "1 workers before; gone: [], without a heartbeat: []"
    leaders = steps(document)["another process leads, if there is one"]
    after, _, before, *_ = leaders.split()
    assert after != before and "of 2 candidates" in leaders
    shown = gpuaas("leader")
    assert (shown["live"], shown["holder"]) == (True, after)


@pytest.mark.usefixtures("kept")
def test_leader_fails_if_a_pool_loses_a_worker(
    gpuaas: Gpuaas, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while no process leads."""
    (worker,) = gpuaas("pools", "show", "kept")["workers"]
    follow = drill._until
    ended = sa.select(PoolWorker.TABLE.c.ended_at).where(PoolWorker.TABLE.c.id == worker["id"])

    def is_recorded() -> bool:
        with reading(engine) as conn:
            return conn.execute(ended).scalar() is not None

    def kill(seconds: float, ask: Callable[[], object]) -> bool:
        monkeypatch.setattr(drill, "_until", follow)
        os.kill(worker["pid"], signal.SIGKILL)
        until(is_recorded)
        return follow(seconds, ask)

    monkeypatch.setattr(drill, "_until", kill)
    document = gpuaas("drill", "leader")
    assert verdict(document) == "failed"
    (lost,) = (row for row in document["evidence"] if not row["holds"])
    assert lost["found"].startswith(f"1 workers before; gone: ['{worker['id']}']")


def test_drain(gpuaas: Gpuaas) -> None:
    document = gpuaas("drill", "drain", "--project", "drills")
    assert verdict(document) == "passed", document
    shown = steps(document)
    assert shown["a new job is refused"] == "maintenance, again after 30 s"
    assert shown["all jobs are done"] == str(["done"] * 4)


def test_drain_is_refused_during_maintenance_and_does_not_end_it(gpuaas: Gpuaas) -> None:
    gpuaas("maintenance", "drain", "--wait", "--reason", "an upgrade")
    assert verdict(gpuaas("drill", "drain", "--project", "drills")) == "failed"
    state = gpuaas("maintenance")
    assert (state["mode"], state["reason"]) == ("drained", "an upgrade")
    assert gpuaas("maintenance", "normal")["mode"] == "normal"


def test_reclaim(gpuaas: Gpuaas, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of the killed worker expires at once here, and the next worker takes no time."""
    submit = drill._Jobs.submit
    monkeypatch.setattr(drill._Jobs, "submit", lambda jobs, _: submit(jobs, [{"seconds": 60}]))
    workers = PoolWorker.TABLE
    running = sa.select(workers.c.pid).join(table, table.c.worker == workers.c.id)
    running = running.where(table.c.status == "running")

    def holder() -> int | None:
        with reading(engine) as conn:
            return conn.execute(running).scalar()

    def expire() -> None:
        pid = until(holder)
        assert pid is not None
        until(lambda: not alive(pid))
        dead = sa.update(table).where(table.c.status == "running")
        with transaction(engine) as conn:
            conn.execute(dead.values(lease_expires_at=1.0, input={"seconds": 0}))

    thread = threading.Thread(target=expire)
    thread.start()
    document = gpuaas("drill", "reclaim", "--project", "drills")
    thread.join()
    assert verdict(document) == "passed", document
    assert steps(document)["its loss is recorded"] == "lost 1 times"


def test_evict(gpuaas: Gpuaas, engine: sa.Engine) -> None:
    until(lambda: hosts(engine))
    # Ends during the drill, as the pool of the drill before may.
    gpuaas("pools", "start", "other", "--model", "drill", "--memory", "256", "--wait")
    gpuaas("pools", "stop", "other")
    document = gpuaas("drill", "evict", "--project", "drills")
    assert verdict(document) == "passed", document
    shown = steps(document)
    assert shown["its processes are gone"].startswith("[] left of [")
    before, _, now, _ = shown["it is counted"].split()
    assert int(now) == int(before) + 1
    assert shown["its job ended once"].startswith("done, 1 attempts")


def test_oom(gpuaas: Gpuaas, engine: sa.Engine) -> None:
    """Without the memory controller, the drill says so, and has no verdict of its own count."""
    until(lambda: hosts(engine))
    document = gpuaas("drill", "oom", "--project", "drills")
    shown = steps(document)
    if hosts(engine) == ["process"]:
        assert verdict(document) == "failed" and len(shown) == 1
    else:
        assert verdict(document) == "passed", document
        assert shown["the kernel has counted it"] >= "oom_kill 1"
        evidence = shown["a pool with kill_on_oom is evicted for its memory"]
        assert evidence.startswith("evicted") and evidence.endswith("memory_exceeded")


def hosts(engine: sa.Engine) -> list[str]:
    with reading(engine) as conn:
        return [host.isolation for host in pools.hosts(conn)]


def test_a_drill_that_fails_leaves_no_jobs(
    gpuaas: Gpuaas, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dead letters would be in the way of the next drill, and others wait for ever."""

    def refuse(*_: object, **__: object) -> None:
        raise Problem("canary", expected="a", found="b", remedy="c")

    monkeypatch.setattr(drill._Jobs, "reprocess", refuse)
    document = gpuaas("drill", "dlq", "--project", "drills", "--count", "2")
    assert verdict(document) == "failed" and "canary" in str(document)
    with reading(engine) as conn:
        left = conn.execute(sa.select(table.c.status)).scalars().all()
    assert set(left) <= {"done", "canceled"}


def test_dlq(gpuaas: Gpuaas, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of other projects cannot call the drill's model, and after the drill it is gone."""
    reach = drill._Jobs.reach
    others: list[str] = []

    def models(project: str) -> list[str]:
        with reading(engine) as conn:
            served = jobs.models(conn, projects.id_of(conn, project))
        return [each.name for each in served if each.name.startswith("drill-")]

    def look(*arguments: Any) -> None:
        reach(*arguments)
        assert len(models("drills")) == 1
        others.extend(models("others"))

    monkeypatch.setattr(drill._Jobs, "reach", look)
    document = gpuaas("drill", "dlq", "--project", "drills", "--count", "7")
    assert verdict(document) == "passed", document
    assert steps(document)["a bad sample keeps the others back"] == "sample_unfinished"
    assert steps(document)["all are done"] == str(["done"] * 7)
    assert (others, models("drills")) == ([], [])

    def living() -> list[str]:
        with reading(engine) as conn:
            names = [pool.name for pool in pools.every(conn, live=True)]
        return [name for name in names if name.startswith("drill-")]

    until(lambda: not living())
