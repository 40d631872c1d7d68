"""When an operator may end an allocation by force. Pure: the service and its pages ask alike."""

from __future__ import annotations

from reconciler.model.errors import Problem
from reconciler.model.states import (
    ANSWERING_NODES,
    AllocationState,
    CapacityShape,
    HealthState,
    NodeState,
)

_DRAINED = (NodeState.DRAINING, NodeState.MAINTENANCE)
# Remedy before a forced clean-up on an unhealthy node, by node state. The default is to drain it.
_FIRST: dict[str, str] = {
    NodeState.ENROLLING: "have its host enrol first (`gpuaas nodes userdata`)",
    NodeState.BOOTSTRAPPING: "end its bootstrap first (`gpuaas nodes bootstrap`); one that cannot"
    " be prepared goes into maintenance by itself after two hours, where this is possible too",
    NodeState.RETIRED: "nothing to do: no slot of a retired node comes back",
}
_STUCK = "a failed, unfinished or stuck slice allocation"


def finishing_command(allocation_id: str, shape: str) -> str:
    """Command by which an operator finishes a clean-up that has failed. No recovery is opened for a
    whole machine, and a member must not learn the id of its node.
    """
    if shape == CapacityShape.BAREMETAL:
        return "gpuaas nodes clean-machine NODE"
    return f"gpuaas recover {allocation_id} --reason WHY"


def require_slices(shape: str) -> None:
    """Problem `allocation_baremetal` for a whole machine."""
    if shape == CapacityShape.BAREMETAL:
        raise Problem(
            "allocation_baremetal",
            expected=_STUCK,
            found="a bare-metal allocation",
            remedy="release it; `gpuaas nodes clean-machine` cleans a machine that stays unclean",
        )


def require_stuck(shape: str, state: str, *, releasing: bool) -> None:
    """Raise a Problem where a person must decide, before any task on the host.

    releasing: whether a slot of the allocation is being released.
    """
    require_slices(shape)
    for wrong, code, finding, remedy in (
        (
            state == AllocationState.ACTIVE,
            "allocation_active",
            "an active allocation: its tenant may be using it",
            "look into its runtime first; then release it, or force its release",
        ),
        (
            state == AllocationState.RELEASING and releasing,
            "allocation_releasing",
            "a release that is under way",
            "wait until it has ended",
        ),
    ):
        if wrong:
            raise Problem(code, expected=_STUCK, found=finding, remedy=remedy)


def require_healthy_node(state: str, node_state: str, node_health: str) -> None:
    """Raise a Problem where the slots could not be cleaned. state: that of the allocation."""
    unhealthy = node_health == HealthState.FAILED and node_state not in _DRAINED
    unready = node_state not in ANSWERING_NODES
    for wrong, code, finding, remedy in (
        (
            state == AllocationState.RELEASED,
            "allocation_released",
            "a released allocation",
            "repair its slot, if one is blocked",
        ),
        (
            node_state == NodeState.UNREACHABLE,
            "node_unreachable",
            "a node that does not answer",
            "bring the node back first: what runs on it is unknown",
        ),
        (
            unready or unhealthy,
            "node_unhealthy",
            f"node {node_state}, health {node_health}",
            _FIRST.get(node_state, "drain the node first (`gpuaas nodes drain`)"),
        ),
    ):
        if wrong:
            expected = f"{_STUCK} on a healthy node"
            raise Problem(code, expected=expected, found=finding, remedy=remedy)


def require_silence(state: str, node_state: str, *, unclean: bool) -> None:
    """Refuse a forced release while the host answers, because a normal release is possible then.

    unclean: the allocation is that of a whole machine which is not clean yet. An allocation whose
    release has failed is an exception: it stays blocked until it is clean.
    """
    release_failed = state == AllocationState.RELEASING and unclean
    if node_state != NodeState.UNREACHABLE and not release_failed:
        raise Problem(
            "node_reachable",
            expected="an allocation whose host does not answer",
            found=f"node {node_state}",
            remedy="release it; `gpuaas recover` ends the release of a slice that failed",
        )
