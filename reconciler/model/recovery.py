"""When blocked slots are recovered without a person, and where a person must decide. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reconciler.model.states import Described

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
    """What the policy does next about the blocked slots of one allocation."""

    WAIT = "wait", "Nothing now; it is looked at again."
    LOOK = "look", "Have the host say what is left of the allocation."
    CLEAN = "clean", "End the allocation and clean its slots: remove, wipe, verify."
    STOP = "stop", "Leave it to a person, and say why."


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One allocation with blocked slots. Times are epoch seconds of the database.

    kept: why a person keeps them blocked, "" when nobody does.

    blocked_since: when the last of its slots was blocked. begun_at: when the policy began with it,
    None when it never did. busy: a task of the allocation is open. absent, observed_at: the last
    report of the host; None: there is none. node_begun, site_begun: recoveries of the last hour.
    """

    blocked_since: float
    reason: str
    kept: str = ""
    begun_at: float | None = None
    busy: bool = False
    absent: bool | None = None
    observed_at: float | None = None
    node_begun: int = 0
    site_begun: int = 0


def next_move(policy: Policy, seen: Seen) -> tuple[Move, str]:
    """The move and why. One allocation is tried once: what comes back blocked stays with people."""
    if seen.kept:
        return Move.WAIT, f"kept for inspection: {seen.kept}"
    begun = seen.begun_at
    if begun is None:
        return _first(policy, seen)
    told = seen.observed_at is not None and seen.observed_at >= begun
    for holds, move, why in (
        (seen.busy, Move.WAIT, _BUSY),
        (seen.blocked_since > begun, Move.STOP, f"it did not come back: {seen.reason}"),
        (not told, Move.STOP, "the host did not say what is left of it"),
        (seen.absent, Move.CLEAN, "nothing of it is left on the host"),
        (policy.remove_leftovers, Move.CLEAN, "what is left of it on the host is removed"),
    ):
        if holds:
            return move, why
    return Move.STOP, "the host still holds something of it"


def _first(policy: Policy, seen: Seen) -> tuple[Move, str]:
    for holds, why in (
        (seen.busy, _BUSY),
        (seen.node_begun >= policy.per_node, f"{seen.node_begun} begun on the node in an hour"),
        (seen.site_begun >= policy.per_hour, f"{seen.site_begun} begun on the site in an hour"),
    ):
        if holds:
            return Move.WAIT, why
    return Move.LOOK, "slots are blocked"
