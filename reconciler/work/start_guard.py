"""Checks before a run starts: the work is still wanted, and the host runs under the proven boot."""

from __future__ import annotations

from reconciler.lifecycle import host, slices
from reconciler.model.errors import Problem
from reconciler.model.states import AllocationState
from reconciler.records import allocations
from reconciler.work.handler import Failure, Work


def begin_provision(work: Work) -> None:
    """The task's allocation is being provisioned; Problem `canceled` when it has ended."""
    key = work.allocation_id
    if slices.provision_started(work.conn, key, work.act.because("provisioning started")):
        return
    state = allocations.get(work.conn, key).state
    # Begun before: this run goes on where one that never reached its host, or failed, has ended.
    if state != AllocationState.PROVISIONING:
        raise Problem(
            "canceled",
            409,
            expected=f"allocation {key} requested, or being provisioned",
            found=str(state),
            remedy="nothing to do: no run was started",
        )


# The code with which a host refuses that has been restarted since it was proven.
BOOT_CHANGED = "boot_changed"


def require_proven_boot(work: Work) -> None:
    """The host checks this too; here no run is started for what is known already."""
    # A task from before there was such a parameter has proven nothing.
    proven, found = work.parameters.get("boot_id", ""), work.node.boot_id
    if not proven or found != proven:
        raise Problem(
            BOOT_CHANGED,
            expected=f"node {work.node.id} under boot {proven}, for which its gate was proven",
            found=f"boot {found or 'unknown'}",
            remedy="discover the node and run its parity, then launch again",
        )


def close_gate_after_reboot(work: Work, failure: Failure) -> None:
    """Close the node's gate when the host says that it was restarted."""
    if failure.error["code"] == BOOT_CHANGED:
        act = work.act.because(failure.error["found"])
        host.restarted(work.conn, work.node.id, act, since=work.parameters["boot_id"])
