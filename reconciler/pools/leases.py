"""Leases of jobs: claimed, renewed and finished in groups by a worker; expired leases end here.

Every function is a transaction's work. All times are the database's.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any, NamedTuple

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import Job, Pool, PoolWorker, jobs, pool_workers, pools, projects
from reconciler.model import jobs as rules
from reconciler.model.errors import Problem
from reconciler.model.jobs import Call, JobStatus, Outcome
from reconciler.model.pools import SERVING_POOLS
from reconciler.pools import control, counts

log = logging.getLogger("gpuaas.jobs")

LEASE_S = 30.0
BEAT_S = 10.0
# Rows that change state in one transaction of `tend`.
_AT_ONCE = 500
# Queues of a claim, so that the number of projects does not slow it.
_QUEUES = 8
# Statements of claims and outcomes are built once: to build them takes longer than to execute them.
_MODEL = jobs.c.model == sa.bindparam("of_model")
_WAITING = sa.select(projects.c.id).where(
    sa.exists().where(control.DUE, jobs.c.project_id == projects.c.id, _MODEL)
)
_FIRST = (
    sa.select(jobs.c.id, jobs.c.lost)
    .where(control.DUE, jobs.c.project_id == sa.bindparam("of_project"), _MODEL)
    .order_by(jobs.c.priority, jobs.c.enqueued_at)
    .limit(sa.bindparam("share", type_=sa.Integer()))
    .with_for_update(skip_locked=True)
)
# The project of each job that runs on workers of all projects. What a project runs in a pool of its
# own takes nothing from others. The list of those workers is short, and read once.
_OF_PROJECT_POOLS = (
    sa.select(pool_workers.c.id)
    .join(pools, pools.c.id == pool_workers.c.pool_id)
    .where(pools.c.project_id.is_not(None), pool_workers.c.ended_at.is_(None))
)
_SHARED = control.HOLDERS.where(jobs.c.worker.not_in(_OF_PROJECT_POOLS))
_IDS = rows.given("ids", id=str)
_THESE = jobs.c.id.in_(sa.select(_IDS.c.id))
# What a worker gets of a job.
_CALL = tuple(jobs.c[field.name] for field in fields(Call))
_CLAIM = (
    sa.update(jobs)
    .where(_THESE, control.DUE)
    .values(
        status=JobStatus.RUNNING,
        token=sa.bindparam("new_token"),
        worker=sa.bindparam("by"),
        lease_expires_at=clock.now() + LEASE_S,
        started_at=clock.now(),
        updated_at=clock.now(),
    )
    .returning(*_CALL)
)
# Transactions lock jobs in the order of their ids, or a heartbeat and an end would wait for each
# other.
_HELD = (
    sa.select(jobs.c.id, jobs.c.token, jobs.c.attempts, jobs.c.max_attempts, jobs.c.project_id)
    .where(_THESE, control.RUNNING)
    .order_by(jobs.c.id)
    .with_for_update()
)
_FAILED = (
    sa.update(jobs)
    .where(jobs.c.id == sa.bindparam("of_id"))
    .values(
        **control.FREE,
        **{
            name: sa.bindparam(f"new_{name}", type_=jobs.c[name].type)
            for name in ("status", "attempts", "error")
        },
        not_before=clock.now() + sa.bindparam("pause", type_=sa.Double()),
        updated_at=clock.now(),
    )
)
_ENDED = rows.given("ended", id=str, token=str, result=dict, size=int)
_MINE = (
    sa.select(*_ENDED.c)
    .join_from(_ENDED, jobs, jobs.c.id == _ENDED.c.id)
    .where(jobs.c.token == _ENDED.c.token, control.RUNNING)
    .order_by(jobs.c.id)
    .with_for_update(of=jobs)
    .cte("mine")
)
# By the id only: the rest was seen under the lock, and would have PostgreSQL compare all jobs that
# run with all of these.
_DONE = (
    sa.update(jobs)
    .where(jobs.c.id == _MINE.c.id)
    .values(
        **control.FREE,
        status=JobStatus.DONE,
        attempts=jobs.c.attempts + 1,
        result=_MINE.c.result,
        error={},
        size=jobs.c.size + _MINE.c.size,
        not_before=None,
        updated_at=clock.now(),
    )
    .returning(jobs.c.id, jobs.c.project_id)
)
# Rows that `tend` mends: delays that are over, expired leases, and leases that end later than one
# that begins now. A second is added for the time between two readings of the clock.
# now: the clock as it was read, because PostgreSQL searches no index for the clock itself.
_NOW: sa.ColumnElement[float] = sa.bindparam("now", type_=sa.Double())
_DELAYED = sa.and_(control.PENDING, jobs.c.not_before.is_not(None), jobs.c.not_before <= _NOW)
_EXPIRED = sa.and_(control.RUNNING, jobs.c.lease_expires_at < _NOW)
_AHEAD = sa.and_(control.RUNNING, jobs.c.lease_expires_at > _NOW + LEASE_S + 1)
_TO_TEND = sa.select(sa.or_(*(sa.exists().where(each) for each in (_DELAYED, _EXPIRED, _AHEAD))))
LOST: Mapping[str, str] = {
    "code": "worker_lost",
    "expected": "a heartbeat of the worker within its lease",
    "found": "none",
    "remedy": "nothing: it is queued again, unless that happened too often",
}


def register(
    conn: sa.Connection, *, host: str, pid: int, models: Sequence[str], version: str = ""
) -> PoolWorker:
    """Record a worker process and the models that it serves."""
    values = {"id": rows.new_id(), "host": host, "pid": pid, "version": version}
    return rows.add(conn, PoolWorker, {**values, "models": sorted(models)})


def enter(
    conn: sa.Connection, worker_id: str, *, pid: int, start_ticks: int, version: str = ""
) -> PoolWorker | None:
    """Record the process of a pool's worker; None if the pool does not wait for it any more."""
    update = (
        sa.update(pool_workers)
        .where(
            pool_workers.c.id == worker_id,
            pool_workers.c.pid == 0,
            pool_workers.c.ended_at.is_(None),
        )
        .values(pid=pid, start_ticks=start_ticks, version=version, beat_at=clock.now())
        .returning(pool_workers)
    )
    row = conn.execute(update).mappings().first()
    return None if row is None else PoolWorker(**row)


def serve(
    conn: sa.Connection, worker_id: str, models: Sequence[str], digests: Mapping[str, str]
) -> PoolWorker:
    """Record that a pool's worker has loaded its models. The files of the first are the pool's;
    Problem `model_changed` for others.
    """
    worker = rows.get(conn, PoolWorker, worker_id)
    pool = rows.get(conn, Pool, worker.pool_id, lock=True)
    for name, digest in digests.items():
        if pool.digests.get(name, digest) != digest:
            raise Problem(
                "model_changed",
                expected=f"model {name}, SHA-256 {pool.digests[name]}",
                found=digest,
                remedy="put the file back, or start the pool again for the new one",
            )
    statement = sa.update(pools).where(pools.c.id == pool.id)
    conn.execute(statement.values(digests={**digests, **pool.digests}))
    update = sa.update(pool_workers).where(pool_workers.c.id == worker_id)
    conn.execute(update.values(models=sorted(models), beat_at=clock.now()))
    return rows.get(conn, PoolWorker, worker_id)


def sign_off(conn: sa.Connection, worker_id: str) -> None:
    """Record that the worker has ended in order."""
    update = sa.update(pool_workers).where(pool_workers.c.id == worker_id)
    conn.execute(update.values(ended_at=clock.now()))


def claim(
    conn: sa.Connection,
    worker: PoolWorker,
    *,
    limit: int,
    token: str = "",
    alone: bool = True,
    behind: Collection[str] = (),
) -> list[Call]:
    """Take due jobs, fairly among the projects, under a token that they share, "" for a new one.

    None during maintenance. alone: the worker holds no other job. Only then it gets one that was
    lost before, and no other with it: should the job end this worker too, none else is to blame.
    behind: projects that get nothing while others wait.
    """
    if not control.is_normal(conn):
        return []
    waiting = _waiting(conn, worker)
    waiting = [queue for queue in waiting if queue[0] not in behind] or waiting
    several = len({project_id for project_id, _ in waiting}) > 1
    running = Counter(conn.execute(_SHARED).scalars() if several else ())
    # Random among equal projects, because a claim knows nothing of earlier claims.
    random.shuffle(waiting)
    waiting = sorted(waiting, key=lambda queue: running[queue[0]])[:_QUEUES]
    ids: list[str] = []
    for (project_id, model), share in rules.shares(waiting, running, limit).items():
        queue = {"of_project": project_id, "of_model": model, "share": share}
        first = conn.execute(_FIRST, queue).all()
        if not ids and first and first[0].lost:
            # A worker that is not alone takes nothing, so that it soon is.
            ids = [first[0].id] if alone else []
            break
        ids += [job.id for job in takewhile(lambda job: not job.lost, first)]
    if not ids:
        return []
    values = {"ids": [{"id": id} for id in ids], "by": worker.id}
    values["new_token"] = token or rows.new_id()
    calls = {row.id: Call(*row) for row in conn.execute(_CLAIM, values)}
    # Worked off in the order of the queue, which an UPDATE does not keep.
    return [calls[id] for id in ids if id in calls]


def claimed(
    conn: sa.Connection, worker: PoolWorker, token: str, *, extra_s: float | None = None
) -> list[Call]:
    """The jobs that a claim got under this token, should its answer have been lost. Their lease
    begins anew. extra_s: as in `renew`.
    """
    mine = sa.and_(
        control.RUNNING, jobs.c.worker == worker.id, jobs.c.token == token, _in_time(extra_s)
    )
    again = sa.update(jobs).where(mine).values(lease_expires_at=clock.now() + LEASE_S)
    return [Call(*row) for row in conn.execute(again.returning(*_CALL))]


def is_idle(conn: sa.Connection, worker: PoolWorker) -> bool:
    """Whether nothing is due for the worker: a read, which keeps no writer waiting."""
    return not _waiting(conn, worker)


def _waiting(conn: sa.Connection, worker: PoolWorker) -> list[tuple[str, str]]:
    """The (project, model) queues with due jobs: one probe of the index for each.

    None for a worker whose pool drains.
    """
    project_id = None
    if worker.pool_id:
        pool = rows.get(conn, Pool, worker.pool_id)
        if pool.state not in SERVING_POOLS:
            return []
        project_id = pool.project_id
    queues: list[tuple[str, str]] = []
    for model in worker.models:
        ids = conn.execute(_WAITING, {"of_model": model}).scalars()
        queues += [(id, model) for id in ids if project_id in (None, id)]
    return queues


def renew(
    conn: sa.Connection, worker: PoolWorker, tokens: Sequence[str], *, extra_s: float | None = None
) -> set[str]:
    """Renew the leases that the worker still holds; returns the ids of these jobs.

    extra_s: only of jobs that began no longer ago than their own time and this.
    """
    beat = sa.update(pool_workers).where(pool_workers.c.id == worker.id)
    conn.execute(beat.values(beat_at=clock.now()))
    held = sa.select(jobs.c.id).where(
        jobs.c.token.in_(tokens), control.RUNNING, jobs.c.worker == worker.id, _in_time(extra_s)
    )
    locked = held.order_by(control.BY_ID).with_for_update().cte("held")
    update = sa.update(jobs).where(jobs.c.id == locked.c.id)
    update = update.values(lease_expires_at=clock.now() + LEASE_S)
    return set(conn.execute(update.returning(jobs.c.id)).scalars())


def _in_time(extra_s: float | None) -> sa.ColumnElement[bool]:
    if extra_s is None:
        return sa.true()
    return jobs.c.started_at + jobs.c.timeout_s > clock.now() - extra_s


def finish(
    conn: sa.Connection, ended: Sequence[tuple[Call | Job, Outcome]]
) -> dict[str, JobStatus]:
    """Record outcomes of jobs that are still held; returns the new status of these.

    An outcome under a token that the job no longer has does not count.
    """
    if not ended:
        return {}
    # Each job once, whatever a worker sends.
    first: dict[tuple[str, str], Outcome] = {}
    for call, outcome in ended:
        first.setdefault((call.id, call.token), outcome)
    results = {key: outcome.result for key, outcome in first.items() if outcome.result is not None}
    held: dict[tuple[str, str], sa.Row[Any]] = {}
    if len({id for id, _ in results}) < len(first):
        # With failures, all are locked by one statement, because only that keeps the order. Of
        # several tokens of a job, this tells which one holds it.
        held = _held(conn, first)
        results = {key: result for key, result in results.items() if key in held}
    done = [
        {"id": id, "token": token, "result": result, "size": len(json.dumps(result).encode())}
        for (id, token), result in results.items()
    ]
    sizes: dict[Any, Any] = {each["id"]: each["size"] for each in done}
    counted: dict[str, JobStatus] = {}
    moves: list[counts.Move] = []
    for id, owner in conn.execute(_DONE, {"ended": done}) if done else ():
        counted[id] = JobStatus.DONE
        moves.append((owner, JobStatus.RUNNING, JobStatus.DONE, sizes[id]))
    failures = []
    for key, job in held.items():
        if key not in results:
            after = _after(job, first[key])
            failures.append({"of_id": job.id, **after})
            counted[job.id] = after["new_status"]
            moves.append((job.project_id, JobStatus.RUNNING, after["new_status"], 0))
            _log(job.id, after["new_status"], after["new_error"])
    if failures:
        conn.execute(_FAILED, failures)
    counts.add(conn, moves)
    retries = sum(status == JobStatus.PENDING for status in counted.values())
    control.count(conn, job_retries=retries)
    return counted


def buried(
    ended: Sequence[tuple[Call | Job, Outcome]], counted: Mapping[str, JobStatus]
) -> dict[str, str]:
    """Error codes by id, of the dead letters among the outcomes. counted: answer of `finish`."""
    return {
        call.id: (outcome.error or {}).get("code", "")
        # The first outcome of a job counts.
        for call, outcome in reversed(ended)
        if counted.get(call.id) == JobStatus.DEAD_LETTER
    }


def _held(
    conn: sa.Connection, keys: Collection[tuple[str, str]]
) -> dict[tuple[str, str], sa.Row[Any]]:
    """Those of the jobs that still run under this token, locked, by id and token."""
    running: sa.Result[Any] = conn.execute(_HELD, {"ids": [{"id": id} for id, _ in keys]})
    held = {(job.id, job.token): job for job in running}
    return {key: job for key, job in held.items() if key in keys}


def _after(job: sa.Row[Any], outcome: Outcome) -> dict[str, Any]:
    """New values of a job that failed. pause: seconds until it is due; None for a dead letter."""
    attempts = job.attempts + 1
    values = {"new_attempts": attempts, "new_error": rules.kept_error(outcome.error or {})}
    if outcome.permanent or attempts >= job.max_attempts:
        return {**values, "new_status": JobStatus.DEAD_LETTER, "pause": None}
    pause = rules.pause(attempts, random.random())  # noqa: S311  # spreads retries
    return {**values, "new_status": JobStatus.PENDING, "pause": pause}


def give_back(conn: sa.Connection, held: Sequence[Call | Job]) -> None:
    """Return jobs that the worker did not begin. It counts neither as an attempt nor as lost."""
    if not held:
        return
    mine = _held(conn, {(job.id, job.token) for job in held})
    update = sa.update(jobs).where(_THESE)
    values = {**control.FREE, "status": JobStatus.PENDING, "updated_at": clock.now()}
    conn.execute(update.values(values), {"ids": [{"id": id} for id, _ in mine]})


class Tended(NamedTuple):
    """due: jobs whose delay is over. reclaimed: jobs whose lease has expired. dead: error codes by
    id, of those that are buried.
    """

    due: int
    reclaimed: int
    dead: dict[str, str]


def any_to_tend(conn: sa.Connection) -> bool:
    """Whether `tend` has anything to do: a statement that reads indexes only, of these rows."""
    return bool(conn.execute(_TO_TEND, {"now": clock.read(conn)}).scalar_one())


def tend(conn: sa.Connection, errors: int = 0) -> Tended:
    """Queue jobs whose delay is over, and those whose lease has expired, or bury the latter.

    Any worker does it, so it needs no leader. errors: of the worker's attempts to do this.
    """
    now = {"now": clock.read(conn)}
    _shorten(conn, now)
    ready = sa.update(jobs).where(_DELAYED, jobs.c.id.in_(_some(_DELAYED)))
    often = jobs.c.lost + 1 >= rules.LOST_LIMIT
    lost = (
        sa.update(jobs)
        .where(_EXPIRED, jobs.c.id.in_(_some(_EXPIRED)))
        .values(
            **control.FREE,
            lost=jobs.c.lost + 1,
            taken_from=jobs.c.worker,
            updated_at=clock.now(),
            status=sa.case((often, JobStatus.DEAD_LETTER.value), else_=JobStatus.PENDING.value),
            error=LOST,
        )
        .returning(jobs.c.id, jobs.c.status, jobs.c.project_id)
    )
    due = conn.execute(ready.values(not_before=None), now).rowcount
    reclaimed = conn.execute(lost, now).all()
    for id, status, _ in reclaimed:
        _log(id, status, LOST)
    counts.add(conn, [(owner, JobStatus.RUNNING, status, 0) for _, status, owner in reclaimed])
    dead = [id for id, status, _ in reclaimed if status == JobStatus.DEAD_LETTER]
    control.count(conn, reclaimed=len(reclaimed), reclaimer_errors=errors)
    return Tended(due, len(reclaimed), dict.fromkeys(dead, LOST["code"]))


def _shorten(conn: sa.Connection, now: Mapping[str, float]) -> None:
    """Let no lease end later than a lease that begins now. A later end is from before the
    database's clock was set back. A worker that still holds the lease renews it.
    """
    shorten = sa.update(jobs).where(_AHEAD, jobs.c.id.in_(_some(_AHEAD)))
    conn.execute(shorten.values(lease_expires_at=clock.now() + LEASE_S), now)


def _log(job_id: str, status: str, error: Mapping[str, str]) -> None:
    # Runbooks look for the words "Job retry".
    words = "Job retry" if status == JobStatus.PENDING else "Job dead letter"
    log.warning("%s: job %s, %s, found %s", words, job_id, error["code"], error["found"])


def _some(condition: sa.ColumnElement[bool]) -> sa.Select[tuple[str]]:
    query = sa.select(jobs.c.id).where(condition).limit(_AT_ONCE)
    return query.with_for_update(skip_locked=True)
