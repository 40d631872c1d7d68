"""What the records say of one node, for a comparison with what its host holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from reconciler.domain.bundle import Bundle
from reconciler.domain.drift import Allocation, Records, Slot
from reconciler.domain.states import AllocationState, SlotState, TaskKind, TaskState
from reconciler.store import rows
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, claims, slots, tasks

# They change nothing on a host, so a snapshot is as good during them as without.
LOOKS = (
    TaskKind.SLICE_TOPOLOGY_DISCOVER,
    TaskKind.SLICE_ABSENCE_VERIFY,
    TaskKind.SLICE_DRIFT_RECONCILE,
    TaskKind.NODE_PARITY,
)
_AT_WORK = (
    SlotState.RESERVED,
    SlotState.PROVISIONING,
    SlotState.RELEASING,
    SlotState.CLEANUP,
)
_UNDER_WAY = (
    AllocationState.REQUESTED,
    AllocationState.PROVISIONING,
    AllocationState.RELEASING,
)
# More names than a host can have use for are the host's own invention; they stay nobody's.
_NAMES = 500


def of_node(
    conn: sa.Connection, node_id: str, holdings: Mapping[str, Any], *, since: float
) -> Records:
    """The node's approved slots, held still until this transaction ends, and the allocations that
    have them or that the host names. since: when the host was asked; what an operation has touched
    from then on is not settled (I14).
    """
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    # Locked first: nobody can claim one between this look and what follows from it.
    found = rows.every(conn, query.order_by(slots.c.id).with_for_update())
    busy = _busy(conn, node_id, since)
    holders = _holders(conn, [slot["id"] for slot in found])
    known = {
        slot["id"]: Slot(
            slot["id"],
            Bundle.of(slot),
            slot["status"],
            holders.get(slot["id"], ""),
            _settled(slot, "status", _AT_WORK, busy, since),
        )
        for slot in found
    }
    named = {slot.holder for slot in known.values()} | _live(conn, node_id)
    records = {one["id"]: one for one in _read(conn, named)}
    records |= {one["id"]: one for one in _named(conn, holdings, records)}
    return Records(
        tuple(known.values()),
        tuple(
            Allocation(
                key,
                one["state"] == AllocationState.ACTIVE and one["node_id"] == node_id,
                _settled(one, "state", _UNDER_WAY, busy, since),
                tuple(slot.id for slot in known.values() if slot.holder == key),
            )
            for key, one in sorted(records.items())
        ),
    )


def _settled(
    record: Record, state: str, moving: tuple[str, ...], busy: set[str], since: float
) -> bool:
    return (
        record[state] not in moving
        and record[f"{state}_since"] < since
        and record["id"] not in busy
    )


def _busy(conn: sa.Connection, node_id: str, since: float) -> set[str]:
    """Allocations and slots on which something works, or has worked since."""
    query = sa.select(tasks).where(
        tasks.c.node_id == node_id,
        tasks.c.kind.not_in(LOOKS),
        sa.or_(tasks.c.state == TaskState.RUNNING, tasks.c.finished_at >= since),
    )
    found: set[str] = set()
    for task in rows.every(conn, query):
        given = task["parameters"].get("slots") or []
        found |= {*task["fences"], *(slot["slot_id"] for slot in given)}
        found |= {task["allocation_id"]} - {None}
    return found


def _holders(conn: sa.Connection, slot_ids: list[str]) -> dict[str, str]:
    """Who claimed each slot last."""
    query = sa.select(claims.c.slot_id, claims.c.allocation_id)
    of_these = query.where(claims.c.slot_id.in_(slot_ids)).order_by(claims.c.disk_generation)
    return {row.slot_id: row.allocation_id for row in conn.execute(of_these)}


def _live(conn: sa.Connection, node_id: str) -> set[str]:
    query = sa.select(allocations.c.id).where(
        allocations.c.node_id == node_id,
        allocations.c.state.in_((*_UNDER_WAY, AllocationState.ACTIVE)),
    )
    return set(conn.execute(query).scalars())


def _read(conn: sa.Connection, ids: set[str]) -> list[Record]:
    return rows.every(conn, sa.select(allocations).where(allocations.c.id.in_(sorted(ids))))


def _named(
    conn: sa.Connection, holdings: Mapping[str, Any], known: Mapping[str, Record]
) -> list[Record]:
    """The allocations that the host names and that are not known yet, wherever they are."""
    starts = [key.replace("-", "") for key in known]
    names = sorted(
        name
        for name in set(_names(holdings))
        if len(name) >= 12 and not any(start.startswith(name) for start in starts)
    )
    found: list[Record] = []
    for name in names[:_NAMES]:
        pattern = f"{_dashed(name)}%"
        query = sa.select(allocations).where(allocations.c.id.like(pattern))
        found += rows.every(conn, query.limit(2))
    return found


def _names(holdings: Mapping[str, Any]) -> Iterator[str]:
    """As hexadecimal digits; anything else is no id of ours."""
    for part in holdings.values():
        for one in part["found"]:
            said = str(one.get("allocation_id") or one.get("owner") or "").replace("-", "")
            if said and set(said) <= set("0123456789abcdef"):
                yield said


def _dashed(digits: str) -> str:
    """As much of an allocation id as these are."""
    parts = [digits[begin:end] for begin, end in pairwise((0, 8, 12, 16, 20, 32))]
    return "-".join(part for part in parts if part)
