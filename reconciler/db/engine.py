"""Database connections and transactions with the same behaviour on SQLite and PostgreSQL."""

from __future__ import annotations

import select
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc, pool

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
# A connection that was idle for longer is pinged before use, because the network may have dropped
# it silently. A lower value would ping before every transaction.
_REST_S = 10
# Connections that stay open. With fewer, requests wait for each other; with more, the processes of
# a site together exceed the server's limit.
_CONNECTIONS = 15
# Of them, so many may write. Writers may all wait for a lock, and readers must not wait for them.
_WRITERS = 10
_TURNS = "gpuaas_turns"
_SINCE = "gpuaas_rests_since"
# idle_in_transaction_session_timeout: the server ended the session, because the process was paused.
_PAUSED = "25P03"
# The transaction had no effect and may be repeated. The others are serialization_failure,
# deadlock_detected and lock_not_available.
_REPEATABLE = frozenset({"40001", "40P01", "55P03", _PAUSED})
# Limits of a session of PostgreSQL. A process that is paused or cut off in the middle of a
# transaction keeps its row locks until the server ends its session. The attempts of `retrying`
# together outlast that.
_LIMITS = {
    "lock_timeout": "3s",
    "idle_in_transaction_session_timeout": "10s",
    "statement_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
}
# The same of our side of the connection, for a server that does not answer.
_LINK = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def open_engine(url: str) -> sa.Engine:
    """Engine for sqlite:///file or postgresql+psycopg://…"""
    if url.startswith("sqlite"):
        engine = sa.create_engine(url)
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    else:
        engine = sa.create_engine(
            url,
            pool_size=_CONNECTIONS,
            max_overflow=0,
            connect_args=_limits(sa.make_url(url)),
            execution_options={_TURNS: threading.Semaphore(_WRITERS)},
        )
        event.listen(engine, "handle_error", _was_ended)
        event.listen(engine, "checkout", partial(_still_there, engine.dialect))
        event.listen(engine, "checkin", _rests)
    return engine


@contextmanager
def transaction(engine: sa.Engine, *, durable: bool = True) -> Iterator[sa.Connection]:
    """A writing transaction, committed as a whole or rolled back.

    durable: no loss of power undoes it. Otherwise its commit does not wait for the disk, and may be
    undone together with all later ones that are not durable either.
    """
    turn = engine.get_execution_options().get(_TURNS) or nullcontext()
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


def _limits(url: sa.URL) -> dict[str, Any]:
    """Connection arguments with the limits of a session; those in the URL itself prevail."""
    options = [f"-c {name}={value}" for name, value in _LIMITS.items()]
    given = url.query.get("options", ())
    options += [given] if isinstance(given, str) else given
    link = {name: value for name, value in _LINK.items() if name not in url.query}
    return {**link, "options": " ".join(options)}


def _was_ended(context: sa.ExceptionContext) -> None:
    """Mark a connection whose session the server has ended; the driver calls that internal."""
    if getattr(context.original_exception, "sqlstate", None) == _PAUSED:
        context.is_disconnect = True


@contextmanager
def _alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as conn:
        yield conn.execution_options(isolation_level="AUTOCOMMIT")


def _rests(_connection: object, record: pool.ConnectionPoolEntry) -> None:
    record.info[_SINCE] = time.monotonic()


def _still_there(
    dialect: sa.Dialect, connection: Any, record: pool.ConnectionPoolEntry, _fairy: object
) -> None:
    """Make the pool open a new connection when the server of this connection has gone."""
    since = record.info.get(_SINCE)
    if since is None:
        return
    # On an idle connection, readable data means that the server ends it or has closed the socket.
    socket = select.poll()
    socket.register(connection.fileno(), select.POLLIN)
    if time.monotonic() - since < _REST_S and not socket.poll(0):
        return
    try:
        dialect.do_ping(connection)
        connection.rollback()
    except dialect.loaded_dbapi.Error as error:
        raise exc.DisconnectionError("the server has gone") from error


def _sqlite_connect(connection: Any, _record: object) -> None:
    # The listener below begins transactions, so the driver must not begin them implicitly.
    connection.isolation_level = None
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        f"busy_timeout = {BUSY_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}")


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
    if not settings.database_url and not (settings.state_dir / "reconciler.db").is_file():
        raise Problem(
            "database_missing",
            404,
            expected=f"a database in {settings.state_dir}",
            found="none",
            remedy="set GPUAAS_STATE_DIR or GPUAAS_DATABASE_URL as the service has it",
        )
    engine = open_engine(settings.database)
    try:
        yield engine
    finally:
        engine.dispose()
