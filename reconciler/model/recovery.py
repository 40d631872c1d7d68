"""Recovery of blocked slots: the next move of a case, and when the policy opens one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.model.states import Described, RecoveryState

HOUR_S = 3600.0
_BUSY = "a task of the allocation has not ended"


@dataclass(frozen=True)
class Policy:
    """What a site lets happen by itself; off until it says so.

    per_node, per_hour: recoveries begun within an hour, on one node and on the whole site. A cause
    that blocks slot after slot is then met by a person before it has wiped a fleet.
    remove_leftovers: also where the host still holds something of the failed machine.
    """

    enabled: bool = False
    per_node: int = 1
    per_hour: int = 4
    remove_leftovers: bool = False


class Move(Described):
    """What is done next about the blocked slots of one allocation."""

    WAIT = "wait", "Nothing now; it is looked at again."
    LOOK = "look", "Have the host say what is left of the allocation."
    CLEAN = "clean", "End the allocation and clean its slots: remove, wipe, verify."
    FINISH = "finish", "Every slot is proven clean: the case is over."
    STOP = "stop", "Leave it to a person, and say why."


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a recovery case is judged by.

    look_open: the task that asks the host has not ended. absent: what the host reported in that
    task; None: nothing. cleaning: a slot of the case is being wiped. stuck: why a slot has not come
    back, "" when all have.
    """

    state: RecoveryState
    remove_leftovers: bool = False
    confirm: bool = False
    look_open: bool = False
    absent: bool | None = None
    cleaning: bool = False
    stuck: str = ""


def next_move(seen: Progress) -> tuple[Move, str]:
    """The next move of an open case, and why."""
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
    """None when the host has answered."""
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
    """One allocation with blocked slots, as the policy sees it. Times are those of the database.

    kept: why a person keeps them blocked, "" when nobody does. case: the state of its open recovery
    case, "" when there is none. tried: the policy has opened a case of it before. busy: a task of
    the allocation is open. reason: why its slots are blocked. node_begun, site_begun: cases that
    the policy opened within the last hour.
    """

    reason: str
    kept: str = ""
    case: str = ""
    tried: bool = False
    busy: bool = False
    node_begun: int = 0
    site_begun: int = 0


def policy_move(policy: Policy, seen: Blocked) -> tuple[Move, str]:
    """Whether the policy opens a case. Each allocation is tried once: what comes back blocked stays
    with people.
    """
    for holds, move, why in (
        (seen.kept, Move.WAIT, f"kept for inspection: {seen.kept}"),
        (seen.case, Move.WAIT, f"its recovery case is {seen.case}"),
        (seen.tried, Move.STOP, f"it did not come back: {seen.reason}"),
        (seen.busy, Move.WAIT, _BUSY),
        (
            seen.node_begun >= policy.per_node,
            Move.WAIT,
            f"{seen.node_begun} begun on the node in an hour",
        ),
        (
            seen.site_begun >= policy.per_hour,
            Move.WAIT,
            f"{seen.site_begun} begun on the site in an hour",
        ),
    ):
        if holds:
            return move, why
    return Move.LOOK, "slots are blocked"
