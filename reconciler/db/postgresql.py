"""PostgreSQL's part of the engine: connections with limits on both sides, and their pool."""

from __future__ import annotations

import select
import threading
import time
from functools import partial
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.abc import PQGen
from sqlalchemy import event, exc, pool

from reconciler.db.engine import PAUSED, TURNS

V = TypeVar("V")
# A connection that was idle for longer is pinged before use, because the network may have dropped
# it silently. A lower value would ping before every transaction.
_REST_S = 10
# Connections that stay open. With fewer, requests wait for each other; with more, the processes of
# a site together exceed the server's limit.
_CONNECTIONS = 15
# Of them, so many may write. Writers may all wait for a lock, and readers must not wait for them.
_WRITERS = 10
_SINCE = "gpuaas_rests_since"
# Limits of a session of PostgreSQL. A process that is paused or cut off in the middle of a
# transaction keeps its row locks until the server ends its session. The attempts of `retrying`
# together last longer.
_LIMITS = {
    "lock_timeout": "3s",
    "idle_in_transaction_session_timeout": "10s",
    "statement_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25s",
}
# Limits of our side of the connection, for a server that does not answer.
LINK = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
# A server, or a proxy before it, may acknowledge all data and never answer. The connection is given
# up this long after the server's own limit of a statement, and sooner for a ping.
_GRACE_S = 30.0
_PING_S = 10.0


def open_engine(url: str) -> sa.Engine:
    engine = sa.create_engine(
        url,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        connect_args=_limits(sa.make_url(url)),
        execution_options={TURNS: threading.Semaphore(_WRITERS)},
    )
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "handle_error", _was_ended)
    event.listen(engine, "checkout", partial(_still_there, engine.dialect))
    event.listen(engine, "checkin", _rests)
    return engine


class Connection(psycopg.Connection[Any]):
    """A connection that closes itself when the server does not answer.

    patience_s: seconds that an answer may take, None for no limit; usual_s once the pool has the
    connection back.
    """

    patience_s: float | None = _PING_S
    usual_s: float | None = None

    def wait(self, gen: PQGen[V], interval: float = 0.1, timeout: float | None = None) -> V:
        limit = self.patience_s
        if timeout is not None or limit is None:
            return super().wait(gen, interval, timeout)
        began = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError as error:
            if time.monotonic() - began < limit:
                raise
            self.close()
            text = f"the database server has not answered for {limit:g} s"
            raise psycopg.OperationalError(text) from error


def _connect(
    _dialect: object, _record: object, words: list[Any], options: dict[str, Any]
) -> Connection:
    connection = Connection.connect(*words, **options)
    query = "SELECT extract(epoch FROM current_setting('statement_timeout')::interval)::float"
    try:
        row = connection.execute(query).fetchone()
        connection.rollback()
    except BaseException:
        connection.close()
        raise
    limit = row[0] if row else 0
    connection.patience_s = connection.usual_s = limit + _GRACE_S if limit else None
    return connection


def _limits(url: sa.URL) -> dict[str, Any]:
    """Connection arguments with the limits of a session; those in the URL itself prevail."""
    options = [f"-c {name}={value}" for name, value in _LIMITS.items()]
    given = url.query.get("options", ())
    options += [given] if isinstance(given, str) else given
    link = {name: value for name, value in LINK.items() if name not in url.query}
    return {**link, "options": " ".join(options)}


def _was_ended(context: sa.ExceptionContext) -> None:
    """Mark a connection whose session the server has ended; the driver calls that internal."""
    if getattr(context.original_exception, "sqlstate", None) == PAUSED:
        context.is_disconnect = True


def _rests(connection: Connection | None, record: pool.ConnectionPoolEntry) -> None:
    record.info[_SINCE] = time.monotonic()
    if connection is not None:
        connection.patience_s = connection.usual_s


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
    connection.patience_s = _PING_S
    try:
        dialect.do_ping(connection)
        connection.rollback()
    except psycopg.Error as error:
        raise exc.DisconnectionError("the server has gone") from error
    connection.patience_s = connection.usual_s
