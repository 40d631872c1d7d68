"""Tables of inference jobs, of worker pools with their hosts, and of the leases of devices."""

from __future__ import annotations

from typing import Annotated, Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Default,
    Number,
    ProjectId,
    Reference,
    Row,
    StateRow,
    Text,
    in_states,
    partial,
    table,
    unique,
)
from reconciler.model.jobs import JobStatus, Mode
from reconciler.model.pools import LIVE_POOLS, PoolState

_LIVE = in_states(LIVE_POOLS)


@table(
    "orchestrator_jobs",
    "job",
    # Jobs that are due, in the order in which a model's worker takes those of a project.
    partial(
        "ix_orchestrator_jobs_due",
        *("model", "project_id", "priority", "enqueued_at"),
        where="status = 'pending' AND not_before IS NULL",
    ),
    partial(
        "ix_orchestrator_jobs_delayed",
        "not_before",
        where="status = 'pending' AND not_before IS NOT NULL",
    ),
    partial(
        "ix_orchestrator_jobs_running",
        *("lease_expires_at", "project_id", "worker"),
        where="status = 'running'",
    ),
    # Lists of a project. Nothing in it changes with a job.
    sa.Index("ix_orchestrator_jobs_project", "project_id", "enqueued_at", "id"),
    partial(
        "ix_orchestrator_jobs_dead",
        *("project_id", "enqueued_at", "id"),
        where="status = 'dead_letter'",
    ),
    partial(
        "ix_orchestrator_jobs_reprocessed",
        *("project_id", "reprocessed_at"),
        where="reprocessed_at IS NOT NULL",
    ),
    partial(
        "ix_orchestrator_jobs_ended",
        "updated_at",
        where="status IN ('done', 'dead_letter', 'canceled')",
    ),
    # A job that no worker has lost is not in it.
    partial("ix_orchestrator_jobs_taken", "taken_from", where="taken_from IS NOT NULL"),
)
class Job(Row):
    """A call of a model with an input. Its history is this row: attempts, losses, last error."""

    id: str
    project_id: ProjectId
    model: str
    input: dict[str, Any]
    # 0 is served first.
    priority: Number
    status: Annotated[str, JobStatus]
    # Calls that came to an end, good or bad.
    attempts: Number
    max_attempts: Annotated[int, Default(3)]
    # Leases that expired: the worker died, or was away for too long.
    lost: Number
    timeout_s: Annotated[int, Default(60)]
    # A delayed job is not due before this time. The worker that sees it due clears the time.
    not_before: float | None
    # Of the claim that holds the job; only with it can the job be finished.
    token: Text
    # Id of the last worker.
    worker: Text
    # Id of the last worker that held it when it was canceled, or when its lease expired.
    taken_from: str | None
    lease_expires_at: float | None
    result: dict[str, Any] | None
    # {} or the last failure: code, expected, found, remedy, and detail for operators.
    error: dict[str, Any]
    # Bytes of input and result.
    size: Number
    requested_by: str
    correlation_id: Text
    enqueued_at: float
    started_at: float | None
    updated_at: float
    # When the job was last taken back from the dead letters; equal for all of one request.
    reprocessed_at: float | None


@table("job_counts", "job_count", sa.Index("ix_job_counts_project_id", "project_id"))
class JobCount(Row):
    """A change of the number and size of a project's jobs; its rows together are their number.

    It references no project, or its writer would wait for a request that has locked the project.
    """

    id: str
    project_id: str
    # Jobs that have not ended.
    open_jobs: Number
    done: Number
    dead_letter: Number
    canceled: Number
    # Bytes of inputs and results.
    size: Number
    # Of the jobs that a project may send in an hour, as of a time; in the row of a request only.
    spent: float
    spent_at: float | None


@table(
    "pool_workers",
    "worker",
    partial("ix_pool_workers_live", "pool_id", where="ended_at IS NULL"),
    partial("ix_pool_workers_ended", "pool_id", where="ended_at IS NOT NULL"),
)
class PoolWorker(Row):
    """A process that runs jobs, or did."""

    id: str
    host: str
    # 0 until the process of a pool has come up. With the time of its start, in clock ticks since
    # the boot, it names a process for good.
    pid: int
    start_ticks: Number
    # "" for a worker that a person started.
    pool_id: Text
    boot_id: Text
    # "" where the memory controller cannot be used.
    cgroup: Text
    # Names of the models that it serves. Others are refused at admission.
    models: list[Any]
    memory_bytes: Number
    oom_kills: Number
    # Of its program, with the revision of the schema; "" if its program did not record it yet.
    version: Text
    # How it ended.
    ending: Text
    # The project whose jobs it held when it ended, or shortly before; "" without jobs, "*" with
    # those of several.
    ended_with: Text
    started_at: float
    beat_at: float
    ended_at: float | None


@table("orchestrator_control", "control")
class Control(Row):
    """The single row that says whether jobs are admitted and claimed."""

    id: str
    mode: Annotated[str, Mode]
    reason: Text
    changed_by: Text
    since: float
    # Until then, what runs may end by itself.
    deadline_at: float | None
    # When jobs that still ran at the deadline were canceled.
    canceled_at: float | None


@table("orchestrator_totals", "totals")
class Totals(Row):
    """Counters since the beginning, in a single row. Not in that of Control, which claims lock."""

    id: str
    reclaimed: Number
    reclaimer_errors: Number
    job_retries: Number
    worker_pool_evictions: Number


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


jobs = Job.TABLE
job_counts = JobCount.TABLE
pool_workers = PoolWorker.TABLE
control = Control.TABLE
totals = Totals.TABLE
pool_hosts = PoolHost.TABLE
pools = Pool.TABLE
device_leases = DeviceLease.TABLE
