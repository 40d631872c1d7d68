"""Finding slots for a slice and keeping others off them until they are claimed."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from reconciler.domain.errors import Problem
from reconciler.domain.states import SlotState
from reconciler.planning.explain import Explanation, explain
from reconciler.planning.place import Placement, place
from reconciler.planning.snapshot import Snapshot, Want
from reconciler.store import capacity, rows
from reconciler.store.rows import Record
from reconciler.store.tables import slots

# How often a place is looked for again when somebody else took it meanwhile (PostgreSQL only).
_TRIES = 20
# How many nodes a launch looks at slot by slot, and by which factor it goes on: what the counts do
# not know (a slot that somebody holds at this moment, an incomplete row, an NVLink set) seldom
# leaves none of the first ones.
_FIRST = 6
_WIDER = 3
_OFF = frozenset({"site_off", "scheduling_off"})


def reserve(conn: sa.Connection, want: Want) -> tuple[str, list[Record]]:
    """A node and its slots for the request, locked; they are checked again by the claim.

    A few nodes that look best are tried, then more and more of the others. Slots that others hold
    locked are passed over while anything else fits; only then are those others waited for, since
    they may yet give back what they hold.
    """
    for _ in range(_TRIES):
        passed: set[str] = set()
        seen: set[str] = set()
        while True:
            limit = _FIRST + len(seen) * _WIDER
            picture = capacity.likely(conn, want, limit, beside=seen)
            found = _take(conn, picture, want, passed)
            if found is not None:
                return found
            if len(picture.nodes) < limit:
                break
            seen |= {node.id for node in picture.nodes}
        if not passed:
            raise _no_capacity(explain(capacity.snapshot(conn), want), want)
        _lock(conn, sorted(passed), skip=False)
    raise Problem(
        "generation_conflict",
        409,
        expected="slots that stay free while they are being reserved",
        found=f"others took them {_TRIES} times",
        remedy="repeat the request",
    )


def judge(conn: sa.Connection, want: Want) -> tuple[Placement | None, Explanation]:
    """Where the request would go now, and how every slot was judged; nothing is reserved."""
    everything = capacity.snapshot(conn)
    return place(everything, want), explain(everything, want)


def _take(
    conn: sa.Connection, snapshot: Snapshot, want: Want, passed: set[str]
) -> tuple[str, list[Record]] | None:
    """Lock the best place; what others hold is added to `passed`, and the next best is tried."""
    while True:
        found = place(snapshot.without(frozenset(passed)) if passed else snapshot, want)
        if found is None:
            return None
        locked = _lock(conn, found.slot_ids, skip=True)
        if len(locked) == len(found.slot_ids):
            return found.node_id, [locked[slot_id] for slot_id in found.slot_ids]
        passed |= set(found.slot_ids) - set(locked)


def _lock(conn: sa.Connection, slot_ids: Sequence[str], *, skip: bool) -> dict[str, Record]:
    query = sa.select(slots).where(slots.c.id.in_(slot_ids), slots.c.status == SlotState.AVAILABLE)
    found = rows.every(conn, query.order_by(slots.c.id).with_for_update(skip_locked=skip))
    return {slot["id"]: slot for slot in found}


def _no_capacity(explanation: Explanation, want: Want) -> Problem:
    refusals = set(explanation["reasons"])
    if refusals and refusals <= _OFF and not explanation["free"]:
        return Problem(
            "scheduling_off",
            409,
            expected="slice scheduling switched on for the site and a node",
            found=", ".join(sorted(refusals)),
            remedy="an admin switches it on once the node is proven",
            detail={"explanation": explanation},
        )
    return Problem(
        "no_capacity",
        409,
        expected=f"{want.gpus} free GPUs on one node",
        found=explanation["summary"],
        remedy=_remedy(explanation),
        detail={"explanation": explanation},
    )


def _remedy(explanation: Explanation) -> str:
    offers = [
        " ".join(
            [f"{offer['gpus']} GPU{'s' if offer['gpus'] > 1 else ''}"]
            + [f"in {kind} {offer[kind]}" for kind in ("region", "pool") if offer[kind]]
        )
        for offer in explanation["nearest"]
    ]
    return f"ask for {', or for '.join(offers)}, or later" if offers else "ask later"
