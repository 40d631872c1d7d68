"""Node records: creation, changes, and conditions for their use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, locks, rows
from reconciler.db.journal import advance
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Node, claims, nodes, slots
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import LIVE_CLAIMS, HealthState, NodeMode, NodeState, SlotState

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
# States of a slot on which a run or a tenant is at work. Other states at most wait for evidence.
AT_WORK = tuple(
    state
    for state in SlotState
    if state not in (SlotState.DISABLED, SlotState.AVAILABLE, SlotState.CLEANUP_BLOCKED)
)
# States of a slot that has, or may have, traces of a tenant.
BUSY = tuple(state for state in SlotState if state not in (SlotState.DISABLED, SlotState.AVAILABLE))


def create(
    conn: sa.Connection,
    act: Act,
    *,
    id: str,
    name: str = "",
    mode: NodeMode = NodeMode.CONVERTING_TO_SLICE,
    **values: Any,
) -> Node:
    """Add a node that is to be enrolled. mode: its mode, or the conversion to it. values: fields of
    CHANGEABLE; the table has their defaults.
    """
    _require_changeable(values)
    taken = sa.or_(nodes.c.id == id, nodes.c.name == (name or id))
    if rows.first(conn, sa.select(nodes).where(taken), Node):
        raise Problem(
            "node_exists",
            409,
            expected="an id and a name that no node has",
            found=f"{id!r}, {name or id!r}",
            remedy="use the node that is there, or another id and name",
        )
    record = rows.add(
        conn,
        Node,
        {
            "id": id,
            "name": name or id,
            **values,
            "mode": str(mode),
            "mode_deadline_at": journal.limit("node_mode", mode),
            "state": NodeState.ENROLLING.value,
            "deadline_at": journal.limit("node", NodeState.ENROLLING),
        },
    )
    journal.begin(conn, "node", record, act)
    journal.audit(conn, act, "admin.node.created", "node", id)
    return record


def get(conn: sa.Connection, id: str) -> Node:
    """The node with an id."""
    return rows.get(conn, Node, id)


def every(
    conn: sa.Connection,
    *,
    state: NodeState | None = None,
    mode: NodeMode | None = None,
    page: Page | None = None,
) -> list[Node]:
    """Nodes in the order of their names."""
    query = rows.where(sa.select(nodes), nodes, state=state, mode=mode)
    return rows.every(conn, part(query, ORDER, page), Node)


def change(conn: sa.Connection, id: str, act: Act, **values: Any) -> Node:
    """Change the fields that an operator may set: address, placement, profile, health."""
    _require_changeable(values)
    with locks.node(conn, id) as before:
        update(conn, id, **values)
    detail = {name: {"from": getattr(before, name), "to": value} for name, value in values.items()}
    journal.audit(conn, act, "admin.node.changed", "node", id, detail=detail)
    return get(conn, id)


def _require_changeable(values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - set(CHANGEABLE))
    if unknown:
        raise Problem(
            "field_not_changeable",
            422,
            expected=", ".join(CHANGEABLE),
            found=", ".join(unknown),
            remedy="leave these out: they follow from what happens to the node",
        )


def update(conn: sa.Connection, id: str, **values: Any) -> None:
    """Update the node with a new generation, so that a decision on an older read is refused."""
    later = {"generation": nodes.c.generation + 1}
    conn.execute(sa.update(nodes).where(nodes.c.id == id).values(**later, **values))


def set_health(
    conn: sa.Connection, node: Node, health: HealthState, detail: dict[str, Any], act: Act
) -> None:
    """Record the health that a report about the host shows, with history."""
    update(conn, node.id, health_state=health.value, health_detail=detail)
    journal.write_history(
        conn,
        "node_health",
        replace(node, generation=node.generation + 1),
        act.because(act.reason, {**act.evidence, "detail": detail}),
        source=node.health_state,
        event="observe",
        target=health.value,
    )


def require_enrolled(conn: sa.Connection, id: str) -> Node:
    """The node; Problem `node_not_enrolled` if its host never enrolled, as no run can reach it."""
    node = rows.get(conn, Node, id)
    if node.state == NodeState.ENROLLING:
        raise Problem(
            "node_not_enrolled",
            409,
            expected="a node whose host has enrolled",
            found=f"state {node.state}: no key of its host is certified",
            remedy=f"run the script that `gpuaas nodes userdata {id}` prints on the host as root,"
            " then ask again",
        )
    return node


def refuse_in_use(conn: sa.Connection, id: str, busy: Sequence[SlotState] = BUSY) -> None:
    """Problem `node_in_use` for a node with live claims or with slots in a busy state.

    For use before a host is restarted, converted, or given up. It waits for the end of a launch
    that is under way, because it locks the slots.
    """
    with locks.slots(conn, id):
        held = sa.select(slots.c.id, slots.c.status).where(
            slots.c.node_id == id, slots.c.status.in_(busy)
        )
        live = sa.select(claims.c.id, claims.c.state).where(
            claims.c.node_id == id, claims.c.state.in_(LIVE_CLAIMS)
        )
        uses = [f"{key} {state}" for query in (held, live) for key, state in conn.execute(query)]
        if uses:
            raise Problem(
                "node_in_use",
                409,
                expected="a node without claims and without slots in use or in clean-up",
                found=", ".join(uses),
                remedy="drain the node, release or recover what is on it, then ask again; of a node"
                " that does not answer, force the release of every allocation",
            )


def by_admin(
    conn: sa.Connection, id: str, event: str, act: Act, detail: Mapping[str, Any] | None = None
) -> Node:
    node = advance(conn, "node", id, event, act)
    journal.audit(conn, act, f"admin.node.{event}", "node", id, detail=detail)
    return node


NOT_CLEAN = "machine_not_clean"
DRIFT = "machine_drifted"
REINSTALL = "reinstall_required"


def require_installed(node: Node) -> None:
    """Problem `reinstall_required` for a machine on which a tenant was root."""
    if node.tenant_machine_ids:
        raise Problem(
            REINSTALL,
            409,
            expected="a machine that was installed anew after its tenant, with a new SSH host key",
            found="the installation on which a tenant was root",
            remedy="install the machine anew, then run the script that"
            f" `gpuaas nodes userdata {node.id}` prints on it as root",
        )


def require_clean(node: Node) -> None:
    """Problem `machine_not_clean` for a machine that may have traces of a tenant."""
    if node.unclean_allocation_id:
        raise Problem(
            NOT_CLEAN,
            409,
            expected="a machine that is proven clean",
            found=f"allocation {node.unclean_allocation_id} may have left something",
            remedy="clean it first (`gpuaas nodes clean-machine`)",
        )
