"""Connections and transactions, so that both engines behave alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc

from reconciler.domain.errors import Problem

T = TypeVar("T")

# Two writers of one SQLite file take turns: longer than any transaction of ours lasts.
BUSY_MS = 30_000
_READING = "gpuaas_reading"
_GUARD = "gpuaas_guard"
# serialization_failure and deadlock_detected: the transaction did nothing and may be repeated.
_REPEATABLE = frozenset({"40001", "40P01"})


def open_engine(url: str) -> sa.Engine:
    """An engine for sqlite:///file or postgresql+psycopg://…"""
    engine = sa.create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    return engine


@contextlib.contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A writing transaction: all of it or nothing."""
    with engine.connect() as conn, conn.begin():
        guard = conn.get_execution_options().get(_GUARD)
        if guard is not None:
            guard(conn)
        yield conn


def guarded(engine: sa.Engine, guard: Callable[[sa.Connection], None]) -> sa.Engine:
    """The same database; every writing transaction begins with the guard, which may refuse it."""
    return engine.execution_options(**{_GUARD: guard})


@contextlib.contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """One consistent picture; holds up no writer."""
    with engine.connect() as conn:
        conn.execution_options(**{_READING: True})
        if engine.dialect.name == "postgresql":
            conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        with conn.begin():
            yield conn


def retrying(engine: sa.Engine, work: Callable[[sa.Connection], T], attempts: int = 5) -> T:
    """Do the work in a transaction; again when somebody else was quicker."""
    for attempt in range(1, attempts + 1):
        try:
            with transaction(engine) as conn:
                return work(conn)
        except (Problem, exc.DBAPIError) as failure:
            if attempt == attempts or not _may_repeat(failure):
                raise
            time.sleep(0.01 * attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _may_repeat(failure: Problem | exc.DBAPIError) -> bool:
    if isinstance(failure, Problem):
        return failure.code == "generation_conflict"
    # A uniqueness that another transaction took first: the next look names it properly.
    if isinstance(failure, exc.IntegrityError):
        return True
    return getattr(failure.orig, "sqlstate", None) in _REPEATABLE


def _sqlite_connect(connection: Any, _record: object) -> None:
    # Transactions are begun by the listener below, not guessed at by the driver.
    connection.isolation_level = None
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        f"busy_timeout = {BUSY_MS}",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _sqlite_begin(conn: sa.Connection) -> None:
    # A writer takes the write lock at once: upgrading later fails without waiting.
    reads = conn.get_execution_options().get(_READING)
    conn.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
