"""Recovery policy of a site: which blocked slots are recovered without a person, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows, settings
from reconciler.db.schema import Allocation, AuditEntry, Slot, allocations, audit_log, claims
from reconciler.db.schema import settings as setting_table
from reconciler.lifecycle import quota
from reconciler.lifecycle.recovery import CASE, FORCE_CLEANUP, blocked
from reconciler.model.act import Act
from reconciler.model.recovery import HOUR_S, Blocked, Move, Policy, policy_move
from reconciler.model.states import AllocationState, HealthState
from reconciler.records import queue, recovery_cases
from reconciler.records import slots as slot_records
from reconciler.records.claims import of_allocation

ACTOR = "policy"
BEGUN = "policy.recovery.begun"
STOPPED = "policy.recovery.stopped"
# Key in a slot's health_detail: the reason why the policy does not recover it.
STOPPED_KEY = "policy_stopped"
REASON = "recovery policy: "
_SETTING = "recovery_policy"
# Key in the detail of BEGUN: the limits do not count it.
_BY_TENANT = "by_tenant"
_DAY_S = 86_400.0


@dataclass(frozen=True)
class BlockedAllocation:
    """Blocked slots of an allocation that the policy still handles, and its next move.

    by_tenant: its launch failed by its tenant's doing, and the policy recovers such.
    """

    allocation_id: str
    node_id: str
    slots: tuple[Slot, ...]
    move: Move
    why: str
    by_tenant: bool = False


def read(conn: sa.Connection) -> Policy:
    """Read the site's policy."""
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
        every = rows.every(conn, query, AuditEntry)
        begun = [row for row in every if not row.detail.get(_BY_TENANT)]
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
    by_tenant = policy.tenant_failures and failed_by_tenant(conn, allocation_id)
    seen = Blocked(
        reason=last.health_detail.get("reason", ""),
        kept=kept(conn, allocation_id),
        case="" if case is None else case.state,
        tried=bool(journal.audit_rows(conn, action=BEGUN, subject_id=allocation_id)),
        busy=bool(queue.open_of_allocation(conn, allocation_id)),
        node_begun=sum(row.detail.get("node_id") == node_id for row in begun),
        site_begun=len(begun),
        by_tenant=by_tenant,
    )
    move, why = policy_move(policy, seen)
    return BlockedAllocation(allocation_id, node_id, tuple(held), move, why, by_tenant)


def covers(conn: sa.Connection, allocation_id: str) -> bool:
    """Whether the policy recovers the allocation's slots."""
    policy = read(conn)
    return policy.enabled or (policy.tenant_failures and failed_by_tenant(conn, allocation_id))


def failed_by_tenant(conn: sa.Connection, allocation_id: str) -> bool:
    """Whether a launch failed by its tenant's own doing.

    When another project's launch failed alike since the slot had its last running machine, the
    host may be the cause, which is for people. Two projects that both fail on other slots, too, say
    nothing about this one: a person who has both would keep slot after slot off sale.
    """
    allocation = rows.get(conn, Allocation, allocation_id)
    if not quota.by_tenant(allocation):
        return False
    for claim in of_allocation(conn, allocation_id):
        query = (
            sa.select(allocations)
            .join(claims, claims.c.allocation_id == allocations.c.id)
            .where(
                claims.c.slot_id == claim.slot_id,
                claims.c.created_at < claim.created_at,
                sa.or_(
                    allocations.c.activated_at.is_not(None),
                    sa.and_(
                        allocations.c.state == AllocationState.FAILED,
                        allocations.c.project_id != allocation.project_id,
                    ),
                ),
            )
            .order_by(claims.c.created_at.desc())
            .limit(1)
        )
        last = rows.first(conn, query, Allocation)
        if last is not None and quota.by_tenant(last):
            slot_id = str(claim.slot_id)
            if not all(_fails_elsewhere(conn, each, slot_id) for each in (allocation, last)):
                return False
    return True


def _fails_elsewhere(conn: sa.Connection, allocation: Allocation, slot_id: str) -> bool:
    """Whether another launch of the project failed by its own doing within a day, elsewhere."""
    query = (
        sa.select(allocations)
        .join(claims, claims.c.allocation_id == allocations.c.id)
        .where(
            allocations.c.project_id == allocation.project_id,
            allocations.c.id != allocation.id,
            allocations.c.state == AllocationState.FAILED,
            allocations.c.created_at > clock.now() - _DAY_S,
            claims.c.slot_id != slot_id,
        )
    )
    return any(quota.by_tenant(other) for other in rows.every(conn, query, Allocation))


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
    extra = {_BY_TENANT: True} if judged.by_tenant else {}
    _audit(conn, BEGUN, judged.allocation_id, judged.node_id, judged.slots, act, extra)


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
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    detail = {"node_id": node_id, "slots": [slot.id for slot in held], **extra}
    journal.audit(conn, act, action, "allocation", allocation_id, detail=detail)
