"""slice.vm_release: a VM ends, its disk is wiped, and the slot comes back only with the proof."""

from __future__ import annotations

from typing import Any

from reconciler.store import allocations, outcomes
from reconciler.tasks.handler import Failure, Handler, Work


def variables(work: Work) -> dict[str, Any]:
    allocation_id = work.task["allocation_id"]
    return {
        "slice_allocation": {"id": allocation_id},
        "slice_slots": allocations.bundles(work.conn, allocation_id),
        "slice_shutdown_deadline": work.profile["deadlines"]["shutdown"],
    }


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    outcomes.release_succeeded(
        work.conn,
        work.task["allocation_id"],
        work.act.because("wiped and verified"),
        proofs=evidence["proofs"],
        absence=evidence["absence"],
    )
    return evidence


def fail(work: Work, failure: Failure) -> None:
    outcomes.release_failed(
        work.conn,
        work.task["allocation_id"],
        work.act.because(failure.error["code"], failure.evidence),
        step=failure.step,
        error=failure.error,
    )


HANDLER = Handler(
    "release_slice", variables, succeed, fail, deadlines=("shutdown",), wiped="slice_slots"
)
