"""Claims of allocations on slots and nodes, the authority for occupied capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows, settings
from reconciler.db.journal import advance
from reconciler.db.schema import Claim, Slot, claims, nodes, tasks
from reconciler.db.schema import slots as slot_table
from reconciler.model.act import Act
from reconciler.model.bundle import BUNDLE_FIELDS, run_bundle
from reconciler.model.states import ClaimKind, ClaimState, SlotState, TaskKind

ENDS = ("finish", "fail")
# 1 January 2020. The seconds since then fit into the integers of the database until 2088.
_NUMBERED_FROM = 1_577_836_800
_COPIED = (*BUNDLE_FIELDS, "nvme_identity", "fence", "disk_generation")


def claim_slot(
    conn: sa.Connection, allocation_id: str, slot: Slot, position: int, act: Act
) -> Claim:
    """Reserve a locked slot and insert a claim with a copy of its bundle, under its next fence.

    Raising disk_generation invalidates every earlier proof, so that the slot needs a new proof to
    become available.
    """
    reserved = advance(
        conn,
        Slot,
        slot.id,
        "reserve",
        act,
        held=slot,
        columns={
            "fence": slot.fence + 1,
            "disk_generation": slot.disk_generation + 1,
            "available_proof_id": None,
        },
    )
    return journal.create(
        conn,
        Claim,
        act,
        allocation_id=allocation_id,
        kind=ClaimKind.SLICE.value,
        node_id=reserved.node_id,
        slot_id=reserved.id,
        position=position,
        state=ClaimState.RESERVED,
        state_reason=act.reason,
        **{name: getattr(reserved, name) for name in _COPIED},
    )


def claim_node(
    conn: sa.Connection,
    allocation_id: str,
    node_id: str,
    act: Act,
    *,
    disks: Sequence[Mapping[str, Any]] = (),
) -> Claim:
    """Claim the whole node with its disks, under its next fence.

    The schema refuses the claim on a node that is not in bare-metal mode.
    """
    return journal.create(
        conn,
        Claim,
        act,
        allocation_id=allocation_id,
        kind=ClaimKind.NODE_EXCLUSIVE.value,
        node_id=node_id,
        fence=next_node_fence(conn, node_id),
        disks=[dict(disk) for disk in disks],
        state=ClaimState.RESERVED,
        state_reason=act.reason,
    )


def next_node_fence(conn: sa.Connection, node_id: str) -> int:
    """Raise the node's fence, so that whole-machine runs under an older fence no longer count."""
    update = sa.update(nodes).where(nodes.c.id == node_id).values(fence=nodes.c.fence + 1)
    return int(conn.execute(update.returning(nodes.c.fence)).scalar_one())


def fence_at(at: float) -> int:
    """A fence above all that hosts can have seen by then, also of records that were restored: no
    slot has a claim each second. Hosts refuse a fence that is lower than their highest.
    """
    return int(at) - _NUMBERED_FROM


def next_fence(conn: sa.Connection, slot: Slot) -> int:
    """The fence for a clean-up of a slot. Since a claim from before the records were restored, its
    host may have seen any number of later claims.
    """
    claimed = sa.select(claims.c.created_at).where(claims.c.slot_id == slot.id)
    last = conn.execute(claimed.order_by(claims.c.disk_generation.desc()).limit(1)).scalar()
    restored_at = float(settings.read(conn, settings.RESTORED, 0.0))
    if last is not None and last < restored_at:
        return max(slot.fence + 1, fence_at(restored_at))
    return slot.fence + 1


def exclusive_ended_at(conn: sa.Connection, node_id: str) -> float:
    """End of the last whole-machine claim whose provisioning task began; 0 without any."""
    began = sa.exists().where(
        tasks.c.allocation_id == claims.c.allocation_id,
        tasks.c.kind == TaskKind.BAREMETAL_PROVISION,
        tasks.c.started_at.is_not(None),
    )
    query = sa.select(sa.func.max(claims.c.ended_at)).where(
        claims.c.node_id == node_id, claims.c.kind == ClaimKind.NODE_EXCLUSIVE, began
    )
    return float(conn.execute(query).scalar_one() or 0.0)


def of_allocation(conn: sa.Connection, allocation_id: str) -> list[Claim]:
    """Claims of an allocation, the boot slot's claim first."""
    query = sa.select(claims).where(claims.c.allocation_id == allocation_id)
    return rows.every(conn, query.order_by(claims.c.position), Claim)


def bundles(conn: sa.Connection, allocation_id: str) -> list[dict[str, Any]]:
    """Bundles of an allocation in the form of the run contract, with the fences of its claims."""
    return run_bundles(of_allocation(conn, allocation_id))


def run_bundles(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """Bundles of slot claims in the form of the run contract, with their fences."""
    return [run_bundle(vars(claim), fence=True) for claim in claims if claim.slot_id]


def held_slots(conn: sa.Connection, allocation_id: str) -> list[Slot]:
    """Slots that no later claim has taken, so that this allocation's traces may be on them.

    They are locked in the common order of locks, but returned with the boot slot first.
    """
    join = sa.and_(
        claims.c.slot_id == slot_table.c.id,
        claims.c.disk_generation == slot_table.c.disk_generation,
    )
    query = (
        sa.select(slot_table, claims.c.position)
        .join(claims, join)
        .where(claims.c.allocation_id == allocation_id)
        .order_by(slot_table.c.id)
    )
    held = rows.every(conn, query.with_for_update(of=slot_table))
    held.sort(key=itemgetter("position"))
    for row in held:
        del row["position"]
    return [Slot(**row) for row in held]


def unfenced(conn: sa.Connection, fences: Mapping[str, int]) -> list[str]:
    """Ids of the slots that still have the given fence; they stay locked in this transaction."""
    query = sa.select(slot_table.c.id, slot_table.c.fence).where(slot_table.c.id.in_(fences))
    locked = conn.execute(query.order_by(slot_table.c.id).with_for_update())
    return [str(slot_id) for slot_id, fence in locked if fences[slot_id] == fence]


def fence_off(conn: sa.Connection, fences: Mapping[str, int]) -> list[str]:
    """Raise the fence of blocked slots that still have the given fence; returns their ids.

    Runs under the old fence no longer count in the records, nor on the host from its next run on.
    """
    fenced = []
    for slot_id, fence in sorted(fences.items()):
        update = sa.update(slot_table).where(
            slot_table.c.id == slot_id,
            slot_table.c.fence == fence,
            slot_table.c.status == SlotState.CLEANUP_BLOCKED,
        )
        if conn.execute(update.values(fence=fence + 1)).rowcount:
            fenced.append(slot_id)
    return fenced


def last_holder(conn: sa.Connection, slot_id: str) -> str:
    """The allocation with the last claim on a slot; "" without any claim."""
    query = sa.select(claims.c.allocation_id).where(claims.c.slot_id == slot_id)
    last = conn.execute(query.order_by(claims.c.disk_generation.desc()).limit(1))
    return str(last.scalar() or "")
