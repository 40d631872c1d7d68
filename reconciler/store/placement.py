"""Finding slots for a slice and keeping others off them until they are claimed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from reconciler.domain.errors import Problem
from reconciler.domain.states import SlotState
from reconciler.planning.explain import Explanation, explain
from reconciler.planning.place import Placement, place
from reconciler.planning.snapshot import Snapshot, Want
from reconciler.store import capacity
from reconciler.store.rows import Record
from reconciler.store.tables import slots

# How often a place is looked for again when somebody else took it meanwhile (PostgreSQL only).
TRIES = 20
# How many nodes a launch looks at slot by slot, and by which factor it goes on: what the counts do
# not know (a slot that somebody holds at this moment, an incomplete row, an NVLink set) seldom
# leaves none of the first ones.
_FIRST = 6
_WIDER = 3
# How many single slots are asked for in one statement once the best one was somebody else's.
_AT_ONCE = 6
_OFF = frozenset({"site_off", "scheduling_off"})


class NoRoom(Problem):
    """Nothing was found for `want`. Why is for `refusal` to say, which takes long and locks none:
    the transaction of a launch holds up other writers.
    """

    def __init__(self, want: Want) -> None:
        super().__init__(
            "no_capacity",
            expected=f"{want.gpus} free GPUs on one node",
            found="none",
            remedy="ask later",
        )
        self.want = want


def reserve(conn: sa.Connection, want: Want) -> tuple[str, list[Record]]:
    """A node and its slots for the request, locked; they are checked again by the claim.

    A few nodes that look best are tried, then more and more of the others. Slots that others hold
    locked are passed over while anything else fits; only then are those others waited for, since
    they may yet give back what they hold.
    """
    for _ in range(TRIES):
        passed: set[str] = set()
        # No node without slices is as good as any with one: those are looked at only afterwards.
        for sliced in (True, False):
            found = _search(conn, want, passed, sliced=sliced)
            if found is not None:
                return found
        if not passed:
            raise NoRoom(want)
        _wait(conn, passed)
    raise contended()


def contended() -> Problem:
    """Others were there first, each time."""
    return Problem(
        "generation_conflict",
        409,
        expected="slots that stay free while they are being reserved",
        found=f"others took them {TRIES} times",
        remedy="repeat the request",
    )


def refusal(conn: sa.Connection, want: Want) -> Problem | None:
    """Why there is no room; None when there is by now.

    Said of one picture, as `reserve` has two: between them, a node may have got its first slice.
    """
    found, explanation = judge(conn, want)
    return None if found is not None else _no_capacity(explanation, want)


def judge(conn: sa.Connection, want: Want) -> tuple[Placement | None, Explanation]:
    """Where the request would go now, and how every slot was judged; nothing is reserved."""
    everything = capacity.snapshot(conn)
    return place(everything, want), explain(everything, want)


def _search(
    conn: sa.Connection, want: Want, passed: set[str], *, sliced: bool
) -> tuple[str, list[Record]] | None:
    seen: set[str] = set()
    while True:
        limit = _FIRST + len(seen) * _WIDER
        picture = capacity.likely(conn, want, limit, sliced=sliced, beside=seen)
        found = _take(conn, picture, want, passed)
        if found is not None or len(picture.nodes) < limit:
            return found
        seen |= {node.id for node in picture.nodes}


def _take(
    conn: sa.Connection, snapshot: Snapshot, want: Want, passed: set[str]
) -> tuple[str, list[Record]] | None:
    """Lock the best place; what others hold is added to `passed`, and the next best is tried."""
    at_once = 1
    while True:
        places = _places(snapshot, want, passed, at_once if want.gpus == 1 else 1)
        if not places:
            return None
        wanted = [slot_id for found in places for slot_id in found.slot_ids]
        if want.gpus > 1:
            locked = _all_or_none(conn, wanted)
        else:
            locked = _first(conn, wanted) if len(places) > 1 else _lock(conn, wanted, skip=True)
        for found in places:
            if set(found.slot_ids) <= set(locked):
                return found.node_id, [locked[slot_id] for slot_id in found.slot_ids]
            passed |= set(found.slot_ids) - set(locked)
        # Others are about: they want the same ones, in the same order.
        at_once = _AT_ONCE


def _places(snapshot: Snapshot, want: Want, passed: set[str], most: int) -> list[Placement]:
    """The best place, then those that are best without the slots of the ones before."""
    places: list[Placement] = []
    without = set(passed)
    while len(places) < most:
        found = place(snapshot.without(frozenset(without)) if without else snapshot, want)
        if found is None:
            break
        places.append(found)
        without |= set(found.slot_ids)
    return places


def _lock(conn: sa.Connection, slot_ids: Sequence[str], *, skip: bool) -> dict[str, Record]:
    found = conn.execute(_locking(skip), {"ids": slot_ids}).mappings()
    return {slot["id"]: dict(slot) for slot in found}


def _all_or_none(conn: sa.Connection, slot_ids: Sequence[str]) -> dict[str, Record]:
    """Lock what nobody else holds; kept only when it is the whole set: others may want a part."""
    savepoint = conn.begin_nested()
    locked = _lock(conn, slot_ids, skip=True)
    if len(locked) == len(slot_ids):
        savepoint.commit()
    else:
        savepoint.rollback()
    return locked


def _wait(conn: sa.Connection, slot_ids: Collection[str]) -> None:
    """Until others hold them no longer. None is kept: two launches would wait for each other."""
    savepoint = conn.begin_nested()
    _lock(conn, sorted(slot_ids), skip=False)
    savepoint.rollback()


def _first(conn: sa.Connection, slot_ids: Sequence[str]) -> dict[str, Record]:
    """Lock the first of them, in this order, that nobody else holds."""
    padded = [*slot_ids, *[""] * (_AT_ONCE - len(slot_ids))]
    found = conn.execute(_choosing(), {f"id{at}": id for at, id in enumerate(padded)}).mappings()
    return {slot["id"]: dict(slot) for slot in found}


@cache
def _locking(skip: bool) -> sa.Select[Any]:
    query = sa.select(slots).where(
        slots.c.id.in_(sa.bindparam("ids", expanding=True)),
        slots.c.status == SlotState.AVAILABLE,
    )
    return query.order_by(slots.c.id).with_for_update(skip_locked=skip)


@cache
def _choosing() -> sa.Select[Any]:
    given = [sa.bindparam(f"id{at}", type_=sa.Text) for at in range(_AT_ONCE)]
    order = sa.case(*((slots.c.id == id, at) for at, id in enumerate(given)))
    query = sa.select(slots).where(slots.c.id.in_(given), slots.c.status == SlotState.AVAILABLE)
    return query.order_by(order).limit(1).with_for_update(skip_locked=True)


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
