"""baremetal.release: the tenant goes with every trace, its disks are wiped with proof.

Serves the release that a tenant asks for and the cleaning of what a failure left. Where MAAS
releases machines it is another handler of the same kind, with the same ends in store.baremetal.
"""

from __future__ import annotations

from typing import Any

from reconciler.domain.proof import DEFAULT_POLICY
from reconciler.store import baremetal, discoveries
from reconciler.tasks.handler import Failure, Handler, Work


def variables(work: Work) -> dict[str, Any]:
    allocation_id = work.task["allocation_id"]
    disks, dead = baremetal.claim_of(work.conn, allocation_id)["disks"], _dead(work)
    found: dict[str, Any] = {
        "slice_allocation": work.parameters["allocation"],
        "slice_fence": work.parameters["fence"],
        "slice_disks": [disk for disk in disks if disk["slot_id"] not in dead],
        "slice_baseline": discoveries.baseline(work.conn, allocation_id),
    }
    if dead:
        found["slice_written_off"] = [disk for disk in disks if disk["slot_id"] in dead]
    return found


def _dead(work: Work) -> list[str]:
    dead: list[str] = work.parameters.get("written_off", [])
    return dead


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    baremetal.release_succeeded(
        work.conn,
        work.task["allocation_id"],
        work.act.because("the tenant is gone, its disks are wiped and verified"),
        fence=work.parameters["fence"],
        evidence=evidence,
        written_off=_dead(work),
        policy=work.profile.get("wipe_policy", DEFAULT_POLICY),
        task_id=work.task["id"],
    )
    return evidence


def fail(work: Work, failure: Failure) -> None:
    baremetal.release_failed(
        work.conn,
        work.task["allocation_id"],
        work.act.because(failure.error["code"], failure.evidence),
        fence=work.parameters["fence"],
        step=failure.step,
        error=failure.error,
    )


HANDLER = Handler(
    "release_baremetal", variables, succeed, fail, deadlines=("shutdown",), wiped="slice_disks"
)
