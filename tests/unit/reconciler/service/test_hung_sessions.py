"""A process that hangs inside a transaction on PostgreSQL; the site goes on without a person."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db import journal, leader, postgresql
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, reading, retrying, transaction, without_limits
from reconciler.db.leader import LOOPS
from reconciler.db.schema import Task
from reconciler.model.states import Role, TaskKind, TaskState
from reconciler.records import leasing, nodes, queue, tokens
from reconciler.service.process import Heartbeat
from reconciler.settings import Settings
from reconciler.trust.ca import open_trust
from reconciler.work import loops as work_loops
from reconciler.work.loops import Loop, Loops
from tests.postgresql import Server
from tests.silent_proxy import SilentProxy
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.service.service import Service, serving, until
from tests.unit.reconciler.service.test_postgres import selling_site_at

pytestmark = [pytest.mark.postgres, pytest.mark.covers("I12")]
# The limits in proportion to those of a site, so that the tests need not last as long.
LOCK = "1200ms"
LIMITS = f"-c lock_timeout={LOCK} -c idle_in_transaction_session_timeout=4s"
# Of a service whose requests wait for a lock until the test frees it.
PATIENT = "40s"
# The session of a paused process ends within that time, and its rows are free.
RECOVERED_S = 30.0
# Requests that do not need the locked row do not wait for it.
SOON_S = 15.0
# Of the 15 connections of a process, requests for the locked node occupy all.
REQUESTS = 30

HOLDER = """
import sys, time
import sqlalchemy as sa
from reconciler.db.engine import open_engine, transaction
with transaction(open_engine(sys.argv[1])) as conn:
    conn.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
    conn.execute(sa.text(sys.argv[2]))
    print("locked", flush=True)
    sys.stdin.readline()
    conn.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = '1s'"))
    print("limited", flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def selling_site(postgres: Server) -> Iterator[Site]:
    """Two nodes with three slots each, made without the limits, which a busy machine exceeds."""
    url = postgres.database(f"hung_{uuid.uuid4().hex[:8]}")
    for site in selling_site_at(url):
        site.engine = open_engine(f"{url}&options={quote(LIMITS)}")
        yield site
        site.engine.dispose()


@contextmanager
def hanging(site: Site, statement: str) -> Iterator[Callable[[], None]]:
    """A process that locks a row and is suspended then, as with its virtual machine. Its session
    has no limit until the function is called.
    """
    url = site.engine.url.render_as_string(hide_password=False)
    program = [sys.executable, "-c", HOLDER, url, statement]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, bufsize=1) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        stdout, stdin = holder.stdout, holder.stdin

        def limit() -> None:
            os.kill(holder.pid, signal.SIGCONT)
            stdin.write("\n")
            assert stdout.readline() == "limited\n"
            os.kill(holder.pid, signal.SIGSTOP)

        try:
            assert stdout.readline() == "locked\n"
            os.kill(holder.pid, signal.SIGSTOP)
            yield limit
        finally:
            holder.kill()


@pytest.mark.covers("CTRL-9")
def test_workers_take_the_work_of_other_nodes_and_then_of_the_locked_node(
    selling_site: Site,
) -> None:
    engine = selling_site.engine
    first = _discovery(engine, "n1")
    with transaction(engine) as conn:
        # More work than a worker looks at in a single query.
        for number in range(80):
            values = {**vars(first), "id": f"many-{number}", "subject_id": f"s{number}"}
            names = [column.name for column in tables.tasks.columns if column.computed is None]
            conn.execute(sa.insert(tables.tasks).values({name: values[name] for name in names}))
    last = _discovery(engine, "n2")

    with hanging(selling_site, "SELECT * FROM nodes WHERE id = 'n1' FOR UPDATE") as limit:
        assert _lease(engine) == [last.id]
        assert _lease(engine) == []
        limit()
        until(lambda: _lease(engine), RECOVERED_S)


@pytest.mark.covers("CTRL-2")
def test_the_api_answers_for_other_nodes_and_then_for_the_locked_node(
    selling_site: Site, tmp_path: Path
) -> None:
    given = _admin(selling_site.engine)
    with _site_service(selling_site, tmp_path) as service:
        service.start("serve")
        until(service.ready)

        def change(client: httpx.Client, number: int) -> int:
            body = {"name": f"n {number}", "reason": "test"}
            return client.patch("/nodes/n1", json=body).status_code

        with (
            hanging(selling_site, "SELECT * FROM nodes WHERE id = 'n1' FOR UPDATE") as limit,
            ThreadPoolExecutor(REQUESTS) as pool,
            httpx.Client(
                base_url=f"{service.url}/api/v1/admin",
                headers=given,
                timeout=2 * RECOVERED_S,
                trust_env=False,
                limits=httpx.Limits(max_connections=2 * REQUESTS),
            ) as client,
        ):
            answers = [pool.submit(change, client, number) for number in range(REQUESTS)]
            until(lambda: _waiting(selling_site.engine) > 1)
            began = time.monotonic()
            assert client.get("/nodes/n2").is_success
            assert time.monotonic() - began < SOON_S
            limit()
            assert {answer.result(2 * RECOVERED_S) for answer in answers} <= {200, 409, 503}
            assert change(client, 0) == 200
        until(service.ready)


@pytest.mark.covers("I9")
def test_another_leads_after_a_session_that_holds_the_leaders_row(selling_site: Site) -> None:
    engine = selling_site.engine
    both = [Heartbeat(engine, lambda: [LOOPS], term_s=4.0) for _ in range(2)]
    for heartbeat in both:
        heartbeat.start()
    try:
        until(lambda: any(heartbeat.term() for heartbeat in both))
        with hanging(selling_site, "SELECT * FROM leaders FOR UPDATE") as limit:
            until(lambda: not any(heartbeat.term() for heartbeat in both))
            limit()
            until(lambda: any(heartbeat.term() for heartbeat in both), RECOVERED_S)
    finally:
        for heartbeat in both:
            heartbeat.stop()


@pytest.mark.covers("I9")
def test_a_loop_that_waits_does_not_end_its_own_term(selling_site: Site) -> None:
    """It waits for a node that a hung session has locked, and is the leader all the while."""
    engine = selling_site.engine
    heartbeat = Heartbeat(engine, lambda: [LOOPS], term_s=8.0)
    heartbeat.start()
    term = heartbeat.term()
    assert term is not None
    led = leader.led_by(engine, term)

    def changed() -> bool:
        try:
            with transaction(led) as conn:
                conn.execute(sa.text("UPDATE nodes SET name = 'changed' WHERE id = 'n1'"))
        except sa.exc.OperationalError:
            assert heartbeat.term() == term
            return False
        return True

    try:
        with hanging(selling_site, "SELECT * FROM nodes WHERE id = 'n1' FOR UPDATE") as limit:
            began = time.monotonic()
            # Less than half of the term, with some time for a busy machine.
            assert not changed() and time.monotonic() - began < SOON_S
            limit()
            until(changed, RECOVERED_S)
        assert heartbeat.term() == term
    finally:
        heartbeat.stop()


@pytest.mark.covers("I9")
def test_a_leader_whose_loops_hang_gives_up_and_comes_back(
    selling_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_loops, "STUCK_S", 1.0)
    engine = selling_site.engine
    hung, go_on, acted = threading.Event(), threading.Event(), []

    def process(name: str, hangs: bool) -> tuple[Loops, Heartbeat]:
        def act(led: sa.Engine, _settings: Settings) -> None:
            # In the middle of a transaction, which keeps the term from changing hands.
            with transaction(led) as conn:
                journal.emit(conn, "written", "process", name, payload={})
                if hangs:
                    hung.set()
                    go_on.wait(600)
            acted.append(name)

        turning = lambda: [LOOPS] if loops.turning() else []  # noqa: E731
        heartbeat = Heartbeat(engine, turning, term_s=2.0)
        settings = Settings(state_dir=tmp_path, poll_s=0.1)
        loops = Loops(settings, engine, heartbeat.term, [Loop("act", 0.2, act)])
        loops.start()
        heartbeat.start()
        return loops, heartbeat

    def roles() -> dict[str, int]:
        with reading(engine) as conn:
            return leader.live_roles(conn)

    first = process("first", True)
    assert hung.wait(60)
    second = process("second", False)
    try:
        until(lambda: len(acted) >= 3)
        assert "first" not in acted and first[1].term() is None
        # On a busy machine the second counts as stuck at times.
        until(lambda: roles() == {LOOPS: 1})
        with reading(engine) as conn:
            row = leader.read(conn, LOOPS)
        assert row["holder"] == second[1].id
        go_on.set()
        until(first[0].turning)
        second[0].stop()
        second[1].stop()
        until(lambda: "first" in acted)
    finally:
        go_on.set()
        for loops, heartbeat in (first, second):
            loops.stop()
            heartbeat.stop()


@pytest.mark.parametrize("victim", ["api", "worker"])
def test_a_process_that_is_suspended_in_the_middle_of_a_transaction(
    selling_site: Site, tmp_path: Path, victim: str
) -> None:
    engine = selling_site.engine
    given = _admin(engine)
    with _site_service(selling_site, tmp_path) as service, ThreadPoolExecutor() as pool:
        pid = service.start(*{"api": ("serve", "--api-only")}.get(victim, (victim,)))
        until(lambda: _live(engine, victim))
        mine = _discovery(engine, "n1", not_before_s=3600.0)
        path = f"{service.url}/api/v1/admin/nodes/n1"
        change = {"url": path, "json": {"name": "suspended"}, "headers": given, "timeout": 90}
        with engine.connect() as conn, conn.begin():
            # It gets the node's row, and then waits for this table.
            conn.execute(sa.text("LOCK TABLE state_history, audit_log IN EXCLUSIVE MODE"))
            patch = partial(httpx.patch, trust_env=False, **change)
            answer = pool.submit(patch) if victim == "api" else None
            if victim == "worker":
                with transaction(engine) as other:
                    other.execute(sa.update(tables.tasks).values(not_before=None))
            until(lambda: _waiting(engine) and _held(engine, "n1"))
            os.kill(pid, signal.SIGSTOP)
        there = _discovery(engine, "n2")
        assert there.id in _lease(engine, limit=2)
        # Its attempts end with an error if the session does not.
        retrying(engine, lambda conn: nodes.change(conn, "n1", ADMIN, name="by another"))
        os.kill(pid, signal.SIGCONT)
        if answer is not None:
            # The server has ended its transaction; it is repeated, or the client may repeat it.
            assert answer.result(60).status_code in {200, 503}
            again = httpx.patch(trust_env=False, **change)
            assert again.status_code == 200
        else:
            until(lambda: _state(engine, mine) != TaskState.QUEUED)


@pytest.mark.covers("CTRL-2")
def test_every_session_has_limits(selling_site: Site, postgres: Server) -> None:
    plain = open_engine(postgres.url)
    server = {
        "lock_timeout": "3s",
        "idle_in_transaction_session_timeout": "10s",
        "statement_timeout": "1min",
    }
    # The server's side of TCP, of which there is none on a socket of this machine, and ours.
    requested = {"tcp_keepalives_idle=10", "tcp_keepalives_interval=5", "tcp_keepalives_count=3"}
    requested |= {"tcp_user_timeout=25s"}
    link = {"connect_timeout": "10", "keepalives_idle": "10", "keepalives_interval": "5"}
    link |= {"keepalives_count": "3", "tcp_user_timeout": "25000"}
    with reading(plain) as conn:
        for name, value in server.items():
            assert conn.exec_driver_sql(f"SHOW {name}").scalar_one() == value
        connection = conn.connection.dbapi_connection
        assert isinstance(connection, postgresql.Connection)
        given = connection.info.get_parameters()
        assert requested <= set(given["options"].split()) and link.items() <= given.items()
    # A migration waits and works as long as it needs.
    with transaction(plain) as conn:
        without_limits(conn)
        for name in ("lock_timeout", "statement_timeout"):
            assert conn.exec_driver_sql(f"SHOW {name}").scalar_one() == "0"
    plain.dispose()
    # The site's own limits in the URL prevail.
    with reading(selling_site.engine) as conn:
        assert conn.exec_driver_sql("SHOW lock_timeout").scalar_one() == LOCK
        assert conn.exec_driver_sql("SHOW statement_timeout").scalar_one() == "1min"


def test_a_transaction_whose_session_was_ended_for_its_pause_is_repeated(
    selling_site: Site,
) -> None:
    attempts = []

    def work(conn: sa.Connection) -> str:
        attempts.append(conn)
        if len(attempts) == 1:
            conn.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 50")
            time.sleep(1)
        return nodes.get(conn, "n1").id

    assert retrying(selling_site.engine, work) == "n1"
    assert len(attempts) == 2


def _discovery(engine: sa.Engine, node_id: str, not_before_s: float = 0) -> Task:
    item = queue.Enqueue(
        kind=TaskKind.SLICE_TOPOLOGY_DISCOVER,
        node_id=node_id,
        subject_kind="node",
        subject_id=node_id,
        not_before_s=not_before_s,
    )
    return retrying(engine, lambda conn: queue.enqueue(conn, item, ADMIN))


def _state(engine: sa.Engine, task: Task) -> str:
    with reading(engine) as conn:
        return queue.get(conn, task.id).state


def _lease(engine: sa.Engine, limit: int = 1) -> list[str]:
    taken = retrying(engine, lambda conn: leasing.lease(conn, "w", limit=limit, share=2))
    return [task.id for task in taken]


def _site_service(site: Site, folder: Path) -> AbstractContextManager[Service]:
    url = site.engine.url.render_as_string(hide_password=False)
    open_trust(folder)
    return serving(folder, GPUAAS_DATABASE_URL=url.replace(LOCK, PATIENT))


def _admin(engine: sa.Engine) -> dict[str, str]:
    with transaction(engine) as conn:
        secret = tokens.issue(conn, ADMIN, name="ops", role=Role.PLATFORM_ADMIN)[1]
    return {"Authorization": f"Bearer {secret}"}


def _live(engine: sa.Engine, role: str) -> bool:
    with reading(engine) as conn:
        return role in leader.live_roles(conn)


def _held(engine: sa.Engine, node: str) -> bool:
    """Whether a session holds the node's row."""
    query = "SELECT count(*) FROM (SELECT 1 FROM nodes WHERE id = :id FOR UPDATE SKIP LOCKED) AS it"
    with engine.connect() as conn:
        return not conn.execute(sa.text(query), {"id": node}).scalar_one()


def _waiting(engine: sa.Engine) -> int:
    """Sessions of this database that wait for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    with engine.connect() as conn:
        return int(conn.execute(sa.text(f"{query} AND wait_event_type = 'Lock'")).scalar_one())


def test_a_server_that_takes_all_and_never_answers_is_given_up(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a transaction, before a transaction, and while a connection is made."""
    monkeypatch.setattr(postgresql, "_GRACE_S", 1.0)
    monkeypatch.setattr(postgresql, "_PING_S", 1.0)
    limits = {"options": "-c statement_timeout=1s", "connect_timeout": "2"}
    url = sa.make_url(postgres.url).update_query_dict(limits)
    with closing(SilentProxy(url)) as proxy:
        with transaction(proxy.engine) as conn, transaction(proxy.engine) as other:
            assert conn.scalar(sa.text("SELECT 1")) == other.scalar(sa.text("SELECT 1")) == 1
        with (
            pytest.raises(sa.exc.OperationalError, match="not answered for 2 s") as lost,
            transaction(proxy.engine) as conn,
        ):
            conn.scalar(sa.text("SELECT 1"))
            proxy.fall_silent()
            conn.scalar(sa.text("SELECT 1"))
        assert lost.value.connection_invalidated
        monkeypatch.setattr(postgresql, "_REST_S", 0)
        with pytest.raises(sa.exc.OperationalError, match="timeout"), reading(proxy.engine):
            pass


def test_a_migration_waits_for_its_answers(postgres: Server) -> None:
    engine = open_engine(postgres.url)
    for _ in range(2):
        with transaction(engine) as conn:
            connection = conn.connection.driver_connection
            assert isinstance(connection, postgresql.Connection)
            assert connection.patience_s == 90
            without_limits(conn)
            assert connection.patience_s is None
    engine.dispose()
