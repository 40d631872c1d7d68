"""The records of machines and their life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.domain import transitions
from reconciler.domain.act import Act, require_reason
from reconciler.domain.errors import Problem
from reconciler.domain.states import LIVE_CLAIMS, NodeMode, NodeState, SlotState
from reconciler.store import (
    audit,
    baremetal,
    discoveries,
    history,
    lifecycle,
    order,
    rows,
    tasks,
    writeoff,
)
from reconciler.store.contact import close_gate, contacted, observed
from reconciler.store.lifecycle import advance
from reconciler.store.paging import Order, Page, part
from reconciler.store.rows import Record
from reconciler.store.tables import claims, nodes, slots

# Their file is their own because the reports of a host use them too.
__all__ = ["contacted", "observed"]

CHANGEABLE = (
    "name",
    "address",
    "port",
    "ssh_user",
    "tenant_address",
    "tenant_port",
    "telemetry_url",
    "fabric_interface",
    "fabric_address",
    "region",
    "pool",
    "profile",
    "maas_tags",
    "health_state",
    "health_detail",
)
ORDER = Order(nodes, ("name",))
# A slot in one of these states holds, or may hold, something of a tenant.
# In one of these a run is at work, or a tenant; of others, evidence is all that is missing.
AT_WORK = tuple(
    state
    for state in SlotState
    if state not in (SlotState.DISABLED, SlotState.AVAILABLE, SlotState.CLEANUP_BLOCKED)
)
BUSY = tuple(state for state in SlotState if state not in (SlotState.DISABLED, SlotState.AVAILABLE))


def create(
    conn: sa.Connection,
    act: Act,
    *,
    id: str,
    name: str = "",
    address: str = "",
    port: int = 22,
    ssh_user: str = "root",
    tenant_address: str = "",
    tenant_port: int = 22,
    telemetry_url: str = "",
    fabric_interface: str = "",
    fabric_address: str = "",
    region: str = "",
    pool: str = "default",
    profile: str = "",
    maas_tags: Sequence[str] | None = None,
    mode: NodeMode = NodeMode.CONVERTING_TO_SLICE,
) -> Record:
    """A machine that is to be enrolled; mode says what it will be.

    maas_tags: None when they are not known, which is not the same as no tags.
    """
    taken = sa.or_(nodes.c.id == id, nodes.c.name == (name or id))
    if rows.first(conn, sa.select(nodes).where(taken)):
        raise Problem(
            "node_exists",
            409,
            expected="an id and a name that no node has",
            found=f"{id!r}, {name or id!r}",
            remedy="use the node that is there, or another id and name",
        )
    record = rows.add(
        conn,
        nodes,
        {
            "id": id,
            "name": name or id,
            "address": address,
            "port": port,
            "ssh_user": ssh_user,
            "tenant_address": tenant_address,
            "tenant_port": tenant_port,
            "telemetry_url": telemetry_url,
            "fabric_interface": fabric_interface,
            "fabric_address": fabric_address,
            "region": region,
            "pool": pool,
            "profile": profile,
            "maas_tags": None if maas_tags is None else list(maas_tags),
            "mode": str(mode),
            "mode_deadline_at": lifecycle.limit("node_mode", mode),
            "state": NodeState.ENROLLING.value,
            "deadline_at": lifecycle.limit("node", NodeState.ENROLLING),
        },
    )
    lifecycle.begin(conn, "node", record, act)
    audit.write(conn, act, "admin.node.created", "node", id)
    return record


def get(conn: sa.Connection, id: str) -> Record:
    """The node with an id."""
    return rows.get(conn, nodes, id, "node")


def every(
    conn: sa.Connection,
    *,
    state: NodeState | None = None,
    mode: NodeMode | None = None,
    page: Page | None = None,
) -> list[Record]:
    """By name."""
    query = rows.where(sa.select(nodes), nodes, state=state, mode=mode)
    return rows.every(conn, part(query, ORDER, page))


def change(conn: sa.Connection, id: str, act: Act, **values: Any) -> Record:
    """Change what an operator may: where it is, what it belongs to, how it is doing."""
    unknown = sorted(set(values) - set(CHANGEABLE))
    if unknown:
        raise Problem(
            "field_not_changeable",
            422,
            expected=", ".join(CHANGEABLE),
            found=", ".join(unknown),
            remedy="leave these out: they follow from what happens to the node",
        )
    before = rows.get(conn, nodes, id, "node", lock=True)
    update = sa.update(nodes).where(nodes.c.id == id)
    conn.execute(update.values(generation=nodes.c.generation + 1, **values))
    detail = {name: {"from": before[name], "to": value} for name, value in values.items()}
    audit.write(conn, act, "admin.node.changed", "node", id, detail=detail)
    return get(conn, id)


def enrolled(
    conn: sa.Connection,
    id: str,
    act: Act,
    *,
    machine_id: str,
    host_key: str,
    boot_id: str = "",
) -> Record:
    """The host's key is certified. Another installation than before must be bootstrapped again."""
    before = rows.get(conn, nodes, id, "node", lock=True)
    identity = {"machine_id": machine_id, "host_key": host_key, "boot_id": boot_id}
    observed(conn, id, act, identity=identity)
    node = get(conn, id)
    renewed = before["install_id"] == node["install_id"]
    if before["state"] == NodeState.BOOTSTRAPPING or (
        renewed and before["state"] not in (NodeState.ENROLLING, NodeState.UNREACHABLE)
    ):
        return node
    if renewed and before["state"] == NodeState.UNREACHABLE:
        return regained(conn, id, act)
    return advance(conn, "node", id, "enrol", act.because("enrolled", {"identity": identity}))


def bootstrapped(
    conn: sa.Connection,
    id: str,
    act: Act,
    *,
    identity: Mapping[str, Any],
    began: float | None = None,
) -> Record:
    """The host is prepared; a conversion to slice host that was in flight is complete."""
    observed(conn, id, act, identity=identity, reboot_required=False, began=began)
    node = get(conn, id)
    if node["state"] == NodeState.BOOTSTRAPPING:
        node = advance(conn, "node", id, "bootstrap", act)
    if node["mode"] == NodeMode.CONVERTING_TO_SLICE:
        node = advance(conn, "node_mode", id, "converted", act)
    return node


def learn_fabric(conn: sa.Connection, id: str, act: Act, *, interface: str, address: str) -> Record:
    """What the host has on the fabric already, if nobody has said what it should have."""
    node = rows.get(conn, nodes, id, "node", lock=True)
    if not (interface and address) or node["fabric_interface"] or node["fabric_address"]:
        return node
    values = {"fabric_interface": interface, "fabric_address": address}
    conn.execute(
        sa.update(nodes).where(nodes.c.id == id).values(generation=nodes.c.generation + 1, **values)
    )
    audit.write(conn, act, "node.fabric.learned", "node", id, detail=values)
    return get(conn, id)


def lost(conn: sa.Connection, id: str, act: Act) -> Record:
    """Contact is lost. Nothing is freed: what goes on there is unknown."""
    return advance(conn, "node", id, "lose", act)


def regained(conn: sa.Connection, id: str, act: Act) -> Record:
    """Contact is back: the node is what it was before."""
    losses = [row for row in history.of(conn, "node", id) if row["event"] == "lose"]
    before = losses[-1]["source"] if losses else NodeState.MAINTENANCE.value
    return advance(conn, "node", id, f"regain_{before}", act)


def drain(conn: sa.Connection, id: str, act: Act) -> Record:
    """Take nothing new."""
    return _by_admin(conn, id, "drain", act)


def resume(conn: sa.Connection, id: str, act: Act) -> Record:
    """Take work again."""
    return _by_admin(conn, id, "resume", act)


def maintain(conn: sa.Connection, id: str, act: Act) -> Record:
    """Out of use until resumed; refused while a tenant is on it."""
    order.hold_node(conn, id)
    # First, so that a launch which has a slot by then is seen by the question after it, and none
    # that has only chosen one gets it.
    close_gate(conn, id, act.because("the node is in maintenance"))
    refuse_in_use(conn, id)
    return _by_admin(conn, id, "maintain", act)


def retire(conn: sa.Connection, id: str, act: Act) -> Record:
    """Gone for good; refused while a tenant is on it.

    Of a node that does not answer, what may be left on it is written off with it.
    """
    node = rows.get(conn, nodes, id, "node", lock=True)
    if transitions.target("node", node["state"], "retire") is None:
        return _by_admin(conn, id, "retire", act)
    lost = node["state"] == NodeState.UNREACHABLE
    if lost:
        require_reason(act, writeoff.WHY)
    else:
        baremetal.require_clean(node)
    # First, so that a launch which has a slot by then is seen by the question after it.
    close_gate(conn, id, act.because("the node is retired"))
    refuse_in_use(conn, id, busy=AT_WORK if lost else BUSY)
    given_up = writeoff.slots_of(conn, id, act)
    conn.execute(sa.update(nodes).where(nodes.c.id == id).values(slice_scheduling=False))
    for task in tasks.open_of_node(conn, id):
        tasks.cancel(conn, task["id"], act.because("its node is retired"))
    detail = {"written_off_slots": given_up, "unclean": node["unclean_allocation_id"]}
    return _by_admin(conn, id, "retire", act, detail)


def convert(conn: sa.Connection, id: str, to: NodeMode, act: Act) -> Record:
    """Begin a conversion, or go on with it: slots go off sale first.

    Problem `node_in_use` while a tenant or a clean-up is on the node, `transition_refused` when it
    is that already.
    """
    node = rows.get(conn, nodes, id, "node", lock=True)
    if node["mode"] == f"converting_to_{to}":
        return node
    baremetal.require_clean(node)
    close_gate(conn, id, act.because(f"conversion to {to} begins"))
    refuse_in_use(conn, id)
    conn.execute(sa.update(nodes).where(nodes.c.id == id).values(slice_scheduling=False))
    audit.write(conn, act, "admin.node.converted", "node", id, detail={"to": to})
    return advance(conn, "node_mode", id, f"to_{to}", act)


def require_enrolled(conn: sa.Connection, id: str) -> Record:
    """The node, unless its host has never enrolled: no run could reach that."""
    node = rows.get(conn, nodes, id, "node")
    if node["state"] == NodeState.ENROLLING:
        raise Problem(
            "node_not_enrolled",
            409,
            expected="a node whose host has enrolled",
            found=f"state {node['state']}: no key of its host is certified",
            remedy=f"run the script that `gpuaas nodes userdata {id}` prints on the host as root,"
            " then ask again",
        )
    return node


def require_slice_mode(conn: sa.Connection, id: str) -> Record:
    """The node, unless it is bare metal: a slice host is made of it on purpose or not at all."""
    node = rows.get(conn, nodes, id, "node")
    if node["mode"] in (NodeMode.BAREMETAL, NodeMode.CONVERTING_TO_BAREMETAL):
        raise Problem(
            "node_is_baremetal",
            409,
            expected="a slice host, or a node that is being made one",
            found=f"mode {node['mode']}",
            remedy="convert the node to a slice host first",
        )
    return node


def converted(conn: sa.Connection, id: str, act: Act) -> Record:
    """The conversion is done and proven."""
    return advance(conn, "node_mode", id, "converted", act)


def conversion_reverted(conn: sa.Connection, id: str, act: Act) -> Record:
    """The conversion was undone on the host."""
    return advance(conn, "node_mode", id, "revert", act)


def set_scheduling(conn: sa.Connection, id: str, on: bool, act: Act) -> Record:
    """Sell this node's slices, or stop; not before there is something proven to sell."""
    node = rows.get(conn, nodes, id, "node", lock=True)
    if on:
        approved = sa.select(slots.c.id).where(slots.c.node_id == id, slots.c.retired_at.is_(None))
        parity = discoveries.latest_parity(conn, id)
        missing = [
            what
            for what, there in (
                ("approved slots", rows.first(conn, approved) is not None),
                ("a passing parity report", parity is not None and not parity["failures"]),
            )
            if not there
        ]
        if missing:
            raise Problem(
                "scheduling_not_ready",
                409,
                expected="approved slots and a passing parity report",
                found=f"no {' and no '.join(missing)}",
                remedy="approve slots, bind the topology and run parity first",
            )
    update = sa.update(nodes).where(nodes.c.id == id)
    conn.execute(update.values(generation=nodes.c.generation + 1, slice_scheduling=on))
    detail = {"from": node["slice_scheduling"], "to": on}
    audit.write(conn, act, "admin.node.scheduling", "node", id, detail=detail)
    return get(conn, id)


def refuse_in_use(conn: sa.Connection, id: str, busy: Sequence[SlotState] = BUSY) -> None:
    """Problem `node_in_use`, asked before a host is restarted, made something else, or given up.

    Of a launch that is under way its end is waited for.
    """
    order.hold_slots(conn, id)
    held = sa.select(slots.c.id, slots.c.status).where(
        slots.c.node_id == id, slots.c.status.in_(busy)
    )
    live = sa.select(claims.c.id, claims.c.state).where(
        claims.c.node_id == id, claims.c.state.in_(LIVE_CLAIMS)
    )
    found = [f"{key} {state}" for query in (held, live) for key, state in conn.execute(query)]
    if found:
        raise Problem(
            "node_in_use",
            409,
            expected="a node without claims and without slots in use or in clean-up",
            found=", ".join(found),
            remedy="drain the node, release or recover what is on it, then ask again; of a node "
            "that does not answer, force the release of every allocation",
        )


def _by_admin(
    conn: sa.Connection, id: str, event: str, act: Act, detail: Mapping[str, Any] | None = None
) -> Record:
    node = advance(conn, "node", id, event, act)
    audit.write(conn, act, f"admin.node.{event}", "node", id, detail=detail)
    return node
