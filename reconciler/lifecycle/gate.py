"""Gate of slots: collect the evidence, open slots that pass and close slots that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db import locks, rows, settings
from reconciler.db.journal import advance
from reconciler.db.schema import Discovery, Node, Parity, Proof, Slot, slots
from reconciler.model import drift
from reconciler.model.act import Act
from reconciler.model.bundle import Bundle
from reconciler.model.discovery import Blocker
from reconciler.model.errors import Problem
from reconciler.model.gate import FAILING, DiskProof, GateEvidence, Sighting, blockers
from reconciler.model.host_faults import UNWRITABLE
from reconciler.model.states import IDLE_SLOTS, HealthState, ProofKind, SlotState
from reconciler.records import nodes as node_records
from reconciler.records import proofs, queue, reports
from reconciler.records.claims import exclusive_ended_at

HEALTHY = {"health_state": HealthState.HEALTHY.value, "health_detail": {}}


@dataclass(frozen=True)
class Host:
    """Evidence shared by all slots of a node. bundles: of the approved slots, by slot id."""

    node: Node
    discovery: Sighting | None
    parity: Sighting | None
    exclusive_ended_at: float
    restored_at: float
    unwritable: str
    bundles: Mapping[str, Bundle]


def host(conn: sa.Connection, node_id: str) -> Host:
    """Read the evidence of a node. A caller that acts on it holds the node lock (lock order)."""
    return Host(
        node=rows.get(conn, Node, node_id),
        discovery=_sighting(reports.latest_discovery(conn, node_id)),
        parity=_sighting(reports.latest_parity(conn, node_id)),
        exclusive_ended_at=exclusive_ended_at(conn, node_id),
        restored_at=float(settings.read(conn, settings.RESTORED, 0.0)),
        unwritable=queue.latest_error(conn, node_id, UNWRITABLE),
        bundles=approved(conn, node_id),
    )


def gate(conn: sa.Connection, slot_id: str) -> tuple[Blocker, ...]:
    """The blockers of a slot. Empty when the slot can be sold."""
    slot = rows.get(conn, Slot, slot_id)
    return judge(conn, slot, proofs.current(conn, slot))


def judge(
    conn: sa.Connection, slot: Slot, proof: Proof | None, seen: Host | None = None
) -> tuple[Blocker, ...]:
    """Judge a slot with this proof. seen: evidence of its node, if the caller already read it."""
    seen = seen or host(conn, slot.node_id)
    return blockers(
        GateEvidence(
            bundle=Bundle.of(vars(slot)),
            approved_at=slot.approved_at,
            disk_generation=slot.disk_generation,
            node_state=seen.node.state,
            node_mode=seen.node.mode,
            boot_id=seen.node.boot_id,
            install_id=seen.node.install_id,
            reboot_required=seen.node.reboot_required,
            reinstall_required=bool(seen.node.tenant_machine_ids),
            firmware=node_records.firmware_blocker(seen.node),
            unwritable=seen.unwritable,
            discovery=seen.discovery,
            parity=seen.parity,
            proof=_proof(proof),
            exclusive_ended_at=seen.exclusive_ended_at,
            restored_at=seen.restored_at,
            wipe_policy=proofs.policy(slot),
            others=tuple(bundle for key, bundle in seen.bundles.items() if key != slot.id),
            drift=_drift(slot),
            partition=_partition(seen.node, slot),
            failures=proofs.launch_failures(conn, slot),
        )
    )


def approved(conn: sa.Connection, node_id: str) -> dict[str, Bundle]:
    """The bundles of the node's approved slots, by slot id."""
    query = sa.select(slots).where(slots.c.node_id == node_id, slots.c.retired_at.is_(None))
    approved_slots = rows.every(conn, query.order_by(slots.c.slot_index), Slot)
    return {slot.id: Bundle.of(vars(slot)) for slot in approved_slots}


def make_available(conn: sa.Connection, slot_id: str, act: Act) -> Slot:
    """Make a disabled slot available. A refusal lists every blocker."""
    with locks.slot(conn, slot_id) as slot:
        proof = proofs.current(conn, slot)
        closed_by = judge(conn, slot, proof)
        if closed_by or proof is None:
            raise Problem(
                "gate_closed",
                expected="a slot without blockers",
                found="; ".join(f"{row.code}: {row.detail}" for row in closed_by),
                remedy="remove the causes on the host, then run discovery and parity again",
                detail={"blockers": [row.document() for row in closed_by]},
            )
        return advance(
            conn,
            Slot,
            slot_id,
            "enable",
            act.because(act.reason or "gate passed", {**act.evidence, "proof_id": proof.id}),
            columns={"available_proof_id": proof.id, "last_proof_id": proof.id, **HEALTHY},
        )


def open_gate(conn: sa.Connection, node_id: str, act: Act) -> dict[str, Any]:
    """Make every wanted slot that passes the gate available. Report the blockers of the others."""
    with locks.node(conn, node_id):
        query = sa.select(slots).where(
            slots.c.node_id == node_id,
            slots.c.retired_at.is_(None),
            slots.c.status == SlotState.DISABLED,
            slots.c.wanted == SlotState.AVAILABLE,
        )
        opened: list[str] = []
        closed: dict[str, list[dict[str, str]]] = {}
        seen = host(conn, node_id)
        sellable = (SlotState.DISABLED, SlotState.AVAILABLE, None)
        for slot in rows.every(conn, query.order_by(slots.c.slot_index), Slot):
            closed_by = judge(conn, slot, proofs.current(conn, slot), seen)
            if closed_by:
                closed[slot.id] = [row.document() for row in closed_by]
                continue
            with locks.slot(conn, slot.id) as now:
                # An operator may have disabled or withdrawn it since.
                if (now.status, now.wanted, now.retired_at) == sellable:
                    make_available(conn, slot.id, act)
                    opened.append(slot.id)
        return {"opened": opened, "closed": closed}


def review(conn: sa.Connection, node_id: str, act: Act) -> list[str]:
    """Disable available slots that fail the gate and return their ids. `wanted` stays unchanged."""
    shut = []
    on_sale = _lock_on_sale(conn, node_id)
    seen = host(conn, node_id)
    for slot in on_sale:
        closed_by = judge(conn, slot, proofs.current(conn, slot), seen)
        if closed_by:
            why = "; ".join(f"{row.code}: {row.detail}" for row in closed_by)[:2000]
            evidence = {**act.evidence, "blockers": [row.document() for row in closed_by]}
            take_off_sale(conn, slot.id, act.because(f"gate closed: {why}", evidence))
            shut.append(slot.id)
    return shut


def close(conn: sa.Connection, node_id: str, act: Act) -> list[str]:
    """Disable the node's available slots and return their ids. `wanted` stays unchanged."""
    closed = [slot.id for slot in _lock_on_sale(conn, node_id)]
    for slot_id in closed:
        take_off_sale(conn, slot_id, act)
    return closed


def take_off_sale(conn: sa.Connection, slot_id: str, act: Act) -> Slot:
    """Disable an available slot."""
    return advance(conn, Slot, slot_id, "disable", act, columns={"available_proof_id": None})


def _lock_on_sale(conn: sa.Connection, node_id: str) -> list[Slot]:
    """The available slots, locked in the common lock order.

    No launch can claim them before their transition. A slot that a launch took in the meantime is
    not available any more.
    """
    query = sa.select(slots).where(
        slots.c.node_id == node_id, slots.c.status == SlotState.AVAILABLE
    )
    return rows.every(conn, query.order_by(slots.c.id).with_for_update(), Slot)


def give_back(conn: sa.Connection, slot: Slot, proof: Proof, act: Act) -> Slot:
    """Return a slot that is proven clean: available, or disabled while its gate is closed.

    The caller holds the locks of the node and the slot, taken in this order.
    """
    closed_by = judge(conn, slot, proof)
    columns: dict[str, Any] = {"last_proof_id": proof.id, **HEALTHY}
    evidence = {**act.evidence, "proof_id": proof.id}
    if slot.wanted == SlotState.AVAILABLE and not closed_by:
        columns["available_proof_id"] = proof.id
        return advance(
            conn, Slot, slot.id, "return", act.because(act.reason, evidence), columns=columns
        )
    for row in closed_by:
        if row.code in FAILING:
            detail = {"code": row.code, "reason": row.detail}
            columns |= {"health_state": HealthState.DEGRADED.value, "health_detail": detail}
    why = "; ".join(row.code for row in closed_by) if closed_by else "it is wanted disabled"
    evidence["blockers"] = [row.document() for row in closed_by]
    parked = act.because(f"{act.reason}; disabled: {why}", evidence)
    return advance(conn, Slot, slot.id, "park", parked, columns=columns)


def _drift(slot: Slot) -> str:
    """Drift of an idle slot. The detail of a slot in clean-up is older than its verification."""
    detail = slot.health_detail
    idle_drift = detail.get("step") == drift.STEP and slot.status in IDLE_SLOTS
    return str(detail["reason"]) if idle_drift else ""


def _partition(node: Node, slot: Slot) -> str:
    """What the latest reading of the fabric's partitions has against the slot."""
    read = node.fabric_reading
    if read is None:
        return ""
    if read["error"]:
        return str(read["error"])
    if slot.id not in read["slots"]:
        return "its partitions have not been read since its approval"
    return str(read["problems"].get(slot.id, ""))


def _proof(record: Proof | None) -> DiskProof | None:
    if record is None:
        return None
    # An untouched disk is as clean as the proof under which the slot was sold.
    method = None if record.kind == ProofKind.UNTOUCHED else record.method
    return DiskProof(
        disk_identity=record.disk_identity,
        disk_generation=record.disk_generation,
        recorded_at=record.created_at,
        method=method,
        install_id=record.install_id,
        gpu=str((record.document.get(proofs.GPU) or {}).get("address") or ""),
    )


def _sighting(record: Discovery | Parity | None) -> Sighting | None:
    if record is None:
        return None
    return Sighting(
        observed_at=record.observed_at or 0.0,
        boot_id=record.boot_id,
        install_id=record.install_id,
        document=record.document,
        failures=getattr(record, "failures", 0),
    )


# Remedy when a write-off has no reason. The audit needs the reason of the person who gives up.
WHY_GIVEN_UP = "say why this is given up"


def doubted(slot: Slot) -> bool:
    """Whether the latest drift detection found something in an idle slot.

    Only the gate of this slot knows the drift. Before the slot is retired, its disk must get the
    next generation. Otherwise the earlier proof would count in the next slot with this disk.
    """
    return bool(slot.health_detail.get("step") == drift.STEP)
