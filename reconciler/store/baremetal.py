"""The life of a whole machine's tenant: what is queued, and what follows from how it ended.

Nothing here says how a host is prepared and cleaned. Tasks that run playbooks over SSH call these
functions today; tasks that let MAAS deploy and release a machine would call the same ones.

A node on which something may be left carries `unclean_allocation_id`: it is neither given away nor
converted until a release of that allocation has ended with proof for every disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act, require_reason
from reconciler.domain.errors import Problem
from reconciler.domain.proof import DEFAULT_POLICY
from reconciler.domain.states import (
    LIVE_CLAIMS,
    AllocationState,
    CapacityShape,
    ClaimKind,
    HealthState,
    TaskKind,
)
from reconciler.store import audit, discoveries, outcomes, proofs, rows, tasks, writeoff
from reconciler.store.claims import next_node_fence, of_allocation
from reconciler.store.rows import Record
from reconciler.store.tables import allocations, claims, nodes, slots

NOT_CLEAN = "machine_not_clean"
DRIFT = "machine_drifted"
IN_SLICE_MODE = "node_in_slice_mode"
OURS = (NOT_CLEAN, DRIFT, IN_SLICE_MODE)
# Shown with the node; all of it is in the result of the task.
_SHOWN = 50


def claim_of(conn: sa.Connection, allocation_id: str) -> Record:
    """The allocation's claim on its node."""
    found = [c for c in of_allocation(conn, allocation_id) if c["kind"] == ClaimKind.NODE_EXCLUSIVE]
    if not found:
        raise Problem(
            "allocation_not_baremetal",
            409,
            expected="an allocation of a whole machine",
            found=f"{allocation_id}, which has no claim on a node",
            remedy="use the routes for slices",
        )
    return found[0]


def queue_provision(conn: sa.Connection, allocation: Record, boot_id: str, act: Act) -> Record:
    """Queue the work that lets the tenant in."""
    named = {key: allocation[key] for key in ("id", "username", "ssh_keys")}
    claim = claim_of(conn, allocation["id"])
    parameters = {"allocation": named, "fence": claim["fence"], "boot_id": boot_id}
    return _enqueue(conn, TaskKind.BAREMETAL_PROVISION, allocation, parameters, act)


def queue_release(
    conn: sa.Connection, allocation: Record, act: Act, *, written_off: Sequence[str] = ()
) -> Record:
    """Queue the work that cleans the machine, under a new fence; one at a time.

    written_off: disks, by the name that the host's ledger has for them, that are not waited for.
    """
    for task in tasks.open_of_allocation(conn, allocation["id"]):
        if task["kind"] == TaskKind.BAREMETAL_RELEASE:
            return task
    named = {key: allocation[key] for key in ("id", "username")}
    fence = next_node_fence(conn, allocation["node_id"])
    parameters: dict[str, Any] = {"allocation": named, "fence": fence}
    if written_off:
        parameters["written_off"] = list(written_off)
    return _enqueue(conn, TaskKind.BAREMETAL_RELEASE, allocation, parameters, act)


def entered(conn: sa.Connection, node_id: str) -> None:
    """A tenant is let onto the machine and is root there: no proof so far says anything of any of
    its disks any more. The schema then refuses to sell a slot on one (I4).
    """
    there = (slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    conn.execute(sa.update(slots).where(*there).values(disk_generation=slots.c.disk_generation + 1))


def provision_succeeded(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    baseline: Mapping[str, Any],
    task_id: str,
) -> bool:
    """The tenant can enter; what the machine was like before is kept where no tenant reaches."""
    allocation = rows.get(conn, allocations, allocation_id, "allocation")
    node = rows.get(conn, nodes, allocation["node_id"], "node")
    connection: dict[str, Any] = {
        "host": node["tenant_address"],
        "port": node["tenant_port"],
        "username": allocation["username"],
    }
    if node["telemetry_url"]:
        connection["telemetry_url"] = node["telemetry_url"]
    discoveries.record_baseline(conn, node["id"], allocation_id, baseline, task_id=task_id)
    return outcomes.provision_succeeded(conn, allocation_id, act, connection=connection)


def provision_failed(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    step: str,
    error: Mapping[str, Any],
    untouched: bool,
    baseline: Mapping[str, Any] | None = None,
    task_id: str = "",
) -> bool:
    """The tenant never came. Free again only when the host says that nothing was touched."""
    if not outcomes.provision_failed(conn, allocation_id, act, step=step, error=error):
        return False
    allocation = rows.get(conn, allocations, allocation_id, "allocation")
    discoveries.record_baseline(
        conn, allocation["node_id"], allocation_id, baseline or {}, task_id=task_id
    )
    if not untouched:
        left_behind(conn, allocation_id, act, step=step, error=error)
    elif error.get("code") == IN_SLICE_MODE:
        # The records and the host disagree about what it is: not to be sold before that is settled.
        detail = _detail(IN_SLICE_MODE, allocation_id, error, step)
        _set_health(conn, allocation["node_id"], HealthState.FAILED, detail)
    else:
        _look_again(conn, allocation["node_id"], act)
    return True


def release_succeeded(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    fence: int,
    evidence: Mapping[str, Any],
    written_off: Sequence[str] = (),
    policy: str = DEFAULT_POLICY,
    task_id: str | None = None,
) -> bool:
    """Nothing is left and every disk is proven clean: the machine is free again.

    Raises when a proof does not say so. False, and nothing changed, when the run was fenced off.
    """
    allocation = rows.get(conn, allocations, allocation_id, "allocation", lock=True)
    node = rows.get(conn, nodes, allocation["node_id"], "node", lock=True)
    if fence != node["fence"] or not _owed(allocation, node):
        return False
    absence = evidence["absence"]
    if not outcomes.release_succeeded(conn, allocation_id, act, proofs={}, absence=absence):
        outcomes.require_absence(conn, allocation_id, absence, act)
    for disk in claim_of(conn, allocation_id)["disks"]:
        if disk["slot_id"] in written_off:
            continue
        # After the claim has ended: only then is the proof newer than the last tenant.
        proofs.record_disk(
            conn,
            node["id"],
            disk,
            evidence["proofs"].get(disk["slot_id"]),
            policy=policy,
            allocation_id=allocation_id,
            task_id=task_id,
        )
    _mark(conn, node["id"], "")
    _name_drift(conn, node["id"], allocation_id, evidence)
    _look_again(conn, node["id"], act)
    return True


def release_failed(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    fence: int,
    step: str,
    error: Mapping[str, Any],
) -> bool:
    """Something may be left: the allocation stays as it is, the node waits for evidence."""
    allocation = rows.get(conn, allocations, allocation_id, "allocation", lock=True)
    node = rows.get(conn, nodes, allocation["node_id"], "node", lock=True)
    if fence != node["fence"] or not _owed(allocation, node):
        return False
    # An allocation that is on its way out says so itself; it has no slots to block.
    outcomes.release_failed(conn, allocation_id, act, step=step, error=error)
    left_behind(conn, allocation_id, act, step=step, error=error)
    return True


def left_behind(
    conn: sa.Connection, allocation_id: str, act: Act, *, step: str, error: Mapping[str, Any]
) -> bool:
    """Keep the node from everybody until it is proven clean; False when it never was near it."""
    allocation = rows.get(conn, allocations, allocation_id, "allocation")
    if allocation["capacity_shape"] != CapacityShape.BAREMETAL:
        return False
    if not any(task["started_at"] for task in tasks.every(conn, allocation_id=allocation_id)):
        return False
    node_id = allocation["node_id"]
    _mark(conn, node_id, allocation_id)
    _set_health(conn, node_id, HealthState.FAILED, _detail(NOT_CLEAN, allocation_id, error, step))
    audit.write(
        conn,
        act,
        "node.machine.not_clean",
        "node",
        node_id,
        detail={"allocation_id": allocation_id},
    )
    return True


def clean(
    conn: sa.Connection, node_id: str, act: Act, *, without_dead_disks: bool = False
) -> Record:
    """Queue the release of what the last tenant left; the task that does it.

    without_dead_disks: disks that the latest discovery lacks are written off, not waited for.
    """
    node = rows.get(conn, nodes, node_id, "node", lock=True)
    allocation_id = node["unclean_allocation_id"] or (
        node["health_detail"].get("allocation_id", "")
        if node["health_detail"].get("code") in OURS
        else ""
    )
    if not allocation_id:
        raise Problem(
            "machine_clean",
            409,
            expected="a node on which a tenant may have left something",
            found=f"health {node['health_state']}, nothing known to be left",
            remedy="nothing to clean; a tenant that is there is released first",
        )
    live = sa.select(claims).where(
        claims.c.node_id == node_id,
        claims.c.allocation_id != allocation_id,
        claims.c.state.in_(LIVE_CLAIMS),
    )
    if rows.first(conn, live) is not None:
        raise Problem(
            "node_in_use",
            409,
            expected="a node without another tenant",
            found="a live claim of another allocation",
            remedy="release it first",
        )
    dead = _dead_disks(conn, node_id, allocation_id, act) if without_dead_disks else []
    detail = {"written_off": dead}
    audit.write(conn, act, "admin.node.machine.clean", "node", node_id, detail=detail)
    allocation = rows.get(conn, allocations, allocation_id, "allocation")
    _mark(conn, node_id, allocation_id)
    return queue_release(conn, allocation, act, written_off=dead)


def _dead_disks(conn: sa.Connection, node_id: str, allocation_id: str, act: Act) -> list[str]:
    """The tenant's disks that a discovery after everything that was tried does not show."""
    require_reason(act, writeoff.WHY)
    ended = [task["finished_at"] or 0.0 for task in tasks.every(conn, allocation_id=allocation_id)]
    disks = claim_of(conn, allocation_id)["disks"]
    dead = writeoff.dead_disks(conn, node_id, disks, max(ended, default=0.0))
    if not dead:
        raise Problem(
            "disk_present",
            409,
            expected="a disk of the tenant's that the latest discovery does not show",
            found="all of them, or no discovery since the machine was last cleaned",
            remedy="discover the node and ask again; clean it with all disks that are there",
        )
    return [disk["slot_id"] for disk in disks if f"eui.{disk['nvme_eui']}" in dead]


def accept_drift(conn: sa.Connection, node_id: str, act: Act) -> Record:
    """A person has looked at what is different and answers for it."""
    node = rows.get(conn, nodes, node_id, "node", lock=True)
    require_reason(act, "say why the differences may stay")
    detail = node["health_detail"]
    if detail.get("code") != DRIFT:
        raise Problem(
            "no_drift",
            409,
            expected="a node whose last tenant left named differences",
            found=f"health {node['health_state']}",
            remedy="nothing to accept",
        )
    audit.write(conn, act, "admin.node.drift.accepted", "node", node_id, detail=detail)
    _set_health(conn, node_id, HealthState.HEALTHY, {})
    return rows.get(conn, nodes, node_id, "node")


def require_clean(node: Mapping[str, Any]) -> None:
    """Refuse to make something else of a machine that may hold a tenant's traces."""
    if node["unclean_allocation_id"]:
        raise Problem(
            NOT_CLEAN,
            409,
            expected="a machine that is proven clean",
            found=f"allocation {node['unclean_allocation_id']} may have left something",
            remedy="clean it first (`gpuaas nodes clean-machine`)",
        )


def _owed(allocation: Record, node: Record) -> bool:
    """Whether a release of the allocation still means something for the node."""
    releasing = allocation["state"] == AllocationState.RELEASING
    return bool(releasing or node["unclean_allocation_id"] == allocation["id"])


def _name_drift(
    conn: sa.Connection, node_id: str, allocation_id: str, evidence: Mapping[str, Any]
) -> None:
    """What could let the last tenant in again keeps the next one out until a person has looked."""
    serious = [row for row in evidence["drift"] if row["access"]]
    if not serious and evidence["compared"]:
        _set_health(conn, node_id, HealthState.HEALTHY, {})
        return
    detail = {
        "code": DRIFT,
        "allocation_id": allocation_id,
        "reason": f"{len(serious)} differences"
        if evidence["compared"]
        else "nothing to compare with: what the machine was like before was never recorded",
        "drift": serious[:_SHOWN],
    }
    _set_health(conn, node_id, HealthState.DEGRADED, detail)


def _detail(code: str, allocation_id: str, error: Mapping[str, Any], step: str) -> dict[str, Any]:
    reason = str(error.get("found") or error.get("code") or "unknown")
    return {"code": code, "allocation_id": allocation_id, "reason": reason, "step": step}


def _set_health(
    conn: sa.Connection, node_id: str, state: HealthState, detail: Mapping[str, Any]
) -> None:
    """Say how the machine is, but for what others have found wrong with it."""
    node = rows.get(conn, nodes, node_id, "node", lock=True)
    troubled = node["health_state"] in (HealthState.FAILED, HealthState.DEGRADED)
    if troubled and node["health_detail"].get("code") not in OURS:
        return
    _change(conn, node_id, health_state=state.value, health_detail=dict(detail))


def _mark(conn: sa.Connection, node_id: str, allocation_id: str) -> None:
    _change(conn, node_id, unclean_allocation_id=allocation_id)


def _change(conn: sa.Connection, node_id: str, **values: Any) -> None:
    """Whoever read the node before decides on something else: drift is accepted as it was read."""
    later = {"generation": nodes.c.generation + 1}
    conn.execute(sa.update(nodes).where(nodes.c.id == node_id).values(**later, **values))


def _look_again(conn: sa.Connection, node_id: str, act: Act) -> None:
    """What the next tenant would get is seen anew."""
    kind = TaskKind.SLICE_TOPOLOGY_DISCOVER
    item = tasks.Enqueue(kind=kind, node_id=node_id, subject_kind="node", subject_id=node_id)
    tasks.enqueue(conn, item, act)


def _enqueue(
    conn: sa.Connection,
    kind: TaskKind,
    allocation: Record,
    parameters: Mapping[str, Any],
    act: Act,
) -> Record:
    return tasks.enqueue(
        conn,
        tasks.Enqueue(
            kind=kind,
            node_id=allocation["node_id"],
            subject_kind="allocation",
            subject_id=allocation["id"],
            allocation_id=allocation["id"],
            parameters=parameters,
        ),
        act,
    )
