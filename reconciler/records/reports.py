"""Host reports: discovery, parity, absence, and the host baseline before a tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.schema import (
    Absence,
    Allocation,
    Baseline,
    Discovery,
    Parity,
    absences,
    baselines,
    discoveries,
    nodes,
    parities,
)
from reconciler.model.act import Act
from reconciler.model.states import NodeMode


def latest_discovery(conn: sa.Connection, node_id: str) -> Discovery | None:
    """The node's newest discovery."""
    query = sa.select(discoveries).where(discoveries.c.node_id == node_id)
    return rows.first(conn, query.order_by(discoveries.c.id.desc()), Discovery)


def latest_parity(conn: sa.Connection, node_id: str, intent: str = "slice") -> Parity | None:
    """The node's newest parity report for an intent."""
    query = sa.select(parities).where(parities.c.node_id == node_id, parities.c.intent == intent)
    return rows.first(conn, query.order_by(parities.c.id.desc()), Parity)


def applied_networks(
    conn: sa.Connection,
) -> Iterator[tuple[str, str, Mapping[str, Any] | None]]:
    """Id and profile of each slice host, with the networks of its guests as its newest parity
    report has them; None where it has none.
    """
    newest = (
        sa.select(parities.c.document["networks"])
        .where(parities.c.node_id == nodes.c.id, parities.c.intent == "slice")
        .order_by(parities.c.id.desc())
        .limit(1)
        .correlate(nodes)
    )
    query = sa.select(nodes.c.id, nodes.c.profile, newest.scalar_subquery())
    yield from map(tuple, conn.execute(query.where(nodes.c.mode == NodeMode.SLICE)))


def passed(conn: sa.Connection, node_id: str, boot_id: str) -> bool:
    """Whether a slice host has ever passed parity under this boot."""
    query = sa.select(parities.c.id).where(
        parities.c.node_id == node_id,
        parities.c.intent == "slice",
        parities.c.boot_id == boot_id,
        parities.c.failures == 0,
    )
    return rows.first(conn, query) is not None


def record_absence(
    conn: sa.Connection,
    allocation_id: str,
    absence: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> None:
    """Record a report of the traces of an allocation on its host."""
    node_id = str(rows.get(conn, Allocation, allocation_id).node_id)
    absent = absence.get("absent") is True
    values = report_values(node_id, absence, task_id, observed_at)
    rows.add(conn, Absence, {**values, "allocation_id": allocation_id, "absent": absent})
    emit_report(conn, "allocation.absence", node_id, {"absent": absent}, act)


def latest_absence(conn: sa.Connection, allocation_id: str) -> Absence | None:
    """The newest absence report of an allocation."""
    query = sa.select(absences).where(absences.c.allocation_id == allocation_id)
    return rows.first(conn, query.order_by(absences.c.id.desc()), Absence)


def record_baseline(
    conn: sa.Connection,
    node_id: str,
    allocation_id: str,
    document: Mapping[str, Any],
    *,
    task_id: str,
) -> None:
    """Record a machine's state before its tenant, once: a later report may show tenant changes."""
    if document and not baseline(conn, allocation_id):
        values = report_values(node_id, document, task_id, None)
        rows.add(conn, Baseline, {**values, "allocation_id": allocation_id})


def baseline(conn: sa.Connection, allocation_id: str) -> dict[str, Any]:
    """State of the machine before the allocation; {} when it was not recorded."""
    query = sa.select(baselines.c.document).where(baselines.c.allocation_id == allocation_id)
    return dict(conn.execute(query.order_by(baselines.c.id).limit(1)).scalar() or {})


def install_id(machine_id: str, host_key: str) -> str:
    """Install id, a digest of machine-id and host key; "" while either is unknown."""
    if not machine_id or not host_key:
        return ""
    # Only type and key, because the comment of a public key is free text.
    key = " ".join(host_key.split()[:2])
    return hashlib.sha256(f"{machine_id}\n{key}".encode()).hexdigest()[:32]


def report_values(
    node_id: str, document: Mapping[str, Any], task_id: str | None, observed_at: float | None
) -> dict[str, Any]:
    identity = document.get("identity") or {}
    machine_id, host_key = identity.get("machine_id") or "", identity.get("host_key") or ""
    return {
        "node_id": node_id,
        "task_id": task_id,
        "boot_id": identity.get("boot_id") or "",
        "install_id": install_id(machine_id, host_key),
        "document": dict(document),
        "observed_at": clock.now() if observed_at is None else observed_at,
    }


def emit_report(
    conn: sa.Connection, topic: str, node_id: str, payload: Mapping[str, Any], act: Act
) -> None:
    journal.emit(
        conn,
        topic,
        "node",
        node_id,
        payload=payload,
        node_id=node_id,
        correlation_id=act.correlation_id,
    )
