"""Maintenance of jobs: admission and claims stop, and what runs ends within a bound.

Every function is a transaction's work. Admission and claims lock the control row, shared, until
their transaction ends. A change of the mode waits for them, so none of them slips through it.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.schema import Control, control, jobs, pool_workers, totals
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.jobs import JobStatus, Mode
from reconciler.pools import counts

# Id of the only row of both tables.
_ROW = "jobs"
RETRY_S = 30
# A worker without a heartbeat for so long is dead, or has lost its jobs.
SILENT_S = 30.0
STATUS = {status: rows.literal(status) for status in JobStatus}
RUNNING = jobs.c.status == STATUS[JobStatus.RUNNING]
PENDING = jobs.c.status == STATUS[JobStatus.PENDING]
DUE = sa.and_(PENDING, jobs.c.not_before.is_(None))
# The project of each job that runs. A range of the leases and no GROUP BY, because SQLite would
# read the index of all jobs.
HOLDERS = sa.select(jobs.c.project_id).where(RUNNING, jobs.c.lease_expires_at > 0)
# Of a job that no worker holds.
FREE = {"token": "", "lease_expires_at": None}
# The order in which transactions lock jobs. For that of the column itself, SQLite would read the
# index of all jobs.
BY_ID = jobs.c.id.concat("")
# Built once: each admission and each claim executes it.
_MODE = sa.select(control.c.mode).where(control.c.id == _ROW).with_for_update(read=True)
_CANCELED = {
    "code": "maintenance",
    "expected": "an end before the site's maintenance",
    "found": "a call that still ran at the deadline of the drain",
    "remedy": "send the job again after the maintenance",
}


def read(conn: sa.Connection) -> Control:
    """The mode, since when, and why."""
    return rows.get(conn, Control, _ROW)


def is_normal(conn: sa.Connection) -> bool:
    """Whether jobs may be admitted and claimed in this transaction."""
    return bool(conn.execute(_MODE).scalar_one() == Mode.NORMAL)


def require_normal(conn: sa.Connection) -> None:
    """Problem `maintenance` while nothing is admitted."""
    if not is_normal(conn):
        raise Problem(
            "maintenance",
            503,
            expected="a site that admits jobs",
            found="its maintenance",
            remedy=f"send the request again after {RETRY_S} s",
            detail={"retry_after_s": RETRY_S},
        )


def drain(conn: sa.Connection, act: Act, deadline_s: float) -> Control:
    """Stop admission and claims. Jobs that run have so long to end; a repetition changes that."""
    mode = rows.get(conn, Control, _ROW, lock=True).mode
    if mode == Mode.DRAINED:
        return read(conn)
    values: dict[str, Any] = {"deadline_at": clock.now() + deadline_s}
    if mode == Mode.NORMAL:
        values |= {"mode": Mode.DRAIN, "since": clock.now()}
    return _change(conn, act, "maintenance.began", values, {"drain_deadline_s": deadline_s})


def resume(conn: sa.Connection, act: Act) -> Control:
    """Admit and claim jobs again."""
    if rows.get(conn, Control, _ROW, lock=True).mode == Mode.NORMAL:
        return read(conn)
    values = {"deadline_at": None, "canceled_at": None, "since": clock.now()}
    return _change(conn, act, "maintenance.ended", {"mode": Mode.NORMAL, **values}, {})


def _change(
    conn: sa.Connection, act: Act, action: str, values: dict[str, Any], detail: dict[str, Any]
) -> Control:
    values = {**values, "reason": act.reason, "changed_by": act.actor}
    conn.execute(sa.update(control).where(control.c.id == _ROW).values(values))
    journal.audit(conn, act, action, "control", _ROW, detail=detail)
    return read(conn)


def follow(conn: sa.Connection) -> str:
    """Take a drain one step further. Returns a line for the log; "" if nothing has changed."""
    state = rows.get(conn, Control, _ROW, lock=True)
    if state.mode != Mode.DRAIN:
        return ""
    mine = sa.update(control).where(control.c.id == _ROW)
    back_s = state.since - clock.read(conn)
    if back_s > 0 and state.deadline_at is not None:
        # The clock has been set back. The drain has its time again from now on, and not also that
        # by which the clock went back.
        conn.execute(mine.values(since=clock.now(), deadline_at=state.deadline_at - back_s))
        state = read(conn)
    if running(conn):
        if clock.read(conn) < (state.deadline_at or 0):
            return ""
        held = sa.select(jobs.c.id).where(RUNNING).order_by(BY_ID)
        locked = held.with_for_update().cte("locked")
        canceled = sa.update(jobs).where(jobs.c.id == locked.c.id)
        canceled = canceled.values(
            **FREE,
            status=JobStatus.CANCELED,
            error=_CANCELED,
            taken_from=jobs.c.worker,
            updated_at=clock.now(),
        )
        ended = conn.execute(canceled.returning(jobs.c.project_id)).scalars().all()
        counts.add(conn, [(id, JobStatus.RUNNING, JobStatus.CANCELED, 0) for id in ended])
        # After the jobs, so that a heartbeat that is later than this has missed them.
        conn.execute(mine.values(canceled_at=clock.now()))
        return f"{len(ended)} jobs ran at the deadline of the drain and were canceled"
    if state.canceled_at is not None:
        if state.canceled_at > clock.read(conn):
            # The clock has been set back, and heartbeats are compared with this.
            conn.execute(mine.values(canceled_at=clock.now()))
            return ""
        # A worker that lives may still run a canceled job until its next heartbeat.
        unaware = sa.and_(
            pool_workers.c.ended_at.is_(None),
            pool_workers.c.beat_at <= state.canceled_at,
            pool_workers.c.beat_at > clock.now() - SILENT_S,
        )
        if conn.execute(sa.select(sa.exists().where(unaware))).scalar():
            return ""
    conn.execute(mine.values(mode=Mode.DRAINED, since=clock.now()))
    return "drained: no job runs"


def running(conn: sa.Connection) -> int:
    """Number of jobs that workers hold."""
    query = sa.select(sa.func.count()).select_from(jobs).where(RUNNING)
    return int(conn.execute(query).scalar_one())


def count(conn: sa.Connection, **added: int) -> None:
    """Add to counters of `Totals`. The last statement of a transaction: it locks their row."""
    if any(added.values()):
        values = {name: totals.c[name] + number for name, number in added.items()}
        conn.execute(sa.update(totals).where(totals.c.id == _ROW).values(values))


def counters(conn: sa.Connection) -> dict[str, int]:
    """All counters by name."""
    columns = [column for column in totals.c if column.name != "id"]
    return dict(conn.execute(sa.select(*columns)).mappings().one())
