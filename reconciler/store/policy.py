"""The recovery policy's records: its setting, what it began, and one step of one recovery.

What it has begun is read from the audit log, which nobody can change: neither a restart nor another
leader makes it forget a limit or try the same allocation twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.errors import Problem
from reconciler.domain.recovery import HOUR_S, Move, Policy, Seen, next_move
from reconciler.domain.states import AllocationState, HealthState
from reconciler.store import audit, clock, discoveries, recovery, rows, settings, slots, tasks
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, audit_log
from reconciler.store.tables import settings as setting_table

ACTOR = "policy"
BEGUN = "policy.recovery.begun"
STOPPED = "policy.recovery.stopped"
# In a slot's health_detail: why the policy leaves it alone.
MARK = "policy_stopped"
_NAME = "recovery_policy"
# Refusals that pass by themselves; any other is for a person.
_PASSING = frozenset(
    {"node_unreachable", "node_unhealthy", "allocation_releasing", "generation_conflict"}
)


@dataclass(frozen=True)
class Case:
    """The blocked slots of one allocation that the policy has not given up."""

    allocation_id: str
    node_id: str
    slots: tuple[Record, ...]
    move: Move
    why: str


def read(conn: sa.Connection) -> Policy:
    """The site's policy; off until set."""
    return Policy(**settings.read(conn, _NAME, {}))


def write(conn: sa.Connection, policy: Policy, act: Act) -> None:
    """Set it, and say who did."""
    settings.write(conn, _NAME, asdict(policy), act)


def cases(conn: sa.Connection) -> list[Case]:
    """Every recovery that there is to do, the longest blocked first; also while it is off."""
    policy = read(conn)
    of_allocation: dict[str, list[Record]] = defaultdict(list)
    for slot in recovery.blocked(conn):
        if MARK not in slot["health_detail"] and slot["allocation_id"]:
            of_allocation[slot["allocation_id"]].append(slot)
    begun = _begun_since(conn, clock.read(conn) - HOUR_S) if of_allocation else []
    found = [_case(conn, policy, key, held, begun) for key, held in of_allocation.items()]
    return sorted(found, key=lambda case: (_since(case.slots), case.allocation_id))


def step(conn: sa.Connection, allocation_id: str) -> Case | None:
    """Do the next move about one allocation; None when there is none, or the policy is off."""
    # One at a time on the whole site: the limits are counted under this lock.
    locked = sa.select(setting_table.c.name).where(setting_table.c.name == _NAME)
    rows.first(conn, locked.with_for_update())
    if not read(conn).enabled:
        return None
    case = next((one for one in cases(conn) if one.allocation_id == allocation_id), None)
    if case is None or case.move == Move.WAIT:
        return case
    act = Act(ACTOR, f"recovery policy: {case.why}", _correlation(conn, allocation_id))
    if case.move == Move.STOP:
        _stop(conn, case, act)
        return case
    try:
        with conn.begin_nested():
            _move(conn, case, act)
    except Problem as refusal:
        if refusal.code not in _PASSING:
            _stop(conn, case, act.because(f"recovery policy: {refusal.code}: {refusal.found}"))
    return case


def _move(conn: sa.Connection, case: Case, act: Act) -> None:
    key = case.allocation_id
    if case.move == Move.LOOK:
        detail = {"node_id": case.node_id, "slots": [slot["id"] for slot in case.slots]}
        audit.write(conn, act, BEGUN, "allocation", key, detail=detail)
        recovery.verify_absence(conn, key, act)
        return
    absence = discoveries.latest_absence(conn, key)
    absent = absence is not None and bool(absence["absent"])
    state = rows.get(conn, allocations, key, "allocation")["state"]
    if state != AllocationState.RELEASED:
        recovery.force_cleanup(conn, key, act, runtime_verified_absent=absent)
    if state == AllocationState.RELEASED or not absent:
        # Its release took the tenant's use away; removing, wiping and verifying is all there is.
        for slot in case.slots:
            recovery.repair(conn, slot["id"], act)


def _stop(conn: sa.Connection, case: Case, act: Act) -> None:
    """Marked on every slot, so that whoever looks at one reads why it is still blocked."""
    why = act.reason.removeprefix("recovery policy: ")
    for slot in case.slots:
        detail = {**slot["health_detail"], MARK: why}
        slots.set_health(conn, slot["id"], HealthState.FAILED, detail, act)
    detail = {"node_id": case.node_id, "slots": [slot["id"] for slot in case.slots]}
    audit.write(conn, act, STOPPED, "allocation", case.allocation_id, detail=detail)


def _case(
    conn: sa.Connection,
    policy: Policy,
    allocation_id: str,
    held: Sequence[Record],
    begun: Sequence[Record],
) -> Case:
    node_id = held[0]["node_id"]
    own = audit.every(conn, action=BEGUN, subject_id=allocation_id)
    absence = discoveries.latest_absence(conn, allocation_id)
    last = max(held, key=lambda slot: float(slot["status_since"]))
    seen = Seen(
        blocked_since=last["status_since"],
        reason=last["reason"],
        kept=_kept(conn, allocation_id),
        begun_at=own[0]["at"] if own else None,
        busy=bool(tasks.open_of_allocation(conn, allocation_id)),
        absent=None if absence is None else bool(absence["absent"]),
        observed_at=None if absence is None else absence["observed_at"],
        node_begun=sum(row["detail"].get("node_id") == node_id for row in begun),
        site_begun=len(begun),
    )
    move, why = next_move(policy, seen)
    return Case(allocation_id, node_id, tuple(held), move, why)


def _kept(conn: sa.Connection, allocation_id: str) -> str:
    """Why a person who ended the allocation wants its slots to stay as they are (seed 000).

    What that person says last counts: with their word for absence the slots are on their way back.
    """
    told = audit.every(conn, action=recovery.ACTION, subject_id=allocation_id)
    persons = [row for row in told if row["actor"] != ACTOR]
    if not persons or persons[0]["detail"]["runtime_verified_absent"]:
        return ""
    return f"{persons[0]['actor']}: {persons[0]['reason']}"


def _begun_since(conn: sa.Connection, since: float) -> list[Record]:
    query = sa.select(audit_log).where(audit_log.c.action == BEGUN, audit_log.c.at > since)
    return rows.every(conn, query)


def _since(held: Sequence[Record]) -> float:
    return min(float(slot["status_since"]) for slot in held)


def _correlation(conn: sa.Connection, allocation_id: str) -> str:
    """The tenant's request that it all began with."""
    found: Any = rows.get(conn, allocations, allocation_id, "allocation")["correlation_id"]
    return str(found)
