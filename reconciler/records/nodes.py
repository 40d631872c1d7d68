"""Node records: creation, changes, and conditions for their use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, locks, rows
from reconciler.db.journal import advance
from reconciler.db.rows import Order, Page, part
from reconciler.db.schema import Node, claims, ingress_rules, nodes, slots
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.hardware import TWICE, bound_serial, owner_of, serial_of
from reconciler.model.states import (
    LIVE_CLAIMS,
    LIVE_INGRESS,
    HealthState,
    NodeMode,
    NodeState,
    SlotState,
)

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
    _require_no_ingress(conn, values)
    taken = sa.or_(nodes.c.id == id, nodes.c.name == (name or id))
    if rows.first(conn, sa.select(nodes).where(taken), Node):
        raise Problem(
            "node_exists",
            expected="an id and a name that no node has",
            found=f"{id!r}, {name or id!r}",
            remedy="use the node that is there, or another id and name",
        )
    record = journal.create(
        conn,
        Node,
        act,
        id=id,
        name=name or id,
        mode=str(mode),
        mode_deadline_at=journal.limit("node_mode", mode),
        state=NodeState.ENROLLING,
        **values,
    )
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
        if values.get("address") != before.address:
            _require_no_ingress(conn, values)
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
            remedy="leave these fields out: the service maintains them",
        )


def _require_no_ingress(conn: sa.Connection, values: Mapping[str, Any]) -> None:
    """A host of that address would hand its own ports to the tenants whose rules name it."""
    query = sa.select(ingress_rules.c.id).where(
        ingress_rules.c.public_address == values.get("address", ""),
        ingress_rules.c.state.in_(LIVE_INGRESS),
    )
    if (rule := conn.scalar(query.limit(1))) is not None:
        raise Problem(
            "ingress_address_in_use",
            expected="the address of a host that no rule of public ingress names",
            found=f"{values['address']}, which rule {rule} names",
            remedy="remove the rules of that address first, or give the host another one",
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
    later = replace(node, generation=node.generation + 1)
    health_act = act.because(act.reason, {**act.evidence, "detail": detail})
    source, target = node.health_state, health.value
    journal.write_health(conn, "node_health", later, health_act, source=source, target=target)


def note_fault(
    conn: sa.Connection, id: str, step: str, fault: tuple[str, str] | None, act: Act, *, well: str
) -> None:
    """Record a fault (code, reason) that `step` has noticed as node health, or its end, for the
    reason `well`. A fault of another step stays.
    """
    node = rows.get(conn, Node, id)
    ours = node.health_detail.get("step") == step
    if fault and (ours or not node.health_detail):
        detail = {"step": step, "code": fault[0], "reason": fault[1][:2000]}
        if detail != node.health_detail:
            set_health(conn, node, HealthState.DEGRADED, detail, act.because(detail["reason"]))
    elif ours and not fault:
        set_health(conn, node, HealthState.HEALTHY, {}, act.because(well))


# For a retired node, which never comes back.
_ADD_ANEW = "add the machine under another id (`gpuaas nodes add`), and enrol that"


def require_living(node: Node) -> None:
    """Problem `node_retired` for a node that is gone for good."""
    if node.state == NodeState.RETIRED:
        raise Problem(
            "node_retired",
            expected="a node that is not retired, for the enrolment of its host",
            found=f"node {node.id} is {node.state}: it never comes back",
            remedy=_ADD_ANEW,
        )


def require_enrolled(conn: sa.Connection, id: str) -> Node:
    """The node; Problem `node_not_enrolled` if its host never enrolled, as no run can reach it, and
    for a retired node.
    """
    node = rows.get(conn, Node, id)
    if node.state == NodeState.RETIRED:
        raise Problem(
            "node_not_enrolled",
            expected="a node whose host has enrolled",
            found=f"state {node.state}: it never comes back",
            remedy=_ADD_ANEW,
        )
    if node.state == NodeState.ENROLLING:
        raise Problem(
            "node_not_enrolled",
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
        if uses := _uses(conn, id, busy):
            raise Problem(
                "node_in_use",
                expected="a node without claims and without slots in use or in clean-up",
                found=", ".join(uses),
                remedy="drain the node, release or recover what is on it, then ask again; of a node"
                " that does not answer, force the release of every allocation",
            )


def is_in_use(conn: sa.Connection, id: str) -> bool:
    """Whether the node has live claims, or slots in use or in clean-up."""
    return bool(_uses(conn, id, BUSY))


def _uses(conn: sa.Connection, id: str, busy: Sequence[SlotState]) -> list[str]:
    held = sa.select(slots.c.id, slots.c.status).where(
        slots.c.node_id == id, slots.c.status.in_(busy)
    )
    live = sa.select(claims.c.id, claims.c.state).where(
        claims.c.node_id == id, claims.c.state.in_(LIVE_CLAIMS)
    )
    return [f"{key} {state}" for query in (held, live) for key, state in conn.execute(query)]


def by_admin(
    conn: sa.Connection, id: str, event: str, act: Act, detail: Mapping[str, Any] | None = None
) -> Node:
    node = advance(conn, Node, id, event, act)
    journal.audit(conn, act, f"admin.node.{event}", "node", id, detail=detail)
    return node


def require_own_serial(conn: sa.Connection, node: Node) -> None:
    """Problem `serial_twice` if the host of another node reports the same serial number, unless
    MAAS shows that it is this node's.
    """
    if not (serial := serial_of(node.hardware)):
        return
    columns = (nodes.c.id, nodes.c.hardware, nodes.c.maas)
    living = conn.execute(sa.select(*columns).where(nodes.c.state != NodeState.RETIRED)).all()
    same = {row.id: row.hardware for row in living if serial_of(row.hardware) == serial}
    bound = {row.id: bound_serial(row.maas) for row in living if row.id in same}
    others = sorted(same.keys() - {node.id})
    if others and owner_of(serial, same, bound) != node.id:
        raise Problem(
            "serial_twice",
            expected=f"serial number {serial} at the host of node {node.id} only",
            found=f"the same at {', '.join(others)}",
            remedy=TWICE,
        )


NOT_CLEAN = "machine_not_clean"
DRIFT = "machine_drifted"
REINSTALL = "reinstall_required"


def require_installed(node: Node) -> None:
    """Problem `reinstall_required` for a machine on which a tenant was root."""
    if node.tenant_machine_ids:
        raise Problem(
            REINSTALL,
            expected="a machine that was installed anew after its tenant, with a new SSH host key",
            found="the installation on which a tenant was root",
            remedy=f"`gpuaas maas deploy {node.id}`, if its task has failed; it says why"
            if node.maas
            else "install the machine anew, then run the script that"
            f" `gpuaas nodes userdata {node.id}` prints on it as root",
        )


DISK_NOT_PROVEN = "disk_not_proven"
FIRMWARE_UNVERIFIED = "firmware_unverified"
FIRMWARE_CHANGED = "firmware_changed"


def firmware_blocker(node: Node) -> str:
    """Code of the reason why the machine's firmware keeps it from being sold, or ""."""
    if node.firmware_before is None or node.tenant_machine_ids:
        return ""
    return FIRMWARE_CHANGED if node.firmware_differences else FIRMWARE_UNVERIFIED


def require_clean(node: Node) -> None:
    """Problem `machine_not_clean` for a machine that may have traces of a tenant."""
    if node.unclean_allocation_id:
        raise Problem(
            NOT_CLEAN,
            expected="a machine that is proven clean",
            found=f"allocation {node.unclean_allocation_id} may have left something",
            remedy="clean it first (`gpuaas nodes clean-machine`)",
        )
