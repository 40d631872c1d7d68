"""Recovery of blocked slots: the next move of a case, and the policy that opens cases. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.model.states import Described, RecoveryState

HOUR_S = 3600.0


@dataclass(frozen=True)
class Policy:
    """Limits of automatic recovery at a site; off by default, except for tenants' failures.

    per_node, per_hour: recoveries that may start within an hour, per node and on the whole site.
    The limits let a person see a cause that blocks slot after slot before it has wiped a fleet.
    remove_leftovers: recover also when the host still has traces of the failed machine.
    tenant_failures: recover what a launch left that failed by its tenant's own doing, leftovers
    included, and also while the policy is off. Its clean-up is that of a release, which needs no
    person either. The limits do not count it: each project's quota of failures does.
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
    not come back, "" when all have.
    """

    state: RecoveryState
    remove_leftovers: bool = False
    confirm: bool = False
    look_open: bool = False
    absent: bool | None = None
    cleaning: bool = False
    stuck: str = ""


def next_move(seen: Progress) -> tuple[Move, str]:
    """Next move of an open case, with the reason."""
    if seen.state == RecoveryState.OPENED:
        return Move.LOOK, "the host is asked what is left of it"
    if seen.state == RecoveryState.VERIFYING:
        return _answered(seen) or _judge_leftovers(seen)
    if seen.state == RecoveryState.CONFIRMING:
        return _answered(seen) or _judge_slots(seen)
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
    return Move.STOP, "the host still holds something of it"


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
