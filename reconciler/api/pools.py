"""Worker pools, their hosts and the leases of their devices, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator
from sqlalchemy import Connection

from reconciler.api.http import PageOf, Paging
from reconciler.api.models import (
    Answer,
    Document,
    Id,
    Integer,
    Label,
    Moment,
    Name,
    Reasoned,
    RequiredText,
    StrictFlag,
)
from reconciler.api.security import Admin, Member
from reconciler.api.timeline import Change
from reconciler.db import journal, schema
from reconciler.db.rows import Page
from reconciler.model.act import Act
from reconciler.model.pools import APART, PoolState, passed_percent
from reconciler.pools import pools, remote, workers

Live = Annotated[
    bool | None, Query(description="true: without those that have ended; false: only those.")
]

router = APIRouter(tags=["pools"])
project_router = APIRouter(prefix="/projects/{project_id}/pools", tags=["pools"])

_MOST_MIB = 1 << 30
_DAY_S = 86_400


class NewPool(Reasoned):
    """Worker processes of a host. memory_mib is the limit of each."""

    name: Name
    models: Annotated[list[Name], Field(min_length=1, max_length=32)]
    replicas: Annotated[Integer, Field(ge=1, le=64)] = 1
    memory_mib: Annotated[Integer, Field(ge=256, le=_MOST_MIB)] = 2048
    kill_on_oom: Annotated[
        StrictFlag, Field(description="End the pool when memory runs out, the largest first.")
    ] = False
    devices: Annotated[
        list[RequiredText],
        Field(max_length=16, default_factory=list, description="Ids of GPUs of the host."),
    ]
    drain_s: Annotated[
        Integer, Field(ge=0, le=_DAY_S, description="Time for jobs to end at a stop.")
    ] = 600
    grace_s: Annotated[
        Integer, Field(ge=1, le=600, description="Time from SIGTERM to SIGKILL.")
    ] = 30
    host: Annotated[Label, Field(description="Id or name; empty: the one with most memory.")] = ""
    project_id: Annotated[
        Name | None, Field(description="Run jobs of this project only; null: of all.")
    ] = None
    target: Annotated[
        Literal["host", "allocation", "remote"],
        Field(
            description="host: a machine of the service. allocation: the slice of a launch that"
            " names the pool. remote: workers that others start."
        ),
    ] = "host"

    @model_validator(mode="after")
    def _fits_target(self) -> Self:
        if self.target != "host":
            if not self.project_id:
                raise ValueError("such a pool runs jobs of a project: name it in project_id")
            memory = ("memory_mib",) if self.target == "remote" else ()
            for name in ("host", "devices", "kill_on_oom", *memory):
                if getattr(self, name) != type(self).model_fields[name].get_default(
                    call_default_factory=True
                ):
                    raise ValueError(f"{name} has no effect on workers of target {self.target}")
        return self


class Eviction(Reasoned):
    """The reason is required for a lost host."""

    host_lost: Annotated[
        StrictFlag,
        Field(
            description="The pool's host, silent for ten minutes, does not come back: the pool is"
            " `evicted` and its GPUs are free without proof that its processes have ended."
        ),
    ] = False


class NewToken(Reasoned):
    """ttl_s: how long the token is valid, unless its pool ends or gets another one before."""

    ttl_s: Annotated[Integer, Field(ge=60, le=30 * _DAY_S)] = _DAY_S


class IssuedToken(Answer):
    """The token of a pool, shown once. It opens nothing but `/worker` for jobs of this pool."""

    pool_id: str
    token: str
    token_expires_at: Moment


class Worker(Answer):
    """A process of a pool. pid is 0 until it has come up; without models it is loading them."""

    id: str
    host: str
    pid: int
    version: str = Field(
        description="Of its program, with the revision of the database; empty: older, or unknown."
    )
    models: list[str]
    memory_bytes: int
    oom_kills: int
    jobs: int = Field(description="That it holds.")
    started_at: Moment
    beat_at: Moment


class Device(Answer):
    """A GPU of a host."""

    id: str
    memory_bytes: int
    memory_used_bytes: int


class PoolGpu(Device):
    """A GPU of a living pool. Nothing is evicted for its memory."""

    above_percent: int = Field(description="85 or 90: so much of its memory is in use; else 0.")

    @classmethod
    def of_device(cls, device: dict[str, Any]) -> Self:
        share = device["memory_used_bytes"] / device["memory_bytes"]
        return cls.of(device, above_percent=passed_percent(share))


class Pool(Answer):
    """A pool, with its living workers."""

    id: str
    name: str
    host_id: str
    project_id: str | None
    models: list[str]
    digests: dict[str, str] = Field(description="SHA-256 of their files; workers load no others.")
    replicas: int
    memory_mib: int
    kill_on_oom: bool
    devices: list[str] = Field(description="GPUs; of a slice, their addresses on its machine.")
    gpus: list[PoolGpu] = Field(description="Those that a machine of the service reports.")
    allocation_id: str | None = Field(description="The slice in which its workers run.")
    image: str = Field(description="Name and version of the slice's image.")
    image_digest: str
    drain_s: int
    grace_s: int
    state: PoolState
    state_reason: str
    state_since: Moment
    deadline_at: Moment | None
    failure: Document = Field(description="{} unless it failed or was evicted for its memory.")
    memory_bytes: int = Field(description="In use by all its workers.")
    jobs: int = Field(description="That its workers hold.")
    workers: list[Worker]
    requested_by: str
    correlation_id: str
    created_at: Moment
    ended_at: Moment | None
    token_expires_at: Moment | None = Field(description="Of the token of a remote pool.")

    @classmethod
    def of_pool(cls, conn: Connection, pool: schema.Pool) -> Self:
        return cls.of_pools(conn, [pool])[0]

    @classmethod
    def of_pools(cls, conn: Connection, rows: Sequence[schema.Pool]) -> list[Self]:
        living = workers.living(conn, [pool.id for pool in rows])
        held = workers.holding(conn, [each.id for pool in rows for each in living[pool.id]])
        placed = workers.placed(conn, [pool.allocation_id for pool in rows if pool.allocation_id])
        gpus = pools.gpus(rows, pools.devices(conn))
        return [
            cls.of(
                pool,
                **asdict(placed.get(pool.allocation_id or "", workers.Placed(pool.devices))),
                workers=[Worker.of(each, jobs=held.get(each.id, 0)) for each in living[pool.id]],
                memory_bytes=sum(each.memory_bytes for each in living[pool.id]),
                jobs=sum(held.get(each.id, 0) for each in living[pool.id]),
                gpus=[PoolGpu.of_device(device) for device in gpus[pool.id]],
            )
            for pool in rows
        ]


class ProjectPool(Answer):
    """A pool as its project sees it: nothing of its machine."""

    id: str
    name: str
    target: Literal["host", "allocation", "remote"]
    models: list[str]
    replicas: int
    memory_mib: int
    state: PoolState
    state_since: Moment
    failure_code: str = Field(description="Empty unless it failed or was evicted for its memory.")
    allocation_id: str | None = Field(description="The slice in which its workers run.")
    workers: int = Field(description="That have loaded its models.")
    jobs: int = Field(description="That its workers hold.")
    created_at: Moment
    ended_at: Moment | None

    @classmethod
    def of_pools(cls, conn: Connection, rows: Sequence[schema.Pool]) -> list[Self]:
        living = workers.living(conn, [pool.id for pool in rows])
        held = workers.holding(conn, [each.id for pool in rows for each in living[pool.id]])
        return [
            cls.of(
                pool,
                target=pool.host_id if pool.host_id in APART else "host",
                failure_code=pool.failure.get("code", ""),
                workers=sum(bool(each.models) for each in living[pool.id]),
                jobs=sum(held.get(each.id, 0) for each in living[pool.id]),
            )
            for pool in rows
        ]


class Pools(Answer):
    """Pools that were stopped together."""

    items: list[Pool]


class PoolHost(Answer):
    """A machine of the service that runs pools. isolation: how limits of memory are enforced, by
    the kernel's groups or by samples of the processes.
    """

    id: str
    name: str
    memory_bytes: int
    memory_used_bytes: int
    isolation: str
    models: list[str]
    devices: list[Device]
    seen_at: Moment


class PoolHosts(Answer):
    """Hosts by name."""

    hosts: list[PoolHost]


class DeviceLease(Answer):
    """A device that a pool holds until none of its processes is left."""

    id: str
    pool_id: str
    host_id: str
    device: str
    since: Moment
    until: Moment | None


@router.post("/pools", status_code=201, response_model=Pool)
def start(body: NewPool, context: Admin) -> JSONResponse:
    """Start a pool. It is `running` once all its workers have loaded their models."""
    wish = pools.NewPool(**body.model_dump(exclude={"reason"}))
    most = context.settings.gpu_pool_max_total
    return context.write(
        lambda conn, act: Pool.of_pool(conn, pools.start(conn, wish, act, most=most)),
        body=body,
        status=201,
    )


@router.get("/pools")
def list_pools(
    context: Admin,
    paging: Paging,
    state: Annotated[PoolState | None, Query()] = None,
    *,
    live: Live = None,
) -> PageOf[Pool]:
    """Pools, the newest first, ended ones included."""
    read = partial(pools.every, state=state, live=live)
    return context.page_with(paging, pools.ORDER, read, Pool.of_pools)


@project_router.get("")
def list_of_project(
    project_id: Id,
    context: Member,
    paging: Paging,
    *,
    live: Live = None,
) -> PageOf[ProjectPool]:
    """Pools that run the jobs of this project alone, the newest first. A launch may name one with
    the target allocation.
    """
    read = partial(pools.every, live=live, project_id=project_id)
    return context.page_with(paging, pools.ORDER, read, ProjectPool.of_pools)


@router.get("/pools/hosts")
def list_hosts(context: Admin) -> PoolHosts:
    """Machines that can run pools, with their models, devices and memory."""
    return PoolHosts(hosts=[PoolHost.of(host) for host in context.read(pools.hosts)])


@router.post("/pools/stop-all", response_model=Pools)
def stop_all(context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Stop every living pool, as `POST /pools/{pool_id}/stop`."""
    return context.write(
        lambda conn, act: Pools(items=Pool.of_pools(conn, pools.stop_all(conn, act))), body=body
    )


@router.get("/pools/{pool_id}")
def show(pool_id: Id, context: Admin) -> Pool:
    """The pool with an id, or the living pool with a name."""
    return context.read(lambda conn: Pool.of_pool(conn, pools.get(conn, pool_id)))


@router.get("/pools/{pool_id}/history")
def list_history(pool_id: Id, context: Admin, paging: Paging) -> PageOf[Change]:
    """Every change of the pool's state, the newest first."""

    def rows(conn: Connection, page: Page) -> list[schema.StateChange]:
        return journal.history_of(conn, "pool", pools.get(conn, pool_id).id, page)

    return context.page(paging, journal.HISTORY_ORDER, rows, Change.of)


@router.post("/pools/{pool_id}/stop", response_model=Pool)
def stop(pool_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Let a pool finish the jobs that it holds within drain_s, then end it."""
    return context.write(
        lambda conn, act: Pool.of_pool(conn, pools.stop(conn, pool_id, act)), body=body
    )


@router.post("/pools/{pool_id}/evict", response_model=Pool)
def evict(pool_id: Id, context: Admin, body: Eviction | None = None) -> JSONResponse:
    """End a pool without waiting for its jobs: SIGTERM, and SIGKILL after grace_s. Its jobs go to
    other workers.
    """
    evict = pools.evict_lost if body and body.host_lost else pools.evict
    return context.write(lambda conn, act: Pool.of_pool(conn, evict(conn, pool_id, act)), body=body)


@router.post("/pools/{pool_id}/token", status_code=201, response_model=IssuedToken)
def issue_token(pool_id: Id, body: NewToken, context: Admin) -> JSONResponse:
    """Give a remote pool a new token, which replaces its previous token."""

    def work(conn: Connection, act: Act) -> IssuedToken:
        pool, secret = remote.issue(conn, pool_id, act, body.ttl_s)
        return IssuedToken.of(pool, pool_id=pool.id, token=secret)

    return context.write(work, body=body, status=201, secrets=frozenset({"token"}))


@router.get("/leases")
def list_leases(
    context: Admin, paging: Paging, *, ended: Annotated[bool, Query()] = False
) -> PageOf[DeviceLease]:
    """Devices that pools hold, the newest first. ended: also leases that have ended."""
    rows = partial(pools.leases, ended=ended)
    return context.page(paging, pools.LEASE_ORDER, rows, DeviceLease.of)
