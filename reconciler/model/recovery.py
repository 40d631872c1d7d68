"""Recovery decisions: forced ends of allocations, the next move of a case, the policy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.model.errors import Problem
from reconciler.model.states import (
    ANSWERING_NODES,
    AllocationState,
    CapacityShape,
    Described,
    HealthState,
    NodeState,
    RecoveryState,
)

# Remedy of a task of any kind whose run has no known end.
UNKNOWN_EFFECT = (
    "the effect on the host is unknown, so nothing is freed: a blocked slot needs"
    " `gpuaas recover ALLOCATION --reason WHY`, a machine that is not clean"
    " `gpuaas nodes clean-machine NODE`; `gpuaas nodes discover NODE` and"
    " `gpuaas nodes parity NODE` examine the host"
)
HOUR_S = 3600.0
_DRAINED = (NodeState.DRAINING, NodeState.MAINTENANCE)
# Remedy before a forced clean-up on an unhealthy node, by node state. The default is to drain it.
_FIRST: dict[str, str] = {
    NodeState.ENROLLING: "have its host enrol first (`gpuaas nodes userdata`)",
    NodeState.BOOTSTRAPPING: "end its bootstrap first (`gpuaas nodes bootstrap`); one that cannot"
    " be prepared goes into maintenance by itself after two hours, where this is possible too",
    NodeState.RETIRED: "nothing to do: no slot of a retired node comes back",
}
_HELD = "the host still holds something of it"
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


@dataclass(frozen=True)
class Policy:
    """Limits of automatic recovery at a site; off by default, except for tenants' failures.

    per_node, per_hour: recoveries that may start within an hour, per node and on the whole site.
    The limits let a person see a cause that blocks slot after slot before it has wiped a fleet.
    remove_leftovers: recover also when the host still has traces of the failed machine.
    tenant_failures: recover launches that their tenants made fail, leftovers included, and also
    while the policy is off. Such a clean-up is that of a release, which needs no person either.
    Each project's quota of failures limits them, so they do not count here.
    """

    enabled: bool = False
    per_node: int = 1
    per_hour: int = 4
    remove_leftovers: bool = False
    tenant_failures: bool = True


class Move(Described):
    """Next step for the blocked slots of an allocation."""

    WAIT = "wait", "Nothing now; it is looked at again."
    LOOK = "look", "Have the host say what is left of the allocation."
    CLEAN = "clean", "End the allocation and clean its slots: remove, wipe, verify."
    FINISH = "finish", "Every slot is proven clean: the case is over."
    STOP = "stop", "Leave it to a person, and say why."


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a recovery case, from which its next move is decided.

    look_open: the verification task on the host has not ended. absent: the host's report in that
    task, None without a report. cleaning: a slot of the case is being wiped. stuck: why a slot has
    not come back, "" when all have. resold: another allocation has a slot of the case by now, so
    what the host holds may be that one's machine.
    """

    state: RecoveryState
    remove_leftovers: bool = False
    confirm: bool = False
    look_open: bool = False
    absent: bool | None = None
    cleaning: bool = False
    stuck: str = ""
    resold: bool = False


def next_move(seen: Progress) -> tuple[Move, str]:
    """Next move of an open case, with the reason."""
    if seen.state == RecoveryState.OPENED:
        return Move.LOOK, "the host is asked what is left of it"
    if seen.state == RecoveryState.VERIFYING:
        return _answered(seen) or _judge_leftovers(seen)
    if seen.state == RecoveryState.CONFIRMING:
        return _answered(seen) or _judge_rest(seen)
    if seen.cleaning:
        return Move.WAIT, "its slots are being wiped"
    if seen.confirm:
        return Move.LOOK, "the host is asked again after the clean-up"
    return _judge_slots(seen)


def _answered(seen: Progress) -> tuple[Move, str] | None:
    """Move while the host's report is outstanding or missing; None when the host has reported."""
    if seen.look_open:
        return Move.WAIT, "the host has not answered"
    # Unknown never frees a slot.
    return (Move.STOP, "the host did not say what is left of it") if seen.absent is None else None


def _judge_leftovers(seen: Progress) -> tuple[Move, str]:
    if seen.absent:
        return Move.CLEAN, "nothing of it is left on the host"
    if seen.remove_leftovers:
        return Move.CLEAN, "what is left of it on the host is removed"
    return Move.STOP, _HELD


def _judge_rest(seen: Progress) -> tuple[Move, str]:
    if seen.absent or seen.resold or seen.stuck:
        return _judge_slots(seen)
    return Move.STOP, _HELD


def _judge_slots(seen: Progress) -> tuple[Move, str]:
    if seen.stuck:
        return Move.STOP, f"it did not come back: {seen.stuck}"
    return Move.FINISH, "every slot is proven clean"


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """An allocation with blocked slots, as the policy sees it. Times are those of the database.

    kept: why a person keeps the slots blocked, "" without such a hold. case: the state of its open
    recovery case, "" without a case. tried: the policy has opened a case for it before. busy: a
    task of the allocation is open. reason: why its slots are blocked. node_begun, site_begun: cases
    that the policy opened within the last hour. by_tenant: it is among the `tenant_failures`.
    """

    reason: str
    kept: str = ""
    case: str = ""
    tried: bool = False
    busy: bool = False
    node_begun: int = 0
    site_begun: int = 0
    by_tenant: bool = False


def policy_move(policy: Policy, seen: Blocked) -> tuple[Move, str]:
    """Whether the policy opens a case. It tries each allocation once; slots that are blocked again
    are left to people.
    """
    if seen.kept:
        return Move.WAIT, f"kept for inspection: {seen.kept}"
    if seen.case:
        return Move.WAIT, f"its recovery case is {seen.case}"
    if seen.tried:
        return Move.STOP, f"it did not come back: {seen.reason}"
    if seen.busy:
        return Move.WAIT, "a task of the allocation has not ended"
    for begun, limit, place in (
        (seen.node_begun, policy.per_node, "node"),
        (seen.site_begun, policy.per_hour, "site"),
    ):
        if begun >= limit and not seen.by_tenant:
            return Move.WAIT, f"{begun} begun on the {place} in an hour"
    return Move.LOOK, "slots are blocked"
