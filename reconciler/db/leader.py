"""Leader election by a term in the database; a leader without a term commits nothing (I9).

A process that was paused past its term does not know it. Therefore every writing transaction of a
leader locks the leader's row at its own epoch until the commit, and the row cannot change hands
meanwhile. The lock admits the renewal of the term, so a slow transaction does not end the term of
its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from reconciler.db import clock, engine, journal, rows
from reconciler.db.rows import Record
from reconciler.db.schema import leaders
from reconciler.db.schema import service_processes as table
from reconciler.model.act import Act
from reconciler.model.errors import Problem, Refusal

# Name of the leader of all loops that may run in a single process only.
LOOPS = "loops"
# Roles of a process of the gateway; they are a rule of its role in the database (`gateway.role`).
GATEWAY = ["gateway"]
# Interval at which a process campaigns for the term or renews it.
ELECTION_S = 2.0
# Longest pause within a transaction of a leader, and longest wait for a lock, as part of its term.
_PAUSE = 0.4
# The last leader waits for this part of a term, two elections of the others, before it leads again.
_COURTESY = 0.5


class Deposed(Refusal):
    """Another process leads, or this process's term has ended; nothing was written."""


@dataclass(frozen=True)
class Term:
    """Term of a leader. seconds: its duration from each renewal on."""

    name: str
    holder: str
    epoch: int
    seconds: float


def campaign(conn: sa.Connection, name: str, holder: str, seconds: float) -> Term | None:
    """Renew the term, or take it when it is free; None while another process has it.

    holder: unique among all processes that ever ran. After a lapse the same holder gets a new
    epoch, because another leader may have superseded its work under the old epoch. It lets the
    others take the term first, so that a leader that was released does not lead again.
    """
    until = clock.now() + seconds
    live = leaders.c.expires_at > clock.now()
    others_first = sa.and_(
        leaders.c.holder == holder, leaders.c.expires_at > clock.now() - seconds * _COURTESY
    )
    mine = sa.update(leaders).where(leaders.c.name == name, leaders.c.holder == holder, live)
    kept = conn.execute(mine.values(expires_at=until).returning(leaders.c.epoch)).scalar()
    if kept is not None:
        return Term(name, holder, kept, seconds)
    fresh = {"holder": holder, "acquired_at": clock.now(), "expires_at": until}
    # The lock excludes transactions of the last leader. It is not waited for, because a candidate
    # campaigns again soon.
    ended = sa.select(leaders.c.epoch).where(leaders.c.name == name, ~live, ~others_first)
    taken: int | None = None
    if conn.execute(ended.with_for_update(skip_locked=True)).scalar() is not None:
        free = sa.update(leaders).where(leaders.c.name == name, ~live)
        taking = free.values(epoch=leaders.c.epoch + 1, **fresh).returning(leaders.c.epoch)
        taken = conn.execute(taking).scalar()
    elif read(conn, name) is None:
        # Of two simultaneous inserts, the primary key refuses the second, which campaigns again.
        conn.execute(sa.insert(leaders).values(name=name, epoch=1, **fresh))
        taken = 1
    return None if taken is None else Term(name, holder, taken, seconds)


def resign(conn: sa.Connection, term: Term) -> None:
    """End the term now, so that another process need not wait for its expiry."""
    _end(conn, term.name, term.epoch)


def release(conn: sa.Connection, name: str, act: Act) -> None:
    """End the term of the present leader, who need not agree; Problem `leader_missing`."""
    term = read(conn, name)
    if not term or not term["live"]:
        raise Problem(
            "leader_missing",
            expected="a process that leads",
            found="none: the last term has ended",
            remedy="wait for the next election, then read the log of the workers",
        )
    _end(conn, name, term["epoch"])
    detail = {"holder": term["holder"], "epoch": term["epoch"]}
    journal.audit(conn, act, "leader.released", "leader", name, detail=detail)


def _end(conn: sa.Connection, name: str, epoch: int) -> None:
    held = sa.update(leaders).where(leaders.c.name == name, leaders.c.epoch == epoch)
    conn.execute(held.values(expires_at=clock.now()))


def require(conn: sa.Connection, term: Term) -> None:
    """Lock the term until this transaction ends; `Deposed` when it has ended."""
    if conn.dialect.name == "postgresql":
        # A process that is paused or waits here keeps all others from leading.
        limit = max(1, int(term.seconds * 1000 * _PAUSE))
        conn.exec_driver_sql(
            f"SET LOCAL idle_in_transaction_session_timeout = {limit};"
            f" SET LOCAL lock_timeout = {limit}"
        )
    live = (leaders.c.expires_at > clock.now()).label("live")
    query = sa.select(leaders.c.epoch, live).where(leaders.c.name == term.name)
    # SQLite has no row locks and needs none, because a writer locks the whole database.
    row = conn.execute(query.with_for_update(read=True, key_share=True)).one_or_none()
    if row is None or row.epoch != term.epoch or not row.live:
        raise Deposed(
            "not_leader",
            expected=f"epoch {term.epoch} of the leader {term.name}, still running",
            found="none" if row is None else f"epoch {row.epoch}, live: {bool(row.live)}",
            remedy="stop: another process does this work now, or this one is elected anew",
        )


def led_by(
    whole: sa.Engine, term: Term, begin: Callable[[sa.Connection, Term], None] = require
) -> sa.Engine:
    """Engine of the same database whose writing transactions begin by requiring the term."""
    return engine.guarded(whole, lambda conn: begin(conn, term))


def require_of(led: sa.Engine) -> None:
    """`Deposed` when the term of this engine of `led_by` has ended, for requests to other services.

    Any other engine is let through.
    """
    with engine.transaction(led):
        pass


def read(conn: sa.Connection, name: str) -> Record | None:
    """Row of the current or last leader; `live` is true while its term runs."""
    live = sa.func.coalesce(leaders.c.expires_at > clock.now(), sa.false()).label("live")
    return rows.first(conn, sa.select(leaders, live).where(leaders.c.name == name))


# A process without a sign of life for longer counts as dead. A lower value reports live processes
# as dead while the database is busy; a higher value reports dead processes as live for longer.
STALE_S = 20.0
# The row of an ended process is kept this long.
FORGET_S = 86_400.0


def record_process(
    conn: sa.Connection, id: str, roles: Sequence[str], *, host: str, pid: int, version: str
) -> None:
    """Record a sign of life of the process, with its roles."""
    values = {"roles": list(roles), "seen_at": clock.now()}
    if not conn.execute(sa.update(table).where(table.c.id == id).values(**values)).rowcount:
        conn.execute(sa.insert(table).values(id=id, host=host, pid=pid, version=version, **values))
        if list(roles) != GATEWAY:
            # A gateway that is taken over may hold the lock of a row of its kind.
            old = sa.select(table.c.id).where(table.c.seen_at < clock.now() - FORGET_S)
            free = old.with_for_update(skip_locked=True)
            conn.execute(sa.delete(table).where(table.c.id.in_(free)))


def remove_process(conn: sa.Connection, id: str) -> None:
    """Sign a process off that ends normally. The next that starts removes its row: the gateway's
    role in the database may delete none, because who may delete can lock the table.
    """
    conn.execute(sa.update(table).where(table.c.id == id).values(seen_at=0))


def processes(conn: sa.Connection) -> list[Record]:
    """All processes, newest first. age_s: seconds since the last sign of life; live: recent."""
    age = (clock.now() - table.c.seen_at).label("age_s")
    query = sa.select(table, age).where(table.c.seen_at > 0)
    recorded = rows.every(conn, query.order_by(table.c.started_at.desc()))
    return [{**row, "live": row["age_s"] < STALE_S} for row in recorded]


def other_version(process: Record, version: str) -> str:
    """What to do about a live process of another version than this; "" for any other process. An
    older one that was not stopped does its work by rules that no longer hold.
    """
    if not process["live"] or process["version"] == version:
        return ""
    return (
        "stop it with SIGTERM or by its unit, then start the version to which the database was"
        " migrated"
    )


def live_roles(conn: sa.Connection) -> dict[str, int]:
    """Number of live processes by role."""
    counted: dict[str, int] = {}
    for row in processes(conn):
        for role in row["roles"] if row["live"] else ():
            counted[role] = counted.get(role, 0) + 1
    return counted
