"""Sessions through the SSH gateway: opened, reported, closed, read."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Project, SshSession, ssh_sessions
from reconciler.model.act import Act

ORDER = Order(ssh_sessions, ("opened_at", "id"), descending=True)
# A gateway reports its sessions more often than this; a silent session's gateway has ended.
SILENT_S = 120.0
# Sessions that a call of `close_silent` closes.
SILENT_AT_ONCE = 200
WEB = "web"
# Bytes from and to the client.
Traffic = tuple[int, int]


def take_turn(conn: sa.Connection, project_id: str) -> None:
    """Wait until no other session of the project begins, so that they can be counted.

    The gateway's role in the database may lock no row. It takes an advisory lock, for which only
    gateways wait, so a gateway in hostile hands stops no browser's terminal.
    """
    if conn.dialect.name == "postgresql":
        writes = sa.func.has_table_privilege("projects", "UPDATE")
        if not conn.execute(sa.select(writes)).scalar_one():
            locks.take_turn(conn, f"sessions {project_id}")
            return
    rows.get(conn, Project, project_id, lock=True)


def open_session(
    conn: sa.Connection,
    act: Act,
    *,
    allocation_id: str,
    project_id: str,
    owner: str,
    fingerprint: str,
    address: str,
    way: str,
) -> str:
    """Record a session; returns its id. way: jump, terminal or web."""
    values = {
        "id": rows.new_id(),
        "allocation_id": allocation_id,
        "project_id": project_id,
        "actor": act.actor,
        "owner": owner,
        "fingerprint": fingerprint,
        "address": address,
        "way": way,
    }
    session = rows.add(conn, SshSession, values)
    journal.audit_of(conn, act, "gateway.opened", session, _detail(session))
    return session.id


def close(conn: sa.Connection, id: str, reason: str, traffic: Traffic) -> None:
    """Record the end of a session; a second end changes nothing."""
    _close(conn, ssh_sessions.c.id == id, reason, {"closed_at": clock.now(), **_bytes(traffic)})


def report(conn: sa.Connection, open_now: Mapping[str, Traffic]) -> None:
    """Report the open sessions of a gateway or of the service."""
    for id, traffic in open_now.items():
        update = sa.update(ssh_sessions).where(
            ssh_sessions.c.id == id, ssh_sessions.c.closed_at.is_(None)
        )
        conn.execute(update.values(seen_at=clock.now(), **_bytes(traffic)))


def close_silent(conn: sa.Connection) -> int:
    """Close sessions whose process has ended, the longest silent first; returns how many.

    A gateway closes no terminal of a browser. One that is taken over may invent any number of
    sessions and lock their rows, so a call closes SILENT_AT_ONCE and waits for no lock.
    """
    columns = ssh_sessions.c
    silent = (
        sa.select(columns.id)
        .where(columns.closed_at.is_(None), columns.seen_at < clock.now() - SILENT_S)
        .order_by(columns.seen_at)
        .limit(SILENT_AT_ONCE)
    )
    which = columns.id.in_(silent.with_for_update(skip_locked=True))
    return _close(conn, which, "gateway_lost", {"closed_at": columns.seen_at})


def count_open(
    conn: sa.Connection, allocation_id: str, owner: str, way: str, *, beside: str = ""
) -> tuple[int, int]:
    """Open sessions of an allocation, and terminals of an owner, without this session.

    Terminals in browsers count apart: a gateway under an attacker's control can invent sessions,
    which must not use up the places of browsers.
    """
    columns = ssh_sessions.c
    alive = (
        columns.closed_at.is_(None),
        columns.seen_at >= clock.now() - SILENT_S,
        columns.id != beside,
        *((columns.way == WEB,) if way == WEB else ()),
    )
    counted = (
        columns.allocation_id == allocation_id,
        sa.and_(columns.owner == owner, columns.way != "jump"),
    )
    sums = (sa.func.coalesce(sa.func.sum(sa.case((which, 1), else_=0)), 0) for which in counted)
    of_allocation, terminals = conn.execute(sa.select(*sums).where(*alive)).one()
    return int(of_allocation), int(terminals)


def every(
    conn: sa.Connection, project_id: str, *, allocation_id: str | None = None, page: Page
) -> list[SshSession]:
    """The sessions of a project, newest first."""
    query = rows.where(
        sa.select(ssh_sessions), ssh_sessions, project_id=project_id, allocation_id=allocation_id
    )
    return rows.every(conn, part(query, ORDER, page), SshSession)


def _close(
    conn: sa.Connection,
    which: sa.ColumnElement[bool],
    reason: str,
    values: Mapping[str, object],
) -> int:
    update = (
        sa.update(ssh_sessions)
        .where(which, ssh_sessions.c.closed_at.is_(None))
        .values(reason=reason, **values)
        .returning(ssh_sessions)
    )
    closed = [SshSession(**row) for row in conn.execute(update).mappings()]
    for session in closed:
        act = Act(session.actor, reason)
        journal.audit_of(conn, act, "gateway.closed", session, _detail(session))
    return len(closed)


def _bytes(traffic: Traffic) -> dict[str, int]:
    return dict(zip(("bytes_in", "bytes_out"), traffic, strict=True))


def _detail(session: SshSession) -> dict[str, object]:
    names = ("allocation_id", "way", "fingerprint", "address", "bytes_in", "bytes_out")
    return {name: getattr(session, name) for name in names}
