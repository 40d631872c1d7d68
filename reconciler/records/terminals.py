"""Tickets for terminals in the browser, and recordings of terminals."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.schema import (
    SshSession,
    TerminalTicket,
    projects,
    ssh_sessions,
    terminal_recordings,
    terminal_tickets,
)
from reconciler.model.act import Act, require_reason
from reconciler.model.errors import Problem, not_found
from reconciler.records.tokens import digest

# Long enough for a page to load on a slow line.
TICKET_S = 30.0
# Unused tickets of a member.
TICKETS = 32
# Bytes of recordings that a project keeps; the oldest are deleted when a session begins.
PROJECT_LIMIT = 256 << 20


def issue(
    conn: sa.Connection, act: Act, *, allocation_id: str, project_id: str, holder: str
) -> tuple[TerminalTicket, str]:
    """Issue a ticket. Returns its record and its secret. Expired tickets are removed here."""
    table = terminal_tickets
    conn.execute(sa.delete(table).where(table.c.expires_at <= clock.now()))
    waiting = sa.select(sa.func.count()).where(table.c.actor == act.actor)
    if conn.execute(waiting).scalar_one() >= TICKETS:
        raise Problem(
            "too_many_tickets",
            429,
            expected=f"at most {TICKETS} unused tickets",
            found="as many",
            remedy=f"use one, or wait {TICKET_S:.0f} seconds",
        )
    secret = secrets.token_urlsafe(32)
    values = {
        "hash": digest(secret),
        "holder": holder,
        "actor": act.actor,
        "allocation_id": allocation_id,
        "project_id": project_id,
        "expires_at": clock.now() + TICKET_S,
    }
    rows.insert(conn, table, values)
    query = sa.select(table).where(table.c.hash == values["hash"])
    return rows.every(conn, query, TerminalTicket)[0], secret


def take(conn: sa.Connection, secret: str, holder: str) -> TerminalTicket | None:
    """Use a ticket up. None: it is unknown, used, expired, or another holder's, who keeps it."""
    table = terminal_tickets
    gone = sa.delete(table).where(
        table.c.hash == digest(secret), table.c.holder == holder, table.c.expires_at > clock.now()
    )
    row = conn.execute(gone.returning(table)).mappings().first()
    return None if row is None else TerminalTicket(**row)


def record_terminals(conn: sa.Connection, project_id: str, act: Act, *, enabled: bool) -> None:
    """Switch the recording of a project's terminals, for sessions that begin from now on."""
    change = sa.update(projects).where(
        projects.c.id == project_id, projects.c.records_terminals.is_not(enabled)
    )
    if not conn.execute(change.values(records_terminals=enabled)).rowcount:
        return
    detail = {"enabled": enabled}
    journal.audit(
        *(conn, act, "project.terminal_recording", "project", project_id),
        detail=detail,
        project_id=project_id,
    )


def append(conn: sa.Connection, session_id: str, project_id: str, lines: str) -> None:
    """Keep another part of a session's recording."""
    values = {"session_id": session_id, "project_id": project_id, "lines": lines}
    rows.insert(conn, terminal_recordings, {**values, "size": len(lines.encode())})


def finish(conn: sa.Connection, session_id: str, checksum: str) -> None:
    """Record the digest of a whole recording."""
    change = sa.update(ssh_sessions).where(ssh_sessions.c.id == session_id)
    conn.execute(change.values(recording_digest=checksum))


def make_room(conn: sa.Connection, project_id: str) -> None:
    """Delete a project's oldest recordings beyond its limit."""
    table = terminal_recordings
    query = (
        sa.select(table.c.session_id, sa.func.sum(table.c.size))
        .where(table.c.project_id == project_id)
        .group_by(table.c.session_id)
        .order_by(sa.func.max(table.c.id).desc())
    )
    total, old = 0, []
    for session_id, size in conn.execute(query):
        total += int(size)
        if total > PROJECT_LIMIT:
            old.append(session_id)
    if old:
        conn.execute(sa.delete(table).where(table.c.session_id.in_(old)))


def replay(conn: sa.Connection, session_id: str, act: Act) -> tuple[SshSession, str]:
    """A session with its recording. Reading it needs a reason and is audited."""
    require_reason(act, "say why you need to see it")
    session = rows.get(conn, SshSession, session_id)
    table = terminal_recordings
    query = sa.select(table.c.lines).where(table.c.session_id == session_id).order_by(table.c.id)
    text = "".join(conn.execute(query).scalars())
    if not text:
        raise not_found("recording", session_id)
    journal.audit_of(conn, act, "terminal.replayed", session, {"digest": session.recording_digest})
    return session, text
