"""Database connections and transactions with the same behaviour on SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc

from reconciler.model.errors import Problem
from reconciler.settings import Settings

T = TypeVar("T")
# How long an SQLite writer waits for another writer: longer than any transaction lasts.
BUSY_MS = 30_000
# Before that, it naps so often and so long.
_NAPS = 200
_NAP_S = 0.0005
# Level of `PRAGMA synchronous` that writes to the disk at checkpoints only. FULL is 2.
_NORMAL = 1
_READING = "gpuaas_reading"
_GUARD = "gpuaas_guard"
TURNS = "gpuaas_turns"
# idle_in_transaction_session_timeout: the server ended the session, because the process was paused.
PAUSED = "25P03"
# The transaction had no effect and may be repeated. The others are serialization_failure,
# deadlock_detected and lock_not_available.
_REPEATABLE = frozenset({"40001", "40P01", "55P03", PAUSED})


def open_engine(url: str) -> sa.Engine:
    """Engine for sqlite:///file or postgresql+psycopg://…"""
    if url.startswith("sqlite"):
        engine = sa.create_engine(url)
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    else:
        from reconciler.db import postgresql  # noqa: PLC0415  # SQLite does not need its driver

        engine = postgresql.open_engine(url)
    return engine


@contextmanager
def transaction(engine: sa.Engine, *, durable: bool = True) -> Iterator[sa.Connection]:
    """A writing transaction, committed as a whole or rolled back.

    durable: no loss of power undoes it. Otherwise its commit does not wait for the disk, and may be
    undone together with all later ones that are not durable either.
    """
    turn = engine.get_execution_options().get(TURNS) or nullcontext()
    with turn, engine.connect() as conn, conn.begin() if durable else _unsynced(conn):
        guard = conn.get_execution_options().get(_GUARD)
        if guard is not None:
            guard(conn)
        yield conn


def guarded(engine: sa.Engine, guard: Callable[[sa.Connection], None]) -> sa.Engine:
    """Engine of the same database whose writing transactions begin with the guard.

    The guard may refuse the transaction.
    """
    return engine.execution_options(**{_GUARD: guard})


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A reading transaction with a consistent snapshot; it blocks no writer."""
    with engine.connect() as conn:
        conn.execution_options(**{_READING: True})
        if engine.dialect.name == "postgresql":
            conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        with conn.begin():
            yield conn


@contextmanager
def asking(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Connection for a single reading statement, which is a consistent snapshot by itself."""
    with _alone(engine) if engine.dialect.name == "postgresql" else reading(engine) as conn:
        yield conn


@contextmanager
def alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Connection for a single writing statement, which is a transaction by itself.

    An engine with a guard gets a normal transaction, so that the guard runs in it.
    """
    guarded = _GUARD in engine.get_execution_options()
    plain = engine.dialect.name == "postgresql" and not guarded
    with _alone(engine) if plain else transaction(engine) as conn:
        yield conn


def retrying(
    engine: sa.Engine,
    work: Callable[[sa.Connection], T],
    attempts: int = 5,
    *,
    durable: bool = True,
) -> T:
    """Do the work in a `transaction`, and repeat it after a conflict with another transaction."""
    for attempt in range(1, attempts + 1):
        try:
            with transaction(engine, durable=durable) as conn:
                return work(conn)
        except (Problem, exc.DBAPIError) as failure:
            if attempt == attempts or not _may_repeat(failure):
                raise
            time.sleep(0.01 * attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _may_repeat(failure: Problem | exc.DBAPIError) -> bool:
    if isinstance(failure, Problem):
        return failure.code == "generation_conflict"
    # Another transaction took the unique value first. The next attempt reads its row and raises the
    # proper Problem.
    if isinstance(failure, exc.IntegrityError):
        return True
    return getattr(failure.orig, "sqlstate", None) in _REPEATABLE


def without_limits(conn: sa.Connection) -> None:
    """Let the statements of this transaction last and wait as long as they need.

    For migrations and sweeps, whose statements grow with the database.
    """
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0")
        connection: Any = conn.connection.driver_connection
        connection.patience_s = None


@contextmanager
def _alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as conn:
        yield conn.execution_options(isolation_level="AUTOCOMMIT")


def _sqlite_connect(connection: Any, _record: object) -> None:
    # The listener below begins transactions, so the driver must not begin them implicitly.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    _use_wal(connection)
    for pragma in ("synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _use_wal(connection: Any) -> None:
    """Of processes that open a new database at once, one has its lock while the others change its
    journal. For that, SQLite does not wait.
    """
    end = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(_NAP_S)


@contextmanager
def _unsynced(conn: sa.Connection) -> Iterator[None]:
    """A transaction whose commit does not wait for the disk."""
    if conn.dialect.name == "postgresql":
        with conn.begin():
            conn.exec_driver_sql("SET LOCAL synchronous_commit = off")
            yield
        return
    connection: Any = conn.connection.driver_connection
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    # SQLite takes no other level within a transaction.
    connection.execute(f"PRAGMA synchronous = {min(level, _NORMAL)}")
    try:
        with conn.begin():
            yield
    finally:
        try:
            connection.execute(f"PRAGMA synchronous = {level}")
        except sqlite3.Error:  # No other transaction gets this connection.
            conn.invalidate()


def _sqlite_begin(conn: sa.Connection) -> None:
    # A writer takes the write lock at once, because a later upgrade fails without waiting.
    reads = conn.get_execution_options().get(_READING)
    if not reads and _took_lock(conn.connection.driver_connection):
        return
    conn.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _took_lock(connection: Any) -> bool:
    """Wait for the write lock in short naps. SQLite's own naps grow to a tenth of a second, in
    which transactions of a millisecond let the lock lie.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        for _ in range(_NAPS):
            try:
                connection.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    return False
            time.sleep(_NAP_S)
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")


@contextmanager
def open_existing(settings: Settings) -> Iterator[sa.Engine]:
    """The site's existing database. Problem `database_missing` instead of creating a new file."""
    file = settings.sqlite_file
    if file is not None and not file.is_file():
        raise Problem(
            "database_missing",
            404,
            expected=f"a database at {file}",
            found="none",
            remedy="set GPUAAS_STATE_DIR or GPUAAS_DATABASE_URL as the service has it",
        )
    engine = open_engine(settings.database)
    try:
        yield engine
    finally:
        engine.dispose()
