"""Recovery policy of a site: which blocked slots are recovered without a person, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from reconciler.db import clock, journal, rows, settings
from reconciler.db.schema import AuditEntry, Slot, audit_log
from reconciler.db.schema import settings as setting_table
from reconciler.lifecycle.recovery import CASE, FORCE_CLEANUP, blocked
from reconciler.model.act import Act
from reconciler.model.recovery import HOUR_S, Blocked, Move, Policy, policy_move
from reconciler.model.states import HealthState
from reconciler.records import queue, recovery_cases
from reconciler.records import slots as slot_records

ACTOR = "policy"
BEGUN = "policy.recovery.begun"
STOPPED = "policy.recovery.stopped"
# Key in a slot's health_detail: the reason why the policy does not recover it.
STOPPED_KEY = "policy_stopped"
REASON = "recovery policy: "
_SETTING = "recovery_policy"


@dataclass(frozen=True)
class BlockedAllocation:
    """Blocked slots of one allocation that the policy still handles, and its next move."""

    allocation_id: str
    node_id: str
    slots: tuple[Slot, ...]
    move: Move
    why: str


def read(conn: sa.Connection) -> Policy:
    """Read the site's policy. It is off until set."""
    return Policy(**settings.read(conn, _SETTING, {}))


def write(conn: sa.Connection, policy: Policy, act: Act) -> None:
    """Store the policy, with the actor in the audit."""
    settings.write(conn, _SETTING, asdict(policy), act)


def hold(conn: sa.Connection) -> Policy:
    """Lock and read the policy, so that only one transaction at a time counts the limits."""
    query = sa.select(setting_table.c.name).where(setting_table.c.name == _SETTING)
    rows.first(conn, query.with_for_update())
    return read(conn)


def blocked_allocations(conn: sa.Connection) -> list[BlockedAllocation]:
    """Every allocation with blocked slots, longest blocked first, also while the policy is off."""
    policy = read(conn)
    by_allocation: dict[str, list[Slot]] = defaultdict(list)
    for slot in blocked(conn):
        allocation_id = slot.health_detail.get("allocation_id")
        if STOPPED_KEY not in slot.health_detail and allocation_id:
            by_allocation[allocation_id].append(slot)
    begun: list[AuditEntry] = []
    if by_allocation:
        since = clock.read(conn) - HOUR_S
        query = sa.select(audit_log).where(audit_log.c.action == BEGUN, audit_log.c.at > since)
        begun = rows.every(conn, query, AuditEntry)
    judged = [_judge(conn, policy, key, held, begun) for key, held in by_allocation.items()]
    return sorted(
        judged, key=lambda row: (min(slot.status_since for slot in row.slots), row.allocation_id)
    )


def _judge(
    conn: sa.Connection,
    policy: Policy,
    allocation_id: str,
    held: Sequence[Slot],
    begun: Sequence[AuditEntry],
) -> BlockedAllocation:
    node_id = held[0].node_id
    last = max(held, key=lambda slot: slot.status_since)
    case = recovery_cases.open_of(conn, allocation_id)
    seen = Blocked(
        reason=last.health_detail.get("reason", ""),
        kept=kept(conn, allocation_id),
        case="" if case is None else case.state,
        tried=bool(journal.audit_rows(conn, action=BEGUN, subject_id=allocation_id)),
        busy=bool(queue.open_of_allocation(conn, allocation_id)),
        node_begun=sum(row.detail.get("node_id") == node_id for row in begun),
        site_begun=len(begun),
    )
    move, why = policy_move(policy, seen)
    return BlockedAllocation(allocation_id, node_id, tuple(held), move, why)


def kept(conn: sa.Connection, allocation_id: str, *, since: float = 0.0) -> str:
    """The actor and reason of a forced clean-up that keeps the slots for inspection, or "".

    Only the newest forced clean-up counts. If it confirmed absence (`runtime_verified_absent`), the
    slots are on their way back. Acts of the policy or of a recovery case do not count.
    since: older acts are ignored.
    """
    for row in journal.audit_rows(conn, action=FORCE_CLEANUP, subject_id=allocation_id):
        if row.actor != ACTOR and CASE not in row.detail and row.at > since:
            released = row.detail["runtime_verified_absent"]
            return "" if released else f"{row.actor}: {row.reason}"
    return ""


def record_begun(conn: sa.Connection, judged: BlockedAllocation, act: Act) -> None:
    """Write the audit row that the limits count."""
    _audit(conn, BEGUN, judged.allocation_id, judged.node_id, judged.slots, act)


def stop(conn: sa.Connection, allocation_id: str, node_id: str, why: str, act: Act) -> None:
    """Stop automatic recovery of the allocation, and mark every blocked slot with the reason."""
    held = [
        slot
        for slot in blocked(conn, node_id)
        if slot.health_detail.get("allocation_id") == allocation_id
    ]
    act = act.because(REASON + why)
    for slot in held:
        detail = {**slot.health_detail, STOPPED_KEY: why}
        slot_records.set_health(conn, slot.id, HealthState.FAILED, detail, act)
    _audit(conn, STOPPED, allocation_id, node_id, held, act)


def _audit(
    conn: sa.Connection,
    action: str,
    allocation_id: str,
    node_id: str,
    held: Sequence[Slot],
    act: Act,
) -> None:
    detail = {"node_id": node_id, "slots": [slot.id for slot in held]}
    journal.audit(conn, act, action, "allocation", allocation_id, detail=detail)
