"""Records of a pool's workers, written by their host: begun, replaced, ended with proof."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.journal import advance
from reconciler.db.schema import (
    Pool,
    PoolHost,
    PoolWorker,
    allocations,
    claims,
    device_leases,
    images,
    jobs,
    pool_hosts,
    pool_workers,
)
from reconciler.db.schema import pools as table
from reconciler.model.act import Act
from reconciler.model.pools import ENDS_S, ENDS_WITH_JOBS, LIVE_POOLS, SERVING_POOLS, PoolState
from reconciler.pools import control

log = logging.getLogger("gpuaas.pools")

# Ending of a worker whose program had another version than the service. It does not count.
REPLACED = "replaced by one of the present version"
# In place of a project: the worker held jobs of several.
_SEVERAL = "*"
_PAUSE_S = 30


def report(
    conn: sa.Connection, host: Mapping[str, Any], loads: Mapping[str, tuple[int, int]]
) -> None:
    """Record a host with its models, devices and memory, and bytes and OOM kills by worker."""
    values = {**host, "seen_at": clock.now()}
    update = sa.update(pool_hosts).where(pool_hosts.c.id == host["id"]).values(**values)
    if not conn.execute(update).rowcount:
        rows.add(conn, PoolHost, values)
    for worker_id, (size, kills) in loads.items():
        of_worker = sa.update(pool_workers).where(pool_workers.c.id == worker_id)
        conn.execute(of_worker.values(memory_bytes=size, oom_kills=kills))


def on_host(conn: sa.Connection, host_id: str) -> list[tuple[Pool, list[PoolWorker]]]:
    """Living pools of a host with their living workers."""
    query = sa.select(table).where(table.c.state.in_(LIVE_POOLS), table.c.host_id == host_id)
    pools = rows.every(conn, query.order_by(table.c.created_at), Pool)
    if not pools:
        return []
    by_pool = living(conn, [pool.id for pool in pools])
    return [(pool, by_pool[pool.id]) for pool in pools]


def living(conn: sa.Connection, pool_ids: Sequence[str]) -> dict[str, list[PoolWorker]]:
    """Living workers by pool."""
    query = sa.select(pool_workers).where(
        pool_workers.c.pool_id.in_(pool_ids), pool_workers.c.ended_at.is_(None)
    )
    by_pool: dict[str, list[PoolWorker]] = {id: [] for id in pool_ids}
    for worker in rows.every(conn, query.order_by(pool_workers.c.started_at), PoolWorker):
        by_pool[worker.pool_id].append(worker)
    return by_pool


@dataclass(frozen=True)
class Placed:
    """What the records know of the machine of a pool's workers."""

    devices: list[Any]
    image: str = ""
    image_digest: str = ""


def placed(conn: sa.Connection, allocation_ids: Sequence[str]) -> dict[str, Placed]:
    """Image and GPUs by allocation of slices."""
    if not allocation_ids:
        return {}
    gpus: dict[str, list[Any]] = {id: [] for id in allocation_ids}
    held = sa.select(claims.c.allocation_id, claims.c.gpu_pci_address)
    held = held.where(claims.c.allocation_id.in_(allocation_ids)).order_by(claims.c.position)
    for allocation_id, address in conn.execute(held):
        gpus[allocation_id].append(address)
    query = sa.select(allocations.c.id, images.c.name, images.c.version, images.c.digest)
    query = query.join(images, images.c.id == allocations.c.image_id)
    return {
        id: Placed(gpus[id], f"{name} {version}", digest)
        for id, name, version, digest in conn.execute(
            query.where(allocations.c.id.in_(allocation_ids))
        )
    }


def move(conn: sa.Connection, pool: Pool, event: str, act: Act) -> Pool | None:
    """Apply an event to a pool, unless it has changed meanwhile."""
    current = rows.get(conn, Pool, pool.id, lock=True)
    if current.generation != pool.generation:
        return None
    return advance(conn, Pool, pool.id, event, act, held=current)


def add(conn: sa.Connection, pool: Pool, worker_id: str, **values: str) -> PoolWorker | None:
    """A worker that is about to be started; None if the pool needs no more workers."""
    current = rows.get(conn, Pool, pool.id, lock=True)
    if current.state not in SERVING_POOLS:
        return None
    return rows.add(
        conn, PoolWorker, {"id": worker_id, "pool_id": pool.id, "pid": 0, "models": [], **values}
    )


def holding(conn: sa.Connection, worker_ids: Sequence[str]) -> dict[str, int]:
    """Number of jobs by worker, of those workers that hold any."""
    held = sa.select(jobs.c.worker, sa.func.count()).group_by(jobs.c.worker)
    held = held.where(jobs.c.worker.in_(worker_ids), control.RUNNING)
    return dict(conn.execute(held).all())


def end(conn: sa.Connection, worker: PoolWorker, ending: str) -> None:
    """Record that no process of a worker is left. Its jobs are lost: without their token no outcome
    of it counts, and `leases.tend` queues or buries them.
    """
    held = sa.and_(jobs.c.worker == worker.id, control.RUNNING)
    # Also those that it may have died of after they were canceled, or given to another worker.
    taken = sa.and_(jobs.c.taken_from == worker.id, jobs.c.updated_at > clock.now() - ENDS_S)
    blamed = [sa.select(jobs.c.project_id).where(each) for each in (held, taken)]
    projects = conn.execute(sa.union(*blamed).limit(2)).scalars().all()
    ended = sa.update(pool_workers).where(
        pool_workers.c.id == worker.id, pool_workers.c.ended_at.is_(None)
    )
    ended_with = _SEVERAL if len(projects) > 1 else "".join(projects)
    values = {"ended_at": clock.now(), "ending": ending, "ended_with": ended_with}
    conn.execute(ended.values(**values, memory_bytes=0))
    lost = sa.update(jobs).where(held)
    conn.execute(lost.values(token="", lease_expires_at=clock.now() - 1))


def forget(conn: sa.Connection, worker_id: str) -> None:
    """Delete the record of a worker of which no process is left. Its models are not known any more
    if no other worker serves them, or has lately.
    """
    conn.execute(sa.delete(pool_workers).where(pool_workers.c.id == worker_id))


def recent_ends(conn: sa.Connection, pool: Pool) -> int:
    """Workers of a serving pool that have ended lately, all of them by themselves.

    In a pool of all projects, an end with jobs of several does not count: one of these jobs has
    killed the worker or will kill the next, alone. Of the ends with jobs of one, a few count.
    """
    query = sa.select(pool_workers.c.ended_with, sa.func.count()).where(_lately(pool))
    counted = conn.execute(query.group_by("ended_with"))
    ends = {ended_with: int(number) for ended_with, number in counted}
    if pool.project_id is not None:
        return sum(ends.values())
    ends.pop(_SEVERAL, None)
    alone = ends.pop("", 0)
    return alone + min(sum(ends.values()), ENDS_WITH_JOBS)


def pause(conn: sa.Connection, pool: Pool, ends: int) -> float:
    """Seconds until a worker is replaced: after the last end, one for each recent end that does not
    count. These never end the pool, so its host would start workers without a pause.

    ends: answer of `recent_ends`.
    """
    since = clock.now() - sa.func.max(pool_workers.c.ended_at)
    number, since_s = conn.execute(sa.select(sa.func.count(), since).where(_lately(pool))).one()
    return min(number - ends, _PAUSE_S) - (since_s or 0.0)


def _lately(pool: Pool) -> sa.ColumnElement[bool]:
    # Not those of before the clock was set back.
    recent = pool_workers.c.ended_at.between(clock.now() - ENDS_S, clock.now())
    itself = pool_workers.c.ending != REPLACED
    return sa.and_(pool_workers.c.pool_id == pool.id, recent, itself)


def conclude(
    conn: sa.Connection,
    pool: Pool,
    act: Act,
    state: PoolState,
    values: Mapping[str, Any] | None = None,
) -> Pool:
    """End a pool of which no process is left, and its leases of devices, together."""
    held = sa.update(device_leases).where(
        device_leases.c.pool_id == pool.id, device_leases.c.until.is_(None)
    )
    conn.execute(held.values(until=clock.now()))
    columns = {"ended_at": clock.now(), "token_hash": "", **(values or {})}
    return advance(conn, Pool, pool.id, state.value, act, columns=columns, held=pool)
