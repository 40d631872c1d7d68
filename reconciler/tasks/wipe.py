"""slice.wipe: cleanup runs the release playbook on slots that no tenant uses any more."""

from __future__ import annotations

from typing import Any

from reconciler.domain.errors import Problem
from reconciler.store import claims, order, outcomes
from reconciler.tasks.handler import Failure, Handler, Work


def variables(work: Work) -> dict[str, Any]:
    return {
        "slice_allocation": {"id": work.parameters["allocation"]["id"]},
        "slice_slots": work.parameters["slots"],
        # Nobody is inside whom one would have to wait for.
        "slice_shutdown_deadline": 0,
    }


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    act = work.act.because("wiped and verified")
    proofs = {slot_id: evidence["proofs"].get(slot_id) for slot_id in _ours(work)}
    missing = sorted(slot_id for slot_id, proof in proofs.items() if proof is None)
    if missing:
        raise Problem(
            "proof_missing",
            expected="a wipe proof of every slot of the task",
            found=f"none of {', '.join(missing)}",
            remedy="read the task's output; repair the slots again",
        )
    measured = work.task["allocation_id"] or ""
    outcomes.wiped_slots(work.conn, proofs, evidence["absence"], act, measured=measured)
    return evidence


def _ours(work: Work) -> list[str]:
    """The slots that this task was given and that nobody fenced off since.

    What the host answers is never the list: it could name slots of others.
    """
    order.hold_node(work.conn, work.task["node_id"])
    given = {slot["slot_id"]: slot["fence"] for slot in work.parameters["slots"]}
    return claims.unfenced(work.conn, given)


def fail(work: Work, failure: Failure) -> None:
    outcomes.wipe_slots_failed(
        work.conn,
        _ours(work),
        work.act.because(failure.error["code"], failure.evidence),
        step=failure.step,
        error=failure.error,
    )


HANDLER = Handler(
    "release_slice", variables, succeed, fail, deadlines=("shutdown",), wiped="slice_slots"
)
