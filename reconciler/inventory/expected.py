"""The records of the site as NetBox should show them: nodes with their slots, and slices."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db import settings as site_settings
from reconciler.db.schema import Node, allocations, claims, nodes, parities, slots
from reconciler.model.states import (
    LIVE_ALLOCATIONS,
    LIVE_CLAIMS,
    AllocationState,
    CapacityShape,
    ClaimKind,
    NodeMode,
    NodeState,
    SlotState,
)

# Custom fields of a device, with their type in NetBox. `gpuaas_slots` contains no device addresses,
# because many people can read it. SEAL is a fingerprint of the other values and the site. If
# somebody else or another site's service changes a value, SEAL no longer matches, and the value is
# not overwritten.
SEAL = "gpuaas_written"
DEVICE_FIELDS: Mapping[str, str] = {
    "gpuaas_node_id": "text",
    "gpuaas_state": "text",
    "gpuaas_mode": "text",
    "gpuaas_slots_total": "integer",
    "gpuaas_slots_available": "integer",
    "gpuaas_slots_active": "integer",
    "gpuaas_slots_blocked": "integer",
    "gpuaas_slots": "json",
    "gpuaas_parity_at": "text",
    "gpuaas_last_seen": "text",
    SEAL: "text",
}
ALLOCATION = "gpuaas_allocation_id"
MACHINE_FIELDS: Mapping[str, str] = {ALLOCATION: "text", SEAL: "text"}
# Status of a virtual machine, by the state of its allocation.
_STATUS = {
    AllocationState.REQUESTED: "planned",
    AllocationState.PROVISIONING: "staged",
    AllocationState.ACTIVE: "active",
    AllocationState.RELEASING: "decommissioning",
    AllocationState.FAILED: "failed",
}
_AT_ONCE = 500
_SEAL = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class ExpectedNode:
    """A node. fields: the custom fields of its device. blocked: it has blocked slots. site: see
    `seal`.
    """

    node: Node
    fields: Mapping[str, Any]
    blocked: bool
    site: str = ""

    @property
    def purpose(self) -> str:
        return NodeMode(self.node.mode).purpose


@dataclass(frozen=True)
class ExpectedMachine:
    """The virtual machine of a slice. state: of its allocation. mac, address: of its interface, as
    it is or was. holds: it has a slot. site: see `seal`.
    """

    allocation_id: str
    node_id: str
    state: str
    status: str
    mac: str = ""
    address: str = ""
    holds: bool = False
    site: str = ""

    @property
    def name(self) -> str:
        return f"gpuaas-slice-{self.allocation_id.replace('-', '')}"


def read_nodes(conn: sa.Connection) -> list[ExpectedNode]:
    """Every node, the retired ones included."""
    of_node: dict[str, list[dict[str, Any]]] = defaultdict(list)
    columns = (slots.c.node_id, slots.c.slot_index, slots.c.status, slots.c.health_state)
    query = sa.select(*columns).where(slots.c.retired_at.is_(None))
    for node_id, index, status, health in conn.execute(query.order_by(slots.c.slot_index)):
        of_node[node_id].append({"index": index, "status": status, "health": health})
    latest = sa.select(parities.c.node_id, sa.func.max(parities.c.created_at))
    parity = {row[0]: row[1] for row in conn.execute(latest.group_by(parities.c.node_id))}
    all_nodes = rows.every(conn, sa.select(nodes).order_by(nodes.c.name), Node)
    site = _site(conn)
    return [_node(node, of_node[node.id], parity.get(node.id), site) for node in all_nodes]


def _site(conn: sa.Connection) -> str:
    """A text that identifies this site; "" before the first start of its service."""
    authorities = site_settings.read(conn, site_settings.AUTHORITIES, {})
    return str(authorities.get("host_ca", ""))


def _node(
    node: Node, of_node: list[dict[str, Any]], parity_at: float | None, site: str
) -> ExpectedNode:
    counts = Counter(slot["status"] for slot in of_node)
    values = {
        "gpuaas_node_id": node.id,
        "gpuaas_state": node.state,
        "gpuaas_mode": node.mode,
        "gpuaas_slots_total": len(of_node),
        "gpuaas_slots_available": counts[SlotState.AVAILABLE],
        "gpuaas_slots_active": counts[SlotState.ACTIVE],
        "gpuaas_slots_blocked": counts[SlotState.CLEANUP_BLOCKED],
        "gpuaas_slots": of_node,
        "gpuaas_parity_at": clock.iso(parity_at) if parity_at else None,
        # The day only, because a new time every few minutes would fill the device's change log.
        "gpuaas_last_seen": str(clock.iso(node.last_contact_at))[:10]
        if node.last_contact_at
        else None,
    }
    return ExpectedNode(node, values, counts[SlotState.CLEANUP_BLOCKED] > 0, site)


def read_machines(conn: sa.Connection, shown: Collection[str]) -> list[ExpectedMachine]:
    """Every live slice, and the ended ones among the allocations that NetBox shows."""
    columns = (
        *(allocations.c.id, allocations.c.node_id, allocations.c.state, allocations.c.stopped),
        allocations.c.capacity_shape,
    )
    shape = allocations.c.capacity_shape == CapacityShape.GPU_SLICE
    query = sa.select(*columns).where(shape)
    by_id = {
        row.id: row for row in conn.execute(query.where(allocations.c.state.in_(LIVE_ALLOCATIONS)))
    }
    for some in _chunks(sorted(set(shown) - by_id.keys())):
        by_id |= {row.id: row for row in conn.execute(query.where(allocations.c.id.in_(some)))}
    of_slice = (
        sa.select(claims.c.allocation_id, claims.c.management_mac, claims.c.private_ip)
        .where(claims.c.kind == ClaimKind.SLICE)
        # The last row of an allocation wins below, and that is its first slot.
        .order_by(claims.c.created_at, claims.c.position.desc())
    )
    live = claims.c.state.in_(LIVE_CLAIMS)
    interfaces = {
        key: (mac, address, True) for key, mac, address in conn.execute(of_slice.where(live))
    }
    for some in _chunks(sorted(by_id.keys() - interfaces.keys())):
        of_ended = of_slice.where(claims.c.allocation_id.in_(some))
        interfaces |= {key: (mac, ip, False) for key, mac, ip in conn.execute(of_ended)}
    site = _site(conn)
    return [
        ExpectedMachine(
            *(row.id, row.node_id or "", row.state, _status(row.state, row.stopped)),
            *interfaces.get(row.id, ("", "", False)),
            site,
        )
        for row in by_id.values()
    ]


def _chunks(ids: list[str]) -> Iterable[list[str]]:
    return (ids[begin : begin + _AT_ONCE] for begin in range(0, len(ids), _AT_ONCE))


def _status(state: str, stopped: bool) -> str:
    if state == AllocationState.ACTIVE and stopped:
        return "offline"
    return _STATUS.get(AllocationState(state), "")


def is_retired(node: Node) -> bool:
    return node.state == NodeState.RETIRED


def seal(values: Mapping[str, Any], site: str = "") -> str:
    """Fingerprint of values as NetBox gives them back. site: whose service wrote them."""
    text = site + json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_seal(value: object) -> TypeGuard[str]:
    """Whether the value has the form of a fingerprint; people and NetBox can write any other."""
    return isinstance(value, str) and _SEAL.fullmatch(value) is not None


def is_sealed(values: Mapping[str, Any], sealed: object, site: str) -> bool:
    """Whether this service wrote the values, also in a version whose fingerprints had no site."""
    return sealed in (seal(values, site), seal(values))
