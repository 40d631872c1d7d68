"""Approved slots: what may be sold of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from reconciler.domain import approval
from reconciler.domain.act import Act
from reconciler.domain.bundle import Bundle, run_bundle
from reconciler.domain.discovery import gpu as find_gpu
from reconciler.domain.discovery import pcie_switch
from reconciler.domain.errors import Problem
from reconciler.domain.proof import DEFAULT_POLICY
from reconciler.domain.states import HealthState, NodeMode, SlotState
from reconciler.store import (
    audit,
    clock,
    discoveries,
    history,
    lifecycle,
    order,
    proofs,
    rows,
    writeoff,
)
from reconciler.store.contact import close_gate
from reconciler.store.gates import approved, gate, make_available, open_gate
from reconciler.store.lifecycle import advance
from reconciler.store.paging import Order, Page, part
from reconciler.store.recovery import repair
from reconciler.store.rows import Record
from reconciler.store.tables import nodes, slots

# Used through this noun as well; they have files of their own because others need them.
__all__ = ["close_gate", "gate", "make_available", "open_gate", "repair"]

ORDER = Order(slots, ("slot_index",))

# column → (code, scope within the node)
_UNIQUE = {
    "slot_index": ("duplicate_slot_index", True),
    "gpu_pci_address": ("duplicate_gpu", True),
    "nvme_identity": ("duplicate_disk", False),
    "fabric_vf_pci_address": ("duplicate_fabric_vf", True),
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
) -> Record:
    """Make a slot of a bundle that the latest discovery shows free; it starts disabled."""
    node = rows.get(conn, nodes, node_id, "node", lock=True)
    if node["mode"] not in (NodeMode.SLICE, NodeMode.CONVERTING_TO_SLICE):
        raise Problem(
            "node_not_slice",
            409,
            expected="a node in slice mode",
            found=f"mode {node['mode']}",
            remedy="convert the node first",
        )
    discovery = _fresh_discovery(conn, node)
    approval.refuse(bundle, discovery["document"], tuple(approved(conn, node_id).values()))
    columns = {**bundle.document(), "nvme_identity": bundle.identity}
    _refuse_duplicates(conn, node_id, columns)
    metadata = {
        "storage_ownership": "slice",
        "storage_mode": "slice",
        "storage_transition_manifest": proofs.manifest(conn, node_id, bundle.identity),
        "storage_identity_kind": "nvme_wwn_by_id",
        "destructive_wipe_policy": DEFAULT_POLICY,
        "fabric_claim_mode": "per_slot_vf",
        "fabric_vf_pci_address": bundle.fabric_vf_pci_address,
        **_place(discovery["document"], bundle),
        **(capacity_metadata or {}),
    }
    slot = rows.add(
        conn,
        slots,
        {
            "id": rows.new_id(),
            "node_id": node_id,
            **columns,
            "capacity_metadata": metadata,
            "status": SlotState.DISABLED.value,
            "status_reason": "approved; its gate has not been passed",
            "disk_generation": proofs.generation(conn, bundle.identity),
            "approved_discovery_id": discovery["id"],
            "approved_by": act.actor,
        },
    )
    lifecycle.begin(conn, "slot", slot, act)
    audit.write(
        conn, act, "admin.slot.approved", "slot", slot["id"], detail={"bundle": bundle.document()}
    )
    return slot


def get(conn: sa.Connection, id: str) -> Record:
    """The slot with an id."""
    return rows.get(conn, slots, id, "slot")


def of_node(conn: sa.Connection, node_id: str, page: Page | None = None) -> list[Record]:
    """The node's approved slots, each with its `last_proof`."""
    rows.get(conn, nodes, node_id, "node")
    found = rows.every(conn, _approved(node_id, page))
    for slot in found:
        proof = slot["last_proof_id"]
        slot["last_proof"] = proofs.get(conn, proof) if proof else None
    return found


def bundles(conn: sa.Connection, node_id: str, *, fences: bool = False) -> list[dict[str, Any]]:
    """All approved slots as the run contract has them."""
    return [run_bundle(slot, fence=fences) for slot in rows.every(conn, _approved(node_id))]


def candidates(conn: sa.Connection, node_id: str) -> list[dict[str, Any]]:
    """What the latest discovery suggests; nothing of it can be sold before approval."""
    rows.get(conn, nodes, node_id, "node")
    discovery = discoveries.latest(conn, node_id)
    return [] if discovery is None else list(discovery["document"].get("candidates") or [])


def disable(conn: sa.Connection, slot_id: str, act: Act) -> Record:
    """Take a slot off sale; one that is in use goes off sale when it comes back."""
    slot = rows.get(conn, slots, slot_id, "slot", lock=True)
    _set(conn, slot_id, wanted=SlotState.DISABLED.value)
    audit.write(conn, act, "admin.slot.disabled", "slot", slot_id)
    if slot["status"] != SlotState.AVAILABLE:
        return get(conn, slot_id)
    return advance(conn, "slot", slot_id, "disable", act, columns={"available_proof_id": None})


def enable(conn: sa.Connection, slot_id: str, act: Act) -> Record:
    """Want a slot on sale; it is, as soon as its gate lets it."""
    slot = order.hold_slot(conn, slot_id)
    _set(conn, slot_id, wanted=SlotState.AVAILABLE.value)
    audit.write(conn, act, "admin.slot.enabled", "slot", slot_id)
    if slot["status"] == SlotState.DISABLED and not gate(conn, slot_id):
        return make_available(conn, slot_id, act)
    return get(conn, slot_id)


def withdraw(conn: sa.Connection, slot_id: str, act: Act) -> Record:
    """Take the approval back: the bundle's devices can be approved anew.

    A blocked slot goes only when the host shows that its disk or GPU has died.
    """
    slot = rows.get(conn, slots, slot_id, "slot", lock=True)
    detail = {}
    if slot["status"] == SlotState.CLEANUP_BLOCKED:
        slot = writeoff.dead_slot(conn, slot, act)
        detail = {"written_off": slot["status_reason"]}
    if slot["status"] != SlotState.DISABLED:
        raise Problem(
            "slot_in_use",
            409,
            expected="a disabled slot",
            found=str(slot["status"]),
            remedy="disable the slot; one that is in use must be released or recovered first",
        )
    generation = slot["disk_generation"] + writeoff.doubted(slot)
    gone = {"retired_at": clock.now(), "wanted": SlotState.DISABLED.value}
    _set(conn, slot_id, disk_generation=generation, **gone)
    audit.write(conn, act, "admin.slot.withdrawn", "slot", slot_id, detail=detail)
    return get(conn, slot_id)


def set_health(
    conn: sa.Connection, slot_id: str, health: HealthState, detail: Mapping[str, Any], act: Act
) -> Record:
    """What drift reconciliation found; the state stays, the history says why."""
    slot = rows.get(conn, slots, slot_id, "slot", lock=True)
    if slot["health_state"] == health and slot["health_detail"] == detail:
        return slot
    _set(conn, slot_id, health_state=health.value, health_detail=dict(detail))
    history.write(
        conn,
        "slot_health",
        slot,
        act.because(act.reason, {**act.evidence, "detail": dict(detail)}),
        source=slot["health_state"],
        event="observe",
        target=health.value,
    )
    return get(conn, slot_id)


def _place(document: Mapping[str, Any], bundle: Bundle) -> dict[str, Any]:
    """Where the GPU sits, for the scheduler: what it is near to, and its module if known."""
    gpu = find_gpu(document, bundle.gpu_pci_address) or {}
    module = {"gpu_module_id": gpu["module_id"]} if isinstance(gpu.get("module_id"), int) else {}
    return {"pcie_switch": pcie_switch(gpu), **module}


def _approved(node_id: str, page: Page | None = None) -> sa.Select[Any]:
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    return part(query, ORDER, page)


def _set(conn: sa.Connection, slot_id: str, **values: Any) -> None:
    update = sa.update(slots).where(slots.c.id == slot_id)
    conn.execute(update.values(generation=slots.c.generation + 1, **values))


def _fresh_discovery(conn: sa.Connection, node: Record) -> Record:
    discovery = discoveries.latest(conn, node["id"])
    if discovery is None:
        raise Problem(
            "discovery_missing",
            409,
            expected="a discovery of the node",
            found="none",
            remedy=f"POST /api/v1/admin/nodes/{node['id']}/slice-topology/discovery",
        )
    found = (discovery["boot_id"], discovery["install_id"])
    if found != (node["boot_id"], node["install_id"]):
        raise Problem(
            "discovery_stale",
            409,
            expected="a discovery under the node's current boot and installation",
            found=f"one of {clock.iso(discovery['observed_at'])}, before that",
            remedy="discover the node again",
        )
    return discovery


def _refuse_duplicates(conn: sa.Connection, node_id: str, columns: Mapping[str, Any]) -> None:
    for column, (code, on_node) in _UNIQUE.items():
        query = sa.select(slots).where(
            slots.c[column] == columns[column], slots.c.retired_at.is_(None)
        )
        found = rows.first(conn, query.where(slots.c.node_id == node_id) if on_node else query)
        if found is not None:
            where = "this node" if found["node_id"] == node_id else f"node {found['node_id']}"
            raise Problem(
                code,
                409,
                expected=f"{column.replace('_', ' ')} {columns[column]} in no other slot",
                found=f"slot {found['slot_index']} of {where} has it",
                remedy="choose another, or withdraw that slot first",
                detail={"slot_id": found["id"]},
            )
