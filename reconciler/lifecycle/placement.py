"""Placement of slices: choose a node and slots and lock them until they are claimed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows, settings
from reconciler.db.schema import Slot, nodes, slots
from reconciler.db.schema import settings as settings_table
from reconciler.model.bundle import REQUIRED
from reconciler.model.errors import Problem
from reconciler.model.scheduler.explain import Explanation, explain
from reconciler.model.scheduler.place import Placement, by_numa, place
from reconciler.model.scheduler.snapshot import NodeView, NvlinkSets, SlotView, Snapshot, Want
from reconciler.model.scheduler.snapshot import refusal as node_refusal
from reconciler.model.states import (
    IDLE_SLOTS,
    HealthState,
    NodeMode,
    NodeState,
    SharingMechanism,
    SlotState,
)

# Attempts to reserve slots when concurrent launches take the candidates (PostgreSQL only).
TRIES = 20
# Number of nodes that a launch first judges slot by slot, and the factor by which it widens. The
# counts miss locked slots, incomplete rows and NVLink sets, but these seldom rule out all of the
# first nodes.
_FIRST = 6
_WIDER = 3
# Single slots requested in one statement after another launch has locked the best slot.
_AT_ONCE = 6
_OFF = frozenset({"site_off", "scheduling_off"})


class NoRoom(Problem):
    """No placement exists for `want`.

    `refusal` explains the reason outside the transaction of the launch. It is slow and takes no
    locks, while a launch's transaction delays other writers.
    """

    def __init__(self, want: Want) -> None:
        super().__init__(
            "no_capacity",
            expected=f"{want.gpus} free GPU{'' if want.gpus == 1 else 's'} on one node",
            found="none",
            remedy="try again later",
        )
        self.want = want


def reserve(
    conn: sa.Connection, want: Want, *, without: Collection[str] = ()
) -> tuple[str, list[Slot]]:
    """Return a node and its locked slots for the request. The claim checks them again.

    without: nodes that do not serve it.

    The best-ranked nodes are tried first, then increasingly many others. Locked slots are skipped
    while another placement fits. Only when none fits does this wait, because the other transactions
    may still release their slots.
    """
    for _ in range(TRIES):
        passed: set[str] = set()
        # Every node with a slice ranks above every node without slices.
        for sliced in (True, False):
            reserved = _search(conn, want, passed, without, sliced=sliced)
            if reserved is not None:
                return reserved
        if not passed:
            raise NoRoom(want)
        _wait(conn, passed)
    raise contended()


def contended() -> Problem:
    """Problem when concurrent launches took the slots in every attempt."""
    return Problem(
        "generation_conflict",
        expected="slots that stay free while they are being reserved",
        found=f"concurrent launches took them {TRIES} times",
        remedy="repeat the request",
    )


def refusal(conn: sa.Connection, want: Want) -> Problem | None:
    """Why the request cannot be placed; None when it fits by now.

    `reserve` reads two snapshots, and this only one: a node may get its first slice in between.
    """
    placement, explanation = judge(conn, want)
    if placement is not None:
        return None
    apart = _apart(snapshot(conn), want) if want.gpus > 1 else None
    return _barred(explanation, want) or apart or _no_capacity(explanation, want)


def judge(conn: sa.Connection, want: Want) -> tuple[Placement | None, Explanation]:
    """The placement of the request and the judgement of every slot. Nothing is reserved."""
    everything = snapshot(conn)
    return place(everything, want), explain(everything, want)


def regions(conn: sa.Connection, wants: Sequence[Want]) -> set[str]:
    """Regions where at least one of the requests can be placed now. Nothing is reserved."""
    of_region: dict[str, list[NodeView]] = defaultdict(list)
    for node in snapshot(conn).nodes:
        of_region[node.region].append(node)
    pictures = {region: Snapshot.of(views) for region, views in of_region.items()}
    return {
        region
        for region, picture in pictures.items()
        if any(place(picture, want) is not None for want in wants)
    }


def _search(
    conn: sa.Connection, want: Want, passed: set[str], without: Collection[str], *, sliced: bool
) -> tuple[str, list[Slot]] | None:
    seen: set[str] = set()
    while True:
        limit = _FIRST + len(seen) * _WIDER
        picture = likely(conn, want, limit, sliced=sliced, beside={*seen, *without})
        reserved = _take(conn, picture, want, passed)
        if reserved is not None or len(picture.nodes) < limit:
            return reserved
        seen |= {node.id for node in picture.nodes}


def _take(
    conn: sa.Connection, snapshot: Snapshot, want: Want, passed: set[str]
) -> tuple[str, list[Slot]] | None:
    """Lock the best placement. Locked slots are added to `passed`, and the next best is tried."""
    at_once = 1
    while True:
        places = _places(snapshot, want, passed, at_once if want.gpus == 1 else 1)
        if not places:
            return None
        slot_ids = [slot_id for placement in places for slot_id in placement.slot_ids]
        if want.gpus > 1:
            locked = _all_or_none(conn, slot_ids)
        else:
            locked = _first(conn, slot_ids) if len(places) > 1 else _lock(conn, slot_ids, skip=True)
        for placement in places:
            if set(placement.slot_ids) <= set(locked):
                return placement.node_id, [locked[slot_id] for slot_id in placement.slot_ids]
            passed |= set(placement.slot_ids) - set(locked)
        # Concurrent launches want the same slots in the same order, so request several at once.
        at_once = _AT_ONCE


def _places(snapshot: Snapshot, want: Want, passed: set[str], most: int) -> list[Placement]:
    """The best placements in order, each without the slots of the placements before it."""
    places: list[Placement] = []
    without = set(passed)
    while len(places) < most:
        placement = place(snapshot.without(frozenset(without)) if without else snapshot, want)
        if placement is None:
            break
        places.append(placement)
        without |= set(placement.slot_ids)
    return places


def _lock(conn: sa.Connection, slot_ids: Sequence[str], *, skip: bool) -> dict[str, Slot]:
    locked = conn.execute(_locking(skip), {"ids": slot_ids}).mappings()
    return {slot["id"]: Slot(**slot) for slot in locked}


def _all_or_none(conn: sa.Connection, slot_ids: Sequence[str]) -> dict[str, Slot]:
    """Lock all slots or none, because a partial lock would block other launches."""
    savepoint = conn.begin_nested()
    locked = _lock(conn, slot_ids, skip=True)
    if len(locked) == len(slot_ids):
        savepoint.commit()
    else:
        savepoint.rollback()
    return locked


def _wait(conn: sa.Connection, slot_ids: Collection[str]) -> None:
    """Wait until the slots are unlocked, and keep no lock: two launches could deadlock."""
    savepoint = conn.begin_nested()
    _lock(conn, sorted(slot_ids), skip=False)
    savepoint.rollback()


def _first(conn: sa.Connection, slot_ids: Sequence[str]) -> dict[str, Slot]:
    """Lock the first unlocked slot, in the given order."""
    padded = [*slot_ids, *[""] * (_AT_ONCE - len(slot_ids))]
    locked = conn.execute(_choosing(), {f"id{at}": id for at, id in enumerate(padded)}).mappings()
    return {slot["id"]: Slot(**slot) for slot in locked}


@cache
def _locking(skip: bool) -> sa.Select[Any]:
    query = sa.select(slots).where(
        slots.c.id.in_(sa.bindparam("ids", expanding=True)), slots.c.status == SlotState.AVAILABLE
    )
    return query.order_by(slots.c.id).with_for_update(skip_locked=skip)


@cache
def _choosing() -> sa.Select[Any]:
    given = [sa.bindparam(f"id{at}", type_=sa.Text) for at in range(_AT_ONCE)]
    order = sa.case(*((slots.c.id == id, at) for at, id in enumerate(given)))
    query = sa.select(slots).where(slots.c.id.in_(given), slots.c.status == SlotState.AVAILABLE)
    return query.order_by(order).limit(1).with_for_update(skip_locked=True)


def _barred(explanation: Explanation, want: Want) -> Problem | None:
    """Problem when every node of this request has a profile that sells no such slice."""
    named = want.profiles or [name for name, _ in want.barred]
    refusals = {barred.code: barred for name, barred in want.barred if name in named}
    codes = {code for code in explanation["reasons"] if not code.startswith("other_")}
    if explanation["free"] or not codes or not codes <= set(refusals):
        return None
    barred = refusals[min(codes)]
    return Problem(
        barred.code,
        barred.status,
        expected=barred.expected,
        found=barred.found or f"{want.gpus} GPUs",
        remedy=barred.remedy,
    )


def _apart(snapshot: Snapshot, want: Want) -> Problem | None:
    """Problem when nodes have so many slots, but no NUMA node of theirs ever has."""
    nodes = [node for node in snapshot.nodes if not node_refusal(node, want)]
    most = max((len(cell) for node in nodes for cell in by_numa(node.slots)), default=0)
    enough = any(len(node.slots) >= want.gpus for node in nodes)
    if not enough or most >= want.gpus or any(node.profile in want.spanning for node in nodes):
        return None
    return Problem(
        "numa_node_exceeded",
        422,
        expected=f"{want.gpus} GPUs on one NUMA node of a host",
        found=f"at most {most}",
        remedy=f"ask for {most} or fewer; a slice spans NUMA nodes only if vm.span_numa of the"
        " hardware profile is set",
    )


def _no_capacity(explanation: Explanation, want: Want) -> Problem:
    refusals = set(explanation["reasons"])
    if refusals and refusals <= _OFF and not explanation["free"]:
        return Problem(
            "scheduling_off",
            expected="slice scheduling switched on for the site and a node",
            found=", ".join(sorted(refusals)),
            remedy="an operator switches it on once the node is proven, with `gpuaas scheduling on`"
            " and `gpuaas nodes scheduling NODE on`, each with `--reason WHY`",
            detail={"explanation": explanation},
        )
    return Problem(
        "no_capacity",
        expected=f"{want.gpus} free GPU{'' if want.gpus == 1 else 's'} on one node",
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
    return f"ask for {', or for '.join(offers)}, or later" if offers else "try again later"


Row = sa.RowMapping
# The topology columns of a slot's metadata. A launch does not read the rest.
_PLACE = (
    slots.c.capacity_metadata["pcie_switch"].as_string().label("pcie_switch"),
    slots.c.capacity_metadata["gpu_module_id"].label("gpu_module_id"),
    slots.c.capacity_metadata["fabric_claim_mode"].as_string().label("fabric_claim_mode"),
    slots.c.capacity_metadata["nvlink_sets"].label("nvlink_sets"),
)
_SITE = sa.select(settings_table.c.value).where(settings_table.c.name == settings.SCHEDULING)


def snapshot(conn: sa.Connection) -> Snapshot:
    """Snapshot of all nodes that are not retired and have approved slots."""
    return _read(conn, _picture())


def likely(
    conn: sa.Connection, want: Want, limit: int, *, sliced: bool, beside: Collection[str] = ()
) -> Snapshot:
    """The nodes that rank first for this request by their slot counts, except those in `beside`.

    sliced: consider only nodes with a slice, or only nodes without. The order approximates
    place.score: first nodes with room on one NUMA node, then the fullest, then those with a
    nearly full NUMA node. Nothing is decided here, because each slot is judged later.
    """
    requested = {"region": want.region, "pool": want.pool, "id": want.node_id}
    given = {name: value for name, value in requested.items() if value}
    lists = {
        "profiles": sorted(want.profiles),
        "barred": sorted(name for name, _ in want.barred),
        "spanning": sorted(want.spanning),
        "beside": sorted(beside),
    }
    lists = {name: values for name, values in lists.items() if values}
    query = _likely(sliced, tuple(given), frozenset(lists))
    values: dict[str, Any] = {f"wanted_{name}": value for name, value in given.items()}
    return _read(conn, query, {**values, **lists, "gpus": want.gpus, "most": limit})


def _read(
    conn: sa.Connection, query: sa.Select[Any], values: Mapping[str, Any] | None = None
) -> Snapshot:
    of_node: dict[str, list[Row]] = defaultdict(list)
    for slot in conn.execute(query, values or {}).mappings():
        of_node[slot["node_id"]].append(slot)
    return Snapshot.of(_node(slot_rows) for slot_rows in of_node.values())


@cache
def _picture() -> sa.Select[Any]:
    """Query for a row per slot with its node's columns. The database computes the flags."""
    node_columns = ("region", "pool", "profile", "mode", "state", "health_state", "reboot_required")
    columns = ("id", "node_id", "slot_index", "status", "numa_node", "fabric_vf_pci_address")
    exclusive = slots.c.sharing_mechanism == SharingMechanism.EXCLUSIVE_DEVICE
    return (
        sa.select(
            *(nodes.c[name] for name in node_columns),
            nodes.c.slice_scheduling,
            _SITE.scalar_subquery().label("site"),
            *(slots.c[name] for name in columns),
            *_PLACE,
            _complete().label("complete"),
            exclusive.label("exclusive_device"),
            slots.c.available_proof_id.is_not(None).label("proven"),
        )
        .join_from(nodes, slots, slots.c.node_id == nodes.c.id)
        .where(nodes.c.state != NodeState.RETIRED, slots.c.retired_at.is_(None))
    )


def _complete() -> sa.ColumnElement[bool]:
    """`Bundle.missing` as an SQL condition."""
    columns = [slots.c[name] for name in REQUIRED]
    return sa.and_(*(column != (0 if column.type.python_type is int else "") for column in columns))


@cache
def _likely(sliced: bool, requested: tuple[str, ...], lists: frozenset[str]) -> sa.Select[Any]:
    counted = _counted(sliced)
    host = nodes.alias("host")
    gpus = sa.bindparam("gpus", type_=sa.Integer)

    def listed(column: sa.ColumnElement[str], name: str) -> sa.ColumnElement[bool]:
        if name not in lists:
            return sa.false()
        return column.in_(sa.bindparam(name, expanding=True, type_=sa.Text))

    some = [listed(host.c.profile, "profiles")] if "profiles" in lists else []
    fit = sa.and_(
        host.c.mode == NodeMode.SLICE,
        host.c.state == NodeState.READY,
        host.c.health_state != HealthState.FAILED,
        host.c.reboot_required.is_(False),
        host.c.slice_scheduling.is_(True),
        *(host.c[name] == sa.bindparam(f"wanted_{name}") for name in requested),
        *some,
        *([sa.not_(listed(host.c.profile, "barred"))] if "barred" in lists else []),
    )
    counts: sa.CTE | sa.Subquery
    if sliced:
        # Few nodes are left, so each is checked by a subquery. With a join, a planner that expects
        # almost no fit node, as it does while all nodes are alike, would count again for each.
        counts = counted.subquery("counts")
        fits = sa.select(sa.literal(1)).where(host.c.id == counts.c.node_id, fit).scalar_subquery()
        best = sa.select(counts.c.node_id).where(fits == 1)
    else:
        # Nodes without slices may be the whole site. They are counted once, and two sets exclude
        # the rest, because PostgreSQL hashes these sets at any estimated size.
        counts = counted.cte("counts").prefix_with("MATERIALIZED", dialect="postgresql")
        unfit = sa.select(host.c.id).where(sa.not_(fit))
        node_id = counts.c.node_id
        best = sa.select(node_id).where(node_id.not_in(unfit), node_id.not_in(_busy()))
    # Whether a slice may span NUMA nodes is judged later, for each node by its profile.
    best = best.where((counts.c.free if "spanning" in lists else counts.c.together) >= gpus)
    if "beside" in lists:
        best = best.where(sa.not_(listed(counts.c.node_id, "beside")))
    best = best.order_by(
        sa.case((counts.c.together >= gpus, 0), else_=1),
        counts.c.free,
        counts.c.least,
        counts.c.node_id,
    ).limit(sa.bindparam("most", type_=sa.Integer))
    return _picture().where(nodes.c.id.in_(best))


def _counted(sliced: bool) -> sa.Select[Any]:
    """Free slots per node. together, least: most and fewest free slots of its NUMA nodes."""
    # Cast to integer, because PostgreSQL sums bigint values as numeric.
    counted = sa.cast(sa.func.count(), sa.Integer)
    query = sa.select(slots.c.node_id, counted.label("free"))
    parts = _free(query, sliced).group_by(slots.c.node_id, slots.c.numa_node).subquery("parts")
    free = parts.c.free
    sums = (sa.func.sum(free).label("free"), sa.func.max(free).label("together"))
    least = sa.func.min(free).label("least")
    return sa.select(parts.c.node_id, *sums, least).group_by(parts.c.node_id)


def _free(query: sa.Select[Any], sliced: bool) -> sa.Select[Any]:
    # Index-only scans of ix_slots_free and ix_slots_busy answer this, so do not read other columns.
    # Nodes with slices come from the smaller set. The others need a scan of all free slots, which
    # happens only when no sliced node has room.
    query = query.where(
        slots.c.retired_at.is_(None), slots.c.status == rows.literal(SlotState.AVAILABLE)
    )
    return query.where(slots.c.node_id.in_(_busy())) if sliced else query


def _busy() -> sa.Select[tuple[str]]:
    """Nodes with a slice, a row for each busy slot."""
    other = slots.alias("busy")
    return sa.select(other.c.node_id).where(
        other.c.retired_at.is_(None),
        other.c.status.not_in(rows.literals(IDLE_SLOTS)),
    )


def _node(slot_rows: list[Row]) -> NodeView:
    node = slot_rows[0]
    return NodeView(
        id=node["node_id"],
        region=node["region"],
        pool=node["pool"],
        profile=node["profile"],
        refusal=_refusal(node) or ("" if node["site"] else "site_off"),
        slots=tuple(map(_slot, slot_rows)),
        nvlink_sets=_nvlink_sets(slot_rows),
    )


def _slot(slot: Row) -> SlotView:
    module = slot["gpu_module_id"]
    return SlotView(
        id=slot["id"],
        index=slot["slot_index"],
        status=slot["status"],
        numa_node=slot["numa_node"],
        switch=slot["pcie_switch"] or "",
        module=module if isinstance(module, int) else -1,
        complete=slot["complete"],
        exclusive_device=slot["exclusive_device"],
        proven=slot["proven"],
        fabric=slot["fabric_vf_pci_address"],
        own_function=slot["fabric_claim_mode"] == "per_slot_vf",
    )


def _nvlink_sets(slot_rows: Iterable[Row]) -> NvlinkSets:
    """NVLink sets from the hardware profile, as stored when each slot was approved."""
    listed: list[Any] = [slot["nvlink_sets"] or [] for slot in slot_rows]
    return frozenset(frozenset(modules) for sets in listed for modules in sets)


def _refusal(node: Row) -> str:
    if node["mode"] != NodeMode.SLICE:
        return "not_slice"
    if node["state"] != NodeState.READY:
        return f"node_{node['state']}"
    if node["health_state"] == HealthState.FAILED:
        return "node_unhealthy"
    if node["reboot_required"]:
        return "reboot_required"
    return "" if node["slice_scheduling"] else "scheduling_off"
