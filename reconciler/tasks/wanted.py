"""The start of what a tenant waits for, or no start when nobody does any more."""

from __future__ import annotations

from reconciler.domain.errors import Problem
from reconciler.domain.states import AllocationState
from reconciler.store import allocations, outcomes
from reconciler.tasks.handler import Work


def begin(work: Work) -> None:
    """The task's allocation is being provisioned; Problem `canceled` when it has ended."""
    key = work.task["allocation_id"]
    if outcomes.provision_started(work.conn, key, work.act.because("provisioning started")):
        return
    state = allocations.get(work.conn, key)["state"]
    # Begun before: this run goes on where one that never reached its host, or failed, has ended.
    if state != AllocationState.PROVISIONING:
        raise Problem(
            "canceled",
            409,
            expected=f"allocation {key} requested, or being provisioned",
            found=str(state),
            remedy="nothing to do: no run was started",
        )
