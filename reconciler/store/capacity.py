"""The snapshot that the scheduler places on: all nodes, or those that look best by their counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.domain.bundle import BUNDLE_FIELDS, Bundle
from reconciler.domain.states import HealthState, NodeMode, NodeState, SharingMechanism, SlotState
from reconciler.planning.feasible import IDLE
from reconciler.planning.snapshot import NodeView, NvlinkSets, SlotView, Snapshot, Want
from reconciler.store import rows, settings
from reconciler.store.rows import Record
from reconciler.store.tables import nodes, slots

_NODE = ("id", "region", "pool", "mode", "state", "health_state", "reboot_required")
_SLOT = (
    "id",
    "node_id",
    *BUNDLE_FIELDS,
    "status",
    "sharing_mechanism",
    "available_proof_id",
    "capacity_metadata",
)


def snapshot(conn: sa.Connection, node_ids: Sequence[str] | None = None) -> Snapshot:
    """Slice hosts with their approved slots as they are now; None means all of them."""
    host = sa.select(*(nodes.c[name] for name in _NODE), nodes.c.slice_scheduling)
    host = host.where(nodes.c.state != NodeState.RETIRED)
    sold = sa.select(*(slots.c[name] for name in _SLOT)).where(slots.c.retired_at.is_(None))
    if node_ids is not None:
        host = host.where(nodes.c.id.in_(node_ids))
        sold = sold.where(slots.c.node_id.in_(node_ids))
    site = settings.site_scheduling(conn)
    of_node: dict[str, list[Record]] = defaultdict(list)
    for slot in rows.every(conn, sold):
        of_node[slot["node_id"]].append(slot)
    return Snapshot.of(
        NodeView(
            id=node["id"],
            region=node["region"],
            pool=node["pool"],
            refusal=_refusal(node) or ("" if site else "site_off"),
            slots=tuple(map(_slot, of_node[node["id"]])),
            nvlink_sets=_nvlink_sets(of_node[node["id"]]),
        )
        for node in rows.every(conn, host)
        if node["id"] in of_node
    )


def likely(
    conn: sa.Connection, want: Want, limit: int, *, beside: Collection[str] = ()
) -> Snapshot:
    """The nodes, but for some, that the counts of their slots rank first for this request.

    The order is that of planning.score as far as counts go: nodes with slices, those with room on
    one NUMA node, the fullest. Nothing is decided here: the slots are judged one by one later.
    """
    counts = _by_node() if want.gpus == 1 else _by_numa()
    wanted = {"region": want.region, "pool": want.pool, "id": want.node_id}
    # A subquery of one value, not a join: a planner that takes almost no node for fit, as it does
    # while all nodes are alike, would count all slots again for each of them.
    fit = rows.where(
        sa.select(sa.literal(1)).where(
            nodes.c.id == counts.c.node_id,
            nodes.c.mode == NodeMode.SLICE,
            nodes.c.state == NodeState.READY,
            nodes.c.health_state != HealthState.FAILED,
            nodes.c.reboot_required.is_(False),
            nodes.c.slice_scheduling.is_(True),
        ),
        nodes,
        **{name: value or None for name, value in wanted.items()},
    )
    query = (
        sa.select(counts.c.node_id)
        .where(counts.c.free >= want.gpus, fit.scalar_subquery() == 1)
        .order_by(
            sa.case((counts.c.busy > 0, 0), else_=1),
            sa.case((counts.c.together >= want.gpus, 0), else_=1),
            counts.c.free,
            counts.c.node_id,
        )
        .limit(limit)
    )
    if beside:
        query = query.where(counts.c.node_id.not_in(beside))
    return snapshot(conn, list(conn.execute(query).scalars()))


def _by_node() -> sa.Subquery:
    """Free and busy slots of each node; together: free ones on one NUMA node, for one GPU any."""
    free, busy = _free_and_busy()
    found = (slots.c.node_id, free.label("free"), busy.label("busy"), free.label("together"))
    return _approved(sa.select(*found)).group_by(slots.c.node_id).subquery("counts")


def _by_numa() -> sa.Subquery:
    free, busy = _free_and_busy()
    query = _approved(sa.select(slots.c.node_id, free.label("free"), busy.label("busy")))
    parts = query.group_by(slots.c.node_id, slots.c.numa_node).subquery("parts")
    found = (
        sa.func.sum(parts.c.free).label("free"),
        sa.func.sum(parts.c.busy).label("busy"),
        sa.func.max(parts.c.free).label("together"),
    )
    return sa.select(parts.c.node_id, *found).group_by(parts.c.node_id).subquery("counts")


def _free_and_busy() -> tuple[sa.ColumnElement[int], sa.ColumnElement[int]]:
    # Answered from ix_slots_counts alone: nothing else of a slot may be asked for here.
    every = sa.func.count()
    free = slots.c.status == SlotState.AVAILABLE
    return every.filter(free), every.filter(slots.c.status.not_in(IDLE))


def _approved(query: sa.Select[Any]) -> sa.Select[Any]:
    return query.where(slots.c.retired_at.is_(None))


def _slot(slot: Record) -> SlotView:
    metadata = slot["capacity_metadata"]
    return SlotView(
        id=slot["id"],
        index=slot["slot_index"],
        status=slot["status"],
        numa_node=slot["numa_node"],
        switch=str(metadata.get("pcie_switch") or ""),
        module=_module(metadata),
        complete=not Bundle.of(slot).missing(),
        exclusive_device=slot["sharing_mechanism"] == SharingMechanism.EXCLUSIVE_DEVICE,
        proven=slot["available_proof_id"] is not None,
        fabric=slot["fabric_vf_pci_address"],
        own_function=metadata.get("fabric_claim_mode") == "per_slot_vf",
    )


def _module(metadata: Record) -> int:
    module = metadata.get("gpu_module_id")
    return module if isinstance(module, int) else -1


def _nvlink_sets(found: Iterable[Record]) -> NvlinkSets:
    """As the profile said at the approval of each slot."""
    listed: list[Any] = [slot["capacity_metadata"].get("nvlink_sets") or [] for slot in found]
    return frozenset(frozenset(modules) for sets in listed for modules in sets)


def _refusal(node: Record) -> str:
    if node["mode"] != NodeMode.SLICE:
        return "not_slice"
    if node["state"] != NodeState.READY:
        return f"node_{node['state']}"
    if node["health_state"] == HealthState.FAILED:
        return "node_unhealthy"
    if node["reboot_required"]:
        return "reboot_required"
    return "" if node["slice_scheduling"] else "scheduling_off"
