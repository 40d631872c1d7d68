"""Which processes of the service live: each says so, by the database's clock."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from reconciler.store import clock, rows
from reconciler.store.rows import Record
from reconciler.store.tables import service_processes as table

# Too low, and a busy database makes a living process look dead; too high, and a dead one is
# believed in for that long.
STALE_S = 20.0
# A row of a process that ended says for a while that there was one.
FORGET_S = 86_400.0


def beat(
    conn: sa.Connection, id: str, roles: Sequence[str], *, host: str, pid: int, version: str
) -> None:
    """The process lives and does this."""
    values = {"roles": list(roles), "seen_at": clock.now()}
    if not conn.execute(sa.update(table).where(table.c.id == id).values(**values)).rowcount:
        conn.execute(sa.insert(table).values(id=id, host=host, pid=pid, version=version, **values))
        forgotten = table.c.seen_at < clock.now() - FORGET_S
        conn.execute(sa.delete(table).where(forgotten))


def gone(conn: sa.Connection, id: str) -> None:
    """The process ends in order."""
    conn.execute(sa.delete(table).where(table.c.id == id))


def every(conn: sa.Connection) -> list[Record]:
    """Newest first; age_s says how long ago each was heard of, live whether that is recent."""
    age = (clock.now() - table.c.seen_at).label("age_s")
    found = rows.every(conn, sa.select(table, age).order_by(table.c.started_at.desc()))
    return [{**row, "live": row["age_s"] < STALE_S} for row in found]


def roles(conn: sa.Connection) -> dict[str, int]:
    """How many living processes there are of each role."""
    counted: dict[str, int] = {}
    for row in every(conn):
        for role in row["roles"] if row["live"] else ():
            counted[role] = counted.get(role, 0) + 1
    return counted
