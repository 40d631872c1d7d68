"""Evidence of a recovery case: the state of its slots, their disks and their gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db.schema import RecoveryCase, Slot, slots
from reconciler.db.schema import proofs as proof_table
from reconciler.db.schema.base import Row
from reconciler.lifecycle import gate
from reconciler.lifecycle.recovery import FORCE_CLEANUP
from reconciler.model.states import IDLE_SLOTS, ProofKind, SlotState
from reconciler.records import proofs as proof_records
from reconciler.records.claims import of_allocation

Document = dict[str, Any]
_PROOF = (
    "id", "kind", "method", "disk_identity", "disk_generation", "allocation_id", "task_id",
)  # fmt: skip
_AUDIT = (
    "id", "actor", "role", "action", "subject_id", "reason", "detail", "correlation_id",
)  # fmt: skip


def slots_of(conn: sa.Connection, case: RecoveryCase) -> list[Slot]:
    """The slots of a case, under any present holder."""
    query = sa.select(slots).where(slots.c.id.in_(case.slot_ids))
    return rows.every(conn, query.order_by(slots.c.slot_index), Slot)


def unsold_slots(conn: sa.Connection, case: RecoveryCase) -> list[Slot]:
    """The slots that no later claim or proof has taken over. A slot that was sold since has already
    come back; one that was written off since, without a proof, has not.
    """
    claimed = of_allocation(conn, case.allocation_id)
    generations = {claim.slot_id: claim.disk_generation for claim in claimed}
    return [
        slot
        for slot in slots_of(conn, case)
        if (
            not _came_back(conn, case, slot, generations.get(slot.id))
            if slot.retired_at
            else slot.disk_generation == generations.get(slot.id)
        )
    ]


def _came_back(conn: sa.Connection, case: RecoveryCase, slot: Slot, generation: int | None) -> bool:
    """Whether a disk was proven clean since the case began, after its claim of this generation."""
    proven = sa.select(proof_table.c.id).where(
        proof_table.c.slot_id == slot.id,
        proof_table.c.disk_generation == generation,
        proof_table.c.kind == ProofKind.WIPE,
        proof_table.c.created_at >= case.requested_at,
    )
    return rows.first(conn, proven) is not None


def stuck(slot_rows: Sequence[Slot]) -> str:
    """Why the most recently blocked slot has not come back. "" when all slots have."""
    left = _stuck_slots(slot_rows)
    if not left:
        return ""
    last = max(left, key=lambda slot: float(slot.status_since))
    if last.retired_at:
        return "it was withdrawn without a proof"
    return str(last.health_detail.get("reason") or last.status)


def not_recovered(slot_rows: Sequence[Slot]) -> Document:
    """The failure of a case whose slots did not all come back."""
    return {
        "code": "slots_not_recovered",
        "expected": "every slot of the allocation proven clean",
        "found": ", ".join(
            f"{slot.id} {slot.status} {slot.health_detail.get('code', '')}".rstrip()
            for slot in _stuck_slots(slot_rows)
        ),
        "remedy": "read the slot's health_detail, and the remedy of the task that failed; when the"
        " host or its disk is mended, recover again",
    }


def _stuck_slots(slot_rows: Sequence[Slot]) -> list[Slot]:
    # A slot under clean-up becomes idle only with the proof of a clean disk.
    return [slot for slot in slot_rows if slot.status not in IDLE_SLOTS or slot.retired_at]


def cleaning(conn: sa.Connection, case: RecoveryCase) -> str:
    """The slots under wipe with their deadlines. "" when there are none."""
    return ", ".join(
        f"slot {slot.slot_index} ({slot.id}) is wiped, until {clock.iso(slot.deadline_at)}"
        for slot in unsold_slots(conn, case)
        if slot.status == SlotState.CLEANUP
    )


def inventory(conn: sa.Connection, slot_rows: Sequence[Slot]) -> Document:
    """State of each slot, by id."""
    return {
        slot.id: {
            "slot_index": slot.slot_index,
            "status": slot.status,
            "status_since": clock.iso(slot.status_since),
            "deadline_at": clock.iso(slot.deadline_at),
            "health_state": slot.health_state,
            "health_detail": slot.health_detail,
            "last_proof": _proof(conn, slot),
        }
        for slot in slot_rows
    }


def proofs(conn: sa.Connection, slot_rows: Sequence[Slot]) -> Document:
    """The last proof of each slot's disk, by slot id. None without a proof."""
    return {slot.id: _proof(conn, slot) for slot in slot_rows}


def proof_ids(conn: sa.Connection, case: RecoveryCase) -> list[str]:
    """The proofs by which the slots of a case came back."""
    left = {slot.id for slot in _stuck_slots(unsold_slots(conn, case))}
    return [
        str(slot.last_proof_id)
        for slot in slots_of(conn, case)
        if slot.last_proof_id and slot.id not in left
    ]


def after_cleanup(conn: sa.Connection, case: RecoveryCase) -> dict[str, Document]:
    """The last steps of the runbook, in order."""
    slot_rows = slots_of(conn, case)
    forced = journal.audit_rows(conn, action=FORCE_CLEANUP, subject_id=case.allocation_id)[:1]
    steps: dict[str, Document] = {
        "inventory_after": inventory(conn, slot_rows),
        "disk_evidence_after": proofs(conn, slot_rows),
        "audit": {"events": [_fields(row, _AUDIT, at="at") for row in forced]},
    }
    closed = {slot.id: _gate(conn, slot) for slot in slot_rows if slot.status == SlotState.DISABLED}
    return {**steps, "not_on_sale": closed} if closed else steps


def _gate(conn: sa.Connection, slot: Slot) -> Document:
    """Why a clean slot is not sold, and the command that comes next."""
    blockers = [blocker.document() for blocker in gate.gate(conn, slot.id)]
    codes = [row["code"] for row in blockers]
    node = slot.node_id
    if slot.wanted == SlotState.DISABLED or "launches_failed" in codes:
        command = f"gpuaas slots enable {node} {slot.id} --reason WHY"
    elif any(code.startswith("proof_") for code in codes):
        command = f"gpuaas nodes transition {node} --device {slot.nvme_device}"
    elif "gpu_unproven" in codes:
        command = f"gpuaas nodes bind {node} && gpuaas nodes parity {node}"
    else:
        command = f"gpuaas nodes discover {node} && gpuaas nodes parity {node}"
    return {"gate": blockers, "wanted": slot.wanted, "next": command}


def _proof(conn: sa.Connection, slot: Slot) -> Document | None:
    if not slot.last_proof_id:
        return None
    return _fields(proof_records.get(conn, slot.last_proof_id), _PROOF, at="created_at")


def _fields(record: Row, names: Sequence[str], *, at: str) -> Document:
    """Fields of a record, its time as text."""
    return {**{name: getattr(record, name) for name in names}, at: clock.iso(getattr(record, at))}
