"""Tables of worker pools: hosts, pools, leases of devices."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Default,
    Reference,
    Row,
    StateRow,
    Text,
    table,
    unique,
)
from reconciler.model.pools import LIVE_POOLS, PoolState

_LIVE = f"state IN ({', '.join(repr(state.value) for state in LIVE_POOLS)})"


@table("pool_hosts", "pool_host")
class PoolHost(Row):
    """A machine of the service that runs pools, as it last reported itself."""

    # Of its state folder (`runs.paths.runner_id`), because names of machines may be equal.
    id: str
    name: str
    # Processes of another boot do not exist any more.
    boot_id: str
    memory_bytes: int
    memory_used_bytes: int
    # How limits of memory are enforced: cgroup1, cgroup2, or process (sampled).
    isolation: str
    # Names of the models in its folder.
    models: list[Any]
    # GPUs: id, memory_bytes, memory_used_bytes.
    devices: list[Any]
    seen_at: float


@table(
    "worker_pools",
    "pool",
    unique("uq_worker_pools_name", "name", where=_LIVE),
    # The limit of pools holds under concurrent starts, too: each live pool has a seat.
    unique("uq_worker_pools_seat", "seat", where=_LIVE),
    sa.Index("ix_worker_pools_created_at", "created_at", "id"),
    unique("uq_worker_pools_token_hash", "token_hash", where="token_hash <> ''"),
    # Its guest has a single token.
    unique("uq_worker_pools_allocation_id", "allocation_id", where="allocation_id IS NOT NULL"),
)
class Pool(StateRow):
    """Worker processes that serve the same models, on one host, in a slice (`GUEST`), or wherever
    people start them (`REMOTE`).
    """

    name: str
    host_id: Annotated[str, Reference("pool_hosts")]
    # Its workers run this project's jobs only; null: those of all projects.
    project_id: Annotated[str | None, Reference("projects", null=True)]
    seat: int
    models: list[Any]
    # SHA-256 of their files by name, as the first worker on a machine of the service loaded them.
    digests: dict[str, Any]
    replicas: int
    # Of each worker with its child.
    memory_mib: int
    kill_on_oom: bool
    devices: list[Any]
    drain_s: int
    grace_s: int
    state: Annotated[str, PoolState]
    # The state in which it ends once it is stopping.
    ends_as: Annotated[str, Default(PoolState.STOPPED.value)]
    # {} unless it failed or was evicted for its memory: code, expected, found, remedy.
    failure: dict[str, Any]
    requested_by: Text
    correlation_id: Text
    created_at: float
    ended_at: float | None
    # Of the token by which workers without the database take its jobs; "" without a token. That of
    # a guest has no time of its own: it ends with the allocation.
    token_hash: Text
    token_expires_at: float | None
    # The slice in which its workers run; null for pools of other hosts, and before a launch.
    allocation_id: Annotated[str | None, Reference("allocations", null=True)]


@table(
    "orchestrator_leases",
    "device_lease",
    unique("uq_orchestrator_leases_device", "host_id", "device", where="until IS NULL"),
    sa.Index("ix_orchestrator_leases_pool_id", "pool_id"),
)
class DeviceLease(Row):
    """A device of a host that a pool has, or had: until no process of the pool was left."""

    id: str
    pool_id: Annotated[str, Reference("worker_pools")]
    host_id: Annotated[str, Reference("pool_hosts")]
    device: str
    since: float
    until: float | None


pool_hosts = PoolHost.TABLE
pools = Pool.TABLE
device_leases = DeviceLease.TABLE
