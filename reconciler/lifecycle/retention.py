"""Retention: delete old events, answers, reports and progress of finished work, in batches.

History, audit, claims, usage, proofs and tasks are the permanent record and are never deleted, but
for the evidence of old failures, which a host can make long. Data of an allocation that has not
ended, or that left an unclean slot or machine behind, is kept too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db.engine import without_limits
from reconciler.db.schema import (
    allocations,
    api_tokens,
    console_sessions,
    discoveries,
    idempotency_keys,
    nodes,
    outbox,
    parities,
    slots,
    ssh_keys,
    task_events,
    tasks,
    telemetry_samples,
    terminal_recordings,
)
from reconciler.lifecycle import slice_telemetry
from reconciler.model.states import (
    ENDED_ALLOCATIONS,
    ENDED_TASKS,
    UNCLEAN_SLOTS,
    NodeState,
    TaskKind,
    TaskState,
)
from reconciler.records import queue, terminals

# Rows per transaction, so that other writers of a SQLite file do not wait long.
AT_ONCE = 500
TOKENS_S = 30 * 86_400.0
# Reports of a kind that a node keeps. Each may have megabytes, and a host can make the service ask
# for one every few minutes.
REPORTS = 20
# Characters of evidence that every failed task keeps. The newest REPORTS of a kind and node keep
# more. Long ones are read and written one by one, so fewer at once.
LONG_EVIDENCE, EVIDENCE_AT_ONCE = 4_096, 100
# Kinds of reports of a node, which a host can have the service ask for every few minutes.
REPORT_KINDS = frozenset(
    {TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY, TaskKind.SLICE_DRIFT_RECONCILE}
)
# The task's node waits for `gpuaas nodes clean-machine`. Retiring the node writes its machine off.
UNCLEAN_MACHINE = sa.exists().where(
    nodes.c.id == tasks.c.node_id,
    nodes.c.unclean_allocation_id != "",
    nodes.c.state != NodeState.RETIRED,
)


def events(conn: sa.Connection, *, sent_s: float, unsent_s: float) -> int:
    """Delete published events older than sent_s and any older than unsent_s. Returns the count."""
    age = clock.now() - outbox.c.at
    sent = sa.and_(outbox.c.published_at.is_not(None), age > sent_s)
    old = sa.select(outbox.c.id).where(sa.or_(sent, age > unsent_s))
    return _delete(conn, outbox, (outbox.c.id,), old)


def answers(conn: sa.Connection, *, age_s: float) -> int:
    """Delete old idempotency keys. A request that is repeated later runs again.

    Keys whose answer names a live allocation are kept, or a repetition would create another.
    """
    table = idempotency_keys
    named = table.c.body["id"].as_string()
    lives = sa.exists().where(
        allocations.c.id == named, allocations.c.state.not_in(ENDED_ALLOCATIONS)
    )
    # A request that never completed did nothing. A late completion of an expired key is refused.
    since = sa.func.coalesce(table.c.completed_at, table.c.expires_at, table.c.created_at)
    old = sa.select(table.c.scope, table.c.key).where(clock.now() - since > age_s, ~lives)
    return _delete(conn, table, (table.c.scope, table.c.key), old)


def progress(conn: sa.Connection, *, age_s: float) -> int:
    """Delete progress events of tasks that ended longer ago than age_s. Their results stay."""
    old = sa.select(task_events.c.id).join(tasks, tasks.c.id == task_events.c.task_id)
    return _delete(conn, task_events, (task_events.c.id,), old.where(_done(age_s)))


def telemetry(conn: sa.Connection) -> int:
    """Delete samples that no newer sample has replaced, such as those of ended allocations."""
    table = telemetry_samples
    key = (table.c.allocation_id, table.c.minute)
    old = sa.select(*key).where(table.c.at < clock.now() - slice_telemetry.KEPT_S)
    return _delete(conn, table, key, old)


def reports(conn: sa.Connection) -> int:
    """Delete all but the newest discoveries and parity reports of each node. Only the newest decide
    anything; of parity, also the newest that passed.
    """
    count = 0
    for table, kind in (
        (discoveries, (discoveries.c.node_id,)),
        (parities, (parities.c.node_id, parities.c.intent, parities.c.failures > 0)),
    ):
        newest = sa.func.row_number().over(partition_by=kind, order_by=table.c.id.desc())
        ranked = sa.select(table.c.id, newest.label("rank")).subquery()
        old = sa.select(ranked.c.id).where(ranked.c.rank > REPORTS)
        approved = sa.exists().where(slots.c.approved_discovery_id == ranked.c.id)
        old = old.where(~approved) if table is discoveries else old
        count += _delete(conn, table, (table.c.id,), old)
    return count


def evidence(conn: sa.Connection) -> int:
    """Drop long evidence of failed tasks, except the newest of each kind and node. Errors stay.

    A host can make its tasks fail every few minutes, and tasks are kept for ever. The evidence of
    tasks with an unknown effect stays. While the node, a slot of it or the task's allocation is not
    clean, only that of reports is dropped, because people recover by the rest.
    """
    error = tasks.c.error["evidence"]
    newest = sa.func.row_number().over(
        partition_by=(tasks.c.kind, tasks.c.node_id), order_by=tasks.c.created_at.desc()
    )
    ranked = (
        sa.select(tasks.c.id, newest.label("rank"))
        .where(
            tasks.c.state.in_((TaskState.FAILED, TaskState.CANCELED)),
            sa.func.length(sa.cast(error, sa.Text)) > LONG_EVIDENCE,
        )
        .subquery()
    )
    unclean = sa.exists().where(
        slots.c.node_id == tasks.c.node_id, slots.c.status.in_(UNCLEAN_SLOTS)
    )
    clean = sa.and_(_done(0), ~unclean, ~UNCLEAN_MACHINE)
    query = (
        sa.select(tasks.c.id)
        .join(ranked, ranked.c.id == tasks.c.id)
        .where(ranked.c.rank > REPORTS, sa.or_(tasks.c.kind.in_(REPORT_KINDS), clean))
    )
    without_limits(conn)
    ids = conn.execute(query.limit(EVIDENCE_AT_ONCE)).scalars().all()
    for task_id in ids:
        queue.shorten_error(conn, task_id)
    return len(ids)


def recordings(conn: sa.Connection, *, age_s: float) -> int:
    """Delete recordings of terminals after age_s, and a person's oldest beyond the limit. Their
    sessions stay.
    """
    table = terminal_recordings
    late = table.c.at < clock.now() - age_s
    old = sa.select(table.c.id).where(sa.or_(late, table.c.session_id.in_(terminals.excess())))
    return _delete(conn, table, (table.c.id,), old)


def tokens(conn: sa.Connection) -> int:
    """Delete tokens that people made for themselves, 30 days after their end.

    A token that made other tokens, registered a key or has a session stays as long as these.
    """
    table, child = api_tokens, api_tokens.alias()
    ended = sa.func.coalesce(table.c.revoked_at, table.c.expires_at)
    named = (child.c.parent_id, ssh_keys.c.token_id, console_sessions.c.token_id)
    old = sa.select(table.c.id).where(
        table.c.owner.is_not(None),
        clock.now() - ended > TOKENS_S,
        *(~sa.exists().where(column == table.c.id) for column in named),
    )
    return _delete(conn, table, (table.c.id,), old)


def done(conn: sa.Connection, ids: Collection[str], *, age_s: float) -> set[str]:
    """The tasks among `ids` that ended long enough ago to delete the files of their runs."""
    query = sa.select(tasks.c.id).where(tasks.c.id.in_(ids), _done(age_s))
    return set(conn.execute(query).scalars())


def _done(age_s: float) -> sa.ColumnElement[bool]:
    named = slots.c.health_detail["allocation_id"].as_string()
    needed = sa.exists().where(
        allocations.c.id == tasks.c.allocation_id, allocations.c.state.not_in(ENDED_ALLOCATIONS)
    )
    unclean = sa.exists().where(slots.c.status.in_(UNCLEAN_SLOTS), named == tasks.c.allocation_id)
    machine = UNCLEAN_MACHINE.where(nodes.c.unclean_allocation_id == tasks.c.allocation_id)
    return sa.and_(
        tasks.c.state.in_(ENDED_TASKS),
        clock.now() - tasks.c.finished_at > age_s,
        ~needed,
        ~unclean,
        ~machine,
    )


def _delete(
    conn: sa.Connection, table: sa.Table, key: tuple[sa.Column[Any], ...], old: sa.Select[Any]
) -> int:
    # An old site has large tables.
    without_limits(conn)
    chosen = old.limit(AT_ONCE)
    whole = sa.tuple_(*key) if len(key) > 1 else key[0]
    return conn.execute(sa.delete(table).where(whole.in_(chosen))).rowcount
