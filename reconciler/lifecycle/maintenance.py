"""Maintenance that restarts a host: a reboot, or a change of its firmware settings.

The node is drained first. Afterwards discovery and parity prove the new boot; a pass takes the node
back into use and starts its slices again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, locks, rows
from reconciler.db.rows import Page
from reconciler.db.schema import Claim, Node, Task, claims, history
from reconciler.lifecycle import gate, host, power
from reconciler.model import firmware
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import (
    LIVE_CLAIMS,
    ClaimKind,
    ClaimState,
    NodeMode,
    NodeState,
    SlotState,
    TaskKind,
    TaskState,
)
from reconciler.records import nodes, queue, slots

Guests = list[dict[str, Any]]

# Keys in the evidence of a drain: the task whose BIOS job may still restart the host, and the boot
# under which a lost run may still restart the host.
_HELD, _HELD_BOOT = "open_bios_job", "boot_of_lost_run"
_WHY_HELD = {
    _HELD: "its BIOS job may still restart the host. Look at the BMC's job queue. Then plan and "
    "apply the firmware settings again, or resume the node.",
    _HELD_BOOT: "its lost run may still restart the host. Cancel the run's job in AWX. Then "
    "restart the host, or resume the node.",
}
# Keys in the evidence of a drain that no person has made.
_OURS = {host.DRAINED, *_WHY_HELD}
_REACHABLE = (NodeState.BOOTSTRAPPING, NodeState.READY, NodeState.DRAINING, NodeState.MAINTENANCE)


def request_reboot(conn: sa.Connection, id: str, act: Act, *, allocations: Collection[str]) -> Task:
    """Queue a restart of the host. allocations: all that are on it, as its operator names them.

    Problem `node_in_use` while a run is at work on it, a disk is wiped, or a tenant has the whole
    machine. Problem `reboot_unconfirmed`, with the allocations, when the operator names others.
    """
    with locks.node(conn, id):
        node = _require_answering(nodes.require_enrolled(conn, id))
        guests = _guests(conn, id)
        if any(slot.status == SlotState.CLEANUP for slot in slots.of_node(conn, id)):
            # The restart would wait for a wipe of hours, and everybody's tasks for the restart.
            nodes.refuse_in_use(conn, id)
        present = {guest["allocation_id"] for guest in guests}
        if present != set(allocations):
            raise _unconfirmed(guests, allocations)
        parameters = {"guests": guests, "boot_id": node.boot_id}
        detail = {"allocations": sorted(present)}
        return _begin(conn, node, TaskKind.NODE_REBOOT, parameters, act, detail)


def request_firmware(
    conn: sa.Connection, id: str, act: Act, *, digest: str, acknowledged_jobs: Sequence[str]
) -> Task:
    """Queue the firmware change whose plan has this digest, with the power cycle that it needs.

    Problem `firmware_plan_changed` when that is not the latest plan, and `node_in_use` while
    anything is on the node.
    """
    with locks.node(conn, id):
        node = _require_answering(nodes.require_enrolled(conn, id))
        nodes.refuse_in_use(conn, id)
        plan = _latest_plan(conn, id)
        if plan.get("digest") != digest:
            raise Problem(
                "firmware_plan_changed",
                expected="the digest of the latest plan, which has something to change",
                found=plan.get("digest") or "no plan with a change",
                remedy=f"run `gpuaas nodes plan-firmware {id}`, read it, then approve its digest",
            )
        parameters = {
            "apply": True,
            "digest": digest,
            "acknowledged_jobs": sorted(acknowledged_jobs),
            "boot_id": node.boot_id,
        }
        detail = {"digest": digest, "differences": plan["differences"]}
        return _begin(conn, node, TaskKind.NODE_FIRMWARE, parameters, act, detail)


def began(conn: sa.Connection, task: Task) -> None:
    """Refuse the restart of a node with allocations that were not named, and note that its slices
    stop.

    A slice counts as stopped by the restart until it is started after the next proof, whether the
    host restarts or not.
    """
    named = [guest["allocation_id"] for guest in task.parameters.get("guests", ())]
    # First, because allocations are locked before their node.
    power.interrupted(conn, named)
    with locks.node(conn, task.node_id):
        if task.kind == TaskKind.NODE_FIRMWARE:
            nodes.refuse_in_use(conn, task.node_id)
            return
        guests = _guests(conn, task.node_id)
        if not {guest["allocation_id"] for guest in guests} <= set(named):
            raise _unconfirmed(guests, named)


def restarted(conn: sa.Connection, task: Task, act: Act) -> str:
    """Record that the host was restarted; returns as `bring_back`."""
    host.restarted(conn, task.node_id, act, since=task.parameters["boot_id"])
    return bring_back(conn, task, act)


def firmware_changed(conn: sa.Connection, task: Task, act: Act) -> str:
    """Record that the BIOS job has restarted the host and is over; returns as `bring_back`."""
    node = rows.get(conn, Node, task.node_id, lock=True)
    if _HELD in _last_drain(conn, node):
        journal.remark(conn, "node", node, _by_maintenance(task.kind, act), "drain")
    return restarted(conn, task, act)


def bring_back(conn: sa.Connection, task: Task, act: Act) -> str:
    """Queue what proves the host again; returns the id of the first task, "" for a node that was
    retired meanwhile. A pass takes a node back that maintenance has drained.
    """
    node = nodes.get(conn, task.node_id)
    if node.state == NodeState.RETIRED:
        return ""
    kinds = host.VERIFICATION if _sells_slices(conn, node) else host.VERIFICATION[:1]
    item = queue.Enqueue(kinds[0], node.id, parameters=queue.then(kinds[1:]))
    return queue.enqueue(conn, item, act).id


def hold(conn: sa.Connection, task: Task, act: Act) -> None:
    """Keep a node drained after its proof, because a BIOS job of the task, or its lost run, may
    restart the host later.

    A firmware change that follows the job to its end ends the hold. So does a person who resumes
    the node. A lost run restarts the host only under the boot it was started for, so another boot
    ends the hold.
    """
    node = rows.get(conn, Node, task.node_id, lock=True)
    firmware_task = task.kind == TaskKind.NODE_FIRMWARE
    holds = {_HELD: task.id} if firmware_task else {_HELD_BOOT: task.parameters["boot_id"]}
    drain = {} if node.state == NodeState.READY else _last_drain(conn, node)
    # Each hold lasts until its own end.
    holds = {key: drain[key] for key in _WHY_HELD if key in drain} | holds
    why = act.because(" ".join(_WHY_HELD[key] for key in holds), holds)
    if node.state == NodeState.READY:
        host.drain(conn, node.id, why)
    elif _OURS & drain.keys():
        journal.remark(conn, "node", node, why, "drain")


def drain(conn: sa.Connection, id: str, act: Act) -> Node:
    """Stop accepting new work. A node that maintenance has drained stays so after its proof."""
    node = rows.get(conn, Node, id, lock=True)
    if node.state != NodeState.DRAINING or not _OURS & _last_drain(conn, node).keys():
        return host.drain(conn, id, act)
    journal.remark(conn, "node", node, act, "drain")
    journal.audit(conn, act, "admin.node.drain", "node", id)
    return node


def resume(conn: sa.Connection, id: str, act: Act) -> Node:
    """Accept work again. Refused until a restart of the host is over: launches would only fail."""
    rows.get(conn, Node, id, lock=True)
    for task in _open(conn, id):
        raise _under_way(task)
    return host.resume(conn, id, act)


def awaits_proof(conn: sa.Connection, node: Node) -> bool:
    """Whether maintenance that is over has drained the node, and no operator has since."""
    if node.state != NodeState.DRAINING or _open(conn, node.id):
        return False
    drain = _last_drain(conn, node)
    # An unknown boot is no other boot.
    restarted = bool(node.boot_id) and drain.get(_HELD_BOOT, node.boot_id) != node.boot_id
    return host.DRAINED in drain or (restarted and _HELD not in drain)


def _last_drain(conn: sa.Connection, node: Node) -> dict[str, Any]:
    """Evidence of the node's last drain."""
    drains = sa.select(history.c.evidence).where(
        history.c.entity == "node", history.c.entity_id == node.id, history.c.event == "drain"
    )
    last = conn.execute(drains.order_by(history.c.id.desc()).limit(1)).scalar()
    return dict(last or {})


def finish(conn: sa.Connection, node_id: str, act: Act) -> bool:
    """Take a node whose host has just been proven back from maintenance."""
    over = awaits_proof(conn, rows.get(conn, Node, node_id, lock=True))
    if over:
        host.resume(conn, node_id, act.because("proven again after maintenance"))
    return over


def discovered(conn: sa.Connection, node_id: str, act: Act) -> None:
    """Take a node that sells no slices back from maintenance, because it gets no parity check."""
    if not _sells_slices(conn, nodes.get(conn, node_id)):
        finish(conn, node_id, act)


def _by_maintenance(kind: str, act: Act) -> Act:
    return act.because(act.reason, {**act.evidence, host.DRAINED: kind})


def _begin(
    conn: sa.Connection,
    node: Node,
    kind: TaskKind,
    parameters: dict[str, Any],
    act: Act,
    detail: dict[str, Any],
) -> Task:
    for task in _open(conn, node.id):
        if task.kind == kind and task.parameters == parameters:
            return task
        raise _under_way(task)
    if not node.boot_id:
        raise Problem(
            "boot_unknown",
            expected="a host whose current boot is known",
            found="the host has restarted, or may have, since its last discovery",
            remedy=f"run `gpuaas nodes discover {node.id}`, then try again",
        )
    if node.state == NodeState.READY and _sells_slices(conn, node):
        host.drain(conn, node.id, _by_maintenance(kind.value, act))
    journal.audit(conn, act, f"admin.{kind}", "node", node.id, detail=detail)
    return queue.add(conn, queue.Enqueue(kind, node.id, parameters=parameters), act)


def _open(conn: sa.Connection, node_id: str) -> list[Task]:
    """Maintenance of the node that has not ended."""
    kinds = (TaskKind.NODE_REBOOT, TaskKind.NODE_FIRMWARE)
    return [task for task in queue.open_of_node(conn, node_id) if task.kind in kinds]


def _under_way(task: Task) -> Problem:
    return Problem(
        "maintenance_under_way",
        expected="no restart of this node under way",
        found=f"{task.kind} {task.id}, {task.state}",
        remedy="wait until it has ended, or cancel it, then ask again",
    )


def _guests(conn: sa.Connection, node_id: str) -> Guests:
    """Allocations on the node with their fenced slots, in the order of the slots: running slices,
    and slices of which a blocked slot may have a trace.

    Problem `node_in_use` while a run is at work on a slot or a tenant has the whole machine.
    """
    query = sa.select(claims).where(claims.c.node_id == node_id, claims.c.state.in_(LIVE_CLAIMS))
    live = rows.every(conn, query, Claim)
    active = {claim.slot_id: claim for claim in live if claim.state == ClaimState.ACTIVE}
    of_node = slots.of_node(conn, node_id)
    # The claim of a failed release lives, but no run is at work on its slot.
    blocked = {slot.id for slot in of_node if slot.status == SlotState.CLEANUP_BLOCKED}
    if any(
        claim.kind == ClaimKind.NODE_EXCLUSIVE or claim.slot_id not in {*active, *blocked}
        for claim in live
    ):
        nodes.refuse_in_use(conn, node_id)
    guests: dict[str, list[dict[str, Any]]] = {}
    for slot in of_node:
        if slot.id in active:
            key, fence = active[slot.id].allocation_id, active[slot.id].fence
        elif slot.id in blocked:
            key, fence = str(slot.health_detail.get("allocation_id") or ""), slot.fence
        else:
            continue
        if key:
            guests.setdefault(key, []).append({"slot_id": slot.id, "fence": fence})
    return [{"allocation_id": key, "slots": held} for key, held in guests.items()]


def _unconfirmed(guests: Guests, named: Collection[str]) -> Problem:
    present = [guest["allocation_id"] for guest in guests]
    return Problem(
        "reboot_unconfirmed",
        expected="the ids of all allocations on the node, because the restart stops them",
        found=f"on it: {', '.join(present) or 'none'}; named: {', '.join(sorted(named)) or 'none'}",
        remedy="tell their tenants, then ask again with exactly the allocations that are on it",
        detail={"allocations": present},
    )


def _require_answering(node: Node) -> Node:
    if node.state not in _REACHABLE:
        raise Problem(
            "host_unreachable",
            expected="a node whose host answers",
            found=f"state {node.state}",
            remedy="restart it by its management controller; its slices start again by themselves",
        )
    return node


def _sells_slices(conn: sa.Connection, node: Node) -> bool:
    return NodeMode(node.mode).purpose == "slice" and bool(gate.approved(conn, node.id))


def _latest_plan(conn: sa.Connection, node_id: str) -> dict[str, Any]:
    """Plan of the latest firmware task with its digest; {} without a change to approve.

    A task that changed the settings outdates the plans before it.
    """
    for task in queue.every(conn, node_id=node_id, kind=TaskKind.NODE_FIRMWARE, page=Page(2)):
        apply = task.parameters.get("apply")
        if apply and task.state in queue.OPEN:
            # The same request, sent again.
            continue
        if apply or task.state != TaskState.SUCCEEDED:
            return {}
        return firmware.approvable((task.result.get("bios") or {}).get("differences") or [])
    return {}
