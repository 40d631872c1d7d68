"""Power of a slice: start, stop, restart and reset for its project, and start after a host's boot.

The claim stays through all of it. A slice that its project stopped stays stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.schema import Allocation, Node, Project, Task, allocations
from reconciler.lifecycle import quota
from reconciler.lifecycle.slices import run_on_slots
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import (
    AllocationState,
    CapacityShape,
    NodeState,
    PowerAction,
    Role,
    TaskKind,
)
from reconciler.records import claims, queue, reports

# State of a machine as its host reports it.
_RUNS = "running"


def request(conn: sa.Connection, id: str, action: PowerAction, act: Act) -> Allocation:
    """Queue a power action on a slice, unless the same action is under way.

    Raises a Problem when the slice is not active, or its host does not answer or is not proven
    since its boot. The same while another task of the allocation is under way, and for a project
    with too many requests.
    """
    # First, because launches lock their project before anything else.
    project_id = rows.get(conn, Allocation, id).project_id
    rows.get(conn, Project, project_id, lock=True)
    allocation = rows.get(conn, Allocation, id, lock=True)
    _require_active_slice(allocation)
    node = rows.get(conn, Node, allocation.node_id)
    if node.state == NodeState.UNREACHABLE:
        raise Problem(
            "host_unreachable",
            expected="an answer of the host of this allocation",
            found="no answer; whether the machine runs is unknown",
            remedy="ask again when the host answers; the operators see it among the nodes",
        )
    if action != PowerAction.STOP:
        _require_proven_boot(conn, node)
    for task in queue.open_of_allocation(conn, id):
        if task.kind == TaskKind.SLICE_VM_POWER and task.parameters["action"] == action:
            return allocation
        raise Problem(
            "allocation_busy",
            expected="no other task of this allocation",
            found=f"{task.kind}, {task.state}",
            remedy="wait until it has ended, then ask again",
        )
    if act.role != Role.PLATFORM_ADMIN:
        quota.admit_action(conn, project_id)
    journal.audit_of(conn, act, "allocation.power", allocation, {"action": action.value})
    _queue(conn, allocation, node, action, act)
    return rows.get(conn, Allocation, id)


def began(conn: sa.Connection, id: str) -> str:
    """Reason why a queued action is no longer wanted; "" when its run may begin."""
    state = rows.get(conn, Allocation, id, lock=True).state
    return "" if state == AllocationState.ACTIVE else f"allocation {state}"


def succeeded(conn: sa.Connection, id: str, *, boot_id: str) -> None:
    """Record the boot under which the slice was started; "" when it was stopped."""
    allocation = rows.get(conn, Allocation, id, lock=True)
    if allocation.state == AllocationState.ACTIVE:
        boot = boot_id or allocation.started_boot_id
        _set(conn, allocation, power_action="", error={}, started_boot_id=boot)


def failed(
    conn: sa.Connection,
    task: Task,
    error: Mapping[str, Any],
    *,
    machine: str = "",
    untouched: bool = False,
) -> None:
    """Record the error with the allocation, which stays active: its claim holds the slots.

    machine: state of its machine as the host reports it after the run, "" when that is unknown. A
    stop counts unless the machine runs; until that is known, its project wants it off. A start
    counts once the machine runs; until then the slice is owed one, and is not taken for one that
    its guest has powered off.
    """
    allocation = rows.get(conn, Allocation, task.allocation_id or "", lock=True)
    if allocation.state != AllocationState.ACTIVE:
        return
    given = task.parameters
    stopped, boot_id = allocation.stopped, allocation.started_boot_id
    withdrawn = untouched and error.get("code") == "canceled"
    if given["action"] == PowerAction.STOP:
        if untouched or machine == _RUNS:
            stopped = given.get("was_stopped", False)
    elif withdrawn:
        stopped = given.get("was_stopped", stopped)
    elif not untouched:
        boot_id = given["boot_id"] if machine == _RUNS else ""
    values = {"stopped": stopped, "started_boot_id": boot_id}
    _set(conn, allocation, power_action="", error=dict(error), **values)


def replaced(conn: sa.Connection, task: Task) -> bool:
    """Whether another action of the slice waits: a restart of the host has ended this one."""
    open_tasks = queue.open_of_allocation(conn, task.allocation_id or "")
    return any(other.kind == task.kind and other.id != task.id for other in open_tasks)


def fence_of_ended_runs(conn: sa.Connection, id: str) -> int | None:
    """Power fence by which a host refuses runs whose tasks have ended, and none that waits; None
    for an allocation that is not active, which has no run of power.
    """
    query = sa.select(allocations).where(
        allocations.c.id == id, allocations.c.state == AllocationState.ACTIVE
    )
    allocation = rows.first(conn, query, Allocation)
    if allocation is None:
        return None
    waiting = [
        task.parameters.get("power_fence")
        for task in queue.open_of_allocation(conn, id)
        if task.kind == TaskKind.SLICE_VM_POWER
    ]
    if None in waiting:  # Of a version without power fences.
        return None
    # The end of each run has raised the generation above its number.
    numbers = (int(number) for number in waiting if number is not None)
    return min(numbers, default=allocation.generation)


def lock_slices(conn: sa.Connection, node_id: str) -> None:
    """Lock the active slices of a node before the node itself, for the end of a task of the node
    that may change their power.
    """
    query = sa.select(allocations.c.id).where(
        allocations.c.node_id == node_id, allocations.c.state == AllocationState.ACTIVE
    )
    conn.execute(query.order_by(allocations.c.id).with_for_update(key_share=True))


def interrupted(conn: sa.Connection, ids: Collection[str]) -> None:
    """Note that a restart of the host stops these slices, which the next proof starts again."""
    for id in sorted(ids):
        allocation = rows.get(conn, Allocation, id, lock=True)
        if allocation.state == AllocationState.ACTIVE:
            # The generation stays: it is the number of this restart among the runs of power.
            update = sa.update(allocations).where(allocations.c.id == id)
            conn.execute(update.values(started_boot_id=""))


def powered_off(
    conn: sa.Connection, ids: Collection[str], act: Act, *, boot_id: str = ""
) -> list[str]:
    """Record slices whose guests have powered themselves off; returns their allocations.

    They stay stopped until their projects start them, also over a restart of the host. A slice that
    is owed a start is left alone: a run has shut it down. boot_id: leave slices alone that were not
    started under this boot, "" for any whose last action did not fail.
    """
    stopped = []
    for id in sorted(ids):
        allocation = rows.get(conn, Allocation, id, lock=True)
        owed = allocation.started_boot_id != boot_id if boot_id else bool(allocation.error)
        owed = owed or bool(allocation.power_action)
        if allocation.state == AllocationState.ACTIVE and not allocation.stopped and not owed:
            _set(conn, allocation, stopped=True)
            journal.audit_of(conn, act, "allocation.powered_off", allocation)
            stopped.append(id)
    return stopped


def seen_running(conn: sa.Connection, ids: Collection[str], act: Act, *, boot_id: str) -> None:
    """Record slices as running under this boot whose machines were seen so. Their stop has failed,
    a restart of their host that should have stopped them did not happen, or contact with their
    start was lost.
    """
    for id in sorted(ids):
        allocation = rows.get(conn, Allocation, id, lock=True)
        up_to_date = allocation.started_boot_id == boot_id and not allocation.stopped
        if allocation.state != AllocationState.ACTIVE or allocation.power_action or up_to_date:
            continue
        # The error of a start is over once the machine runs; that of a stop is not.
        error = allocation.error if allocation.stopped else {}
        _set(conn, allocation, stopped=False, started_boot_id=boot_id, error=error)
        journal.audit_of(conn, act, "allocation.running", allocation)


def start_after_boot(
    conn: sa.Connection, node_id: str, act: Act, *, restart: bool = True
) -> list[str]:
    """Queue the start of each slice that ran before the host's boot; returns the allocations.

    Nothing starts while the host is not proven under its present boot (I16). restart: without it,
    as the profile may say, the slices stay stopped until their projects start them.
    """
    node = rows.get(conn, Node, node_id)
    started: list[str] = []
    if not _proven(conn, node):
        return started
    for allocation in _to_start(conn, node, lock=True):
        if not restart:
            powered_off(conn, [allocation.id], act.because("the profile starts no slice again"))
            continue
        why = act.because("the host was restarted", {"boot_id": node.boot_id})
        earlier = _end_earlier(conn, allocation, node, why)
        if earlier is None:
            continue
        # Withdrawn, a start leaves the slice as it was before the first of them.
        stopped = any(task.parameters.get("was_stopped") for task in earlier)
        _queue(conn, allocation, node, PowerAction.START, why, was_stopped=stopped)
        started.append(allocation.id)
    return started


def awaits_proof(conn: sa.Connection, node_id: str) -> bool:
    """Whether the host's boot is unknown, or slices wait for its next proof.

    Under a proven boot these are the slices that a restart should have stopped, which then failed.
    Those whose start was tried wait for their projects.
    """
    node = rows.get(conn, Node, node_id)
    if not node.boot_id:
        return True
    waiting = _to_start(conn, node)
    if _proven(conn, node):
        waiting = [row for row in waiting if not row.error and not row.power_action]
    return bool(waiting)


def _to_start(conn: sa.Connection, node: Node, *, lock: bool = False) -> list[Allocation]:
    """Slices that ran before the host's boot, and have not been started under it.

    lock: keep other writers of them out. One that was stopped while this waited is not returned.
    """
    query = sa.select(allocations).where(
        allocations.c.node_id == node.id,
        allocations.c.state == AllocationState.ACTIVE,
        allocations.c.capacity_shape == CapacityShape.GPU_SLICE,
        ~allocations.c.stopped,
        allocations.c.started_boot_id != node.boot_id,
    )
    query = query.order_by(allocations.c.id)
    return rows.every(conn, query.with_for_update(key_share=True) if lock else query, Allocation)


def _end_earlier(
    conn: sa.Connection, allocation: Allocation, node: Node, act: Act
) -> list[Task] | None:
    """Cancel open tasks of power of an earlier boot, which the host would refuse, and return them.
    None if an open task starts the slice under this boot.
    """
    is_open = queue.open_of_allocation(conn, allocation.id)
    mine = [task for task in is_open if task.kind == TaskKind.SLICE_VM_POWER]
    earlier = [task for task in mine if task.parameters["boot_id"] != node.boot_id]
    for task in earlier:
        queue.cancel(conn, task.id, act)
    return earlier if len(earlier) == len(mine) else None


def _queue(
    conn: sa.Connection,
    allocation: Allocation,
    node: Node,
    action: PowerAction,
    act: Act,
    *,
    was_stopped: bool = False,
) -> None:
    stopped = action == PowerAction.STOP
    _set(conn, allocation, power_action=action.value, stopped=stopped, error={})
    held = claims.of_allocation(conn, allocation.id)
    # All runs of power have the fence of the claim. The allocation's generation only grows, and by
    # it the host tells a late run from its successor.
    fence = rows.get(conn, Allocation, allocation.id).generation
    parameters: dict[str, Any] = {
        "action": action.value,
        "boot_id": node.boot_id,
        "power_fence": fence,
        "was_stopped": allocation.stopped or was_stopped,
    }
    queue.add(conn, run_on_slots(allocation, TaskKind.SLICE_VM_POWER, held, **parameters), act)


def _set(conn: sa.Connection, allocation: Allocation, **values: Any) -> None:
    later = {"generation": allocations.c.generation + 1}
    update = sa.update(allocations).where(allocations.c.id == allocation.id)
    conn.execute(update.values(**later, **values))


def _require_active_slice(allocation: Allocation) -> None:
    if allocation.capacity_shape != CapacityShape.GPU_SLICE:
        raise Problem(
            "power_of_whole_machine",
            expected="a slice",
            found="a whole machine",
            remedy="restart it from within; its tenant is root there",
        )
    if allocation.state != AllocationState.ACTIVE:
        raise Problem(
            "allocation_not_active",
            expected="an active allocation",
            found=str(allocation.state),
            remedy="wait until it is active; one that has ended needs a new launch",
        )


def _require_proven_boot(conn: sa.Connection, node: Node) -> None:
    """Problem `host_unproven` unless parity has passed under the host's present boot (I16)."""
    if _proven(conn, node):
        return
    raise Problem(
        "host_unproven",
        expected="a host that was proven since its last boot",
        found="a host whose proof is missing or fails",
        remedy="wait: slices that ran before start by themselves once the host is proven;"
        " if it lasts, ask the operators",
    )


def _proven(conn: sa.Connection, node: Node) -> bool:
    parity = reports.latest_parity(conn, node.id)
    if parity is None or not node.boot_id:
        return False
    return parity.boot_id == node.boot_id and not parity.failures
