"""Checks before a run starts: allocation not canceled, host under the proven boot id."""

from __future__ import annotations

from reconciler.lifecycle import host, slices
from reconciler.model.errors import Problem
from reconciler.model.states import AllocationState
from reconciler.records import allocations
from reconciler.work.handler import Failure, Work


def begin_provision(work: Work) -> None:
    """Set the task's allocation to provisioning; Problem `canceled` when it has ended."""
    key = work.allocation_id
    if slices.provision_started(work.conn, key, work.act.because("provisioning started")):
        return
    state = allocations.get(work.conn, key).state
    # Already provisioning: this run continues after a run that failed or never reached its host.
    if state != AllocationState.PROVISIONING:
        raise Problem(
            "canceled",
            409,
            expected=f"allocation {key} requested, or being provisioned",
            found=str(state),
            remedy="nothing to do: no run was started",
        )


# Error code of a host that was restarted since its gate was proven.
BOOT_CHANGED = "boot_changed"


def require_proven_boot(work: Work) -> None:
    """Refuse a known change of boot without a run. The host checks the boot id as well."""
    # Tasks queued by versions without this parameter have no proven boot.
    proven, found = work.parameters.get("boot_id", ""), work.node.boot_id
    if not proven or found != proven:
        raise Problem(
            BOOT_CHANGED,
            expected=f"node {work.node.id} under boot {proven}, for which its gate was proven",
            found=f"boot {found or 'unknown'}",
            remedy="discover the node and run its parity, then launch again",
        )


def close_gate_after_reboot(work: Work, failure: Failure) -> None:
    """Close the node's gate when the host reports a restart."""
    if failure.error["code"] == BOOT_CHANGED:
        act = work.act.because(failure.error["found"])
        host.restarted(work.conn, work.node.id, act, since=work.parameters["boot_id"])
