"""Installation of a machine by MAAS, and its return to MAAS: when they are allowed.

Both erase the system disk, and MAAS may give a returned machine to any of its users. The node must
therefore be out of use and free of traces of a tenant.
"""

from __future__ import annotations

from contextlib import suppress

import sqlalchemy as sa

from reconciler.db import journal, locks, rows
from reconciler.db.schema import Node, Task, slots
from reconciler.lifecycle.slots import unproven_disks
from reconciler.model.act import Act
from reconciler.model.discovery import disk_identities
from reconciler.model.errors import Problem
from reconciler.model.states import BY_MAAS, NodeMode, NodeState, TaskKind
from reconciler.records import nodes as node_records
from reconciler.records import queue as task_queue
from reconciler.records import reports, tokens

# States in which no launch chooses the node, whatever happens to its machine.
_OUT_OF_USE = (NodeState.ENROLLING, NodeState.MAINTENANCE, NodeState.UNREACHABLE)


def queue(conn: sa.Connection, node_id: str, kind: TaskKind, act: Act, *, series: str = "") -> Task:
    """Queue the deployment or the release of the node's machine; return the open task."""
    with locks.node(conn, node_id) as node:
        require_free(conn, node, kind)
        for task in task_queue.open_of_node(conn, node_id):
            if task.kind == kind:
                return task
            if task.kind in BY_MAAS:
                raise Problem(
                    "node_busy",
                    expected="a node whose machine MAAS leaves as it is",
                    found=f"{task.kind} {task.id}, {task.state}",
                    remedy="wait for its end, or cancel it (`gpuaas tasks cancel`)",
                )
        # By default the release of the operating system that it had before.
        release = series or (node.maas or {}).get("series", "")
        parameters = {"series": release} if kind == TaskKind.NODE_DEPLOY else {}
        item = task_queue.Enqueue(kind, node_id, parameters=parameters, audited=bool(act.role))
        return task_queue.add(conn, item, act)


def queue_after_tenant(conn: sa.Connection, node_id: str, act: Act) -> None:
    """Let MAAS install the machine anew after its tenant, if it is a machine of MAAS.

    If that is refused, the node waits for a person, as on a site without MAAS.
    """
    if maas := rows.get(conn, Node, node_id).maas:
        node_records.update(conn, node_id, maas={**maas, "tenant": True})
        with suppress(Problem):
            queue(conn, node_id, TaskKind.NODE_DEPLOY, act)


def require_free(conn: sa.Connection, node: Node, kind: TaskKind) -> None:
    """Refuse a node whose machine may not be installed, or returned to MAAS."""
    if not node.maas:
        raise Problem(
            "maas_machine_unknown",
            expected=f"a machine in MAAS that is known to be node {node.id}",
            found="none",
            remedy="`gpuaas maas diff` shows why no machine matches the node (docs/maas.md)",
        )
    node_records.require_own_serial(conn, node)
    node_records.require_clean(node)
    _require_no_slice_host(conn, node)
    node_records.refuse_in_use(conn, node.id)
    # A machine that a tenant had is not chosen before it is installed anew.
    if node.state not in _OUT_OF_USE and not (
        node.tenant_machine_ids and node.state != NodeState.RETIRED
    ):
        raise Problem(
            "node_in_service",
            expected="a node that is in maintenance, does not answer or has never enrolled",
            found=f"state {node.state}",
            remedy=f"`gpuaas nodes drain {node.id}`, then `gpuaas nodes maintain {node.id}`",
        )
    if kind == TaskKind.NODE_RELEASE:
        _require_proven_disks(conn, node.id)


def _require_proven_disks(conn: sa.Connection, node_id: str) -> None:
    """Refuse while a written-off disk may be in the machine: its next user in MAAS could read it.

    A new installation by us needs no proof. The node stays off sale while the disk is there
    (`baremetal`), and a host must be installed after its tenant before it can wipe anything.
    """
    latest = reports.latest_discovery(conn, node_id)
    present = disk_identities(latest.document) if latest else set()
    unproven = unproven_disks(conn).items()
    # A disk that is not seen may answer again after the next power cycle.
    dirty = sorted(disk for disk, lost_on in unproven if disk in present or node_id in lost_on)
    if dirty:
        raise Problem(
            node_records.DISK_NOT_PROVEN,
            expected="a wipe with proof of every disk that a tenant had",
            found=f"disks that were written off: {', '.join(dirty)}",
            remedy="take a disk that is there over, which wipes it (`gpuaas nodes transition`);"
            " else take the disks out of the machine and return it in MAAS by hand",
        )


def begin(conn: sa.Connection, node: Node, kind: TaskKind, act: Act) -> None:
    """Take the node from its installation, before MAAS is asked to end it.

    Its keys are revoked, and the installation is marked as that of a tenant. The node is used again
    only when a new installation has enrolled with a key of its own.
    """
    require_free(conn, node, kind)
    ids = {*node.tenant_machine_ids, node.machine_id} - {""}
    node_records.update(conn, node.id, tenant_machine_ids=sorted(ids))
    tokens.replace_certificates(conn, node.id, "", act)
    journal.audit(conn, act, f"{kind}.began", "node", node.id, detail={"maas": node.maas})


def had_tenant(node: Node) -> bool:
    """Whether a tenant was root on the machine of MAAS since its last installation or erasure."""
    return bool((node.maas or {}).get("tenant"))


def is_installed(node: Node) -> bool:
    """Whether a new installation has enrolled since `begin`."""
    return bool(node.machine_id and not node.tenant_machine_ids) and (
        node.state != NodeState.ENROLLING
    )


def needs_lock(conn: sa.Connection, node: Node) -> bool:
    """Whether a release of the machine in MAAS would destroy a slice host or a tenant's disks."""
    if node.state == NodeState.RETIRED:
        return False
    # A marked installation is being replaced, unless a tenant is still on it.
    if node.mode != NodeMode.BAREMETAL and node.machine_id and not node.tenant_machine_ids:
        return True
    return bool(node.unclean_allocation_id) or node_records.is_in_use(conn, node.id)


def _require_no_slice_host(conn: sa.Connection, node: Node) -> None:
    approved = sa.select(slots.c.id).where(slots.c.node_id == node.id, slots.c.retired_at.is_(None))
    if node.mode == NodeMode.BAREMETAL or (
        node.mode == NodeMode.CONVERTING_TO_SLICE and rows.first(conn, approved) is None
    ):
        return
    raise Problem(
        "node_in_slice_mode",
        expected="bare-metal mode, or a conversion to slice host before any slot is approved",
        found=f"mode {node.mode}",
        remedy=f"convert it first (`gpuaas nodes convert {node.id} baremetal`)",
    )
