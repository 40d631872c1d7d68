"""What may be forgotten: traces of work that is over, once they are old, some at a time.

Never history, audit, claims, usage and proofs, nor tasks themselves: these are the record. Nor what
belongs to an allocation that lives, or to one that left a slot behind which nobody has cleaned.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.schema import allocations, idempotency_keys, outbox, slots, task_events, tasks
from reconciler.model.states import AllocationState, SlotState, TaskState
from reconciler.records.leasing import DUE

# Rows of one transaction: it must not keep other writers of a SQLite file waiting.
AT_ONCE = 500
_OVER = (AllocationState.RELEASED, AllocationState.FAILED)
_UNCLEAN = (SlotState.CLEANUP, SlotState.CLEANUP_BLOCKED)


def events(conn: sa.Connection, *, sent_s: float, unsent_s: float) -> int:
    """Forget events that a relay took so long ago, and those that nobody ever took; how many."""
    age = clock.now() - outbox.c.at
    sent = sa.and_(outbox.c.published_at.is_not(None), age > sent_s)
    old = sa.select(outbox.c.id).where(sa.or_(sent, age > unsent_s))
    return _delete(conn, outbox, (outbox.c.id,), old)


def answers(conn: sa.Connection, *, age_s: float) -> int:
    """Forget idempotency keys: a request that is repeated later is done anew.

    One whose answer names an allocation that lives is kept, or the repetition would make another.
    """
    table = idempotency_keys
    named = table.c.body["id"].as_string()
    lives = sa.exists().where(allocations.c.id == named, allocations.c.state.not_in(_OVER))
    # What was never completed did nothing; whoever holds it past its time is refused in the end.
    since = sa.func.coalesce(table.c.completed_at, table.c.expires_at, table.c.created_at)
    old = sa.select(table.c.scope, table.c.key).where(clock.now() - since > age_s, ~lives)
    return _delete(conn, table, (table.c.scope, table.c.key), old)


def progress(conn: sa.Connection, *, age_s: float) -> int:
    """Forget how far tasks were that ended so long ago; how they ended stays."""
    old = sa.select(task_events.c.id).join(tasks, tasks.c.id == task_events.c.task_id)
    return _delete(conn, task_events, (task_events.c.id,), old.where(_done(age_s)))


def done(conn: sa.Connection, ids: Collection[str], *, age_s: float) -> set[str]:
    """Which of these tasks ended so long ago that the files of their runs may go."""
    query = sa.select(tasks.c.id).where(tasks.c.id.in_(ids), _done(age_s))
    return set(conn.execute(query).scalars())


def _done(age_s: float) -> sa.ColumnElement[bool]:
    named = slots.c.health_detail["allocation_id"].as_string()
    wanted = sa.exists().where(
        allocations.c.id == tasks.c.allocation_id, allocations.c.state.not_in(_OVER)
    )
    unclean = sa.exists().where(slots.c.status.in_(_UNCLEAN), named == tasks.c.allocation_id)
    return sa.and_(
        tasks.c.state.not_in((*DUE, TaskState.RUNNING)),
        clock.now() - tasks.c.finished_at > age_s,
        ~wanted,
        ~unclean,
    )


def _delete(
    conn: sa.Connection, table: sa.Table, key: tuple[sa.Column[Any], ...], old: sa.Select[Any]
) -> int:
    chosen = old.limit(AT_ONCE)
    whole = sa.tuple_(*key) if len(key) > 1 else key[0]
    return conn.execute(sa.delete(table).where(whole.in_(chosen))).rowcount
