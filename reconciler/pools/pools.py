"""Worker pools as operators see them: started within limits, listed, stopped, evicted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.journal import Overdue, advance
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import DeviceLease, Pool, PoolHost, Project, device_leases, pool_hosts
from reconciler.db.schema import pools as table
from reconciler.model.act import Act, require_reason
from reconciler.model.errors import Problem, not_found
from reconciler.model.pools import APART, LIVE_POOLS, SERVING_POOLS, PoolState
from reconciler.pools import control, workers

log = logging.getLogger("gpuaas.pools")

ORDER = Order(table, ("created_at", "id"), descending=True)
LEASE_ORDER = Order(device_leases, ("since", "id"), descending=True)
# A host that has not reported itself for longer takes no new pool.
SILENT_S = 30.0
# After so long an operator may declare that it does not come back.
LOST_S = 600.0
_MIB = 1 << 20
_LIVE = table.c.state.in_(LIVE_POOLS)


@dataclass(frozen=True)
class NewPool:
    """A request for a pool. host: id or name; "" for any. project_id None: jobs of all projects.

    target: "host", a machine of the service; `GUEST`: the slice of a launch that names the pool;
    `REMOTE`: workers that others start anywhere.
    """

    name: str
    models: Sequence[str]
    replicas: int = 1
    memory_mib: int = 2048
    kill_on_oom: bool = False
    devices: Sequence[str] = ()
    drain_s: int = 600
    grace_s: int = 30
    host: str = ""
    project_id: str | None = None
    target: str = "host"


def start(conn: sa.Connection, wish: NewPool, act: Act, *, most: int) -> Pool:
    """Record a pool, which its host then starts. most: pools that the site may have at once."""
    if wish.project_id:
        rows.get(conn, Project, wish.project_id)
    apart = wish.target in APART
    host = rows.get(conn, PoolHost, wish.target) if apart else _host(conn, wish)
    same = sa.select(table.c.id).where(_LIVE, table.c.name == wish.name)
    if existing := conn.execute(same).scalar():
        raise Problem(
            "pool_exists",
            expected="a name that no living pool has",
            found=f"{wish.name!r}, which pool {existing} has",
            remedy="choose another name, or stop that pool",
        )
    values: dict[str, Any] = {**asdict(wish), "models": sorted(set(wish.models))}
    del values["host"], values["target"]
    devices = values["devices"] = list(dict.fromkeys(wish.devices))
    pool = journal.create(
        conn,
        Pool,
        act,
        **values,
        host_id=host.id,
        seat=_seat(conn, most),
        state=PoolState.REQUESTED,
        state_reason=act.why,
        requested_by=act.actor,
        correlation_id=act.correlation_id,
    )
    for device in devices:
        lease = {"id": rows.new_id(), "pool_id": pool.id, "host_id": host.id, "device": device}
        rows.add(conn, DeviceLease, lease)
    for event in ("begin", "ready") if apart else ():
        pool = advance(conn, Pool, pool.id, event, act, held=pool)
    _audit(conn, pool, act, "started", {"host": host.name, "replicas": pool.replicas})
    return pool


def get(conn: sa.Connection, key: str, *, lock: bool = False) -> Pool:
    """The pool with an id, or the living pool with a name."""
    named = sa.and_(_LIVE, table.c.name == key)
    # A name may look like the id of another pool, and an id prevails.
    query = sa.select(table).where(sa.or_(table.c.id == key, named))
    query = query.order_by(sa.case((table.c.id == key, 0), else_=1))
    pool = rows.first(conn, query.with_for_update() if lock else query, Pool)
    if pool is None:
        raise not_found("pool", key)
    return pool


def every(
    conn: sa.Connection,
    *,
    state: PoolState | None = None,
    live: bool | None = None,
    project_id: str | None = None,
    page: Page | None = None,
) -> list[Pool]:
    """Pools, the newest first. live: only those that may have processes, or only the others.
    project_id: only those that run the jobs of this project alone.
    """
    query = rows.where(sa.select(table), table, state=state, project_id=project_id)
    if live is not None:
        query = query.where(_LIVE if live else sa.not_(_LIVE))
    return rows.every(conn, part(query, ORDER, page), Pool)


def failed(conn: sa.Connection, within_s: float) -> int:
    """Number of pools that have failed lately."""
    lately = table.c.ended_at > clock.now() - within_s
    query = sa.select(sa.func.count()).where(table.c.state == PoolState.FAILED, lately)
    return int(conn.execute(query).scalar_one())


def hosts(conn: sa.Connection) -> list[PoolHost]:
    """Hosts that have reported themselves, by name."""
    query = sa.select(pool_hosts).where(pool_hosts.c.id.not_in(APART))
    query = query.order_by(pool_hosts.c.name, pool_hosts.c.id)
    return rows.every(conn, query, PoolHost)


def devices(conn: sa.Connection) -> dict[tuple[str, str], dict[str, Any]]:
    """GPUs by host and id, as their host reports them. A silent host takes no pool, and may not
    come back: it has none.
    """
    since = clock.read(conn) - SILENT_S
    reporting = [host for host in hosts(conn) if host.seen_at > since]
    return {(host.id, device["id"]): device for host in reporting for device in host.devices}


def gpus(
    of: Sequence[Pool], devices: Mapping[tuple[str, str], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """GPUs of living pools by pool. devices: those that hosts report."""
    return {
        pool.id: [
            devices[pool.host_id, device]
            for device in pool.devices
            if (pool.host_id, device) in devices and pool.state in LIVE_POOLS
        ]
        for pool in of
    }


def leases(
    conn: sa.Connection, *, ended: bool = False, page: Page | None = None
) -> list[DeviceLease]:
    """Leases of devices, the newest first. ended: also those of pools that have ended."""
    query = sa.select(device_leases)
    if not ended:
        query = query.where(device_leases.c.until.is_(None))
    return rows.every(conn, part(query, LEASE_ORDER, page), DeviceLease)


def stop(conn: sa.Connection, key: str, act: Act) -> Pool:
    """Let a pool finish the jobs that it holds, then end it. One that ends stays as it is."""
    pool = get(conn, key, lock=True)
    if pool.state == PoolState.REQUESTED:
        pool = workers.conclude(conn, pool, act, PoolState.STOPPED)
    elif pool.state in SERVING_POOLS:
        limit = clock.now() + pool.drain_s
        pool = advance(conn, Pool, pool.id, "drain", act, columns={"deadline_at": limit}, held=pool)
    else:
        return pool
    _audit(conn, pool, act, "stopped")
    return pool


def stop_all(conn: sa.Connection, act: Act) -> list[Pool]:
    """Stop every living pool."""
    ids = sa.select(table.c.id).where(_LIVE).order_by(table.c.id)
    return [stop(conn, id, act) for id in conn.execute(ids).scalars().all()]


def evict(
    conn: sa.Connection, key: str, act: Act, failure: Mapping[str, str] | None = None
) -> Pool:
    """End a pool without waiting for its jobs, which go to other workers."""
    pool = get(conn, key, lock=True)
    if pool.state not in LIVE_POOLS or pool.state == PoolState.STOPPING:
        return pool
    values = {"ends_as": PoolState.EVICTED.value, "failure": dict(failure or {})}
    if pool.state == PoolState.REQUESTED:
        pool = workers.conclude(conn, pool, act, PoolState.EVICTED, values)
    else:
        pool = end(conn, pool, act, values)
    # Runbooks look for these words.
    log.warning("Pool eviction: %s (%s), %s", pool.name, pool.id, act.why)
    _audit(conn, pool, act, "evicted", failure)
    control.count(conn, worker_pool_evictions=1)
    return pool


def evict_lost(conn: sa.Connection, key: str, act: Act) -> Pool:
    """End a pool whose host does not come back, by the word of an operator in place of proof that
    no process of it is left. Should its host come back, it kills them before it offers its GPUs.
    """
    pool = get(conn, key, lock=True)
    if pool.state not in LIVE_POOLS:
        return pool
    require_reason(act, "say how you know that the host does not come back")
    host = rows.get(conn, PoolHost, pool.host_id)
    silent_s = clock.read(conn) - host.seen_at
    if host.id in APART or silent_s < LOST_S:
        raise Problem(
            "pool_host_present",
            expected=f"a pool of a machine that has not reported itself for {LOST_S:.0f} s",
            found=f"pool {pool.name} of host {host.name}"
            + ("" if host.id in APART else f", which did {max(silent_s, 0):.0f} s ago"),
            remedy="evict it without --host-lost: its host ends its processes",
        )
    pool = evict(conn, pool.id, act)
    if pool.state in LIVE_POOLS:
        for worker in workers.living(conn, [pool.id])[pool.id]:
            workers.end(conn, worker, "its host is lost")
        failed = pool.ends_as == PoolState.FAILED
        state = PoolState.FAILED if failed else PoolState.EVICTED
        pool = workers.conclude(conn, pool, act, state)
    _audit(conn, pool, act, "host_lost", {"host": host.name, "seen_at": host.seen_at})
    return pool


def end(conn: sa.Connection, pool: Pool, act: Act, values: Mapping[str, Any]) -> Pool:
    """Tell the host to end a pool's processes now."""
    limit = clock.now() + pool.grace_s + 60
    columns = {"deadline_at": limit, **values}
    return advance(conn, Pool, pool.id, "end", act, columns=columns, held=pool)


def expire(conn: sa.Connection, overdue: Overdue, act: Act) -> None:
    """End a pool that came up too late, or whose jobs did not end in time."""
    pool = get(conn, overdue.id, lock=True)
    if pool.state != overdue.state or pool.deadline_at != overdue.deadline_at:
        return
    if pool.state == PoolState.DRAINING:
        end(conn, pool, act, {})
        return
    failure = {
        "code": "pool_late",
        "expected": "its host to begin"
        if pool.state == PoolState.REQUESTED
        else "workers that load their models in time",
        "found": f"still {pool.state} at its deadline",
        "remedy": "read the log of the service on its host, then start it again",
    }
    if pool.state == PoolState.REQUESTED:
        workers.conclude(conn, pool, act, PoolState.FAILED, {"failure": failure})
    else:
        end(conn, pool, act, {"ends_as": PoolState.FAILED.value, "failure": failure})


def _audit(
    conn: sa.Connection,
    pool: Pool,
    act: Act,
    action: str,
    detail: Mapping[str, object] | None = None,
) -> None:
    journal.audit_of(conn, act, f"pool.{action}", pool, {"name": pool.name, **(detail or {})})


def _seat(conn: sa.Connection, most: int) -> int:
    """The lowest free seat. Of two simultaneous starts, the unique index refuses the second, which
    counts again.
    """
    taken = set(conn.execute(sa.select(table.c.seat).where(_LIVE)).scalars())
    if len(taken) >= most:
        raise Problem(
            "pool_limit",
            expected=f"at most {most} living pools (GPUAAS_GPU_POOL_MAX_TOTAL)",
            found=f"{len(taken)}",
            remedy="stop a pool, or raise the limit",
        )
    return next(seat for seat in range(1, most + len(taken) + 1) if seat not in taken)


def _host(conn: sa.Connection, wish: NewPool) -> PoolHost:
    """The host with most free memory that can take the pool; otherwise why the first cannot."""
    query = sa.select(pool_hosts).where(pool_hosts.c.seen_at > clock.now() - SILENT_S)
    if wish.host:
        query = query.where(sa.or_(pool_hosts.c.id == wish.host, pool_hosts.c.name == wish.host))
    # Requests count the memory of a host one after the other.
    query = query.order_by(pool_hosts.c.id).with_for_update()
    live = rows.every(conn, query, PoolHost)
    if not live:
        raise Problem(
            "pool_host_missing",
            expected=f"a living host {wish.host}" if wish.host else "a living host of pools",
            found="none",
            remedy="list them with `gpuaas pools hosts`; start `gpuaas worker` or `gpuaas serve`"
            " there",
        )
    size = sa.func.sum(table.c.memory_mib * table.c.replicas)
    query = sa.select(table.c.host_id, size).where(_LIVE).group_by(table.c.host_id)
    used = {host_id: int(mib) for host_id, mib in conn.execute(query)}
    free = {host.id: host.memory_bytes // _MIB - used.get(host.id, 0) for host in live}
    live.sort(key=lambda host: free[host.id], reverse=True)
    refusals = []
    for host in live:
        refusal = _refusal(conn, host, wish, free[host.id])
        if refusal is None:
            return host
        refusals.append(refusal)
    raise refusals[0]


def _refusal(conn: sa.Connection, host: PoolHost, wish: NewPool, free: int) -> Problem | None:
    """Why a host cannot take the pool, if it cannot."""
    if unknown := sorted(set(wish.models) - set(host.models)):
        return Problem(
            "model_unknown",
            422,
            expected=f"models of host {host.name}: {', '.join(host.models)}",
            found=repr(unknown[0]),
            remedy="correct the name, or put its file into the folder of models of that host",
        )
    ids = {device["id"] for device in host.devices}
    if missing := sorted(set(wish.devices) - ids):
        return Problem(
            "device_unknown",
            422,
            expected=f"devices of host {host.name}: {', '.join(sorted(ids)) or 'none'}",
            found=missing[0],
            remedy="list them with `gpuaas pools hosts`",
        )
    held = sa.select(device_leases.c.device, device_leases.c.pool_id).where(
        device_leases.c.host_id == host.id,
        device_leases.c.until.is_(None),
        device_leases.c.device.in_(wish.devices),
    )
    if lease := conn.execute(held).first():
        return Problem(
            "device_leased",
            expected="devices that no pool has",
            found=f"{lease.device}, which pool {lease.pool_id} has",
            remedy="choose another device, or stop that pool",
        )
    needed = wish.replicas * wish.memory_mib
    if needed > free:
        return Problem(
            "pool_memory_exceeded",
            422,
            expected=f"at most {max(free, 0)} MiB for all workers: host {host.name} has"
            f" {host.memory_bytes // _MIB} MiB, and its other pools may use the rest",
            found=f"{wish.replicas} x {wish.memory_mib} MiB",
            remedy="lower the limit or the number of workers, or stop another pool",
        )
    return None
