"""The same history and the same rules on PostgreSQL."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from reconciler.db import journal, leader, migrations
from reconciler.db import rows as db_rows
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.migrations import migrate
from reconciler.lifecycle import launch, slices
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, Role
from reconciler.records import allocations, claims, leasing, nodes, tokens
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import ADMIN, PostgresDatabase, Site

pytestmark = pytest.mark.postgres
HEAD = ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head()


@pytest.fixture
def engine(postgres_database: PostgresDatabase) -> sa.Engine:
    """An empty database."""
    return postgres_database.restore()


@pytest.fixture
def sold(engine: sa.Engine, site: Site) -> Site:
    """Node n1 with two slots on sale, for other modules too."""
    site.node()
    return site


@pytest.mark.covers("CTRL-2")
def test_the_whole_life(engine: sa.Engine, site: Site) -> None:
    site.node()
    with transaction(engine) as conn:
        allocation_id = site.active(conn, 2)
        launch.release(conn, allocation_id, site.act)
        given = site.proofs(conn, allocation_id)
        absence = {"absent": True}
        assert slices.release_succeeded(
            conn, allocation_id, site.act, proofs=given, absence=absence
        )
    with reading(engine) as conn:
        assert site.statuses(conn) == ["available", "available"]
        assert allocations.get(conn, allocation_id).state == "released"


@pytest.mark.covers("CTRL-8")
def test_no_task_begins_while_a_newer_version_migrates(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its change is not visible before its commit, and commits within a wait for a lock."""
    changed, commit = Event(), Event()

    def upgrade(config: Config, _to: str) -> None:
        conn = config.attributes["connection"]
        conn.exec_driver_sql("LOCK TABLE tasks")
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        changed.set()
        assert commit.wait(30)

    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        sold.allocate(conn)
        sold.allocate(conn)
        (task,) = leasing.lease(conn, "w")
    settings, handler = Settings(state_dir=tmp_path), HANDLERS[task.kind]
    monkeypatch.setattr(command, "upgrade", upgrade)
    with ThreadPoolExecutor(3) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "head", lambda: "9999")
            migration = pool.submit(migrate, sold.engine)
            assert changed.wait(30)
        try:
            # Who only reads the revision does not wait.
            assert migrations.current(sold.engine) == HEAD
            waiting: list[Future[Any]] = [
                pool.submit(worker.prepare, sold.engine, settings, handler, task, "r"),
                pool.submit(retrying, sold.engine, partial(worker._lease, owner="w", limit=1)),
            ]
            done = wait(waiting, timeout=1).done
            assert not [each.exception() for each in done]
        finally:
            commit.set()
        for each in waiting:
            with pytest.raises(Problem, match="schema_outdated"):
                each.result()
        migration.result()


@pytest.mark.covers("ORCH-4")
def test_the_runbook_s_release_of_the_leader_s_lock_releases_nothing(engine: sa.Engine) -> None:
    with transaction(engine) as conn:
        assert leader.campaign(conn, leader.LOOPS, "a", 30)
    other = engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as holder, other.connect() as stranger:
        with pytest.raises(sa.exc.ProgrammingError, match=r"release_lock.* does not exist"):
            stranger.exec_driver_sql("SELECT RELEASE_LOCK('gpu_orchestrator_leader')")
        # PostgreSQL's own locks of this kind belong to the session that took them.
        holder.exec_driver_sql("SELECT pg_advisory_lock(7)")
        release = stranger.exec_driver_sql("SELECT pg_advisory_unlock(7)")
        assert release.scalar_one() is False
        assert stranger.exec_driver_sql("SELECT pg_try_advisory_lock(7)").scalar_one() is False
    with transaction(engine) as conn:
        assert leader.campaign(conn, leader.LOOPS, "b", 30) is None, "the first still leads"
        leader.release(conn, leader.LOOPS, ADMIN)
        assert leader.campaign(conn, leader.LOOPS, "b", 30), "that is what releases it"


@pytest.mark.covers("CTRL-2", "I2", "I4", "I20")
def test_schema_refuses_what_it_must(engine: sa.Engine, site: Site) -> None:
    site.node()
    with transaction(engine) as conn:
        allocation_id = site.allocate(conn)
        nodes.create(conn, site.act, id="n2", mode=NodeMode.BAREMETAL)
        claims.claim_node(conn, allocation_id, "n2", site.act)
        for statement in (
            sa.update(tables.nodes).values(mode="slice"),
            sa.update(tables.slots).values(status="available"),
            sa.update(tables.history).values(reason="changed"),
            sa.update(tables.claims).values(slot_id=None),
            sa.text("TRUNCATE audit_log"),
            sa.text("TRUNCATE state_history"),
            sa.text("TRUNCATE wipe_proofs"),
        ):
            with pytest.raises(sa.exc.DBAPIError), conn.begin_nested():
                conn.execute(statement)


@pytest.mark.covers("CTRL-4", "CTRL-5", "I1")
def test_many_at_once(engine: sa.Engine, site: Site) -> None:
    for number, node in enumerate(("n1", "n2")):
        site.node(node, (0, 1, 3), number)

    def client(_: int) -> str:
        try:
            return str(retrying(engine, site.allocate))
        except Problem as problem:
            return problem.code

    def worker(number: int) -> list[str]:
        taken = retrying(engine, lambda conn: leasing.lease(conn, f"w{number}", limit=2))
        return [task.id for task in taken]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client, range(10)))
        leased = [task for taken in pool.map(worker, range(8)) for task in taken]
    # A worker skips tasks that another worker has locked; its next look finds them.
    leased += [task for number in range(3) for task in worker(number)]
    assert answers.count("no_capacity") == 4
    assert len(leased) == len(set(leased)) == 6
    with reading(engine) as conn:
        assert site.statuses(conn) == site.statuses(conn, "n2") == ["reserved"] * 3


def test_pages_hold_every_row_once(engine: sa.Engine, site: Site) -> None:
    site.node()
    with transaction(engine) as conn:
        for number in range(5):
            nodes.create(
                conn, site.act, id=f"n{number + 2}", name=f"Ä {number}", address="10.0.2.9"
            )
            tokens.issue(conn, site.act, role=Role.PLATFORM_ADMIN, name=f"t{number}")
    for order, read in (
        (nodes.ORDER, nodes.every),
        (tokens.ORDER, tokens.every),
        (journal.AUDIT_ORDER, journal.audit_rows),
    ):
        with reading(engine) as conn:
            whole = [row.id for row in read(conn)]
            ids: list[Any] = []
            page = db_rows.Page(2)
            while rows := read(conn, page=page):
                ids += [row.id for row in rows]
                # As the API does it: the place goes out as JSON and comes back.
                page = db_rows.Page(2, tuple(json.loads(json.dumps(order.keys(rows[-1])))))
        assert ids == whole
        assert len(set(ids)) == len(ids) >= 5


@pytest.mark.covers("CTRL-8", "I3")
def test_a_relay_misses_nothing_that_commits_late(engine: sa.Engine) -> None:
    """Where transactions overlap, the first event in the outbox may become visible last."""
    taken: list[str] = []

    def deliver() -> None:
        with transaction(engine) as conn:
            pending = relay.pending_events(conn)
            relay.mark_published(conn, [event.id for event in pending])
        taken.extend(event.subject_id for event in pending)

    with transaction(engine) as slow:
        journal.emit(slow, "slot.available", "slot", "late", payload={})
        with transaction(engine) as conn:
            journal.emit(conn, "slot.reserved", "slot", "early", payload={})
        deliver()
    deliver()
    assert taken == ["early", "late"]
    deliver()
    assert taken == ["early", "late"], "each once, where nothing fails"
