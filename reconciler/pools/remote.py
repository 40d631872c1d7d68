"""Workers without the database: the token of their pool, their seats, and the jobs that they hold.

Every function is a transaction's work. A worker is believed nothing: it gets, renews and ends jobs
that it holds itself, of its pool's project, as long as its pool has the token.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.schema import Pool, PoolWorker, jobs, pool_workers
from reconciler.db.schema import pools as table
from reconciler.model.act import Act
from reconciler.model.errors import Problem, not_found
from reconciler.model.jobs import Call, Mode, Outcome
from reconciler.model.pools import APART, GUEST, LIVE_POOLS, REMOTE, SERVING_POOLS, PoolState
from reconciler.pools import control, leases, pools, workers
from reconciler.records.tokens import digest

# Of tokens, so that people and filters of logs know them.
PREFIX = "gpuaas_pool_"
# Jobs that a worker can hold at a time.
HELD = 64
# After this time without a heartbeat a worker has no lease any more, and its seat is free.
SILENT_S = leases.LEASE_S
# After this time it is recorded as ended.
_GONE_S = 600.0
# Records of workers kept for each seat of a pool, its present worker included: as many as may end
# before a pool on the service's own machines is given up.
_KEPT = 8
# A job is renewed for its own time and this, in which models are loaded again.
_EXTRA_S = 360.0
# States of a pool whose token is valid; a pool that is ended by force has none.
_ADMITTED = (*SERVING_POOLS, PoolState.DRAINING)
_ACT = Act("reconciler")


class Claim(NamedTuple):
    """A repetition with the same token gets the same jobs, should the first answer be lost."""

    token: str
    limit: int


class Turn(NamedTuple):
    """counted: how many outcomes counted. serving: whether the pool gives out jobs. dead: error
    codes of dead letters by id.
    """

    counted: int
    jobs: list[Call]
    serving: bool
    dead: dict[str, str]


def issue(conn: sa.Connection, key: str, act: Act, ttl_s: float) -> tuple[Pool, str]:
    """Give a pool a token, which replaces its previous token. Returns the secret, too."""
    pool = pools.get(conn, key, lock=True)
    if pool.host_id != REMOTE or pool.state not in SERVING_POOLS:
        raise Problem(
            "pool_without_token",
            expected="a pool with the target remote that serves",
            found=f"{pool.state}, and its workers run on {pool.host_id}",
            remedy="start one with `gpuaas pools start --target remote`",
        )
    secret = f"{PREFIX}{secrets.token_urlsafe(32)}"
    update = sa.update(table).where(table.c.id == pool.id)
    expires = clock.now() + ttl_s
    conn.execute(update.values(token_hash=digest(secret), token_expires_at=expires))
    detail = {"name": pool.name, "ttl_s": ttl_s}
    journal.audit_of(conn, act, "pool.token.issued", pool, detail)
    return pools.get(conn, pool.id), secret


def authenticate(conn: sa.Connection, secret: str) -> Pool | None:
    """The pool of a token; None when it is unknown or expired, or its pool has ended."""
    query = sa.select(table).where(
        table.c.token_hash == digest(secret),
        sa.or_(table.c.token_expires_at.is_(None), table.c.token_expires_at > clock.now()),
        table.c.state.in_(_ADMITTED),
    )
    return rows.first(conn, query, Pool)


def register(
    conn: sa.Connection,
    pool: Pool,
    *,
    host: str,
    pid: int,
    models: Sequence[str],
    version: str = "",
) -> PoolWorker:
    """Record a worker of a pool, which has a seat for each of its replicas."""
    pool = rows.get(conn, Pool, pool.id, lock=True)
    if pool.state not in SERVING_POOLS:
        raise Problem(
            "pool_ended",
            expected="a pool that serves",
            found=f"{pool.state}",
            remedy="end the worker, or give it the token of another pool",
        )
    if unknown := sorted(set(models) - set(pool.models)):
        raise Problem(
            "model_unknown",
            422,
            expected=f"models of the pool: {', '.join(pool.models)}",
            found=repr(unknown[0]),
            remedy="correct --model, or start a pool with it",
        )
    _require_seat(conn, pool)
    _forget_ended(conn, pool)
    # A guest is believed nothing of where it is.
    where = pool.allocation_id if pool.host_id == GUEST and pool.allocation_id else host
    values = {"id": rows.new_id(), "pool_id": pool.id, "host": where, "pid": pid}
    values |= {"version": version, "models": sorted(set(models))}
    return rows.add(conn, PoolWorker, values)


def turn(
    conn: sa.Connection,
    pool: Pool,
    worker_id: str,
    *,
    ended: Sequence[tuple[Call, Outcome]] = (),
    returned: Sequence[Call] = (),
    claim: Claim | None = None,
) -> Turn:
    """Record outcomes of jobs that the worker holds, queue others again, and claim new ones."""
    worker = _member(conn, pool, worker_id)
    if claim is not None:
        # Locked before the jobs, as at the deadline of a drain, or each would wait for the other.
        control.is_normal(conn)
    mine = sa.and_(control.RUNNING, jobs.c.worker == worker.id)
    query = sa.select(jobs.c.id, jobs.c.token, jobs.c.lost).where(mine)
    held = {(id, token): lost for id, token, lost in conn.execute(query)}
    of_worker = [(call, outcome) for call, outcome in ended if (call.id, call.token) in held]
    counted = leases.finish(conn, of_worker)
    back = {(call.id, call.token): call for call in returned if (call.id, call.token) in held}
    leases.give_back(conn, list(back.values()))
    rest = [lost for key, lost in held.items() if key[0] not in counted and key not in back]
    claimed: list[Call] = []
    if claim is not None:
        claimed = leases.claimed(conn, worker, claim.token, extra_s=_EXTRA_S)
        room = 0 if any(rest) else min(claim.limit, HELD - len(rest))
        if not claimed and room > 0:
            claimed = leases.claim(conn, worker, limit=room, token=claim.token, alone=not rest)
    dead = leases.buried(of_worker, counted)
    return Turn(len(counted), claimed, pool.state in SERVING_POOLS, dead)


def renew(conn: sa.Connection, pool: Pool, worker_id: str, tokens: Sequence[str]) -> set[str]:
    """Renew leases; returns the ids of jobs that the worker still holds.

    A job that has had its time is not renewed, and goes to another worker.
    """
    worker = _member(conn, pool, worker_id)
    return leases.renew(conn, worker, tokens, extra_s=_EXTRA_S)


def look(conn: sa.Connection, pool: Pool, worker_id: str) -> tuple[bool, list[str]]:
    """Whether a claim of the worker would get jobs, and its models: a read."""
    worker = rows.first(conn, _of(pool, worker_id), PoolWorker)
    if worker is None:
        raise not_found("worker", worker_id)
    due = control.read(conn).mode == Mode.NORMAL and not leases.is_idle(conn, worker)
    return due, worker.models


def leave(conn: sa.Connection, pool: Pool, worker_id: str) -> None:
    """Record the end of a worker. Jobs that it still holds are lost."""
    workers.end(conn, _member(conn, pool, worker_id), "left")


def any_pool(conn: sa.Connection) -> bool:
    """Whether `tend` has anything to do."""
    query = sa.select(table.c.id).where(table.c.host_id.in_(APART), table.c.state.in_(LIVE_POOLS))
    return conn.execute(query.limit(1)).first() is not None


def tend(conn: sa.Connection) -> list[Pool]:
    """Record the ends of silent workers and of pools; returns the pools of which nothing is left.

    Their processes are beyond reach. Without the token, whatever is left of them has no effect.
    """
    # From before the clock was set back. A living worker soon has a new heartbeat.
    ahead = sa.update(pool_workers).where(
        pool_workers.c.ended_at.is_(None), pool_workers.c.beat_at > clock.now() + 1
    )
    conn.execute(ahead.values(beat_at=clock.now()))
    silent = sa.select(pool_workers).join(table, table.c.id == pool_workers.c.pool_id)
    left = table.c.allocation_id.is_(None) | (table.c.allocation_id != pool_workers.c.host)
    silent = silent.where(
        table.c.host_id.in_(APART),
        pool_workers.c.ended_at.is_(None),
        sa.or_(
            pool_workers.c.beat_at < clock.now() - _GONE_S,
            # Those of a guest whose allocation has ended.
            sa.and_(table.c.host_id == GUEST, left),
        ),
    )
    for worker in rows.every(conn, silent, PoolWorker):
        workers.end(conn, worker, "silent")
    ending = sa.select(table).where(
        table.c.host_id.in_(APART), table.c.state.in_((PoolState.DRAINING, PoolState.STOPPING))
    )
    ended: list[Pool] = []
    for pool in rows.every(conn, ending.with_for_update(), Pool):
        living = workers.living(conn, [pool.id])[pool.id]
        ids = [worker.id for worker in living]
        if pool.state == PoolState.STOPPING or not workers.holding(conn, ids):
            for worker in living:
                workers.end(conn, worker, "dismissed")
            act = _ACT.because("its token is revoked, and its workers hold no jobs")
            ended.append(workers.conclude(conn, pool, act, PoolState(pool.ends_as)))
    return ended


def _of(pool: Pool, worker_id: str) -> sa.Select[tuple[PoolWorker]]:
    return sa.select(pool_workers).where(
        pool_workers.c.id == worker_id,
        pool_workers.c.pool_id == pool.id,
        pool_workers.c.ended_at.is_(None),
    )


def _member(conn: sa.Connection, pool: Pool, worker_id: str) -> PoolWorker:
    """A living worker of the pool, locked: its requests come one after the other."""
    worker = rows.first(conn, _of(pool, worker_id).with_for_update(), PoolWorker)
    if worker is None:
        raise not_found("worker", worker_id)
    if worker.beat_at < clock.read(conn) - SILENT_S:
        # Its seat may have gone to another worker. If not, it has it again, and no other worker.
        _require_seat(conn, rows.get(conn, Pool, pool.id, lock=True), worker_id)
        beat = sa.update(pool_workers).where(pool_workers.c.id == worker_id)
        conn.execute(beat.values(beat_at=clock.now()))
    return worker


def _forget_ended(conn: sa.Connection, pool: Pool) -> None:
    """Delete the oldest of a pool's ended workers: a guest may register and leave without end."""
    ended = sa.select(pool_workers.c.id).where(
        pool_workers.c.pool_id == pool.id, pool_workers.c.ended_at.is_not(None)
    )
    old = ended.order_by(pool_workers.c.ended_at.desc()).offset((_KEPT - 1) * pool.replicas)
    conn.execute(sa.delete(pool_workers).where(pool_workers.c.id.in_(old)))


def _require_seat(conn: sa.Connection, pool: Pool, worker_id: str = "") -> None:
    taken = sa.select(sa.func.count()).where(
        pool_workers.c.pool_id == pool.id,
        pool_workers.c.id != worker_id,
        pool_workers.c.ended_at.is_(None),
        pool_workers.c.beat_at >= clock.now() - SILENT_S,
    )
    if (count := conn.execute(taken).scalar_one()) >= pool.replicas:
        raise Problem(
            "pool_full",
            expected=f"at most {pool.replicas} workers of the pool",
            found=f"{count} with a heartbeat in the last {SILENT_S:.0f} s",
            remedy="end one of them, or start a pool with more replicas",
            detail={"retry_after_s": int(SILENT_S)},
        )
