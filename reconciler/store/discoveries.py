"""What hosts reported: candidate topology, parity, absence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.identity import install_id
from reconciler.domain.states import NodeMode
from reconciler.store import clock, contact, gates, outbox, rows
from reconciler.store.rows import Record
from reconciler.store.sightings import latest, latest_parity
from reconciler.store.tables import absences, allocations, baselines, discoveries, nodes, parities

# Found through this noun as well; the gate, which every discovery is judged by, reads them too.
__all__ = ["latest", "latest_parity"]


def record(
    conn: sa.Connection,
    node_id: str,
    document: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Record:
    """A discovery document; what it speaks against goes off sale.

    observed_at: when its run was started, by the database's clock.
    """
    node = rows.get(conn, nodes, node_id, "node")
    # It is what a slice host would need; of a bare-metal machine nobody asks it.
    reboot = bool(document.get("reboot_required")) and node["mode"] != NodeMode.BAREMETAL
    identity = document.get("identity") or {}
    contact.observed(
        conn, node_id, act, identity=identity, reboot_required=reboot, began=observed_at
    )
    values = _sighting(node_id, document, task_id, observed_at)
    row = rows.add(conn, discoveries, {**values, "reboot_required": reboot})
    gates.review(conn, node_id, act.because(act.reason, {"discovery_id": row["id"]}))
    summary = dict(document.get("candidate_summary") or {})
    _tell(conn, "node.discovered", node_id, summary, act)
    return row


def record_parity(
    conn: sa.Connection,
    node_id: str,
    report: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Record:
    """A parity report; failures close the gate until a later one passes."""
    identity = report.get("identity") or {}
    contact.observed(conn, node_id, act, identity=identity, began=observed_at)
    failures = int(report.get("failures", 1))
    row = rows.add(
        conn,
        parities,
        {
            **_sighting(node_id, report, task_id, observed_at),
            "intent": str(report.get("intent") or "slice"),
            "failures": failures,
            "warnings": int(report.get("warnings", 0)),
        },
    )
    if failures and row["intent"] == "slice":
        why = act.because(f"gate closed: {failures} parity checks fail", {"parity_id": row["id"]})
        contact.close_gate(conn, node_id, why)
    counts = {"failures": failures, "warnings": row["warnings"]}
    _tell(conn, "node.parity", node_id, counts, act)
    return row


def record_absence(
    conn: sa.Connection,
    allocation_id: str,
    absence: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Record:
    """Whether anything of an allocation is left on its host."""
    allocation = rows.get(conn, allocations, allocation_id, "allocation")
    node_id = str(allocation["node_id"])
    row = rows.add(
        conn,
        absences,
        {
            **_sighting(node_id, absence, task_id, observed_at),
            "allocation_id": allocation_id,
            "absent": absence.get("absent") is True,
        },
    )
    _tell(conn, "allocation.absence", node_id, {"absent": row["absent"]}, act)
    return row


def latest_absence(conn: sa.Connection, allocation_id: str) -> Record | None:
    """The newest absence report of an allocation."""
    query = sa.select(absences).where(absences.c.allocation_id == allocation_id)
    return rows.first(conn, query.order_by(absences.c.id.desc()))


def record_baseline(
    conn: sa.Connection,
    node_id: str,
    allocation_id: str,
    document: Mapping[str, Any],
    *,
    task_id: str,
) -> None:
    """What a machine was like before its tenant, once: a later look could show the tenant's."""
    if document and not baseline(conn, allocation_id):
        values = _sighting(node_id, document, task_id, None)
        rows.add(conn, baselines, {**values, "allocation_id": allocation_id})


def baseline(conn: sa.Connection, allocation_id: str) -> dict[str, Any]:
    """What was recorded before the tenant; {} when nothing was."""
    query = sa.select(baselines.c.document).where(baselines.c.allocation_id == allocation_id)
    return dict(conn.execute(query.order_by(baselines.c.id).limit(1)).scalar() or {})


def _sighting(
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


def _tell(
    conn: sa.Connection, topic: str, node_id: str, payload: Mapping[str, Any], act: Act
) -> None:
    outbox.add(
        conn,
        topic,
        "node",
        node_id,
        payload=payload,
        node_id=node_id,
        correlation_id=act.correlation_id,
    )
