"""slice.absence_verify: what is left of an allocation on its host, measured."""

from __future__ import annotations

from typing import Any

from reconciler.store import allocations, discoveries
from reconciler.tasks.handler import Handler, Work


def variables(work: Work) -> dict[str, Any]:
    allocation_id = work.task["allocation_id"]
    return {
        "slice_allocation": {"id": allocation_id},
        "slice_slots": allocations.bundles(work.conn, allocation_id),
    }


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    discoveries.record_absence(
        work.conn,
        work.task["allocation_id"],
        evidence["absence"],
        work.act.because("absence measured"),
        task_id=work.task["id"],
        observed_at=work.task["started_at"],
    )
    return evidence


HANDLER = Handler("verify_absent", variables, succeed)
