"""Approved slots of a node: approval, enabling, disabling, withdrawal and write-off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.journal import advance
from reconciler.db.schema import Discovery, Node, Slot, audit_log, history, slots
from reconciler.db.schema import proofs as proof_table
from reconciler.lifecycle import gate as slot_gate
from reconciler.lifecycle.gate import approved, gate, make_available
from reconciler.model import approval
from reconciler.model import discovery as seen
from reconciler.model.act import Act, require_reason
from reconciler.model.bundle import Bundle, disk_identity
from reconciler.model.discovery import gpu as find_gpu
from reconciler.model.discovery import pcie_switch
from reconciler.model.errors import Problem
from reconciler.model.proof import DEFAULT_POLICY
from reconciler.model.states import LIVE_CLAIMS, NodeMode, ProofKind, SlotState
from reconciler.records import proofs, reports
from reconciler.records import slots as slot_records
from reconciler.records.claims import last_holder, of_allocation

# column → (code, scope within the node)
_UNIQUE = {
    "slot_index": ("duplicate_slot_index", True),
    "gpu_pci_address": ("duplicate_gpu", True),
    "nvme_identity": ("duplicate_disk", False),
    "fabric_vf_pci_address": ("duplicate_fabric_vf", True),
    "fabric_identity": ("duplicate_fabric_vf", False),
    "management_mac": ("duplicate_mac", False),
    "private_ip": ("duplicate_ip", True),
}


def approve(
    conn: sa.Connection,
    node_id: str,
    bundle: Bundle,
    act: Act,
    *,
    capacity_metadata: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
) -> Slot:
    """Approve a bundle that the latest discovery shows free. The new slot starts disabled.

    profile: the node's hardware profile, which says how much of the host a slot takes.
    """
    node = rows.get(conn, Node, node_id, lock=True)
    if node.mode not in (NodeMode.SLICE, NodeMode.CONVERTING_TO_SLICE):
        raise Problem(
            "node_not_slice",
            expected="a node in slice mode",
            found=f"mode {node.mode}",
            remedy="convert the node first",
        )
    discovery = _fresh_discovery(conn, node)
    others = tuple(approved(conn, node_id).values())
    approval.refuse(bundle, discovery.document, others)
    function = seen.function(discovery.document, bundle.fabric_vf_pci_address) or {}
    columns = {
        **bundle.document(),
        "nvme_identity": bundle.identity,
        "fabric_identity": str(function.get("identity") or ""),
    }
    _refuse_duplicates(conn, node_id, columns)
    if profile:
        approval.refuse_room(bundle, discovery.document, others, profile)
    metadata = {
        "storage_ownership": "slice",
        "storage_mode": "slice",
        "storage_transition_manifest": proofs.manifest(conn, node_id, bundle.identity),
        "storage_identity_kind": "nvme_wwn_by_id",
        "destructive_wipe_policy": DEFAULT_POLICY,
        "fabric_claim_mode": "per_slot_vf",
        "fabric_vf_pci_address": bundle.fabric_vf_pci_address,
        **_place(discovery.document, bundle),
        **(capacity_metadata or {}),
    }
    slot = journal.create(
        conn,
        Slot,
        act,
        node_id=node_id,
        **columns,
        capacity_metadata=metadata,
        status=SlotState.DISABLED,
        status_reason="approved; its gate has not been passed",
        disk_generation=proofs.generation(conn, bundle.identity),
        approved_discovery_id=discovery.id,
        approved_by=act.actor,
    )
    journal.audit(
        conn, act, "admin.slot.approved", "slot", slot.id, detail={"bundle": bundle.document()}
    )
    return slot


def disable(conn: sa.Connection, slot_id: str, act: Act) -> Slot:
    """Take a slot off sale. A slot in use goes off sale when it comes back."""
    slot = rows.get(conn, Slot, slot_id, lock=True)
    slot_records.update(conn, slot_id, wanted=SlotState.DISABLED.value)
    journal.audit(conn, act, "admin.slot.disabled", "slot", slot_id)
    if slot.status != SlotState.AVAILABLE:
        return slot_records.get(conn, slot_id)
    return slot_gate.take_off_sale(conn, slot_id, act)


def enable(conn: sa.Connection, slot_id: str, act: Act) -> Slot:
    """Put a slot on sale, now or as soon as its gate opens."""
    with locks.slot(conn, slot_id) as slot:
        if slot.retired_at:
            raise Problem(
                "slot_withdrawn",
                expected="a slot whose approval stands",
                found="one that was withdrawn",
                remedy="approve its devices again (`gpuaas slots approve`); they get a new slot",
            )
        slot_records.update(conn, slot_id, wanted=SlotState.AVAILABLE.value)
        journal.audit(conn, act, "admin.slot.enabled", "slot", slot_id)
        if slot.status == SlotState.DISABLED and not gate(conn, slot_id):
            return make_available(conn, slot_id, act)
        return slot_records.get(conn, slot_id)


def withdraw(conn: sa.Connection, slot_id: str, act: Act) -> Slot:
    """Withdraw the approval, so that the bundle's devices can be approved again.

    A blocked slot is withdrawn only if discovery shows that its disk or GPU has died.
    """
    slot = rows.get(conn, Slot, slot_id, lock=True)
    detail = {}
    if slot.status == SlotState.CLEANUP_BLOCKED:
        slot = write_off(conn, slot, act)
        detail = {"written_off": slot.status_reason}
    if slot.status != SlotState.DISABLED:
        raise Problem(
            "slot_in_use",
            expected="a disabled slot",
            found=str(slot.status),
            remedy="disable the slot; one that is in use must be released or recovered first",
        )
    generation = slot.disk_generation + slot_gate.doubted(slot)
    gone = {"retired_at": clock.now(), "wanted": SlotState.DISABLED.value}
    slot_records.update(conn, slot_id, disk_generation=generation, **gone)
    journal.audit(conn, act, WITHDRAWN, "slot", slot_id, detail=detail)
    return slot_records.get(conn, slot_id)


def _place(document: Mapping[str, Any], bundle: Bundle) -> dict[str, Any]:
    """The GPU's switch, and module if known, for the scheduler; its link for later proofs."""
    gpu = find_gpu(document, bundle.gpu_pci_address) or {}
    module = {"gpu_module_id": gpu["module_id"]} if isinstance(gpu.get("module_id"), int) else {}
    return {"pcie_switch": pcie_switch(gpu), "gpu_link": gpu.get("link") or {}, **module}


def _fresh_discovery(conn: sa.Connection, node: Node) -> Discovery:
    discovery = reports.latest_discovery(conn, node.id)
    if discovery is None:
        raise Problem(
            "discovery_missing",
            expected="a discovery of the node",
            found="none",
            remedy=f"run `gpuaas nodes discover {node.id}`, then approve again",
        )
    identity = (discovery.boot_id, discovery.install_id)
    if identity != (node.boot_id, node.install_id):
        raise Problem(
            "discovery_stale",
            expected="a discovery under the node's current boot and installation",
            found=f"one of {clock.iso(discovery.observed_at)}, before that",
            remedy="discover the node again",
        )
    return discovery


def _refuse_duplicates(conn: sa.Connection, node_id: str, columns: Mapping[str, Any]) -> None:
    for column, (code, on_node) in _UNIQUE.items():
        if columns[column] == "":
            # Hosts of earlier versions did not report it.
            continue
        query = sa.select(slots).where(
            slots.c[column] == columns[column], slots.c.retired_at.is_(None)
        )
        other = rows.first(
            conn, query.where(slots.c.node_id == node_id) if on_node else query, Slot
        )
        if other is not None:
            where = "this node" if other.node_id == node_id else f"node {other.node_id}"
            raise Problem(
                code,
                expected=f"{column.replace('_', ' ')} {columns[column]} in no other slot",
                found=f"slot {other.slot_index} of {where} has it",
                remedy="choose another, or withdraw that slot first",
                detail={"slot_id": other.id},
            )


# Audited actions that can write a disk off.
MACHINE_CLEANED, WITHDRAWN = "admin.node.machine.clean", "admin.slot.withdrawn"
NODE_RETIRED = "admin.node.retire"
# Holds that a host accepts in a conversion. Earlier conversions have given up the older holds.
_LEASES = 256


def write_off(conn: sa.Connection, slot: Slot, act: Act) -> Slot:
    """Take a blocked slot out of recovery, if discovery shows that its disk or GPU is gone.

    Raises Problem `reason_required`, `claim_live`, or `slot_in_use` while disk and GPU are present.
    """
    require_reason(act, slot_gate.WHY_GIVEN_UP)
    holder = require_claim_ended(conn, slot.id)
    latest = _after(conn, slot.node_id, slot.status_since)
    document = latest.document if latest else {}
    missing = [
        name
        for name, device in (
            ("disk", seen.disk_by_identity(document, slot.nvme_identity)),
            ("gpu", seen.gpu(document, slot.gpu_pci_address)),
        )
        if latest and device is None
    ]
    if latest is None or not missing:
        raise Problem(
            "slot_in_use",
            expected="a disabled slot, or a blocked one whose disk or GPU has died",
            found="cleanup_blocked, its disk and GPU are there"
            if latest
            else "cleanup_blocked, and no discovery since then under the host's present boot",
            remedy="recover the slot; if a device has died, discover the node and ask again",
        )
    evidence = {"discovery_id": latest.id, "missing": missing, "allocation_id": holder}
    return _withdraw(conn, slot, act, _died(missing), evidence)


def require_claim_ended(conn: sa.Connection, slot_id: str) -> str:
    """The allocation with the last claim on a slot, or "". Refused while the claim is live."""
    holder = last_holder(conn, slot_id)
    claimed = [claim for claim in of_allocation(conn, holder) if claim.slot_id == slot_id]
    if any(claim.state in LIVE_CLAIMS for claim in claimed):
        raise Problem(
            "claim_live",
            expected="a slot whose last claim has ended",
            found=f"the claim of allocation {holder}",
            remedy=f"end it first: `gpuaas recover {holder}`, or force its release",
        )
    return holder


def written_off_slots(conn: sa.Connection, node_id: str, act: Act) -> list[str]:
    """Retire all slots of a retired node, which frees their devices and addresses."""
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    given_up = []
    # Locked in the common lock order, written off in the order of slot indexes.
    held = rows.every(conn, query.order_by(slots.c.id).with_for_update(), Slot)
    for slot in sorted(held, key=attrgetter("slot_index")):
        if slot.status == SlotState.CLEANUP_BLOCKED:
            evidence = {"allocation_id": last_holder(conn, slot.id)}
            _withdraw(conn, slot, act, "the node goes with whatever is left on it", evidence)
            given_up.append(str(slot.id))
        elif slot_gate.doubted(slot):
            distrust = sa.update(slots).where(slots.c.id == slot.id)
            conn.execute(distrust.values(disk_generation=slots.c.disk_generation + 1))
    update = sa.update(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    gone = {"retired_at": clock.now(), "wanted": SlotState.DISABLED.value}
    conn.execute(update.values(generation=slots.c.generation + 1, **gone))
    return given_up


def dead_disks(conn: sa.Connection, node_id: str, disks: list[Any], since: float) -> list[str]:
    """Disks of a whole machine that are missing from its latest discovery after `since`."""
    latest = _after(conn, node_id, since)
    if latest is None:
        return []
    identities = [disk_identity(disk["nvme_eui"]) for disk in disks]
    return [name for name in identities if seen.disk_by_identity(latest.document, name) is None]


def written_off_holds(conn: sa.Connection, node_id: str) -> list[dict[str, Any]]:
    """Holds that a host may still have for written-off slots, which no run releases.

    Each has the slot's current fence, its last allocation and the dead devices, newest first. The
    reason is generated, because text that a person wrote is not sent to the host.
    """
    query = sa.select(history.c.evidence, slots.c.id, slots.c.fence).where(
        history.c.node_id == node_id,
        history.c.entity == "slot",
        history.c.event == "withdraw",
        slots.c.id == history.c.entity_id,
        slots.c.retired_at.is_not(None),
    )
    return [
        {
            "slot_id": row["id"],
            "fence": row["fence"],
            "allocation_id": row["evidence"]["allocation_id"],
            "reason": _died(row["evidence"].get("missing", [])),
        }
        for row in rows.every(conn, query.order_by(history.c.id.desc()).limit(_LEASES))
        if row["evidence"].get("allocation_id")
    ]


def unproven_disks(conn: sa.Connection) -> dict[str, set[str]]:
    """Disks of all nodes that were written off and not wiped with proof since, each with the nodes
    that it was written off on. It may be back, also in another machine.

    They are read from the audit log, which has an index for actions.
    """
    actions = (MACHINE_CLEANED, WITHDRAWN, NODE_RETIRED)
    columns = (audit_log.c.at, audit_log.c.action, audit_log.c.subject_id, audit_log.c.detail)
    losses: list[tuple[str, str, float]] = []
    slot_ids: set[str] = set()
    query = sa.select(*columns).where(audit_log.c.action.in_(actions))
    for at, action, subject_id, detail in conn.execute(query):
        if action == MACHINE_CLEANED:
            names = [name.removeprefix("disk-") for name in detail.get("written_off", ())]
            losses += [(disk_identity(name), subject_id, at) for name in names]
        elif action == NODE_RETIRED:
            slot_ids.update(detail.get("written_off_slots", ()))
        elif detail.get("written_off"):
            slot_ids.add(subject_id)
    withdrawn = sa.select(slots.c.nvme_identity, slots.c.node_id, slots.c.retired_at)
    losses += map(tuple, conn.execute(withdrawn.where(slots.c.id.in_(slot_ids))))
    wiped = dict(
        conn.execute(
            sa.select(proof_table.c.disk_identity, sa.func.max(proof_table.c.created_at))
            .where(
                proof_table.c.disk_identity.in_({identity for identity, _node, _at in losses}),
                proof_table.c.kind.in_((ProofKind.WIPE, ProofKind.TRANSITION)),
            )
            .group_by(proof_table.c.disk_identity)
        ).all()
    )
    unproven: dict[str, set[str]] = defaultdict(set)
    for identity, node_id, at in losses:
        if at >= wiped.get(identity, 0.0):
            unproven[identity].add(node_id)
    return dict(unproven)


def _died(devices: list[str]) -> str:
    return f"no {' and no '.join(devices)} any more" if devices else "given up with its node"


def _withdraw(
    conn: sa.Connection, slot: Slot, act: Act, why: str, evidence: Mapping[str, object]
) -> Slot:
    # The next fence shuts out a run that is still alive. The next disk generation voids the proof
    # that a slot still has if it was idle when it was blocked.
    slot_act = act.because(f"{act.reason}; written off: {why}", {**act.evidence, **evidence})
    columns = {"fence": slot.fence + 1, "disk_generation": slot.disk_generation + 1}
    return advance(conn, Slot, slot.id, "withdraw", slot_act, columns=columns)


def _after(conn: sa.Connection, node_id: str, since: float) -> Discovery | None:
    """The latest discovery, if it began after `since` under the host's current boot."""
    node = rows.get(conn, Node, node_id)
    latest = reports.latest_discovery(conn, node_id)
    if latest is None or not node.boot_id or (latest.observed_at or 0.0) < since:
        return None
    now = (node.boot_id, node.install_id)
    return latest if (latest.boot_id, latest.install_id) == now else None
