"""Sessions of the web console, each of which stands for an API token or a person of the provider.

Only the hash of a cookie is stored. A session of a token ends with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import ApiToken, ConsoleSession, api_tokens, console_sessions
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.records import tokens

# A working day. A stolen cookie opens nothing on the next day.
LIFETIME_S = 12 * 3600.0
# A person of the provider: for how long the groups of a login are believed, and the age at which a
# page asks the provider again.
PROVIDER_S, ASK_S = 4 * 3600.0, 600.0
# A login at the provider must end within this time.
LOGIN_S = 600.0
_LONGEST = 200
# Logins of a person in this time. Each is a row here and in the audit log.
PACE, PACE_S = 30, 60.0
ORDER = Order(console_sessions, ("created_at", "id"), descending=True)


def start(
    conn: sa.Connection,
    act: Act,
    *,
    address: str,
    agent: str,
    token_id: str | None = None,
    login: str = "",
    claims: dict[str, Any] | None = None,
) -> str:
    """Start a session for a valid token, or for claims of the provider by a login of this secret.
    Returns the session's secret, which cannot be read again.

    Sessions that have ended are removed here, so that no loop is needed for them. They are kept
    until their login could not be used again anyway.
    """
    over = clock.now() - LOGIN_S
    conn.execute(sa.delete(console_sessions).where(console_sessions.c.expires_at <= over))
    if login:
        _require_unused(conn, login)
    _require_pace(conn, token_id, claims or {})
    secret = secrets.token_urlsafe(32)
    record = rows.add(
        conn,
        ConsoleSession,
        {
            "id": rows.new_id(),
            "hash": tokens.digest(secret),
            "token_id": token_id,
            "login": tokens.digest(login) if login else None,
            "claims": claims or {},
            "expires_at": clock.now() + (PROVIDER_S if login else LIFETIME_S),
            "address": address[:_LONGEST],
            "agent": agent[:_LONGEST],
        },
    )
    detail = {"address": record.address, "agent": record.agent, "token_id": token_id}
    journal.audit(conn, act, "console.session.started", "console_session", record.id, detail=detail)
    return secret


def renew(conn: sa.Connection, secret: str, login: str, claims: dict[str, Any]) -> bool:
    """Give an open session of the same person the claims of a new login. Its pages, streams and
    terminals go on.

    Returns False for another person's session, and eight hours after its login, because the renewed
    session would outlast twelve hours.
    """
    _require_unused(conn, login)
    query = sa.select(console_sessions).where(*_open(secret), console_sessions.c.login.is_not(None))
    session = rows.first(conn, query, ConsoleSession)
    same = session and all(session.claims[name] == claims[name] for name in ("iss", "sub"))
    ends = clock.read(conn) + PROVIDER_S
    if not session or not same or session.created_at + LIFETIME_S < ends:
        return False
    change = sa.update(console_sessions).where(console_sessions.c.id == session.id)
    values = {"claims": claims, "login": tokens.digest(login), "expires_at": ends}
    conn.execute(change.values(values))
    return True


def asks(conn: sa.Connection, secret: str) -> bool:
    """Whether the person's groups should be asked for again."""
    old = console_sessions.c.expires_at < clock.now() + PROVIDER_S - ASK_S
    query = sa.exists().where(*_open(secret), console_sessions.c.login.is_not(None), old)
    return bool(conn.execute(sa.select(query)).scalar())


def every(conn: sa.Connection, page: Page | None = None) -> list[ConsoleSession]:
    """Open sessions, the newest first."""
    query = sa.select(console_sessions).where(console_sessions.c.expires_at > clock.now())
    return rows.every(conn, part(query, ORDER, page), ConsoleSession)


def end_some(conn: sa.Connection, sessions: Collection[ConsoleSession], act: Act) -> None:
    """End these sessions."""
    for session in sessions:
        over = sa.update(console_sessions).where(console_sessions.c.id == session.id)
        conn.execute(over.values(expires_at=clock.now()))
        journal.audit(conn, act, "console.session.ended", "console_session", session.id)


def token_of(conn: sa.Connection, secret: str) -> ApiToken | None:
    """The valid token of a session that has not ended."""
    of_session = sa.select(console_sessions.c.token_id).where(*_open(secret))
    return tokens.valid_one(conn, api_tokens.c.id.in_(of_session))


def claims_of(conn: sa.Connection, secret: str) -> dict[str, Any] | None:
    """The provider's claims of a session that has not ended, with the time until which they are
    believed; None without such a session.
    """
    query = sa.select(console_sessions).where(*_open(secret), console_sessions.c.login.is_not(None))
    session = rows.first(conn, query, ConsoleSession)
    return None if session is None else session.claims | {"exp": session.expires_at}


def end(conn: sa.Connection, secret: str, act: Act) -> None:
    """End a session. An unknown session has ended already."""
    over = sa.update(console_sessions).where(*_open(secret)).values(expires_at=clock.now())
    session = conn.execute(over.returning(console_sessions.c.id)).scalar()
    if session is not None:
        journal.audit(conn, act, "console.session.ended", "console_session", session)


def end_all(conn: sa.Connection) -> None:
    """End every session."""
    conn.execute(sa.delete(console_sessions))


def _require_pace(conn: sa.Connection, token_id: str | None, claims: dict[str, Any]) -> None:
    """Problem `rate_exceeded` for a person of the provider, or an owner of tokens, who begins
    sessions faster than people do.
    """
    other = api_tokens.alias()
    same = sa.func.coalesce(other.c.owner, other.c.id) == sa.func.coalesce(
        api_tokens.c.owner, api_tokens.c.id
    )
    mine = console_sessions.c.token_id.in_(
        sa.select(other.c.id).where(api_tokens.c.id == token_id, same)
    )
    if claims:
        mine = console_sessions.c.claims["sub"].as_string() == claims["sub"]
    recent = console_sessions.c.created_at > clock.now() - PACE_S
    if conn.execute(sa.select(sa.func.count()).where(mine, recent)).scalar_one() >= PACE:
        raise Problem(
            "rate_exceeded",
            429,
            expected=f"at most {PACE} logins of a person in {PACE_S:.0f} s",
            found="another one",
            remedy="use the session that you have",
            detail={"retry_after_s": int(PACE_S)},
        )


def _require_unused(conn: sa.Connection, login: str) -> None:
    used = console_sessions.c.login == tokens.digest(login)
    if conn.execute(sa.select(sa.exists().where(used))).scalar():
        raise Problem(
            "login_failed",
            401,
            expected="a login that has not started a session yet",
            found="a used one",
            remedy="begin again on the login page",
        )


def _open(secret: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        console_sessions.c.hash == tokens.digest(secret),
        console_sessions.c.expires_at > clock.now(),
    )
