"""Members' SSH keys for the gateway: registered, revoked, read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import SshKey, ssh_keys
from reconciler.model.act import Act
from reconciler.model.errors import Problem

ORDER = Order(ssh_keys, ("created_at", "id"), descending=True)


def bare(line: str) -> str:
    """Type and base64 of the line of a public key."""
    return " ".join(line.split()[:2])


def fingerprint(key: str) -> str:
    """The fingerprint of a key as ssh-keygen shows it."""
    digest = hashlib.sha256(base64.b64decode(key.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def register(
    conn: sa.Connection,
    project_id: str,
    line: str,
    act: Act,
    *,
    token_id: str | None,
    ttl_s: float | None = None,
) -> SshKey:
    """Register a key under its member's token. A key of an ended token gets the new token."""
    key = find(conn, project_id, line)
    if key is not None and key.revoked_at is not None:
        raise Problem(
            "ssh_key_revoked",
            expected="a key that was not revoked in this project",
            found=f"{fingerprint(key.public_key)}, which was",
            remedy="make a new pair with `ssh-keygen -t ed25519` and register it",
        )
    if key is not None and ttl_s is None and (key.token_id, key.expires_at) == (token_id, None):
        return key
    ends = None if ttl_s is None else clock.now() + ttl_s
    holder = {"token_id": token_id, "registered_by": act.actor, "owner": act.owner}
    values = {**holder, "expires_at": ends}
    return _store(conn, project_id, line, key, act, "ssh_key.registered", values)


def revoke(conn: sa.Connection, project_id: str, line: str, act: Act) -> SshKey:
    """Revoke a key in its project for ever, whether it was registered or came with a launch."""
    key = find(conn, project_id, line)
    if key is not None and key.revoked_at is not None:
        return key
    values: dict[str, Any] = {"revoked_at": clock.now()}
    if key is None:
        values["registered_by"] = act.actor
    return _store(conn, project_id, line, key, act, "ssh_key.revoked", values)


def of_person(conn: sa.Connection, actors: Sequence[str]) -> list[SshKey]:
    """Keys that a person registered and that would open something later."""
    return _ending(conn, ssh_keys.c.registered_by.in_(actors))


def outside(conn: sa.Connection, owner: str, projects: Collection[str]) -> list[SshKey]:
    """Like `of_person`, by the owner and for all but these projects."""
    return _ending(conn, ssh_keys.c.owner == owner, ssh_keys.c.project_id.not_in(projects))


def _ending(conn: sa.Connection, *which: sa.ColumnElement[bool]) -> list[SshKey]:
    valid = (ssh_keys.c.revoked_at.is_(None), ssh_keys.c.expires_at > clock.now())
    return rows.every(conn, sa.select(ssh_keys).where(*which, *valid), SshKey)


def end(conn: sa.Connection, project_id: str, line: str, actor: str, act: Act) -> SshKey:
    """Let a key of a person through no longer, until they register it again."""
    values = {"registered_by": actor, "expires_at": clock.now()}
    key = find(conn, project_id, line)
    return _store(conn, project_id, line, key, act, "ssh_key.ended", values)


def _store(
    conn: sa.Connection,
    project_id: str,
    line: str,
    key: SshKey | None,
    act: Act,
    action: str,
    values: Mapping[str, Any],
) -> SshKey:
    if key is None:
        words = line.split(None, 2)
        first = {"id": rows.new_id(), "project_id": project_id, "public_key": bare(line)}
        key = rows.add(conn, SshKey, {**first, "name": " ".join(words[2:])[:100], **values})
    else:
        conn.execute(sa.update(ssh_keys).where(ssh_keys.c.id == key.id).values(values))
    journal.audit_of(conn, act, action, key, {"fingerprint": fingerprint(key.public_key)})
    return rows.get(conn, SshKey, key.id)


def find(conn: sa.Connection, project_id: str, line: str) -> SshKey | None:
    """The record of a key in a project."""
    query = sa.select(ssh_keys).where(
        ssh_keys.c.project_id == project_id, ssh_keys.c.public_key == bare(line)
    )
    return rows.first(conn, query, SshKey)


def every(conn: sa.Connection, project_id: str, page: Page | None = None) -> list[SshKey]:
    """The keys of a project, newest first."""
    query = sa.select(ssh_keys).where(ssh_keys.c.project_id == project_id)
    return rows.every(conn, part(query, ORDER, page), SshKey)
