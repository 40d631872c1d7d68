"""One leader at a time, by a lease in the database, and nothing that an old one writes counts (I9).

A process that was paused past its lease does not know it. So it is not asked: every writing
transaction of a leader reads the leader's row at its own epoch and keeps it until it commits, and
the row cannot change hands meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from reconciler.db import clock, engine, rows
from reconciler.db.rows import Record
from reconciler.db.schema import leaders
from reconciler.db.schema import service_processes as table
from reconciler.model.errors import Refusal

# The loops that must be single have one leader for all of them.
LOOPS = "loops"
# How often a process asks for the lease, or for more of it.
ELECTION_S = 2.0


class Deposed(Refusal):
    """Another process leads, or this one's lease has run out: nothing was written."""


@dataclass(frozen=True)
class Lease:
    """What a leader holds. seconds: how long it lasts from each renewal on."""

    name: str
    holder: str
    epoch: int
    seconds: float


def campaign(conn: sa.Connection, name: str, holder: str, seconds: float) -> Lease | None:
    """Keep the lease, or take it when nobody has it; None while somebody else does.

    holder: unique among all processes that ever were. After a lapse the same holder gets a new
    epoch: what it began under the old one may have been overtaken.
    """
    until = clock.now() + seconds
    live = leaders.c.expires_at > clock.now()
    mine = sa.update(leaders).where(leaders.c.name == name, leaders.c.holder == holder, live)
    kept = conn.execute(mine.values(expires_at=until).returning(leaders.c.epoch)).scalar()
    if kept is not None:
        return Lease(name, holder, kept, seconds)
    fresh = {"holder": holder, "acquired_at": clock.now(), "expires_at": until}
    free = sa.update(leaders).where(leaders.c.name == name, ~live)
    taking = free.values(epoch=leaders.c.epoch + 1, **fresh).returning(leaders.c.epoch)
    taken = conn.execute(taking).scalar()
    if taken is None and read(conn, name) is None:
        # Of two that insert at once, one is refused by the key and asks again.
        conn.execute(sa.insert(leaders).values(name=name, epoch=1, **fresh))
        taken = 1
    return None if taken is None else Lease(name, holder, taken, seconds)


def resign(conn: sa.Connection, lease: Lease) -> None:
    """Give the lease up, so that nobody has to wait for its end."""
    held = sa.update(leaders).where(leaders.c.name == lease.name, leaders.c.epoch == lease.epoch)
    conn.execute(held.values(expires_at=clock.now()))


def require(conn: sa.Connection, lease: Lease) -> None:
    """Hold the lease still until this transaction ends; `Deposed` when it is not ours any more."""
    if conn.dialect.name == "postgresql":
        # A process that stops right here would keep everybody else from leading until it goes on.
        limit = max(1, int(lease.seconds * 1000))
        conn.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {limit}")
    live = (leaders.c.expires_at > clock.now()).label("live")
    query = sa.select(leaders.c.epoch, live).where(leaders.c.name == lease.name)
    # SQLite has no row locks and needs none: whoever writes has the whole database.
    found = conn.execute(query.with_for_update(read=True)).one_or_none()
    if found is None or found.epoch != lease.epoch or not found.live:
        raise Deposed(
            "not_leader",
            expected=f"epoch {lease.epoch} of the leader {lease.name}, still running",
            found="none" if found is None else f"epoch {found.epoch}, live: {bool(found.live)}",
            remedy="stop: another process does this work now, or this one is elected anew",
        )


def led_by(whole: sa.Engine, lease: Lease) -> sa.Engine:
    """The same database; every writing transaction begins by requiring the lease."""
    return engine.guarded(whole, lambda conn: require(conn, lease))


def read(conn: sa.Connection, name: str) -> Record | None:
    """Who leads, or led last: the row, and whether its lease still runs as `live`."""
    live = sa.func.coalesce(leaders.c.expires_at > clock.now(), sa.false()).label("live")
    return rows.first(conn, sa.select(leaders, live).where(leaders.c.name == name))


# Too low, and a busy database makes a living process look dead; too high, and a dead one is
# believed in for that long.
STALE_S = 20.0
# A row of a process that ended says for a while that there was one.
FORGET_S = 86_400.0


def record_process(
    conn: sa.Connection, id: str, roles: Sequence[str], *, host: str, pid: int, version: str
) -> None:
    """The process lives and does this."""
    values = {"roles": list(roles), "seen_at": clock.now()}
    if not conn.execute(sa.update(table).where(table.c.id == id).values(**values)).rowcount:
        conn.execute(sa.insert(table).values(id=id, host=host, pid=pid, version=version, **values))
        forgotten = table.c.seen_at < clock.now() - FORGET_S
        conn.execute(sa.delete(table).where(forgotten))


def remove_process(conn: sa.Connection, id: str) -> None:
    """The process ends in order."""
    conn.execute(sa.delete(table).where(table.c.id == id))


def processes(conn: sa.Connection) -> list[Record]:
    """Newest first; age_s says how long ago each was heard of, live whether that is recent."""
    age = (clock.now() - table.c.seen_at).label("age_s")
    found = rows.every(conn, sa.select(table, age).order_by(table.c.started_at.desc()))
    return [{**row, "live": row["age_s"] < STALE_S} for row in found]


def live_roles(conn: sa.Connection) -> dict[str, int]:
    """How many living processes there are of each role."""
    counted: dict[str, int] = {}
    for row in processes(conn):
        for role in row["roles"] if row["live"] else ():
            counted[role] = counted.get(role, 0) + 1
    return counted
