"""API tokens, enrolment tokens and host certificates.

A secret is returned once, when it is issued; only its hash is stored.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import (
    ApiToken,
    EnrolmentToken,
    NodeCertificate,
    Project,
    api_tokens,
    enrolment_tokens,
    node_certificates,
)
from reconciler.model.act import Act, roles_of
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import Role

T = TypeVar("T", ApiToken, EnrolmentToken)

# A stolen enrolment token can enrol a false host, so its lifetime covers only a first boot.
ENROLMENT_MAX_S = 900
# A ticket is useless without the machine's address, and lasts for an installation.
TICKET_S = 4 * 3600
ORDER = Order(api_tokens, ("created_at", "id"), descending=True)
# Tokens that a person may have made for themselves and that are valid, or were made in this time.
MOST, MOST_WITHIN_S = 32, 3600.0


def _open(table: sa.FromClause) -> tuple[sa.ColumnElement[bool], ...]:
    ends = table.c.expires_at
    return table.c.revoked_at.is_(None), sa.or_(ends.is_(None), ends > clock.now())


def _valid(which: sa.ColumnElement[bool], *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """The usable tokens of a condition: no token in their line of parents has ended, and none has
    fewer rights than the token made with it.
    """
    table, parent = api_tokens.c, api_tokens.alias("parent")
    start = sa.select(table.id.label("origin"), table.parent_id, table.role, table.project_id)
    line = start.where(which, *_open(api_tokens)).cte("line", recursive=True)
    same = sa.and_(parent.c.role == line.c.role, parent.c.project_id == line.c.project_id)
    step = sa.select(line.c.origin, parent.c.parent_id, parent.c.role, parent.c.project_id).where(
        parent.c.id == line.c.parent_id,
        sa.or_(parent.c.role == Role.PLATFORM_ADMIN.value, same),
        *_open(parent),
    )
    # Without repetitions, so that a line that is a circle has an end, too.
    line = line.union(step)
    firsts = sa.select(line.c.origin).where(line.c.parent_id.is_(None))
    return sa.select(*(columns or table)).where(table.id.in_(firsts))


_VALID = _valid(api_tokens.c.hash == sa.bindparam("given"))


def issue(
    conn: sa.Connection,
    act: Act,
    *,
    role: Role,
    name: str,
    project_id: str | None = None,
    node_id: str | None = None,
    ttl_s: float | None = None,
) -> tuple[ApiToken, str]:
    """Issue an API token. Returns its record and its secret, which cannot be read again."""
    values = {"role": str(role), "name": name, "project_id": project_id, "node_id": node_id}
    ends = None if ttl_s is None else clock.now() + ttl_s
    return _add(conn, act, "admin.token.issued", {**values, "expires_at": ends})


def issue_own(
    conn: sa.Connection,
    act: Act,
    *,
    parent_id: str | None,
    owner: str,
    until: float | None,
    role: Role,
    name: str,
    project_id: str | None,
    ttl_s: float,
) -> tuple[ApiToken, str]:
    """Issue a token that a person makes for themselves, as `issue` does. It ends with its parent.

    owner: as in the record. until: the end of what the caller has authenticated with.
    """
    if project_id is not None:
        rows.get(conn, Project, project_id)
    # Of several requests at once, each counts those before it.
    locks.take_turn(conn, f"tokens {owner}")
    now = clock.read(conn)
    ends = now + ttl_s
    _require_room(conn, owner, now)
    values = {
        "role": str(role),
        "name": name,
        "project_id": project_id,
        "parent_id": parent_id,
        "expires_at": ends if until is None else min(ends, until),
    }
    return _add(conn, act, "token.issued", values, owner=owner)


def _require_room(conn: sa.Connection, owner: str, now: float) -> None:
    table = api_tokens.c
    recent = sa.select(table.id).where(table.owner == owner, table.created_at > now - MOST_WITHIN_S)
    ids = {*conn.execute(recent.limit(MOST)).scalars()}
    ids |= {token.id for token in _every_valid(conn, table.owner == owner)}
    if len(ids) >= MOST:
        raise Problem(
            "too_many_tokens",
            expected=f"fewer than {MOST} tokens of your own that are valid"
            " or less than an hour old",
            found=f"{len(ids)}",
            remedy="revoke one with `gpuaas token own revoke`; it counts until it is an hour old",
        )


def _add(
    conn: sa.Connection, act: Act, action: str, values: dict[str, Any], owner: str | None = None
) -> tuple[ApiToken, str]:
    secret = f"gpuaas_{secrets.token_urlsafe(32)}"
    made = {"id": rows.new_id(), "hash": digest(secret), "issued_by": act.actor, "owner": owner}
    record = rows.add(conn, ApiToken, {**made, **values})
    detail = {name: getattr(record, name) for name in values}
    project_id = (record.project_id or "") if owner else ""
    journal.audit(conn, act, action, "token", record.id, detail=detail, project_id=project_id)
    return _without_hash(record), secret


def authenticate(conn: sa.Connection, secret: str) -> ApiToken | None:
    """Token of a secret; None when it is unknown, expired or revoked."""
    row = conn.execute(_VALID, {"given": digest(secret)}).mappings().first()
    return None if row is None else _without_hash(ApiToken(**row))


def valid_one(conn: sa.Connection, which: sa.ColumnElement[bool]) -> ApiToken | None:
    """The token of a condition; None when it is unknown, or it or a token before it has ended."""
    return next(iter(_every_valid(conn, which)), None)


def owner(conn: sa.Connection, id: str, project_id: str) -> str:
    """The owner of a valid token that opens the project; "" for any other. Reads only what the
    gateway's role may read.
    """
    table = api_tokens.c
    opens = sa.or_(table.role == Role.PLATFORM_ADMIN.value, table.project_id == project_id)
    owner = sa.func.coalesce(table.owner, table.id)
    return conn.execute(_valid(sa.and_(table.id == id, opens), owner)).scalar() or ""


def revoke(conn: sa.Connection, id: str, act: Act) -> None:
    """Revoke an API token. A second time changes nothing, because the first time is evidence."""
    if not _revoke(conn, id, act, "admin.token.revoked"):
        rows.get(conn, ApiToken, id)


def revoke_own(conn: sa.Connection, id: str, act: Act, *, holder: str) -> None:
    """Revoke a token of a holder (`of_holder`). To it, other tokens do not exist."""
    if conn.execute(_of_holder(holder).where(api_tokens.c.id == id)).first() is None:
        raise not_found("token", id)
    _revoke(conn, id, act, "token.revoked")


def persons(conn: sa.Connection) -> set[str]:
    """The people of the provider who have made tokens that are still valid."""
    table = api_tokens.c
    query = sa.select(table.issued_by).where(
        table.owner.is_not(None), table.parent_id.is_(None), *_open(api_tokens)
    )
    return set(conn.execute(query).scalars())


def end_person(conn: sa.Connection, actor: str, act: Act) -> int:
    """Revoke the tokens that a person of the provider has made; returns their number.

    Also those of another role: the person may have been in the group of admins meanwhile.
    """
    query = sa.select(api_tokens.c.id).where(
        api_tokens.c.issued_by.in_(roles_of(actor)),
        api_tokens.c.owner.is_not(None),
        api_tokens.c.parent_id.is_(None),
    )
    revoked = [
        _revoke(conn, id, act, "admin.token.revoked") for id in conn.execute(query).scalars().all()
    ]
    return sum(revoked)


def end_lost(conn: sa.Connection, owner: str, projects: Collection[str], act: Act) -> None:
    """Revoke the tokens that a person of the provider has made, but those for these projects."""
    table = api_tokens.c
    lost = sa.or_(table.role == Role.PLATFORM_ADMIN.value, table.project_id.not_in(projects))
    which = (table.owner == owner, table.parent_id.is_(None), lost, *_open(api_tokens))
    query = sa.select(table.id).where(*which)
    for id in conn.execute(query).scalars().all():
        _revoke(conn, id, act, "token.revoked")


def _revoke(conn: sa.Connection, id: str, act: Act, action: str) -> bool:
    valid = sa.update(api_tokens).where(api_tokens.c.id == id, api_tokens.c.revoked_at.is_(None))
    revoked = bool(conn.execute(valid.values(revoked_at=clock.now())).rowcount)
    if revoked:
        journal.audit(conn, act, action, "token", id)
    return revoked


def every(
    conn: sa.Connection, page: Page | None = None, *, project_id: str | None = None
) -> list[ApiToken]:
    """All tokens, or those of a project, newest first, without their hashes."""
    query = rows.where(sa.select(api_tokens), api_tokens, project_id=project_id)
    query = part(query, ORDER, page)
    return [_without_hash(record) for record in rows.every(conn, query, ApiToken)]


def of_holder(conn: sa.Connection, page: Page | None = None, *, holder: str) -> list[ApiToken]:
    """A token with all that were made from it, or all of a person of the provider, newest first."""
    query = part(_of_holder(holder), ORDER, page)
    return [_without_hash(record) for record in rows.every(conn, query, ApiToken)]


def _of_holder(holder: str) -> sa.Select[Any]:
    table = api_tokens.c
    first = sa.or_(table.id == holder, sa.and_(table.owner == holder, table.parent_id.is_(None)))
    tree = sa.select(table.id).where(first).cte("tree", recursive=True)
    tree = tree.union(sa.select(table.id).join(tree, table.parent_id == tree.c.id))
    return sa.select(api_tokens).where(table.id.in_(sa.select(tree.c.id)))


def issue_enrolment(
    conn: sa.Connection, node_id: str, act: Act, *, ttl_s: float = ENROLMENT_MAX_S
) -> tuple[EnrolmentToken, str]:
    """Issue a single-use enrolment token for a host. Unused older tokens of the node expire."""
    table = enrolment_tokens.c
    older = (table.node_id == node_id, table.used_at.is_(None), table.ticket.is_(None))
    conn.execute(sa.update(enrolment_tokens).where(*older).values(expires_at=clock.now()))
    record, secret = _add_enrolment(conn, "enrol", node_id, min(ttl_s, ENROLMENT_MAX_S))
    journal.audit(conn, act, "admin.node.enrollment_token.issued", "node", node_id)
    return record, secret


def issue_ticket(
    conn: sa.Connection, node_id: str, system_id: str, addresses: Sequence[str], act: Act
) -> str:
    """Issue a ticket by which a machine of MAAS fetches its enrolment token once.

    Older tickets stay: a deployment without an answer may have sent them to the machine.
    """
    ticket = {"system_id": system_id, "addresses": list(addresses)}
    _, secret = _add_enrolment(conn, "ticket", node_id, TICKET_S, ticket=ticket)
    journal.audit(conn, act, "node.enrolment_ticket.issued", "node", node_id, detail=ticket)
    return secret


def _add_enrolment(
    conn: sa.Connection, name: str, node_id: str, seconds: float, **values: Any
) -> tuple[EnrolmentToken, str]:
    secret = f"{name}_{secrets.token_urlsafe(32)}"
    fresh = {"id": rows.new_id(), "hash": digest(secret), "node_id": node_id}
    ends = {"expires_at": clock.now() + seconds}
    record = rows.add(conn, EnrolmentToken, {**fresh, **ends, **values})
    return _without_hash(record), secret


def require_ticket(conn: sa.Connection, node_id: str, secret: str, *, address: str) -> None:
    """Problem `token_invalid` unless the ticket can be redeemed from this address."""
    query = sa.select(enrolment_tokens).where(*_open_tickets(node_id))
    _require_ticket(rows.every(conn, query, EnrolmentToken), node_id, secret, address)


def _require_ticket(
    tickets: Sequence[EnrolmentToken], node_id: str, secret: str, address: str
) -> None:
    for ticket in tickets:
        if ticket.hash == digest(secret) and address in (ticket.ticket or {})["addresses"]:
            return
    raise _invalid_enrolment(node_id)


def redeem_ticket(conn: sa.Connection, node_id: str, secret: str, *, address: str) -> None:
    """Use up a ticket, and all others of the node. Of two simultaneous uses one succeeds."""
    update = sa.update(enrolment_tokens).where(*_open_tickets(node_id))
    values = {"used_at": clock.now(), "used_by": {"address": address}}
    used = conn.execute(update.values(values).returning(enrolment_tokens)).mappings()
    # A refusal takes the update back.
    _require_ticket([EnrolmentToken(**row) for row in used], node_id, secret, address)


def end_tickets(conn: sa.Connection, node_id: str) -> None:
    """Expire the tickets of a node whose deployment has ended."""
    unused = sa.update(enrolment_tokens).where(*_open_tickets(node_id))
    conn.execute(unused.values(expires_at=clock.now()))


def redeem_enrolment(
    conn: sa.Connection, node_id: str, secret: str, *, used_by: Mapping[str, Any]
) -> EnrolmentToken:
    """Use up an enrolment token. Of two simultaneous uses a single use succeeds.

    A refusal does not reveal the reason.
    """
    table = enrolment_tokens
    update = (
        sa.update(table)
        .where(*_usable(node_id, secret))
        .values(used_at=clock.now(), used_by=dict(used_by))
        .returning(table)
    )
    row = conn.execute(update).mappings().first()
    if row is None:
        raise _invalid_enrolment(node_id)
    return _without_hash(EnrolmentToken(**row))


def require_enrolment(conn: sa.Connection, node_id: str, secret: str) -> None:
    """Problem `token_invalid` unless the enrolment token can be redeemed."""
    query = sa.select(enrolment_tokens.c.id).where(*_usable(node_id, secret))
    if conn.execute(query).first() is None:
        raise _invalid_enrolment(node_id)


def _usable(node_id: str, secret: str) -> tuple[sa.ColumnElement[bool], ...]:
    columns = enrolment_tokens.c
    return (columns.hash == digest(secret), columns.ticket.is_(None), *_unused(node_id))


def _open_tickets(node_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (enrolment_tokens.c.ticket.is_not(None), *_unused(node_id))


def _unused(node_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    columns = enrolment_tokens.c
    due = columns.expires_at > clock.now()
    return (columns.node_id == node_id, columns.used_at.is_(None), due)


def _invalid_enrolment(node_id: str) -> Problem:
    return Problem(
        "token_invalid",
        401,
        expected="an unused enrolment token of this node, at most 15 minutes old",
        found="a token that is unknown, used, expired or of another node",
        remedy=f"run the script that `gpuaas nodes userdata {node_id}` prints now",
    )


def end_enrolments(conn: sa.Connection) -> None:
    """Expire all unused enrolment tokens."""
    unused = sa.update(enrolment_tokens).where(enrolment_tokens.c.used_at.is_(None))
    conn.execute(unused.values(expires_at=clock.now()))


def valid(
    conn: sa.Connection, *, role: Role | None = None, ids: Sequence[str] | None = None
) -> list[ApiToken]:
    """Valid API tokens without their hashes, oldest first; of a role, or among these."""
    which: sa.ColumnElement[bool] = sa.true() if ids is None else api_tokens.c.id.in_(ids)
    if role is not None:
        which = sa.and_(which, api_tokens.c.role == role.value)
    return _every_valid(conn, which)


def _every_valid(conn: sa.Connection, which: sa.ColumnElement[bool]) -> list[ApiToken]:
    query = _valid(which).order_by(api_tokens.c.created_at, api_tokens.c.id)
    return [_without_hash(token) for token in rows.every(conn, query, ApiToken)]


def record_certificate(
    conn: sa.Connection,
    node_id: str,
    act: Act,
    *,
    serial: str,
    public_key: str,
    certificate: str,
    principals: Sequence[str],
    valid_until: float,
) -> None:
    """Record a host certificate that the SSH CA has signed."""
    rows.add(
        conn,
        NodeCertificate,
        {
            "id": rows.new_id(),
            "node_id": node_id,
            "serial": serial,
            "public_key": public_key,
            "certificate": certificate,
            "principals": list(principals),
            "valid_until": valid_until,
        },
    )
    detail = {"serial": serial}
    journal.audit(conn, act, "node.certificate.enrolled", "node", node_id, detail=detail)


def check_host_key(conn: sa.Connection, node_id: str, public_key: str) -> None:
    """Refuse a host key that is revoked or belongs to another node.

    A host does not prove that it has the private key. It could name the key of its neighbour, and
    replace it by another key at the next enrolment, which would revoke the neighbour's key.
    """
    # Two hosts that enrol at once would both get a certificate for it.
    locks.take_turn(conn, f"host key {public_key}")
    query = sa.select(node_certificates).where(node_certificates.c.public_key == public_key)
    for certificate in rows.every(conn, query, NodeCertificate):
        if certificate.revoked_at is not None or certificate.node_id != node_id:
            raise Problem(
                "host_key_not_accepted",
                expected="a host key that no other node has and that was not replaced before",
                found="one that is revoked" if certificate.revoked_at else "one of another node",
                remedy="delete /etc/ssh/ssh_host_ed25519_key and its .pub, then enrol again:"
                " the enrolment script makes a new key",
            )


def replace_certificates(conn: sa.Connection, node_id: str, public_key: str, act: Act) -> None:
    """Revoke the node's certificates of any other host key.

    public_key: the host key that stays, or "" for none.
    """
    table = node_certificates
    update = (
        sa.update(table)
        .where(
            table.c.node_id == node_id,
            table.c.public_key != public_key,
            table.c.revoked_at.is_(None),
        )
        .values(revoked_at=clock.now())
        .returning(table.c.serial)
    )
    serials = sorted(conn.execute(update).scalars())
    if serials:
        detail = {"serials": serials}
        journal.audit(conn, act, "node.certificate.revoked", "node", node_id, detail=detail)


def known_host_key(conn: sa.Connection, node_id: str, public_key: str) -> bool:
    """Whether the node had a certificate of this host key."""
    table = node_certificates
    query = sa.select(table.c.id).where(
        table.c.node_id == node_id, table.c.public_key == public_key
    )
    return conn.execute(query.limit(1)).first() is not None


def revoked_host_keys(conn: sa.Connection, node_id: str | None = None) -> list[str]:
    """Revoked public host keys of all nodes, or of a single node."""
    query = rows.where(
        sa.select(node_certificates.c.public_key), node_certificates, node_id=node_id
    ).where(node_certificates.c.revoked_at.is_not(None))
    return sorted(set(conn.execute(query).scalars()))


def certificates(conn: sa.Connection, node_id: str) -> list[NodeCertificate]:
    """Certificates of a node, newest first."""
    query = sa.select(node_certificates).where(node_certificates.c.node_id == node_id)
    return rows.every(conn, query.order_by(node_certificates.c.created_at.desc()), NodeCertificate)


def digest(secret: str) -> str:
    """The stored form of a secret."""
    # A secret of 256 random bits cannot be guessed, so it needs neither a salt nor a slow hash.
    return hashlib.sha256(secret.encode()).hexdigest()


def _without_hash(token: T) -> T:
    return replace(token, hash="")
