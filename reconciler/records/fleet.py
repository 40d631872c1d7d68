"""The whole fleet in few queries: sums of nodes and slots, and the slots of a page of nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Node, claims, nodes, slots
from reconciler.model.states import LIVE_CLAIMS, UNCLEAN_SLOTS, ClaimKind, NodeState

ORDER = Order(nodes, ("name",))
_PRESENT = slots.c.retired_at.is_(None)


@dataclass(frozen=True)
class Sums:
    """Numbers of nodes by region and state, and of approved slots."""

    nodes: dict[str, dict[str, int]]
    slots: list[SlotCount]


@dataclass(frozen=True)
class SlotCount:
    """Number of approved slots of one region, profile and status."""

    region: str
    profile: str
    status: str
    count: int


@dataclass(frozen=True)
class HeldSlot:
    """A slot in short, with the allocation that holds it, or that left it blocked."""

    id: str
    node_id: str
    slot_index: int
    status: str
    status_reason: str
    health_state: str
    allocation_id: str | None


@dataclass(frozen=True, kw_only=True)
class NodeWithSlots(Node):
    """A node with its approved slots, in the order of their numbers."""

    slots: list[HeldSlot]


def sums(conn: sa.Connection) -> Sums:
    """The sums over all nodes that are not retired."""
    living = nodes.c.state != NodeState.RETIRED
    place = (nodes.c.region, nodes.c.state)
    counted = sa.select(*place, sa.func.count()).where(living).group_by(*place).order_by(*place)
    columns = (nodes.c.region, nodes.c.profile, slots.c.status)
    by_place = (
        sa.select(*columns, sa.func.count().label("count"))
        .join_from(slots, nodes, slots.c.node_id == nodes.c.id)
        .where(living, _PRESENT)
        .group_by(*columns)
        .order_by(*columns)
    )
    by_region: dict[str, dict[str, int]] = defaultdict(dict)
    for region, state, count in conn.execute(counted):
        by_region[region][str(state)] = int(count)
    return Sums(dict(by_region), rows.every(conn, by_place, SlotCount))


def regions(conn: sa.Connection) -> list[str]:
    """Names of the regions that have a node which is not retired, in alphabetical order."""
    region = nodes.c.region
    living = sa.select(region).where(nodes.c.state != NodeState.RETIRED)
    return list(conn.execute(living.distinct().order_by(region)).scalars())


def disk_sizes(conn: sa.Connection) -> dict[str, tuple[int, int]]:
    """Bytes of the smallest and the largest disk of a slot, by hardware profile."""
    size = slots.c.nvme_size_bytes
    query = (
        sa.select(nodes.c.profile, sa.func.min(size), sa.func.max(size))
        .join_from(slots, nodes, slots.c.node_id == nodes.c.id)
        .where(nodes.c.state != NodeState.RETIRED, _PRESENT, size > 0)
        .group_by(nodes.c.profile)
    )
    return {profile: (least, most) for profile, least, most in conn.execute(query)}


def nodes_with_slots(
    conn: sa.Connection,
    *,
    region: str | None = None,
    state: str | None = None,
    blocked: bool = False,
    page: Page | None = None,
) -> list[NodeWithSlots]:
    """Nodes in the order of their names, each with its slots and who is on them."""
    query = rows.where(sa.select(nodes), nodes, region=region, state=state)
    if state is None:
        query = query.where(nodes.c.state != NodeState.RETIRED)
    if blocked:
        of_node = sa.select(slots.c.id).where(slots.c.node_id == nodes.c.id, _PRESENT)
        query = query.where(of_node.where(slots.c.status.in_(UNCLEAN_SLOTS)).exists())
    page_rows = rows.every(conn, part(query, ORDER, page), Node)
    of_nodes = _slots(conn, [node.id for node in page_rows])
    return [NodeWithSlots(**vars(node), slots=of_nodes[node.id]) for node in page_rows]


def _slots(conn: sa.Connection, node_ids: Sequence[str]) -> dict[str, list[HeldSlot]]:
    names = ("id", "node_id", "slot_index", "status", "status_reason", "health_state")
    # The claim of a blocked slot may have ended; its health then names the last allocation.
    last = slots.c.health_detail["allocation_id"].as_string()
    holder = sa.func.coalesce(claims.c.allocation_id, last).label("allocation_id")
    live = sa.and_(
        claims.c.slot_id == slots.c.id,
        claims.c.kind == rows.literal(ClaimKind.SLICE),
        claims.c.state.in_(rows.literals(LIVE_CLAIMS)),
    )
    query = (
        sa.select(*(slots.c[name] for name in names), holder)
        .join_from(slots, claims, live, isouter=True)
        .where(slots.c.node_id.in_(node_ids), _PRESENT)
        .order_by(slots.c.slot_index)
    )
    of_nodes: dict[str, list[HeldSlot]] = defaultdict(list)
    for slot in rows.every(conn, query, HeldSlot):
        of_nodes[slot.node_id].append(slot)
    return of_nodes
