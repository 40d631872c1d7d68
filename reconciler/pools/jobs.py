"""Jobs of projects: enqueued within limits, read, canceled, taken back from the dead letters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.rows import Order, Page, Record, part
from reconciler.db.schema import Job, Project, idempotency_keys, jobs, pool_workers, pools
from reconciler.lifecycle import quota
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.jobs import ENDED, OPEN, JobStatus
from reconciler.model.pools import LIVE_POOLS, SERVING_POOLS
from reconciler.model.storable import STORABLE, stored_size, unstorable
from reconciler.pools import control, counts

ORDER = Order(jobs, ("enqueued_at", "id"), descending=True)
# Limits of a project for which neither it nor the site has others, so that a single one cannot
# fill the database.
LIMITS = {"jobs_open": 10_000, "jobs_kept": 50_000, "jobs_mib": 256}
_RATE = "jobs_per_hour"
# The longest time that a call may have, as a job asks for it.
_TIME = "jobs_timeout_s"
_MIB = 1 << 20
INPUT_BYTES = 64 << 10
# When a project is at its limits, its oldest results make room. A result can be read for so long.
READABLE_S = 60
# Rows that make room at a time.
_ROOM = 1_000
# As deletion by age is bounded, so are requests to take jobs back and to cancel them.
REPROCESS_LIMIT = CANCEL_LIMIT = 1_000
# Of the chart of a queue: an hour by minutes.
DEPTH_STEPS = 60
DEPTH_STEP_S = 60
_ENDED = jobs.c.status.in_([control.STATUS[status] for status in ENDED])
_DEAD = jobs.c.status == control.STATUS[JobStatus.DEAD_LETTER]
_ENDS = {**control.FREE, "not_before": None}
_FRESH = {**_ENDS, "status": JobStatus.PENDING, "attempts": 0, "lost": 0}


# A worker that takes jobs now, in a query that joins the pool of each. A heartbeat from before the
# clock was set back says nothing.
_PRESENT = sa.and_(
    pool_workers.c.ended_at.is_(None),
    pool_workers.c.beat_at.between(clock.now() - control.SILENT_S, clock.now() + control.SILENT_S),
    sa.or_(pools.c.id.is_(None), pools.c.state.in_(SERVING_POOLS)),
)
# Workers, past ones included, that may run jobs of the project `of_project`. Built once, as what
# each request executes.
_WORKERS = pool_workers.outerjoin(pools, pools.c.id == pool_workers.c.pool_id)
_OF_PROJECT = sa.or_(pools.c.project_id.is_(None), pools.c.project_id == sa.bindparam("of_project"))
_SERVES = sa.select(pool_workers.c.models).select_from(_WORKERS).where(_OF_PROJECT).distinct()
_SERVING = _SERVES.where(pool_workers.c.ended_at.is_(None))
_SERVED = _SERVES.where(pool_workers.c.ended_at.is_not(None))
_DUE_OF = (
    sa.select(jobs.c.project_id, sa.func.count())
    .where(control.DUE, jobs.c.model == sa.bindparam("of_model"))
    .group_by(jobs.c.project_id)
)
# Each model from the one before, because DISTINCT would read all jobs that are due.
_LEAST = sa.select(sa.func.min(jobs.c.model).label("model")).where(control.DUE)
_FIRST = _LEAST.cte("m", recursive=True)
_NEXT = _LEAST.where(jobs.c.model > _FIRST.c.model)
_MODELS = _FIRST.union_all(
    sa.select(_NEXT.correlate(_FIRST).scalar_subquery()).where(_FIRST.c.model.is_not(None))
)
_DUE_MODELS = sa.select(_MODELS.c.model).where(_MODELS.c.model.is_not(None))

_INSERT = sa.insert(jobs).values(
    not_before=clock.now() + sa.bindparam("delay_s", type_=sa.Double())
)


@dataclass(frozen=True)
class NewJob:
    """A request for a call of a model. size: of its input, if `input_size` has measured it."""

    model: str
    input: Mapping[str, Any]
    priority: int = 5
    delay_s: float = 0
    max_attempts: int = 3
    timeout_s: int = 60
    size: int = 0


def enqueue(conn: sa.Connection, project_id: str, new: Sequence[NewJob], act: Act) -> list[str]:
    """Queue jobs of a project, all of them or none; returns their ids."""
    control.require_normal(conn)
    sizes = [item.size or input_size(number, item.input) for number, item in enumerate(new)]
    _require_models(conn, project_id, {item.model for item in new})
    _require_room(conn, project_id, new, sum(sizes))
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
    counts.add(conn, [(project_id, None, JobStatus.PENDING, size) for size in sizes])
    return [value["id"] for value in values]


def get(conn: sa.Connection, project_id: str, id: str, *, lock: bool = False) -> Job:
    """The project's job with an id. To a project, the jobs of others do not exist."""
    return rows.of_project(conn, Job, project_id, id, lock=lock)


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
    query = rows.where(query, jobs, model=model)
    if status is not None:
        query = query.where(jobs.c.status == control.STATUS[status])
    return rows.every(conn, part(query, ORDER, page))


def cancel(conn: sa.Connection, project_id: str, id: str) -> Job:
    """Cancel a job that has not ended, or give up a dead letter. The worker that runs it notices at
    its next heartbeat.
    """
    job = get(conn, project_id, id, lock=True)
    if job.status == JobStatus.CANCELED:
        return job
    if job.status == JobStatus.DONE:
        raise Problem(
            "job_ended",
            expected="a job that is pending or running, or a dead letter",
            found=f"{job.status}",
            remedy="read its result with GET",
        )
    _cancel(conn, project_id, [job])
    return get(conn, project_id, id)


def cancel_all(
    conn: sa.Connection, project_id: str, act: Act, *, dead: bool = False, model: str | None = None
) -> int:
    """Cancel jobs that have not ended, or give up dead letters: a thousand at a time.

    Returns their number.
    """
    rows.get(conn, Project, project_id)
    query = sa.select(jobs.c.id, jobs.c.status, jobs.c.worker).where(
        jobs.c.project_id == project_id, _DEAD if dead else jobs.c.status.in_(OPEN)
    )
    query = rows.where(query, jobs, model=model).order_by(control.BY_ID).limit(CANCEL_LIMIT)
    result: sa.Result[Any] = conn.execute(query.with_for_update())
    chosen = result.all()
    if chosen:
        _cancel(conn, project_id, chosen)
        detail = {"jobs": len(chosen), "model": model, "dead_letters": dead}
        _audit(conn, act, "canceled", project_id, detail)
    return len(chosen)


def _cancel(conn: sa.Connection, project_id: str, chosen: Sequence[Job | sa.Row[Any]]) -> None:
    """Cancel jobs, which are locked."""
    values = {
        **_ENDS,
        "status": JobStatus.CANCELED,
        "taken_from": sa.case((control.RUNNING, jobs.c.worker), else_=jobs.c.taken_from),
    }
    conn.execute(_changed(values).where(jobs.c.id.in_([job.id for job in chosen])))
    counts.add(conn, [(project_id, job.status, JobStatus.CANCELED, 0) for job in chosen])


def reprocess(
    conn: sa.Connection,
    project_id: str,
    act: Act,
    *,
    sample: int | None,
    force: bool = False,
    model: str | None = None,
) -> list[str]:
    """Queue dead letters again, with all their attempts: a sample of the oldest, or all (None).
    Those that have never been taken back go first, so that a thousand that always fail do not keep
    the others from it.

    Refused while the last jobs of a model that were taken back have not all succeeded, unless
    forced: their cause is not mended yet. Returns the ids.
    """
    control.require_normal(conn)
    # One request after the other, or each would see the sample of none.
    project = rows.get(conn, Project, project_id, lock=True)
    if not force:
        _require_good_sample(conn, project_id, model)
    dead = rows.where(sa.select(jobs.c.id).where(_DEAD), jobs, project_id=project_id, model=model)
    dead = (
        dead.order_by(sa.func.coalesce(jobs.c.reprocessed_at, 0), jobs.c.enqueued_at, jobs.c.id)
        .limit(min(sample or REPROCESS_LIMIT, REPROCESS_LIMIT))
        .with_for_update(skip_locked=True)
    )
    ids = list(conn.execute(dead).scalars())
    if ids:
        _fold(conn, project, len(ids))
        values = {**_FRESH, "reprocessed_at": clock.read(conn)}
        conn.execute(_changed(values).where(jobs.c.id.in_(ids)))
        moves = [(project_id, JobStatus.DEAD_LETTER, JobStatus.PENDING, 0)] * len(ids)
        counts.add(conn, moves)
        detail = {"jobs": len(ids), "sample": sample, "force": force, "model": model}
        _audit(conn, act, "reprocessed", project_id, detail)
    return ids


class ServedModel(NamedTuple):
    """A model that a project may call. serving: a worker takes its jobs now. due: jobs of the
    project that wait for one.
    """

    name: str
    serving: bool
    due: int


def models(conn: sa.Connection, project_id: str) -> list[ServedModel]:
    """Models that a project may call, by name."""
    serving: dict[str, bool] = {}
    query = _SERVES.add_columns(_PRESENT.label("present"))
    for names, takes in conn.execute(query, {"of_project": project_id}):
        serving |= {name: bool(takes) or serving.get(name, False) for name in names}
    # By the models, so that an index has the answer, and not by all jobs of the project.
    due = sa.select(jobs.c.model, sa.func.count()).where(
        control.DUE, jobs.c.model.in_(serving), jobs.c.project_id == project_id
    )
    waiting = {name: int(number) for name, number in conn.execute(due.group_by(jobs.c.model))}
    return [ServedModel(name, serving[name], waiting.get(name, 0)) for name in sorted(serving)]


def limits(conn: sa.Connection, project: Project) -> dict[str, int]:
    """The limits that hold for a project: its own, the site's, and for its jobs `LIMITS`."""
    return LIMITS | quota.limits(conn, project)


def used(conn: sa.Connection, project: Project) -> dict[str, int]:
    """Present use of each limit of a project's jobs."""
    kept = counts.read(conn, project.id).get(project.id, Counter())
    rate = limits(conn, project).get(_RATE)
    return {
        "jobs_open": kept["open_jobs"],
        "jobs_kept": kept["open_jobs"] + sum(kept[status] for status in ENDED),
        "jobs_mib": math.ceil(kept["size"] / _MIB),
        _RATE: 0 if rate is None else math.ceil(counts.spent(conn, project.id, rate)),
    }


def count(conn: sa.Connection) -> dict[str, int]:
    """Number of jobs by status, of all projects."""
    each = by_project(conn).values()
    return {status.value: sum(of[status] for of in each) for status in JobStatus}


def delayed(conn: sa.Connection) -> int:
    """Number of jobs that wait for their time."""
    query = sa.select(sa.func.count()).select_from(jobs)
    query = query.where(control.PENDING, jobs.c.not_before.is_not(None))
    return int(conn.execute(query).scalar_one())


def unserved(conn: sa.Connection) -> int:
    """Number of jobs that are due and that no living worker takes."""
    served: dict[str, set[str | None]] = {}
    living = sa.select(pool_workers.c.models, pools.c.project_id).outerjoin(
        pools, pools.c.id == pool_workers.c.pool_id
    )
    for names, project_id in conn.execute(living.where(_PRESENT)):
        for name in names:
            served.setdefault(name, set()).add(project_id)
    number = 0
    for model in conn.execute(_DUE_MODELS).scalars().all():
        of = served.get(model, set())
        if None not in of:
            waiting = conn.execute(_DUE_OF, {"of_model": model})
            number += sum(count for id, count in waiting if id not in of)
    return number


def by_project(conn: sa.Connection) -> dict[str, dict[str, int]]:
    """Number of jobs by status, of each project that has any."""
    # Not of the counts, or each claim would write there.
    running = Counter(conn.execute(control.HOLDERS).scalars())
    numbers = {}
    for id, kept in counts.read(conn).items():
        kept[JobStatus.RUNNING] = running[id]
        kept[JobStatus.PENDING] = kept["open_jobs"] - running[id]
        numbers[id] = {status.value: kept[status] for status in JobStatus}
    return {id: each for id, each in numbers.items() if any(each.values())}


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
    numbers = [sum(each["open_jobs"] for each in counts.read(conn, project_id).values())]
    for step in range(DEPTH_STEPS - 1, 0, -1):
        numbers.append(max(numbers[-1] - came[step] + went[step], 0))
    return Depth(since, numbers[::-1])


def forget(conn: sa.Connection, *, age_s: float, limit: int) -> int:
    """Delete jobs that ended, and workers that were last seen, longer ago than age_s: at most limit
    of each. Returns the larger number. Workers of a pool stay until they or their pool have ended,
    because only they say which processes must be gone before it ends.
    """
    # As it was read: for the clock itself, PostgreSQL would read all jobs.
    old = clock.read(conn) - age_s
    ended = sa.select(jobs.c.id).where(_ENDED, jobs.c.updated_at < old)
    count = len(_delete(conn, ended.limit(limit)))
    living = sa.select(pools.c.id).where(pools.c.state.in_(LIVE_POOLS))
    silent = sa.select(pool_workers.c.id).where(
        pool_workers.c.beat_at < old,
        sa.or_(pool_workers.c.ended_at.is_not(None), pool_workers.c.pool_id.not_in(living)),
    )
    # A worker that registers deletes some of these, too, in another order.
    silent = silent.limit(limit).with_for_update(skip_locked=True)
    gone = conn.execute(sa.delete(pool_workers).where(pool_workers.c.id.in_(silent)))
    return max(count, gone.rowcount)


def _delete(conn: sa.Connection, ids: sa.Select[tuple[str]]) -> list[counts.Move]:
    # Ended still: PostgreSQL does not select again after it has waited for a request that takes one
    # back from the dead letters.
    gone = sa.delete(jobs).where(jobs.c.id.in_(ids), _ENDED)
    columns = (jobs.c.id, jobs.c.project_id, jobs.c.status, jobs.c.size)
    deleted = conn.execute(gone.returning(*columns)).all()
    if deleted:
        keys = idempotency_keys.c.job_id.in_([row.id for row in deleted])
        conn.execute(sa.delete(idempotency_keys).where(keys))
    moves: list[counts.Move] = [(owner, status, None, -size) for _, owner, status, size in deleted]
    counts.add(conn, moves)
    return moves


def _changed(values: Mapping[str, Any]) -> sa.Update:
    return sa.update(jobs).values({**values, "updated_at": clock.now()})


def _audit(
    conn: sa.Connection, act: Act, action: str, project_id: str, detail: Mapping[str, Any]
) -> None:
    subject = (f"jobs.{action}", "project", project_id)
    journal.audit(conn, act, *subject, detail=detail, project_id=project_id)


def input_size(number: int, given: Mapping[str, Any]) -> int:
    """Bytes of a job's input; a Problem for an input that is too large or cannot be stored."""
    size = stored_size(given, INPUT_BYTES)
    if size > INPUT_BYTES:
        raise Problem(
            "input_too_large",
            413,
            expected=f"an input of at most {INPUT_BYTES} bytes of JSON, with all digits of numbers",
            found=f"{size} bytes in job {number}",
            remedy="divide it among several jobs",
        )
    place = unstorable(given)
    if place is not None:
        raise Problem(
            "input_invalid",
            422,
            expected=f"an input of {STORABLE}",
            found=f"another value at {place!r} of job {number}",
            remedy="correct the value",
        )
    return size


def _require_models(conn: sa.Connection, project_id: str, names: set[str]) -> None:
    """Problem `model_unknown` for a model that no worker serves for the project, or has lately."""
    served: set[str] = set()
    # Workers that have ended are read only for a model that none serves at present.
    for query in (_SERVING, _SERVED):
        for names_of in conn.execute(query, {"of_project": project_id}).scalars():
            served |= set(names_of)
        if names <= served:
            return
    raise Problem(
        "model_unknown",
        422,
        expected=f"one of the models {', '.join(sorted(served))}" if served else "a model",
        found=f"{min(names - served)!r}, which no worker serves",
        remedy="correct the name, or ask the operators to start a worker of the model",
    )


def _require_time(most: int | None, new: Sequence[NewJob]) -> None:
    """Problem `timeout_too_long` for a call that may occupy its worker for longer than that."""
    number, longest = max(enumerate(new), key=lambda each: each[1].timeout_s)
    if most is not None and longest.timeout_s > most:
        raise Problem(
            "timeout_too_long",
            422,
            expected=f"a timeout_s of at most {most} ({_TIME} of this project)",
            found=f"{longest.timeout_s} s in job {number}",
            remedy="lower it, or ask the operators for a higher limit",
        )


def _require_room(conn: sa.Connection, project_id: str, new: Sequence[NewJob], size: int) -> None:
    """Make room for new jobs among the project's oldest results, or refuse them."""
    count = len(new)
    # Requests of a project count its jobs one after the other.
    project = rows.get(conn, Project, project_id, lock=True)
    most, kept = _fold(conn, project, count)
    _require_time(most.get(_TIME), new)

    def over() -> str | None:
        if kept.kept + count > most["jobs_kept"]:
            return "jobs_kept"
        return "jobs_mib" if kept.size + size > most["jobs_mib"] * _MIB else None

    # More than once only after operators have lowered a limit.
    while (name := over()) is not None:
        gone = _delete(conn, _oldest(project_id))
        if not gone and name == "jobs_kept":
            raise _limited(name, kept.kept, count, most[name])
        if not gone:
            raise _limited(name, kept.size / _MIB, size / _MIB, most[name])
        freed = sum(move[3] for move in gone)
        kept = replace(kept, kept=kept.kept - len(gone), size=kept.size + freed)


def _oldest(project_id: str) -> sa.Select[tuple[str]]:
    """Jobs of a project that have ended and may be deleted, those that came first."""
    # Those with a later time ended before the clock was set back.
    lately = jobs.c.updated_at.between(clock.now() - READABLE_S, clock.now() + READABLE_S)
    return (
        sa.select(jobs.c.id)
        .where(jobs.c.project_id == project_id, jobs.c.status.in_(ENDED), sa.not_(lately))
        .order_by(jobs.c.enqueued_at)
        .limit(_ROOM)
    )


def _fold(conn: sa.Connection, project: Project, count: int) -> tuple[dict[str, int], counts.Count]:
    """Limits and counts of a project that queues so many jobs, or a Problem for too many."""
    most = limits(conn, project)
    rate = most.get(_RATE)
    kept = counts.fold(conn, project.id, rate, count)
    if kept.open + count > most["jobs_open"]:
        raise _limited("jobs_open", kept.open, count, most["jobs_open"])
    if rate is not None and kept.spent + count > rate:
        # Time does not help a request for more than an hour's jobs.
        wait_s = (kept.spent + count - rate) * counts.HOUR_S / rate if count <= rate else 0
        raise quota.exceeded(_RATE, math.ceil(kept.spent), count, rate, math.ceil(wait_s))
    return most, kept


def _limited(name: str, use: float, count: float, most: int) -> Problem:
    if count > most:
        return quota.exceeded(name, math.ceil(use), math.ceil(count), most, 0)
    kept = "" if name == "jobs_open" else "; results younger than a minute are kept"
    return Problem(
        "job_limit",
        429,
        expected=f"at most {most} {name} of this project",
        found=f"{use:g}, and {count:g} more{kept}",
        remedy=f"ask again after {READABLE_S} s",
        detail={"limit": name, "allowed": most, "retry_after_s": READABLE_S},
    )


def _require_good_sample(conn: sa.Connection, project_id: str, model: str | None) -> None:
    mine = sa.select(jobs).where(jobs.c.reprocessed_at.is_not(None))
    again = rows.where(mine, jobs, project_id=project_id, model=model).subquery()
    last = sa.select(again.c.model, sa.func.max(again.c.reprocessed_at).label("at"))
    last_of = last.group_by(again.c.model).subquery()
    query = (
        sa.select(sa.func.count())
        .select_from(again)
        .join(
            last_of,
            sa.and_(last_of.c.model == again.c.model, last_of.c.at == again.c.reprocessed_at),
        )
        .where(again.c.status.not_in((JobStatus.DONE, JobStatus.CANCELED)))
    )
    if bad := conn.execute(query).scalar_one():
        raise Problem(
            "sample_unfinished",
            expected="the last dead letters that were queued again to have succeeded",
            found=f"{bad} of them that have not",
            remedy="read their errors and mend the cause, cancel them, or repeat with force",
        )
