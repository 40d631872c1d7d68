"""Whole-machine allocations: reservation, provisioning, release, clean-up and drift."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.schema import Allocation, Claim, Discovery, Node, Task, claims, nodes, slots
from reconciler.lifecycle import firmware, gate, host, installation, slices
from reconciler.lifecycle import slots as slot_life
from reconciler.model.act import Act, require_reason
from reconciler.model.bundle import disk_identity
from reconciler.model.discovery import GPU_COUNT, disk_identities, node_blockers
from reconciler.model.errors import Problem
from reconciler.model.proof import DEFAULT_POLICY
from reconciler.model.scheduler.explain import explain_machines
from reconciler.model.scheduler.place import choose_machine
from reconciler.model.scheduler.snapshot import NodeView, Want
from reconciler.model.states import (
    IDLE_SLOTS,
    LIVE_CLAIMS,
    AllocationState,
    CapacityShape,
    ClaimKind,
    HealthState,
    NodeMode,
    NodeState,
    TaskKind,
)
from reconciler.records import certificates, proofs, queue, reports, tokens
from reconciler.records import nodes as node_records
from reconciler.records import slots as slot_records
from reconciler.records.claims import exclusive_ended_at, next_node_fence, of_allocation

# Attempts to reserve a machine when concurrent launches take the candidates (PostgreSQL only).
_TRIES = 20


def reserve(conn: sa.Connection, want: Want) -> tuple[Node, Discovery]:
    """Return a free machine, locked until the transaction ends, and its discovery.

    Machines that other transactions hold locked are skipped while another machine fits. Only when
    none fits does this wait for a lock.
    """
    passed: frozenset[str] = frozenset()
    unproven = slot_life.unproven_disks(conn)
    for _ in range(_TRIES):
        sliced = set(conn.execute(sa.select(slots.c.node_id).distinct()).scalars())
        views = _views(conn, passed, unproven)
        chosen = choose_machine(views, want, sliced)
        if chosen is None and passed:
            rows.get(conn, Node, min(passed), lock=True)
            passed = frozenset()
        elif chosen is None:
            explanation = explain_machines(views, want)
            raise Problem(
                "no_capacity",
                expected="a free machine in bare-metal mode",
                found=explanation["summary"],
                remedy="try again later, or launch GPU slices",
                detail={"explanation": explanation},
            )
        else:
            query = sa.select(nodes).where(nodes.c.id == chosen)
            node = rows.first(conn, query.with_for_update(skip_locked=True), Node)
            discovery = reports.latest_discovery(conn, chosen)
            if node is None:
                passed |= {chosen}
            elif discovery is not None and not _refusal(conn, node, unproven):
                return node, discovery
    raise Problem(
        "generation_conflict",
        expected="a machine that stays free while it is being claimed",
        found=f"concurrent launches took it {_TRIES} times",
        remedy="repeat the request",
    )


@dataclass
class Stock:
    """Numbers of machines in bare-metal mode. free: those that a launch could get now."""

    free: int = 0
    in_use: int = 0
    not_on_sale: int = 0


def stock(conn: sa.Connection) -> dict[tuple[str, str], Stock]:
    """Machines in bare-metal mode by profile and region."""
    count: dict[tuple[str, str], Stock] = defaultdict(Stock)
    held = sa.select(claims.c.node_id).where(
        claims.c.kind == ClaimKind.NODE_EXCLUSIVE, claims.c.state.in_(LIVE_CLAIMS)
    )
    in_use = set(conn.execute(held).scalars())
    unproven = slot_life.unproven_disks(conn)
    whole = sa.and_(nodes.c.mode == NodeMode.BAREMETAL, nodes.c.state != NodeState.RETIRED)
    for node in rows.every(conn, sa.select(nodes).where(whole), Node):
        place = count[node.profile, node.region]
        if node.id in in_use:
            place.in_use += 1
        elif _refusal(conn, node, unproven):
            place.not_on_sale += 1
        else:
            place.free += 1
    return dict(count)


def _views(
    conn: sa.Connection, without: frozenset[str], unproven: Collection[str]
) -> list[NodeView]:
    query = sa.select(nodes).where(nodes.c.state != NodeState.RETIRED)
    return [
        NodeView(
            id=node.id,
            region=node.region,
            pool=node.pool,
            profile=node.profile,
            refusal=_refusal(conn, node, unproven),
        )
        for node in rows.every(conn, query.order_by(nodes.c.id), Node)
        if node.id not in without
    ]


def _refusal(conn: sa.Connection, node: Node, unproven: Collection[str]) -> str:
    """Reason code why a node cannot be allocated. "" when it can.

    unproven: disks that were written off and not wiped since, read once for all nodes.
    """
    for wrong, reason in (
        (node.mode != NodeMode.BAREMETAL, "not_baremetal"),
        (node.state != NodeState.READY, f"node_{node.state}"),
        (node.unclean_allocation_id, "not_clean"),
        (node.health_state == HealthState.FAILED, "node_unhealthy"),
        (node.health_state == HealthState.DEGRADED, "node_degraded"),
        (node.reboot_required, "reboot_required"),
        (not node.tenant_address, "tenant_address_missing"),
    ):
        if wrong:
            return reason
    # A launch asks about every machine, and most are claimed. So reports, which are large, are read
    # of the others only.
    return (
        _in_use(conn, node.id)
        or (node_records.REINSTALL if node.tenant_machine_ids else "")
        or node_records.firmware_blocker(node)
        or _unknown(conn, node, unproven)
        or _restarting(conn, node.id)
    )


def _in_use(conn: sa.Connection, node_id: str) -> str:
    live = sa.select(claims.c.id).where(
        claims.c.node_id == node_id, claims.c.state.in_(LIVE_CLAIMS)
    )
    if rows.first(conn, live) is not None:
        return "claimed"
    busy = sa.select(slots.c.id).where(
        slots.c.node_id == node_id, slots.c.status.not_in(IDLE_SLOTS)
    )
    return "slots_in_use" if rows.first(conn, busy) is not None else ""


def _unknown(conn: sa.Connection, node: Node, unproven: Collection[str]) -> str:
    """Reason code without a discovery since the last tenant under the current boot (I16), or for
    what that discovery shows.
    """
    seen = reports.latest_discovery(conn, node.id)
    if seen is None:
        return "not_discovered"
    same = node.boot_id and seen.boot_id == node.boot_id
    if not same or seen.install_id != node.install_id:
        return "discovery_stale"
    if (seen.observed_at or 0.0) < exclusive_ended_at(conn, node.id):
        return "discovery_stale"
    # Its tenant would pay for GPUs that it may not have.
    many = any(blocker.code == GPU_COUNT for blocker in node_blockers(seen.document))
    if many:
        return GPU_COUNT
    # Its tenant would be root and could read every disk, not only those of the claim.
    back = not disk_identities(seen.document).isdisjoint(unproven)
    return node_records.DISK_NOT_PROVEN if back else ""


def _restarting(conn: sa.Connection, node_id: str) -> str:
    """Reason code of a machine that an operator restarts, which would fail a launch meanwhile. A
    slice host is drained for it.
    """
    restarts = (
        task.kind == TaskKind.NODE_REBOOT
        or (task.kind == TaskKind.NODE_FIRMWARE and task.parameters.get("apply"))
        for task in queue.open_of_node(conn, node_id)
    )
    return "node_restarting" if any(restarts) else ""


IN_SLICE_MODE = "node_in_slice_mode"
OURS = (node_records.NOT_CLEAN, node_records.DRIFT, IN_SLICE_MODE)
# Steps of a provision before its tenant can enter. Reports of later steps may be the tenant's.
BEFORE_THE_TENANT = frozenset(
    {
        "deadline",
        "start the run",
        "wait for its run",
        "Take the machine under the fence of the claim",
        "Look whether the account can be made",
        "Wipe the disks that are not proven clean",
        "Remember what the machine is like before the tenant",
    }
)
# Differences kept in the node's health detail. The result of the task has all of them.
_SHOWN = 50


def claim_of(conn: sa.Connection, allocation_id: str) -> Claim:
    """The allocation's exclusive claim on its node."""
    exclusive = [
        c for c in of_allocation(conn, allocation_id) if c.kind == ClaimKind.NODE_EXCLUSIVE
    ]
    if not exclusive:
        raise Problem(
            "allocation_not_baremetal",
            expected="an allocation of a whole machine",
            found=f"{allocation_id}, which has no claim on a node",
            remedy="use the routes for slices",
        )
    return exclusive[0]


def queue_provision(conn: sa.Connection, allocation: Allocation, boot_id: str, act: Act) -> Task:
    """Queue the task that gives the tenant access."""
    named = {key: getattr(allocation, key) for key in ("id", "username", "ssh_keys")}
    claim = claim_of(conn, allocation.id)
    parameters = {"allocation": named, "fence": claim.fence, "boot_id": boot_id}
    return _enqueue(conn, TaskKind.BAREMETAL_PROVISION, allocation, parameters, act)


def queue_release(
    conn: sa.Connection, allocation: Allocation, act: Act, *, written_off: Sequence[str] = ()
) -> Task:
    """Queue the task that cleans the machine, under a new fence. An open release task is returned.

    written_off: disks, by their names in the host's ledger, that need no proof. Problem
    `allocation_releasing` if the open task has others.
    """
    for task in queue.open_of_allocation(conn, allocation.id):
        if task.kind == TaskKind.BAREMETAL_RELEASE:
            if written_off and task.parameters.get("written_off") != list(written_off):
                raise Problem(
                    "allocation_releasing",
                    expected="no clean-up under way, or one that writes the same disks off",
                    found=f"task {task.id}, {task.state}",
                    remedy="wait until it has ended, or cancel it, then ask again",
                )
            return task
    named = {key: getattr(allocation, key) for key in ("id", "username")}
    fence = next_node_fence(conn, allocation.node_id)
    parameters: dict[str, Any] = {"allocation": named, "fence": fence}
    if written_off:
        parameters["written_off"] = list(written_off)
    return _enqueue(conn, TaskKind.BAREMETAL_RELEASE, allocation, parameters, act)


def entered(conn: sa.Connection, node_id: str) -> None:
    """Mark the installation and void all proofs, because a tenant gets root on the machine.

    A new generation of every disk makes the schema refuse to sell a slot on these disks (I4). The
    mark stays until a new installation enrols.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    ids = {*node.tenant_machine_ids, node.machine_id}
    node_records.update(conn, node_id, tenant_machine_ids=sorted(ids))
    firmware.remember(conn, node_id)
    slot_records.void_proofs(conn, node_id)


def provision_succeeded(
    conn: sa.Connection, allocation_id: str, act: Act, *, baseline: Mapping[str, Any], task_id: str
) -> bool:
    """Activate the allocation. The baseline is stored here, out of the tenant's reach."""
    allocation = rows.get(conn, Allocation, allocation_id)
    node = rows.get(conn, Node, allocation.node_id)
    connection: dict[str, Any] = {
        "host": node.tenant_address,
        "port": node.tenant_port,
        "username": allocation.username,
    }
    if keys := certificates.host_keys(conn, node.id):
        connection["host_keys"] = keys
    if node.telemetry_url:
        connection["telemetry_url"] = node.telemetry_url
    reports.record_baseline(conn, node.id, allocation_id, baseline, task_id=task_id)
    return slices.provision_succeeded(conn, allocation_id, act, connection=connection)


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
    """Fail the allocation. The machine is free only if the host reports that it is untouched."""
    if not slices.provision_failed(conn, allocation_id, act, step=step, error=error):
        return False
    allocation = rows.get(conn, Allocation, allocation_id)
    reports.record_baseline(
        conn, allocation.node_id, allocation_id, baseline or {}, task_id=task_id
    )
    if untouched and _never_in(conn, allocation_id, step):
        node_records.update(conn, allocation.node_id, tenant_machine_ids=[])
        firmware.restore(conn, allocation.node_id)
    if not untouched:
        left_behind(conn, allocation_id, act, step=step, error=error)
    elif error.get("code") == IN_SLICE_MODE:
        # Records and host disagree on the mode. The node is not sold until that is resolved.
        detail = _detail(IN_SLICE_MODE, allocation_id, error, step)
        _set_health(conn, allocation.node_id, HealthState.FAILED, detail)
    else:
        host.reverify_allocation(conn, allocation_id, act)
    return True


def _never_in(conn: sa.Connection, allocation_id: str, step: str) -> bool:
    """Whether a provision failed before its tenant can have entered. An earlier attempt may have
    let the tenant in, and then every report of the host is in doubt.
    """
    return step in BEFORE_THE_TENANT and not queue.past(conn, allocation_id).repeated


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
    """Finish a release, with no traces left and every disk proven clean.

    The report is that of a system on which a tenant was root, so the machine is not sold again
    until it is installed anew. Its host keys are revoked, because the tenant could copy them.
    Raises when the evidence falls short. Returns False and changes nothing when the fence is old.
    """
    allocation = rows.get(conn, Allocation, allocation_id, lock=True)
    node = rows.get(conn, Node, allocation.node_id, lock=True)
    if fence != node.fence or not _owed(allocation, node):
        return False
    absence = evidence["absence"]
    if not slices.release_succeeded(conn, allocation_id, act, proofs={}, absence=absence):
        slices.require_absence(conn, allocation_id, absence, act)
    for disk in claim_of(conn, allocation_id).disks:
        if disk["slot_id"] in written_off:
            continue
        # Record after the end of the claim, so that the proof is newer than the last tenant.
        proofs.record_disk(
            conn,
            node.id,
            disk,
            evidence["proofs"].get(disk["slot_id"]),
            policy=policy,
            allocation_id=allocation_id,
            task_id=task_id,
        )
    node_records.update(conn, node.id, unclean_allocation_id="")
    _name_drift(conn, node.id, allocation_id, evidence)
    if node.tenant_machine_ids:
        # Without the mark, the report of the BMC is newer than the new installation, and stays.
        firmware.forget_bmc(conn, node.id)
        why = act.because("a tenant was root on the host")
        tokens.replace_certificates(conn, node.id, "", why)
        installation.queue_after_tenant(conn, node.id, why)
    else:
        host.reverify(conn, node, act)
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
    """Mark the node unclean until there is evidence. The allocation keeps its state."""
    allocation = rows.get(conn, Allocation, allocation_id, lock=True)
    node = rows.get(conn, Node, allocation.node_id, lock=True)
    if fence != node.fence or not _owed(allocation, node):
        return False
    # A releasing allocation records the error itself. It has no slots to block.
    slices.release_failed(conn, allocation_id, act, step=step, error=error)
    left_behind(conn, allocation_id, act, step=step, error=error)
    return True


def left_behind(
    conn: sa.Connection, allocation_id: str, act: Act, *, step: str, error: Mapping[str, Any]
) -> bool:
    """Block the node until it is proven clean. False if no task of the allocation started."""
    allocation = rows.get(conn, Allocation, allocation_id)
    if allocation.capacity_shape != CapacityShape.BAREMETAL:
        return False
    if not queue.past(conn, allocation_id).begun:
        return False
    node_id = allocation.node_id
    node_records.update(conn, node_id, unclean_allocation_id=allocation_id)
    _set_health(
        conn,
        node_id,
        HealthState.FAILED,
        _detail(node_records.NOT_CLEAN, allocation_id, error, step),
    )
    journal.audit(
        conn,
        act,
        "node.machine.not_clean",
        "node",
        node_id,
        detail={"allocation_id": allocation_id},
    )
    return True


def clean(conn: sa.Connection, node_id: str, act: Act, *, without_dead_disks: bool = False) -> Task:
    """Queue the clean-up after the last tenant and return its task.

    without_dead_disks: write off disks that the latest discovery lacks, instead of waiting.
    """
    node_records.require_enrolled(conn, node_id)
    node = rows.get(conn, Node, node_id, lock=True)
    allocation_id = node.unclean_allocation_id or (
        node.health_detail.get("allocation_id", "")
        if node.health_detail.get("code") in OURS
        else ""
    )
    if not node.unclean_allocation_id and allocation_id:
        # Its release has revoked the host's keys, so no run can reach it.
        node_records.require_installed(node)
    if not allocation_id:
        raise Problem(
            "machine_clean",
            expected="a node on which a tenant may have left something",
            found=f"health {node.health_state}, nothing known to be left",
            remedy="nothing to clean; if a tenant is on the node, release the allocation first",
        )
    live = sa.select(claims).where(
        claims.c.node_id == node_id,
        claims.c.allocation_id != allocation_id,
        claims.c.state.in_(LIVE_CLAIMS),
    )
    if rows.first(conn, live, Claim) is not None:
        raise Problem(
            "node_in_use",
            expected="a node without another tenant",
            found="a live claim of another allocation",
            remedy="release it first",
        )
    dead = _dead_disks(conn, node_id, allocation_id, act) if without_dead_disks else []
    detail = {"written_off": dead}
    journal.audit(conn, act, slot_life.MACHINE_CLEANED, "node", node_id, detail=detail)
    allocation = rows.get(conn, Allocation, allocation_id)
    node_records.update(conn, node_id, unclean_allocation_id=allocation_id)
    return queue_release(conn, allocation, act, written_off=dead)


def _dead_disks(conn: sa.Connection, node_id: str, allocation_id: str, act: Act) -> list[str]:
    """The tenant's disks missing from a discovery newer than all tasks of the allocation."""
    require_reason(act, gate.WHY_GIVEN_UP)
    ended = queue.past(conn, allocation_id).finished_at
    disks = claim_of(conn, allocation_id).disks
    dead = slot_life.dead_disks(conn, node_id, disks, ended)
    if not dead:
        raise Problem(
            "disk_present",
            expected="a disk of the tenant that is missing in a discovery since the clean-up",
            found="every disk, or no such discovery",
            remedy="discover the node and try again, or clean it without giving a disk up",
        )
    return [disk["slot_id"] for disk in disks if disk_identity(disk["nvme_eui"]) in dead]


def accept_drift(conn: sa.Connection, node_id: str, act: Act) -> Node:
    """Accept the drift of a machine, on the responsibility of the person who reviewed it."""
    node = rows.get(conn, Node, node_id, lock=True)
    require_reason(act, "say why the differences may stay")
    detail = node.health_detail
    if detail.get("code") != node_records.DRIFT:
        raise Problem(
            "no_drift",
            expected="a node whose last tenant left named differences",
            found=f"health {node.health_state}",
            remedy="nothing to accept",
        )
    journal.audit(conn, act, "admin.node.drift.accepted", "node", node_id, detail=detail)
    _set_health(conn, node_id, HealthState.HEALTHY, {})
    return rows.get(conn, Node, node_id)


def _owed(allocation: Allocation, node: Node) -> bool:
    """Whether the node still waits for a release of the allocation."""
    releasing = allocation.state == AllocationState.RELEASING
    return bool(releasing or node.unclean_allocation_id == allocation.id)


def _name_drift(
    conn: sa.Connection, node_id: str, allocation_id: str, evidence: Mapping[str, Any]
) -> None:
    """Degrade the node on drift that affects access: a person reviews it before the next use."""
    serious = [row for row in evidence["drift"] if row["access"]]
    if not serious and evidence["compared"]:
        _set_health(conn, node_id, HealthState.HEALTHY, {})
        return
    detail = {
        "code": node_records.DRIFT,
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
    """Set the health of the machine, unless another check has found a fault."""
    node = rows.get(conn, Node, node_id, lock=True)
    troubled = node.health_state in (HealthState.FAILED, HealthState.DEGRADED)
    if troubled and node.health_detail.get("code") not in OURS:
        return
    node_records.update(conn, node_id, health_state=state.value, health_detail=dict(detail))


def _enqueue(
    conn: sa.Connection,
    kind: TaskKind,
    allocation: Allocation,
    parameters: Mapping[str, Any],
    act: Act,
) -> Task:
    item = queue.Enqueue(
        kind=kind, node_id=allocation.node_id, allocation_id=allocation.id, parameters=parameters
    )
    return queue.enqueue(conn, item, act)
