"""Jobs of projects: enqueued within limits, read, canceled, taken back from the dead letters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.rows import Order, Page, Record, part
from reconciler.db.schema import Job, Project, jobs, pool_workers, pools
from reconciler.model.act import Act
from reconciler.model.errors import Problem, not_found
from reconciler.model.jobs import ENDED, OPEN, JobStatus
from reconciler.pools import control
from reconciler.runs.contract import STORABLE, unstorable

ORDER = Order(jobs, ("enqueued_at", "id"), descending=True)
# Limits of a project, so that a single one cannot fill the database.
OPEN_LIMIT = 10_000
KEPT_LIMIT = 50_000
KEPT_BYTES = 256 << 20
INPUT_BYTES = 64 << 10
# When a project is at its limits, its oldest results make room. A result can be read for so long.
READABLE_S = 60
# Rows that make room at a time.
_ROOM = 1_000
# As deletion by age is bounded, so is a request to take jobs back.
REPROCESS_LIMIT = 1_000
# Of the chart of a queue: an hour by minutes.
DEPTH_STEPS = 60
DEPTH_STEP_S = 60
# As the partial index has it.
_ENDED = jobs.c.status.in_([sa.literal_column(f"'{status.value}'") for status in ENDED])
_FRESH = {
    "status": JobStatus.PENDING,
    "attempts": 0,
    "lost": 0,
    "token": "",
    "not_before": None,
    "lease_expires_at": None,
}


_INSERT = sa.insert(jobs).values(
    not_before=clock.now() + sa.bindparam("delay_s", type_=sa.Double())
)


@dataclass(frozen=True)
class NewJob:
    """A request for a call of a model."""

    model: str
    input: Mapping[str, Any]
    priority: int = 5
    delay_s: float = 0
    max_attempts: int = 3
    timeout_s: int = 60


def enqueue(conn: sa.Connection, project_id: str, new: Sequence[NewJob], act: Act) -> list[str]:
    """Queue jobs of a project, all of them or none; returns their ids."""
    control.require_normal(conn)
    sizes = [_size(number, item) for number, item in enumerate(new)]
    _require_models(conn, project_id, {item.model for item in new})
    # Requests of a project count its jobs one after the other.
    rows.get(conn, Project, project_id, lock=True)
    _require_room(conn, project_id, len(new), sum(sizes))
    values = [
        {
            **vars(item),
            "delay_s": item.delay_s or None,
            "id": rows.ordered_id(),
            "project_id": project_id,
            "status": JobStatus.PENDING,
            "size": size,
            "requested_by": act.actor,
            "correlation_id": act.correlation_id,
        }
        for item, size in zip(new, sizes, strict=True)
    ]
    conn.execute(_INSERT, values)
    return [value["id"] for value in values]


def get(conn: sa.Connection, project_id: str, id: str, *, lock: bool = False) -> Job:
    """The project's job with an id. To a project, the jobs of others do not exist."""
    query = sa.select(jobs).where(jobs.c.id == id, jobs.c.project_id == project_id)
    job = rows.first(conn, query.with_for_update() if lock else query, Job)
    if job is None:
        raise not_found("job", id)
    return job


def every(
    conn: sa.Connection,
    project_id: str,
    *,
    status: JobStatus | None = None,
    model: str | None = None,
    page: Page | None = None,
) -> list[Record]:
    """Jobs of a project, newest first, without inputs and results: a page of them fills memory."""
    columns = [column for column in jobs.c if column.name not in ("input", "result")]
    query = sa.select(*columns).where(jobs.c.project_id == project_id)
    query = rows.where(query, jobs, status=status, model=model)
    return rows.every(conn, part(query, ORDER, page))


def cancel(conn: sa.Connection, project_id: str, id: str) -> Job:
    """Cancel a job that has not ended. The worker that runs it notices at its next heartbeat."""
    job = get(conn, project_id, id, lock=True)
    if job.status == JobStatus.CANCELED:
        return job
    if job.status in ENDED:
        raise Problem(
            "job_ended",
            expected="a job that is pending or running",
            found=f"{job.status}",
            remedy="read its result with GET",
        )
    values = {**_FRESH, "attempts": job.attempts, "lost": job.lost, "status": JobStatus.CANCELED}
    _update(conn, [id], values)
    return get(conn, project_id, id)


def reprocess(
    conn: sa.Connection, project_id: str, act: Act, *, sample: int | None, force: bool = False
) -> list[str]:
    """Queue dead letters again, with all their attempts: a sample of the oldest, or all (None).

    Refused while the last jobs that were taken back have not all succeeded, unless forced: their
    cause is not mended yet. Returns the ids.
    """
    control.require_normal(conn)
    # One request after the other, or each would see the sample of none.
    rows.get(conn, Project, project_id, lock=True)
    if not force:
        _require_good_sample(conn, project_id)
    dead = (
        sa.select(jobs.c.id)
        .where(jobs.c.project_id == project_id, jobs.c.status == JobStatus.DEAD_LETTER)
        .order_by(jobs.c.enqueued_at, jobs.c.id)
        .limit(min(sample or REPROCESS_LIMIT, REPROCESS_LIMIT))
    )
    ids = list(conn.execute(dead).scalars())
    if ids:
        _require_open(conn, project_id, len(ids))
        _update(conn, ids, {**_FRESH, "reprocessed_at": clock.read(conn)})
        detail = {"jobs": len(ids), "sample": sample, "force": force}
        journal.audit(
            *(conn, act, "jobs.reprocessed", "project", project_id),
            detail=detail,
            project_id=project_id,
        )
    return ids


def count(conn: sa.Connection) -> dict[str, int]:
    """Number of jobs by status, of all projects."""
    counts = by_project(conn).values()
    return {status.value: sum(each[status] for each in counts) for status in JobStatus}


def by_project(conn: sa.Connection) -> dict[str, dict[str, int]]:
    """Number of jobs by status, of each project that has any."""
    of_project = (jobs.c.project_id, jobs.c.status)
    query = sa.select(*of_project, sa.func.count()).group_by(*of_project).order_by(*of_project)
    counts: dict[str, dict[str, int]] = {}
    for project_id, status, number in conn.execute(query):
        counts.setdefault(project_id, dict.fromkeys(map(str, JobStatus), 0))[status] = number
    return counts


class Depth(NamedTuple):
    """How many jobs had not ended at the end of each step since a time."""

    since: float
    open: list[int]


def depth(conn: sa.Connection, project_id: str | None = None) -> Depth:
    """Queue of a project, or of the site, over the last hour, counted back from the jobs that it
    has now.
    """
    mine = jobs.c.project_id == project_id if project_id else sa.true()
    since = clock.read(conn) - DEPTH_STEPS * DEPTH_STEP_S

    def steps(column: sa.Column[Any], *conditions: sa.ColumnElement[bool]) -> Counter[int]:
        # Not floor(), which SQLite may lack.
        step = sa.func.round((column - since) / DEPTH_STEP_S - 0.5).label("step")
        query = sa.select(step, sa.func.count()).where(mine, column > since, *conditions)
        return Counter({int(row[0]): row[1] for row in conn.execute(query.group_by("step"))})

    came, went = steps(jobs.c.enqueued_at), steps(jobs.c.updated_at, _ENDED)
    still = sa.select(sa.func.count()).select_from(jobs).where(mine, jobs.c.status.in_(OPEN))
    counts = [int(conn.execute(still).scalar_one())]
    for step in range(DEPTH_STEPS - 1, 0, -1):
        counts.append(max(counts[-1] - came[step] + went[step], 0))
    return Depth(since, counts[::-1])


def forget(conn: sa.Connection, *, age_s: float, limit: int) -> int:
    """Delete jobs that ended, and workers that were last seen, longer ago than age_s."""
    old = clock.now() - age_s
    ended = sa.select(jobs.c.id).where(_ENDED, jobs.c.updated_at < old)
    count = conn.execute(sa.delete(jobs).where(jobs.c.id.in_(ended.limit(limit)))).rowcount
    conn.execute(sa.delete(pool_workers).where(pool_workers.c.beat_at < old))
    return count


def _update(conn: sa.Connection, ids: Sequence[str], values: Mapping[str, Any]) -> None:
    update = sa.update(jobs).where(jobs.c.id.in_(ids))
    conn.execute(update.values({**values, "updated_at": clock.now()}))


def _size(number: int, item: NewJob) -> int:
    """Bytes of the input; a Problem for an input that is too large or cannot be stored."""
    place = unstorable(item.input)
    if place is not None:
        raise Problem(
            "input_invalid",
            422,
            expected=f"an input of {STORABLE}",
            found=f"another value at {place!r} of job {number}",
            remedy="correct the value",
        )
    size = len(json.dumps(item.input).encode())
    if size > INPUT_BYTES:
        raise Problem(
            "input_too_large",
            413,
            expected=f"an input of at most {INPUT_BYTES} bytes of JSON",
            found=f"{size} bytes in job {number}",
            remedy="divide it among several jobs",
        )
    return size


def _require_models(conn: sa.Connection, project_id: str, names: set[str]) -> None:
    """Problem `model_unknown` for a model that no worker serves for the project, or has lately."""
    served: set[str] = set()
    joined = pool_workers.outerjoin(pools, pools.c.id == pool_workers.c.pool_id)
    mine = sa.or_(pools.c.project_id.is_(None), pools.c.project_id == project_id)
    query = sa.select(pool_workers.c.models).select_from(joined).where(mine)
    for models in conn.execute(query).scalars():
        served |= set(models)
    if unknown := sorted(names - served):
        raise Problem(
            "model_unknown",
            422,
            expected=f"one of the models {', '.join(sorted(served))}" if served else "a model",
            found=f"{unknown[0]!r}, which no worker serves",
            remedy="correct the name, or ask the operators to start a worker of the model",
        )


def _require_room(conn: sa.Connection, project_id: str, count: int, size: int) -> None:
    """Make room for new jobs among the project's oldest results, or refuse them."""
    _require_open(conn, project_id, count)
    mine = jobs.c.project_id == project_id
    kept = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(jobs.c.size), 0)).where(mine)

    def full() -> bool:
        rows_, bytes_ = conn.execute(kept).one()
        return bool(rows_ + count > KEPT_LIMIT or bytes_ + size > KEPT_BYTES)

    if full():
        oldest = (
            sa.select(jobs.c.id)
            .where(mine, jobs.c.status.in_(ENDED), jobs.c.updated_at < clock.now() - READABLE_S)
            .order_by(jobs.c.enqueued_at)
            .limit(_ROOM)
        )
        conn.execute(sa.delete(jobs).where(jobs.c.id.in_(oldest)))
        if full():
            raise _limited(
                f"at most {KEPT_LIMIT} jobs and {KEPT_BYTES} bytes of a project to be kept",
                "more, with results that are younger than a minute",
            )


def _require_open(conn: sa.Connection, project_id: str, count: int) -> None:
    mine = sa.select(sa.func.count()).select_from(jobs)
    mine = mine.where(jobs.c.project_id == project_id, jobs.c.status.in_(OPEN))
    open_jobs = conn.execute(mine).scalar_one()
    if open_jobs + count > OPEN_LIMIT:
        raise _limited(
            f"at most {OPEN_LIMIT} jobs of a project that have not ended",
            f"{open_jobs}, and {count} more",
        )


def _limited(expected: str, found: str) -> Problem:
    return Problem(
        "job_limit",
        429,
        expected=expected,
        found=found,
        remedy=f"ask again after {READABLE_S} s",
        detail={"retry_after_s": READABLE_S},
    )


def _require_good_sample(conn: sa.Connection, project_id: str) -> None:
    mine = jobs.c.project_id == project_id
    last = sa.select(sa.func.max(jobs.c.reprocessed_at)).where(mine).scalar_subquery()
    query = (
        sa.select(sa.func.count())
        .select_from(jobs)
        .where(
            mine,
            jobs.c.reprocessed_at == last,
            jobs.c.status.not_in((JobStatus.DONE, JobStatus.CANCELED)),
        )
    )
    if bad := conn.execute(query).scalar_one():
        raise Problem(
            "sample_unfinished",
            expected="the last dead letters that were queued again to have succeeded",
            found=f"{bad} of them that have not",
            remedy="read their errors and mend the cause, or repeat with force",
        )
