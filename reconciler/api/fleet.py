"""The fleet at a glance: sums of nodes and slots, and nodes with their slots."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Connection

from reconciler.api.catalog import AnswerCache
from reconciler.api.http import PageOf, Paging
from reconciler.api.models import Answer, Filter
from reconciler.api.security import Admin
from reconciler.lifecycle import baremetal
from reconciler.model.states import CapacityShape, HealthState, NodeMode, NodeState, SlotState
from reconciler.profiles import profile_skus
from reconciler.records import fleet

router = APIRouter(prefix="/admin/fleet", tags=["fleet"])


class FleetSlot(Answer):
    """A slot in short, with the allocation that holds it, or that left it blocked."""

    id: str
    slot_index: int
    status: SlotState
    status_reason: str
    health_state: HealthState
    allocation_id: str | None


class FleetNode(Answer):
    """A node in short, with its slots."""

    id: str
    name: str
    region: str
    pool: str
    profile: str
    mode: NodeMode
    state: NodeState
    state_reason: str
    health_state: HealthState
    slice_scheduling: bool
    reboot_required: bool
    slots: list[FleetSlot]


class Capacity(Answer):
    """Approved slots of one region and SKU, by status."""

    region: str
    sku: str
    slots: dict[str, int]


class RegionNodes(Answer):
    """Nodes of one region that are not retired, by state."""

    region: str
    nodes: dict[str, int]


class MachineCapacity(Answer):
    """Machines in bare-metal mode of one region and SKU."""

    region: str
    sku: str
    free: int = Field(description="A launch could get them now.")
    in_use: int
    not_on_sale: int = Field(description="In no allocation, and not ready for one.")


class Fleet(PageOf[FleetNode]):
    """A page of nodes in the order of their names, and sums over the whole fleet."""

    nodes: dict[str, int] = Field(description="Nodes that are not retired, by state.")
    regions: list[RegionNodes]
    slots: dict[str, int] = Field(description="Their approved slots, by status.")
    capacity: list[Capacity]
    machines: list[MachineCapacity]


@router.get("")
def show(
    context: Admin,
    paging: Paging,
    *,
    region: Filter = None,
    state: NodeState | None = None,
    blocked: Annotated[
        bool, Query(description="Only nodes with a slot that waits for recovery.")
    ] = False,
) -> Fleet:
    """Nodes with their slots. Retired nodes are listed only when their state is named."""
    page = paging.page(fleet.ORDER)
    skus = profile_skus(context.settings.profiles_dir)
    whole = profile_skus(context.settings.profiles_dir, CapacityShape.BAREMETAL)
    cache: AnswerCache = context.request.app.state.availability

    def judge(conn: Connection) -> list[MachineCapacity]:
        return [
            MachineCapacity(region=region, sku=whole.get(profile) or profile, **vars(stock))
            for (profile, region), stock in sorted(baremetal.stock(conn).items())
        ]

    def read(conn: Connection) -> Fleet:
        sums = fleet.sums(conn)
        by_state: Counter[str] = Counter()
        for counts in sums.nodes.values():
            by_state.update(counts)
        rows = fleet.nodes_with_slots(conn, region=region, state=state, blocked=blocked, page=page)
        total: dict[str, int] = {}
        places: dict[tuple[str, str], dict[str, int]] = {}
        for row in sums.slots:
            # Two profiles may be sold under one SKU.
            sku = skus.get(row.profile) or row.profile
            for counts in (total, places.setdefault((row.region, sku), {})):
                counts[row.status] = counts.get(row.status, 0) + row.count
        return Fleet(
            nodes=dict(by_state),
            regions=[RegionNodes(region=name, nodes=counts) for name, counts in sums.nodes.items()],
            slots=total,
            capacity=[
                Capacity(region=name, sku=sku, slots=counts)
                for (name, sku), counts in places.items()
            ],
            # Each machine takes several queries, so pages share the answer until something changes.
            machines=cache.share(conn, ("fleet", *whole.items()), judge),
            **dict(paging.answer(fleet.ORDER, rows, map(FleetNode.of, rows))),
        )

    return context.read(read)
