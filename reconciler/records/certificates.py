"""Validity of host certificates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import Node, NodeCertificate, node_certificates, nodes
from reconciler.model.errors import Problem
from reconciler.model.states import NodeState
from reconciler.records.nodes import require_installed


@dataclass(frozen=True)
class TrustedKey:
    """A host key of a node, with start and end of its trust in epoch seconds."""

    node_id: str
    public_key: str
    since: float
    until: float


def ends(conn: sa.Connection, node_ids: Iterable[str]) -> dict[str, float]:
    """Expiry by node: the latest end of its certificates that are not revoked."""
    return ends_where(conn, nodes.c.id.in_(list(node_ids)))


def of_living(conn: sa.Connection) -> dict[str, float]:
    """Like `ends`, for every node that is not retired."""
    return ends_where(conn, nodes.c.state != NodeState.RETIRED)


def ends_where(conn: sa.Connection, which: sa.ColumnElement[bool]) -> dict[str, float]:
    table = node_certificates
    query = (
        sa.select(table.c.node_id, sa.func.max(table.c.valid_until))
        .join(nodes, nodes.c.id == table.c.node_id)
        .where(which, table.c.revoked_at.is_(None), table.c.valid_until.is_not(None))
        .group_by(table.c.node_id)
    )
    return {str(node_id): float(until) for node_id, until in conn.execute(query)}


def accepted(conn: sa.Connection) -> list[TrustedKey]:
    """Host keys that are trusted now, by node."""
    table = node_certificates
    since, until = sa.func.min(table.c.created_at), sa.func.max(table.c.valid_until)
    query = (
        sa.select(table.c.node_id, table.c.public_key, since.label("since"), until.label("until"))
        .join(nodes, nodes.c.id == table.c.node_id)
        .where(nodes.c.state != NodeState.RETIRED, table.c.revoked_at.is_(None))
        .group_by(table.c.node_id, table.c.public_key)
        .having(until > clock.now())
        .order_by(table.c.node_id, since)
    )
    return rows.every(conn, query, TrustedKey)


def host_keys(conn: sa.Connection, node_id: str) -> list[str]:
    """Trusted host keys of a node: type and base64."""
    return [
        " ".join(key.public_key.split()[:2]) for key in accepted(conn) if key.node_id == node_id
    ]


def current(conn: sa.Connection, node_id: str) -> NodeCertificate:
    """The current certificate of a host; Problem when it is missing or has expired."""
    table = node_certificates
    query = sa.select(table).where(table.c.node_id == node_id, table.c.revoked_at.is_(None))
    certificate = rows.first(
        conn, query.order_by(table.c.valid_until.desc(), table.c.created_at.desc()), NodeCertificate
    )
    if certificate is None:
        raise Problem(
            "host_certificate_missing",
            expected="a node whose host has enrolled",
            found="no certificate of its SSH key",
            remedy=_enrol(node_id),
        )
    require_valid(conn, node_id)
    return certificate


def require_valid(conn: sa.Connection, node_id: str) -> None:
    """Problem `host_certificate_expired` when all certificates of the host have expired, and
    `reinstall_required` when they were revoked after a tenant had the machine.

    Any other node without a certificate passes, because SSH refuses it by itself.
    """
    until = ends(conn, [node_id]).get(node_id)
    if cut_off(conn, node_id):
        require_installed(rows.get(conn, Node, node_id))
    if until is not None and until <= clock.read(conn):
        raise expired(node_id, until)


def cut_off(conn: sa.Connection, node_id: str) -> bool:
    """Whether every certificate that the host had is revoked."""
    table = node_certificates
    query = sa.select(sa.func.count(), sa.func.count(table.c.revoked_at))
    every, revoked = conn.execute(query.where(table.c.node_id == node_id)).one()
    return bool(every and every == revoked)


def expired(node_id: str, until: float, message: str = "") -> Problem:
    """Problem for a host with an expired certificate. message: the last message of SSH."""
    return Problem(
        "host_certificate_expired",
        expected="a host whose certificate is valid",
        found=f"one that ended at {clock.iso(until)}{f'; {message}' if message else ''}",
        remedy=_enrol(node_id),
    )


def _enrol(node_id: str) -> str:
    return (
        f"enrol the host again with a new token: `gpuaas nodes userdata {node_id}`, or POST"
        f" /api/v1/admin/nodes/{node_id}/enrollment-token, and run its script on the host as root"
    )
