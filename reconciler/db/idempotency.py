"""Idempotency keys: a repeated request gets the stored answer, even after a crash (I21).

The same key with another body is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from reconciler.db import clock, rows
from reconciler.db.engine import alone, retrying, transaction
from reconciler.db.schema import idempotency_keys as table
from reconciler.model.errors import Problem

_NOTHING_YET: dict[str, Any] = {"completed_at": None, "status": 0, "body": {}}
# How long an unfinished request keeps its key: longer than any request takes.
IN_FLIGHT_S = 30


@dataclass(frozen=True)
class Call:
    """A request with its key. scope: route and caller, so that two callers may use the same key."""

    scope: str
    key: str
    body: Any

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the body, independent of the order of its keys."""
        text = json.dumps(self.body, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def columns(self, holder: str) -> dict[str, str]:
        """Columns of the row of the key, while this holder works on the request."""
        return {
            "scope": self.scope,
            "key": self.key,
            "fingerprint": self.fingerprint,
            "holder": holder,
        }


@dataclass(frozen=True)
class Answer:
    """Answer to the caller. replayed: the work was done by an earlier request. job_id: the last
    job that the request has queued; the answer is deleted with it.
    """

    status: int
    body: Any
    replayed: bool = False
    job_id: str | None = None


def once(engine: sa.Engine, call: Call, work: Callable[[sa.Connection], Answer]) -> Answer:
    """Do the work and store its answer in the same transaction; a Problem is not stored."""
    if not call.key:
        raise Problem(
            "idempotency_key_required",
            400,
            expected="a header Idempotency-Key or X-Idempotency-Key",
            found="none",
            remedy="send a new key for a new request, the same one to repeat it",
        )
    holder = rows.new_id()
    # The key is taken in a separate transaction, so that others see that the work is in flight.
    if not _new(engine, call, holder):
        remembered = retrying(engine, lambda conn: _take(conn, call, holder))
        if remembered is not None:
            return remembered

    def act(conn: sa.Connection) -> Answer:
        answer = work(conn)
        _complete(conn, call, holder, answer)
        return answer

    try:
        return retrying(engine, act)
    except BaseException:
        with transaction(engine) as conn:
            conn.execute(sa.delete(table).where(*_MINE), _mine(call, holder))
        raise


def _new(engine: sa.Engine, call: Call, holder: str) -> bool:
    """Take an unused key; False when the key was used before."""
    values = {**call.columns(holder), **_NOTHING_YET}
    with alone(engine) as conn:
        return conn.execute(_insert(engine.dialect.name), values).first() is not None


@cache
def _insert(dialect: str) -> sa.Insert:
    made = {"expires_at": clock.now() + IN_FLIGHT_S, "created_at": clock.now()}
    plain = ("scope", "key", "fingerprint", "holder", *_NOTHING_YET)
    insert = rows.conflict_insert(dialect, table)
    statement = insert.values({**made, **{name: sa.bindparam(name) for name in plain}})
    return statement.on_conflict_do_nothing().returning(soon())


class soon(FunctionElement[str]):
    """Let this transaction commit without waiting for the disk.

    A crash can lose the taken key only together with all later commits. Then the work under the
    key is lost as well and may be done again.
    """

    type = sa.Text()
    inherit_cache = True


@compiles(soon, "sqlite")
def _sqlite(*_: Any, **__: Any) -> str:
    return "''"


@compiles(soon, "postgresql")
def _postgresql(*_: Any, **__: Any) -> str:
    return "set_config('synchronous_commit', 'off', true)"


def _take(conn: sa.Connection, call: Call, holder: str) -> Answer | None:
    same = (table.c.scope == call.scope, table.c.key == call.key)
    row = rows.first(conn, sa.select(table).where(*same).with_for_update())
    if row is None:
        expires_at = clock.now() + IN_FLIGHT_S
        rows.insert(conn, table, {**call.columns(holder), "expires_at": expires_at})
        return None
    if row["fingerprint"] != call.fingerprint:
        raise Problem(
            "idempotency_key_reused",
            422,
            expected="the body that this key was first used with",
            found="another body",
            remedy="use a new key for a new request",
        )
    if row["completed_at"] is not None:
        return Answer(row["status"], row["body"], replayed=True)
    take_over = (
        sa.update(table)
        .where(*same, table.c.holder == row["holder"], table.c.expires_at < clock.now())
        .values(holder=holder, expires_at=clock.now() + IN_FLIGHT_S)
    )
    if not conn.execute(take_over).rowcount:
        raise _in_flight()
    return None


def _complete(conn: sa.Connection, call: Call, holder: str, answer: Answer) -> None:
    values = {"status": answer.status, "body": answer.body, "job_id": answer.job_id}
    if not conn.execute(_COMPLETE, values | _mine(call, holder)).rowcount:
        # Another request took the key over after it had expired, so this transaction rolls back.
        raise _in_flight()


# The request under the key, while it has no answer and its holder has not changed.
_MINE = (
    table.c.scope == sa.bindparam("is_scope"),
    table.c.key == sa.bindparam("is_key"),
    table.c.holder == sa.bindparam("is_holder"),
    table.c.completed_at.is_(None),
)
_COMPLETE = (
    sa.update(table)
    .where(*_MINE)
    .values(
        completed_at=clock.now(),
        **{name: sa.bindparam(name) for name in ("status", "body", "job_id")},
    )
)


def _mine(call: Call, holder: str) -> dict[str, str]:
    return {"is_scope": call.scope, "is_key": call.key, "is_holder": holder}


def _in_flight() -> Problem:
    return Problem(
        "idempotency_in_flight",
        expected="the first request with this key to have ended",
        found="it is still being worked on",
        remedy="repeat the request in a few seconds with the same key",
    )
