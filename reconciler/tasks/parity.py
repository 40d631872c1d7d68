"""node.parity: the proof that the host is what its mode says; a slice host's opens its slots' gate.

A bare-metal node is asked whether slice services are absent. That is worth knowing and opens
nothing: evidence for a slot is a slice host's only.
"""

from __future__ import annotations

from typing import Any

from reconciler.domain import hardware
from reconciler.domain.states import NodeMode
from reconciler.store import discoveries, slots
from reconciler.tasks.handler import Handler, Work


def variables(work: Work) -> dict[str, Any]:
    node_id, asked = work.task["node_id"], NodeMode(work.node["mode"]).purpose
    tags = hardware.maas_tags(work.node["maas_tags"])
    if asked != "slice":
        return {"slice_slots": [], "slice_intent": asked, **tags}
    latest = discoveries.latest(work.conn, node_id)
    topology: dict[str, Any] = {"source": "reconciler", "completed": latest is not None}
    summary = latest["document"]["candidate_summary"] if latest else {}
    topology["blockers"] = summary.get("blockers", [])
    return {
        "slice_slots": slots.bundles(work.conn, node_id),
        "slice_intent": asked,
        "slice_api_topology": topology,
        **tags,
    }


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    report, node_id = evidence["parity"], work.task["node_id"]
    discoveries.record_parity(
        work.conn,
        node_id,
        report,
        work.act.because("parity measured"),
        task_id=work.task["id"],
        observed_at=work.task["started_at"],
    )
    result = {"failures": report["failures"], "warnings": report["warnings"]}
    if report["failures"] or report.get("intent", "slice") != "slice":
        return result
    gate = slots.open_gate(work.conn, node_id, work.act.because("parity passed", result))
    return {**result, **gate}


HANDLER = Handler("parity", variables, succeed)
