"""Tickets for terminals in the browser, and recordings of terminals."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.rows import Page
from reconciler.db.schema import (
    Project,
    SshSession,
    TerminalTicket,
    projects,
    ssh_sessions,
    terminal_recordings,
    terminal_tickets,
)
from reconciler.model.act import Act, require_reason
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import Role
from reconciler.records.ssh_sessions import WEB
from reconciler.records.tokens import digest

# Long enough for a page to load on a slow line.
TICKET_S = 30.0
# Unused tickets of a member.
TICKETS = 32
# Bytes of a person's recordings in a project; the service deletes the oldest.
PERSON_LIMIT = 64 << 20
_SWITCHED = "project.terminal_recording"
# Recordings of the service, which a gateway cannot invent.
_IN_BROWSER = ssh_sessions.c.way == WEB


def issue(
    conn: sa.Connection, act: Act, *, allocation_id: str, project_id: str, holder: str
) -> tuple[TerminalTicket, str]:
    """Issue a ticket. Returns its record and its secret. Expired tickets are removed here."""
    table = terminal_tickets
    conn.execute(sa.delete(table).where(table.c.expires_at <= clock.now()))
    waiting = sa.select(sa.func.count()).where(table.c.owner == act.owner)
    if conn.execute(waiting).scalar_one() >= TICKETS:
        raise Problem(
            "too_many_tickets",
            429,
            expected=f"at most {TICKETS} unused tickets",
            found=f"{TICKETS} unused tickets",
            remedy=f"use one, or wait {TICKET_S:.0f} seconds",
        )
    secret = secrets.token_urlsafe(32)
    values = {
        "hash": digest(secret),
        "holder": holder,
        "actor": act.actor,
        "owner": act.owner,
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
    """Switch the recording of a project's terminals, for sessions that begin from now on.

    Problem `recording_required` for a member who stops a recording that an operator switched on.
    """
    project = rows.get(conn, Project, project_id, lock=True)
    required, by_operator = is_required(conn, project_id), act.role == Role.PLATFORM_ADMIN
    if required and not by_operator and not enabled:
        raise Problem(
            "recording_required",
            403,
            expected="an operator, because an operator has switched the recording on",
            found="a member of the project",
            remedy="ask the operators",
        )
    if project.records_terminals is enabled and (required or not by_operator or not enabled):
        return
    change = sa.update(projects).where(projects.c.id == project_id)
    conn.execute(change.values(records_terminals=enabled))
    detail = {"enabled": enabled}
    journal.audit(
        *(conn, act, _SWITCHED, "project", project_id), detail=detail, project_id=project_id
    )


def is_required(conn: sa.Connection, project_id: str) -> bool:
    """Whether an operator was the last who switched the recording on: only operators end it."""
    newest = journal.audit_rows(conn, action=_SWITCHED, subject_id=project_id, page=Page(1))
    return any(row.role == Role.PLATFORM_ADMIN and row.detail["enabled"] for row in newest)


def append(conn: sa.Connection, session_id: str, project_id: str, lines: str) -> None:
    """Keep another part of a session's recording."""
    values = {"session_id": session_id, "project_id": project_id, "lines": lines}
    rows.insert(conn, terminal_recordings, {**values, "size": len(lines.encode())})


def finish(conn: sa.Connection, session_id: str, checksum: str) -> None:
    """Record the digest of a whole recording."""
    change = sa.update(ssh_sessions).where(ssh_sessions.c.id == session_id)
    conn.execute(change.values(recording_digest=checksum))


def are_recorded(conn: sa.Connection, project_id: str, owner: str, way: str) -> bool:
    """Whether a terminal of the project is recorded now.

    Problem `recording_full` while a person's recordings are far beyond the limit, because the
    service has not deleted the oldest yet (`excess`).
    """
    query = sa.select(projects.c.records_terminals).where(projects.c.id == project_id)
    if not conn.execute(query).scalar_one():
        return False
    table = terminal_recordings
    total = conn.execute(
        sa.select(sa.func.coalesce(sa.func.sum(table.c.size), 0))
        .join(ssh_sessions, ssh_sessions.c.id == table.c.session_id)
        .where(table.c.project_id == project_id, ssh_sessions.c.owner == owner)
        .where(_IN_BROWSER if way == WEB else ~_IN_BROWSER)
    ).scalar_one()
    if int(total) > 2 * PERSON_LIMIT:
        raise Problem(
            "recording_full",
            expected=f"at most {2 * PERSON_LIMIT >> 20} MiB of a person's recordings",
            found="more",
            remedy="try again in a minute; the oldest go first",
        )
    return True


def excess() -> sa.Select[tuple[str]]:
    """Sessions whose recordings are a person's oldest beyond the limit.

    Each person, and each of gateway and browser, has a limit of its own. So no person can push out
    the recordings of another, and a gateway in hostile hands none of the browser.
    """
    table = terminal_recordings
    whose = (table.c.project_id, ssh_sessions.c.owner, _IN_BROWSER.label("web"))
    sums = (
        sa.select(
            *(table.c.session_id, *whose),
            sa.func.sum(table.c.size).label("size"),
            sa.func.max(table.c.id).label("newest"),
        )
        .join(ssh_sessions, ssh_sessions.c.id == table.c.session_id)
        .group_by(table.c.session_id, table.c.project_id, ssh_sessions.c.owner, ssh_sessions.c.way)
        .subquery()
    )
    total = sa.func.sum(sums.c.size).over(
        partition_by=(sums.c.project_id, sums.c.owner, sums.c.web), order_by=sums.c.newest.desc()
    )
    totals = sa.select(sums.c.session_id, total.label("total")).subquery()
    return sa.select(totals.c.session_id).where(totals.c.total > PERSON_LIMIT)


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
