"""Finding a whole machine for a tenant and keeping others off it until the claim is made."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from reconciler.domain.errors import Problem
from reconciler.domain.states import LIVE_CLAIMS, HealthState, NodeMode, NodeState, SlotState
from reconciler.planning.machine import MachineView, MachineWant, choose
from reconciler.planning.place import NoFit
from reconciler.store import discoveries, rows
from reconciler.store.claims import exclusive_ended_at
from reconciler.store.rows import Record
from reconciler.store.tables import claims, nodes, slots

# How often another one is looked for when somebody else took it meanwhile (PostgreSQL only).
_TRIES = 20
_IDLE = (SlotState.DISABLED, SlotState.AVAILABLE)


def reserve(conn: sa.Connection, want: MachineWant) -> tuple[Record, Record]:
    """A machine that is free, locked until the transaction ends, and its discovery.

    One that others hold locked is passed over while another fits; only then are they waited for.
    """
    passed: frozenset[str] = frozenset()
    for _ in range(_TRIES):
        found = choose(_views(conn, passed), want)
        if isinstance(found, NoFit) and passed:
            rows.get(conn, nodes, min(passed), "node", lock=True)
            passed = frozenset()
        elif isinstance(found, NoFit):
            raise _none(found)
        else:
            query = sa.select(nodes).where(nodes.c.id == found)
            node = rows.first(conn, query.with_for_update(skip_locked=True))
            discovery = discoveries.latest(conn, found)
            if node is None:
                passed |= {found}
            elif discovery is not None and not _refusal(conn, node):
                return node, discovery
    raise Problem(
        "generation_conflict",
        409,
        expected="a machine that stays free while it is being claimed",
        found=f"others took it {_TRIES} times",
        remedy="repeat the request",
    )


def _views(conn: sa.Connection, without: frozenset[str]) -> Iterator[MachineView]:
    sliced = set(conn.execute(sa.select(slots.c.node_id).distinct()).scalars())
    query = sa.select(nodes).where(nodes.c.state != NodeState.RETIRED)
    for node in rows.every(conn, query.order_by(nodes.c.id)):
        if node["id"] not in without:
            yield MachineView(
                id=node["id"],
                region=node["region"],
                pool=node["pool"],
                profile=node["profile"],
                refusal=_refusal(conn, node),
                sliced=node["id"] in sliced,
            )


def _refusal(conn: sa.Connection, node: Record) -> str:
    """Why a node is not given away, as a code; "" when it is."""
    for wrong, reason in (
        (node["mode"] != NodeMode.BAREMETAL, "not_baremetal"),
        (node["state"] != NodeState.READY, f"node_{node['state']}"),
        (node["unclean_allocation_id"], "not_clean"),
        (node["health_state"] == HealthState.FAILED, "node_unhealthy"),
        (node["health_state"] == HealthState.DEGRADED, "node_degraded"),
        (node["reboot_required"], "reboot_required"),
        (not node["tenant_address"], "tenant_address_missing"),
    ):
        if wrong:
            return reason
    return _in_use(conn, node["id"]) or _unknown(conn, node)


def _in_use(conn: sa.Connection, node_id: str) -> str:
    live = sa.select(claims.c.id).where(
        claims.c.node_id == node_id, claims.c.state.in_(LIVE_CLAIMS)
    )
    if rows.first(conn, live) is not None:
        return "claimed"
    busy = sa.select(slots.c.id).where(slots.c.node_id == node_id, slots.c.status.not_in(_IDLE))
    return "slots_in_use" if rows.first(conn, busy) is not None else ""


def _unknown(conn: sa.Connection, node: Record) -> str:
    """What is there must have been seen since the last tenant, under the present boot (I16)."""
    seen = discoveries.latest(conn, node["id"])
    if seen is None:
        return "not_discovered"
    same = node["boot_id"] and seen["boot_id"] == node["boot_id"]
    if not same or seen["install_id"] != node["install_id"]:
        return "discovery_stale"
    before = seen["observed_at"] < exclusive_ended_at(conn, node["id"])
    return "discovery_stale" if before else ""


def _none(found: NoFit) -> Problem:
    return Problem(
        "no_capacity",
        409,
        expected="a free machine in bare-metal mode",
        found=found.explanation["summary"],
        remedy="ask later, or for GPU slices",
        detail={"explanation": found.explanation},
    )
