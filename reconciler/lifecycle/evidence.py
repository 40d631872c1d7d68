"""Store discovery and parity reports and apply them to the gates of the node's slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.schema import Discovery, Node, Parity
from reconciler.lifecycle import gate, host
from reconciler.model.act import Act
from reconciler.model.states import NodeMode
from reconciler.records import reports


def record_discovery(
    conn: sa.Connection,
    node_id: str,
    document: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Discovery:
    """Store a discovery document. Slots that it blocks go off sale.

    observed_at: when its run started, on the database's clock.
    """
    node = rows.get(conn, Node, node_id)
    # Only a slice host needs the reboot. A bare-metal machine does not.
    reboot = bool(document.get("reboot_required")) and node.mode != NodeMode.BAREMETAL
    identity = document.get("identity") or {}
    host.observed(conn, node_id, act, identity=identity, reboot_required=reboot, began=observed_at)
    values = reports.report_values(node_id, document, task_id, observed_at)
    row = rows.add(conn, Discovery, {**values, "reboot_required": reboot})
    gate.review(conn, node_id, act.because(act.reason, {"discovery_id": row.id}))
    summary = dict(document.get("candidate_summary") or {})
    reports.emit_report(conn, "node.discovered", node_id, summary, act)
    return row


def record_parity(
    conn: sa.Connection,
    node_id: str,
    report: Mapping[str, Any],
    act: Act,
    *,
    task_id: str | None = None,
    observed_at: float | None = None,
) -> Parity:
    """Store a parity report. Failures close the gate until a later report passes."""
    identity = report.get("identity") or {}
    host.observed(conn, node_id, act, identity=identity, began=observed_at)
    failures = int(report.get("failures", 1))
    row = rows.add(
        conn,
        Parity,
        {
            **reports.report_values(node_id, report, task_id, observed_at),
            "intent": str(report.get("intent") or "slice"),
            "failures": failures,
            "warnings": int(report.get("warnings", 0)),
        },
    )
    if failures and row.intent == "slice":
        why = act.because(f"gate closed: {failures} parity checks fail", {"parity_id": row.id})
        gate.close(conn, node_id, why)
    counts = {"failures": failures, "warnings": row.warnings}
    reports.emit_report(conn, "node.parity", node_id, counts, act)
    return row
