"""Number and size of a project's jobs, so that a request need not count them.

Each transaction that adds, ends or deletes jobs adds a row with the difference. A request of the
project folds its rows into one, under the lock of the project. A single row would keep workers
that end jobs of the same project waiting for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import job_counts, jobs
from reconciler.model.jobs import OPEN, JobStatus

HOUR_S = 3_600.0
_OPEN = "open_jobs"
_KINDS = (_OPEN, *(status.value for status in JobStatus if status not in OPEN))
_ADDED = (*_KINDS, "size")
# Statements of each request are built once.
_FOLDED = (
    sa.delete(job_counts)
    .where(job_counts.c.project_id == sa.bindparam("of_project"))
    .returning(*job_counts.c)
)
_INSERT = sa.insert(job_counts)
# A job that came (before None), changed or was deleted (after None): its project, and its bytes.
Move = tuple[str, str | None, str | None, int]


@dataclass(frozen=True)
class Count:
    """Jobs of a project. spent: what is left of its requests of the last hour."""

    open: int
    kept: int
    size: int
    spent: float


def add(conn: sa.Connection, moves: Iterable[Move]) -> None:
    """Count changes of jobs, in the transaction that makes them."""
    changes: dict[str, Counter[str]] = {}
    for project_id, before, after, size in moves:
        change = changes.setdefault(project_id, Counter())
        if before is not None:
            change[_kind(before)] -= 1
        if after is not None:
            change[_kind(after)] += 1
        change["size"] += size
    values = [_row(id, change) for id, change in changes.items() if any(change.values())]
    if values:
        conn.execute(_INSERT, values)


def read(conn: sa.Connection, project_id: str | None = None) -> dict[str, dict[str, int]]:
    """By project: `open_jobs`, the number of each status of ended jobs, and `size`."""
    columns = [sa.cast(sa.func.sum(job_counts.c[name]), sa.BigInteger()) for name in _ADDED]
    query = sa.select(job_counts.c.project_id, *columns).group_by(job_counts.c.project_id)
    query = rows.where(query.order_by(job_counts.c.project_id), job_counts, project_id=project_id)
    return {id: dict(zip(_ADDED, sums, strict=True)) for id, *sums in conn.execute(query)}


def missing(conn: sa.Connection, project_id: str | None = None) -> dict[str, dict[str, int]]:
    """By project, what its counts lack of its jobs; {} if they are right. A process of an older
    version does not count what it changes.

    One statement, so that jobs and counts are of the same moment, whatever goes on meanwhile.
    """
    real: dict[str, sa.ColumnElement[Any]] = {
        name: sa.case((jobs.c.status == name, 1), else_=0) for name in _KINDS
    }
    real |= {_OPEN: sa.case((jobs.c.status.in_(OPEN), 1), else_=0), "size": jobs.c.size}
    jobs_of = rows.where(
        sa.select(jobs.c.project_id, *(real[name].label(name) for name in _ADDED)),
        jobs,
        project_id=project_id,
    )
    counted = rows.where(
        sa.select(job_counts.c.project_id, *(-job_counts.c[name] for name in _ADDED)),
        job_counts,
        project_id=project_id,
    )
    both = sa.union_all(jobs_of, counted).subquery()
    sums = [sa.cast(sa.func.sum(both.c[name]), sa.BigInteger()) for name in _ADDED]
    query = sa.select(both.c.project_id, *sums).group_by(both.c.project_id)
    query = query.having(sa.or_(*(each != 0 for each in sums))).order_by(both.c.project_id)
    return {id: dict(zip(_ADDED, lack, strict=True)) for id, *lack in conn.execute(query)}


def mend(conn: sa.Connection, project_id: str) -> dict[str, int]:
    """Add what the counts of a project lack; returns it."""
    lack = missing(conn, project_id).get(project_id, {})
    if lack:
        conn.execute(_INSERT, [_row(project_id, Counter(lack))])
    return lack


def fold(conn: sa.Connection, project_id: str, rate: int | None, spend: int) -> Count:
    """Make one row of a project's; returns what it holds. The caller has locked the project.

    rate: what the project may spend in an hour, if that is limited. It comes back evenly.
    """
    parts = conn.execute(_FOLDED, {"of_project": project_id}).mappings().all()
    remaining = 0.0
    total = Counter({name: sum(part[name] for part in parts) for name in _ADDED})
    row = _row(project_id, total)
    if rate is not None:
        left = [(part["spent"], part["spent_at"]) for part in parts]
        row["spent_at"] = clock.read(conn)
        remaining = _left(left, row["spent_at"], rate)
        row["spent"] = remaining + spend
    conn.execute(_INSERT, [row])
    return Count(total[_OPEN], sum(total[kind] for kind in _KINDS), total["size"], remaining)


def spent(conn: sa.Connection, project_id: str, rate: int) -> float:
    """What is left of the requests of a project's last hour."""
    query = sa.select(job_counts.c.spent, job_counts.c.spent_at)
    query = query.where(job_counts.c.project_id == project_id, job_counts.c.spent_at.is_not(None))
    return _left([tuple(row) for row in conn.execute(query)], clock.read(conn), rate)


def _left(parts: Iterable[tuple[float, float | None]], now: float, rate: int) -> float:
    """What is left of spendings after a time: nothing after an hour, whether the share has come
    back or the clock has jumped.
    """
    return sum(
        max(0.0, spent - max(0.0, now - at) * rate / HOUR_S)
        for spent, at in parts
        if at is not None and abs(now - at) < HOUR_S
    )


def _kind(status: str) -> str:
    return _OPEN if status in OPEN else str(status)


def _row(project_id: str, change: Counter[str]) -> dict[str, Any]:
    mine = {"id": rows.ordered_id(), "project_id": project_id, "spent": 0.0, "spent_at": None}
    return {**mine, **{name: change[name] for name in _ADDED}}
