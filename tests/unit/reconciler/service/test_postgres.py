"""Several workers on the same PostgreSQL, and that database ended as by a power cut."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from reconciler.db import idempotency, leader
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, reading, retrying, transaction
from reconciler.db.idempotency import Answer, Call, once
from reconciler.db.migrations import migrate
from reconciler.lifecycle import launch
from reconciler.model.errors import Problem
from reconciler.model.states import AllocationState, Role, TaskState
from reconciler.records import allocations, nodes, tokens
from reconciler.trust.ca import open_trust
from tests.postgresql import Server as Postgres
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.service.service import Service, pauses, serving, until
from tests.unit.reconciler.service.tenants import LIMIT_S, Tenants

pytestmark = pytest.mark.postgres
T = TypeVar("T")
LIVES = ("machine-a", "machine-b")
# Fewer allocations would show little.
MANY = 5
PASSING = {"idempotency_in_flight", "generation_conflict"}


@pytest.fixture
def selling_site(postgres: Postgres) -> Iterator[Site]:
    """Two nodes with three slots each, in a database of their own."""
    yield from selling_site_at(postgres.database(f"site_{uuid.uuid4().hex[:8]}"))


def selling_site_at(url: str) -> Iterator[Site]:
    """Two nodes with three slots each, in an empty database."""
    engine = open_engine(url)
    migrate(engine)
    site = Site(engine)
    for number, node in enumerate(("n1", "n2")):
        site.node(node, (0, 1, 3), number)
        with transaction(engine) as conn:
            nodes.change(conn, node, ADMIN, profile="lab")
    yield site
    engine.dispose()


class Load:
    """Launches and releases through the store, each exactly once, even if its answer is lost.

    `Tenants` do the same over HTTP, beside it.
    """

    def __init__(self, site: Site) -> None:
        self.promised: set[str] = set()
        self._site = site
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._live) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _live(self) -> None:
        while not self._over.is_set():
            key = str(uuid.uuid4())
            try:
                answer = insist(lambda key=key: self._launch(key))
            except Problem as problem:
                assert problem.code == "no_capacity"
                time.sleep(0.05)
                continue
            name = answer.body["id"]
            self.promised.add(name)
            while not self._over.is_set() and not insist(lambda it=name: self._ended(it)):
                time.sleep(0.05)

    def _launch(self, key: str) -> Answer:
        def work(conn: sa.Connection) -> Answer:
            return Answer(201, {"id": self._site.allocate(conn)})

        return once(self._site.engine, Call("launch", key, {}), work)

    def _ended(self, name: str) -> bool:
        with reading(self._site.engine) as conn:
            state = allocations.get(conn, name).state
        if state == AllocationState.ACTIVE:
            retrying(self._site.engine, lambda conn: launch.release(conn, name, ADMIN))
        return state in (AllocationState.RELEASED, AllocationState.FAILED)


def insist(work: Callable[[], T]) -> T:
    """Ask until the database answers; it is never away for long."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            return work()
        except (exc.DBAPIError, Problem) as failure:
            passes = not isinstance(failure, Problem) or failure.code in PASSING
            if not passes or time.monotonic() > end:
                raise
        time.sleep(0.05)


@pytest.mark.covers("CTRL-9", "CTRL-2", "I3", "I21")
@pytest.mark.parametrize(
    "ends", [10, pytest.param(200, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_two_workers_and_a_database_that_ends_again_and_again(
    selling_site: Site,
    postgres: Postgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: int,
) -> None:
    # A caller that was cut off keeps its key for that long.
    monkeypatch.setattr(idempotency, "IN_FLIGHT_S", 1)
    url = selling_site.engine.url.render_as_string(hide_password=False)
    open_trust(tmp_path)
    with serving(tmp_path, GPUAAS_DATABASE_URL=url, GPUAAS_TASK_LEASE_S="5") as service:
        for life in LIVES:
            # As operations.md has it: the authorities are the site's, the runs the machine's.
            shutil.copytree(tmp_path / "trust", tmp_path / life / "trust")
            service.start("worker", state_dir=tmp_path / life)
        service.start("serve", "--api-only")
        until(service.ready)
        until(lambda: _roles(selling_site.engine) == {"api": 1, "worker": 2, "loops": 2})
        token = _token(selling_site)
        load = Load(selling_site)
        with Tenants(service.url, token, 1, selling_site.project, "base") as tenants:
            try:
                for pause in pauses(ends, 0.2, 0.8):
                    time.sleep(pause)
                    postgres.stop()
                    postgres.start()
                # A busy machine launches less in that time than there is to be judged.
                until(lambda: len(load.promised) > MANY)
                until(lambda: insist(lambda: len(_runners(selling_site.engine)) == len(LIVES)))
            finally:
                load.stop()
        until(lambda: insist(lambda: _at_rest(selling_site.engine)))
        until(service.ready)
        # While the database was away, clients over HTTP were told why, and to come back.
        assert set(tenants.unavailable) == {"database_unavailable"}
        assert 500 not in tenants.answers, service.log()[-3000:]
        assert tenants.launched
        _kept(selling_site.engine, service, load.promised | set(tenants.launched.values()))


def _roles(engine: sa.Engine) -> dict[str, int]:
    """Live processes by role: the API runs no tasks, and the workers serve no requests."""
    with reading(engine) as conn:
        return dict(leader.live_roles(conn))


def _token(site: Site) -> str:
    with transaction(site.engine) as conn:
        member = {"role": Role.PROJECT_MEMBER, "project_id": site.project}
        return tokens.issue(conn, ADMIN, name="tenant", **member)[1]


def _at_rest(engine: sa.Engine) -> bool:
    live = tables.tasks.c.state.in_([TaskState.QUEUED, TaskState.WAITING, TaskState.RUNNING])
    with reading(engine) as conn:
        return conn.execute(sa.select(tables.tasks.c.id).where(live)).first() is None


def _runners(engine: sa.Engine) -> set[str]:
    """The workers that had a task."""
    with reading(engine) as conn:
        return set(conn.execute(sa.select(tables.tasks.c.runner)).scalars()) - {""}


def _kept(engine: sa.Engine, service: Service, promised: set[str]) -> None:
    service.check()
    with reading(engine) as conn:
        ids = set(conn.execute(sa.select(tables.allocations.c.id)).scalars())
        done = list(conn.execute(sa.select(tables.tasks.c.run_id, tables.tasks.c.runner)))
        states = set(conn.execute(sa.select(tables.tasks.c.state)).scalars())
        leads = leader.read(conn, leader.LOOPS)
    assert ids == promised
    assert len(ids) > MANY
    assert states == {TaskState.SUCCEEDED}, service.log()[-3000:]
    # Each run began once, whichever of the two had its task; and both had some.
    assert service.began() == {run: 1 for run, _ in done}
    assert len({runner for _, runner in done}) == len(LIVES)
    assert leads["live"], "one of the two leads again"
    assert "correlation_id=corr-1 task_id=" in service.log()
