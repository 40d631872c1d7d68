"""An old leader commits nothing (I9), and only the database's clock counts (I22)."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal, leader
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, reading, transaction
from reconciler.db.leader import LOOPS, Deposed, campaign, led_by, resign
from reconciler.db.migrations import migrate, program_version
from reconciler.model.errors import Problem
from reconciler.service import process
from reconciler.service.process import Heartbeat
from reconciler.settings import Settings
from reconciler.work.loops import Loop, Loops
from tests.postgresql import Server as Postgres
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.service.writer import SHORT_TERM_S

PAUSES = 20
LIMIT_S = 120.0
# Longer than any pause of the machine.
TERM_S = 600.0


@pytest.fixture
def leading(engine: sa.Engine) -> leader.Term:
    """The first term."""
    with transaction(engine) as conn:
        term = campaign(conn, LOOPS, "a", 30)
    assert term is not None
    return term


def test_the_log_has_the_words_of_the_runbooks(
    engine: sa.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gpuaas.leader")
    first, second = (Heartbeat(engine, lambda: [LOOPS]) for _ in range(2))
    for heartbeat in (first, second, second):
        heartbeat._beat()

    def away(*_: object) -> None:
        raise sa.exc.OperationalError("", {}, OSError("the database is away"))

    monkeypatch.setattr(process, "retrying", away)
    first._beat()
    led, refused, lost = (record.getMessage() for record in caplog.records)
    assert led == "leading, epoch 1"
    assert refused.startswith("Failed to acquire leader lock")
    assert lost.startswith("Leader DB connection lost")


@pytest.mark.covers("I9")
def test_a_process_gives_up_when_a_newer_version_has_migrated_the_database(
    engine: sa.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    migrate(engine)
    settings = Settings(state_dir=tmp_path, database_url=str(engine.url), leader_lease_s=TERM_S)
    ended = threading.Event()
    former = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        with (
            pytest.raises(Problem, match="schema_outdated"),
            process.running(settings, engine, api=True, work=True) as heartbeat,
        ):
            assert heartbeat.term() is not None
            with transaction(engine) as conn:
                conn.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
            assert ended.wait(LIMIT_S)
            assert heartbeat.term() is None
            with reading(engine) as conn:
                term, (row,) = leader.read(conn, LOOPS), leader.processes(conn)
            assert term is not None and not term["live"]
            assert row["roles"] == ["api"] and row["version"] == program_version()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert "a newer version has migrated the database" in caplog.text


@pytest.mark.covers("I9")
def test_one_leads_until_its_term_ends_or_it_resigns(
    engine: sa.Engine, leading: leader.Term
) -> None:
    with transaction(engine) as conn:
        assert campaign(conn, LOOPS, "b", 30) is None
        assert campaign(conn, LOOPS, "a", 30) == leading
        resign(conn, leading)
        follower = campaign(conn, LOOPS, "b", 30)
        assert follower.epoch == leading.epoch + 1
        # Resigning a term that has ended takes nothing from its successor.
        resign(conn, leading)
        assert campaign(conn, LOOPS, "a", 30) is None
        _expire(conn)
        again = campaign(conn, LOOPS, "b", 30)
        assert again.epoch == follower.epoch + 1


@pytest.mark.covers("I9", "I22")
def test_a_term_that_ran_out_writes_nothing(engine: sa.Engine, leading: leader.Term) -> None:
    mine = led_by(engine, leading)
    with transaction(mine) as conn:
        journal.emit(conn, "written", "epoch", "1", payload={})
    with transaction(engine) as conn:
        _expire(conn)
    with pytest.raises(Deposed), transaction(mine) as conn:
        journal.emit(conn, "written", "epoch", "1", payload={})
    with reading(mine) as conn:
        assert len(relay.pending_events(conn)) == 1


@pytest.mark.covers("I9")
def test_loops_run_where_the_term_is(engine: sa.Engine, tmp_path: Path) -> None:
    held: list[leader.Term | None] = [None]
    written: list[str] = []

    def write(led: sa.Engine, _settings: Settings) -> None:
        with transaction(led) as conn:
            journal.emit(conn, "written", "epoch", "1", payload={})
        written.append("written")

    def broken(_led: sa.Engine, _settings: Settings) -> None:
        raise ValueError("a loop's own error")

    every = (Loop("broken", 0, broken), Loop("write", 0, write), Loop("rare", 3600, write))
    loops = Loops(Settings(state_dir=tmp_path), engine, lambda: held[0], every)
    assert loops.run_due() == []
    with transaction(engine) as conn:
        held[0] = campaign(conn, LOOPS, "a", 30)
    assert loops.run_due() == ["write", "rare"]
    assert loops.run_due() == ["write"]
    with transaction(engine) as conn:
        _expire(conn)
    # The process still believes that it leads.
    assert loops.run_due() == []
    assert written == ["written"] * 3


def test_a_process_that_ends_in_order_leaves_at_once(engine: sa.Engine) -> None:
    first, second = (Heartbeat(engine, lambda: ["loops"], term_s=TERM_S) for _ in range(2))
    first.start()
    second.start()
    assert first.term() is not None and second.term() is None
    with reading(engine) as conn:
        assert leader.live_roles(conn) == {"loops": 2}
    first.stop()
    second._beat()
    assert second.term() is not None
    second.stop()
    with reading(engine) as conn:
        assert leader.processes(conn) == []


@pytest.mark.covers("ORCH-4")
def test_a_leader_that_is_released_lets_another_lead(engine: sa.Engine) -> None:
    """Its own term is void at once, although it does not know that."""
    first, second = (Heartbeat(engine, lambda: ["loops"], term_s=TERM_S) for _ in range(2))
    first.start()
    second.start()
    held = first.term()
    assert held is not None
    with transaction(engine) as conn:
        leader.release(conn, LOOPS, ADMIN)
    with pytest.raises(Deposed), transaction(led_by(engine, held)):
        pass
    first._beat()
    assert first.term() is None, "the others come first"
    second._beat()
    assert second.term() is not None
    second.stop()
    first._beat()
    assert first.term() is not None, "that was the other's term, not its own"
    first.stop()


def test_a_single_leader_that_is_released_leads_again(engine: sa.Engine) -> None:
    alone = Heartbeat(engine, lambda: ["loops"], term_s=TERM_S)
    alone._beat()
    with transaction(engine) as conn:
        leader.release(conn, LOOPS, ADMIN)
    alone._beat()
    assert alone.term() is None, "the others come first"
    with transaction(engine) as conn:
        _expire(conn)
    alone._beat()
    term = alone.term()
    assert term.epoch == 2


@pytest.mark.covers("I9", "I22")
@pytest.mark.postgres
@pytest.mark.parametrize(
    "pauses", [PAUSES, pytest.param(300, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_a_leader_paused_past_its_term_writes_nothing_when_it_goes_on(
    tmp_path: Path, postgres: Postgres, pauses: int
) -> None:
    """I9: both engines at once, because most of the time is waiting."""
    urls = [f"sqlite:///{tmp_path / 'fenced.db'}", postgres.database(f"paused_{pauses}")]
    with ThreadPoolExecutor(len(urls)) as pool:
        stories = list(pool.map(lambda url: _story(url, "fenced", pauses), urls))
    for epochs in stories:
        assert max(epochs) > pauses, "every pause brought another leader"
        assert _stale(epochs) == 0


def test_without_the_fence_the_same_pauses_are_seen(tmp_path: Path) -> None:
    """The test above could not fail otherwise. Three pauses may all meet a leader at its commit."""
    urls = (f"sqlite:///{tmp_path / f'free-{number}.db'}" for number in range(10))
    assert any(_stale(_story(url, "free", 3)) for url in urls)


def _stale(epochs: list[int]) -> int:
    """Writes of an epoch after a later epoch had begun to write."""
    return sum(1 for before, after in pairwise(epochs) if after < before)


def _story(url: str, manner: str, pauses: int) -> list[int]:
    """The epochs of all writes, in order, of two processes of which the leader is paused often."""
    engine = open_engine(url)
    try:
        migrate(engine)
        with _writers(url, manner):
            done = 0
            _until(lambda: _leader(engine) is not None)
            end = time.monotonic() + 3 * LIMIT_S * max(1, pauses / PAUSES)
            while done < pauses:
                assert time.monotonic() < end, f"{done} of {pauses} pauses"
                done += _pause(engine)
        with reading(engine) as conn:
            query = sa.select(tables.outbox.c.subject_id).order_by(tables.outbox.c.id)
            return [int(epoch) for epoch in conn.execute(query).scalars()]
    finally:
        engine.dispose()


def _pause(engine: sa.Engine) -> bool:
    """Stop the leader until the other has written; False when it held the whole database."""
    leads = _leader(engine)
    if leads is None:
        time.sleep(0.02)
        return False
    pid, epoch = leads
    os.kill(pid, signal.SIGSTOP)
    try:
        return _until(lambda: _written_after(engine, epoch), limit_s=6 * SHORT_TERM_S)
    finally:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


@contextmanager
def _writers(url: str, manner: str) -> Iterator[None]:
    program = [sys.executable, "-m", "tests.unit.reconciler.service.writer", url, manner]
    writers = [subprocess.Popen(program) for _ in range(2)]
    try:
        yield
        assert [writer.poll() for writer in writers] == [None, None]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


def _leader(engine: sa.Engine) -> tuple[int, int] | None:
    with reading(engine) as conn:
        leads = leader.read(conn, LOOPS)
        pids = {row["id"]: row["pid"] for row in leader.processes(conn)}
    return (pids[leads["holder"]], leads["epoch"]) if leads and leads["live"] else None


def _written_after(engine: sa.Engine, epoch: int) -> bool:
    query = sa.select(tables.outbox.c.subject_id).order_by(tables.outbox.c.id.desc())
    try:
        with reading(engine) as conn:
            return int(conn.execute(query.limit(1)).scalar() or 0) > epoch
    except sa.exc.OperationalError as error:
        # It was stopped while it held SQLite's lock of the index, without which no process reads.
        if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_PROTOCOL:
            raise
        return False


def _expire(conn: sa.Connection) -> None:
    conn.execute(sa.update(tables.leaders).values(expires_at=0))


def _until(true: Callable[[], Any], limit_s: float = LIMIT_S) -> bool:
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
