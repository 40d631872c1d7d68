"""Transitions of a slice allocation at the start and end of a run, with its claims and slots.

Each function runs in the transaction that finishes the task. It returns False and changes nothing
when the allocation has already left the expected state, because a late result decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, locks, rows
from reconciler.db.journal import advance
from reconciler.db.schema import Allocation, Claim, Slot, allocations
from reconciler.lifecycle import gate, guest_pool, host, ingress
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.proof import nothing_written
from reconciler.model.states import (
    LIVE_CLAIMS,
    UNCLEAN_SLOTS,
    AllocationState,
    HealthState,
    ProofKind,
    SlotState,
    TaskKind,
)
from reconciler.records import claims, queue, reports, usage
from reconciler.records import proofs as proof_records
from reconciler.records.claims import held_slots, last_holder

Proofs = Mapping[str, Mapping[str, Any]]
BUILDING = (AllocationState.REQUESTED, AllocationState.PROVISIONING)
CLAIMED = (SlotState.RESERVED, SlotState.PROVISIONING)


def provision_started(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    machine: Mapping[str, Any] = MappingProxyType({}),
) -> bool:
    """Record that a run has begun to build the allocation. machine: what the slice keeps of it."""
    if not _in_state(conn, allocation_id, AllocationState.REQUESTED):
        return False
    columns = {"machine": dict(machine)}
    advance_together(conn, allocation_id, "provision", act, columns=columns)
    return True


def provision_succeeded(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    connection: Mapping[str, Any],
    boot_id: str = "",
) -> bool:
    """Activate the allocation. connection: the access data that the tenant may see. boot_id: the
    boot of the host under which it was started.
    """
    if not _in_state(conn, allocation_id, AllocationState.PROVISIONING):
        return False
    columns = {
        "connection": dict(connection),
        "activated_at": clock.now(),
        "started_boot_id": boot_id,
    }
    advance_together(conn, allocation_id, "activate", act, columns=columns, on_slots=gate.HEALTHY)
    return True


def provision_failed(
    conn: sa.Connection,
    allocation_id: str,
    act: Act,
    *,
    step: str,
    error: Mapping[str, Any],
    untouched: Proofs | None = None,
) -> bool:
    """Fail the allocation. Only slots that the host reports as untouched return automatically.

    After a launch failure that the host caused, they stay disabled until the host is verified.
    """
    if not _in_state(conn, allocation_id, *BUILDING):
        return False
    with locks.allocation(conn, allocation_id):
        act = about(act, allocation_id, f"provisioning failed at {step}", error=dict(error))
        fail(conn, allocation_id, act, error=error)
        launch_failed = False
        for slot in held_slots(conn, allocation_id):
            if slot.status not in CLAIMED:
                continue
            evidence = (untouched or {}).get(slot.id, {})
            if nothing_written(evidence):
                document = proof_records.with_failure(evidence, str(error.get("code") or step))
                proof = proof_records.record(
                    conn, slot, ProofKind.UNTOUCHED, document, allocation_id=allocation_id
                )
                gate.give_back(conn, slot, proof, act)
                launch_failed |= proof_records.launch_failures(conn, slot).count > 0
            else:
                block(conn, slot, allocation_id, act, step=step, error=error)
        if launch_failed:
            host.reverify_allocation(conn, allocation_id, act)
        return True


def release_succeeded(
    conn: sa.Connection, allocation_id: str, act: Act, *, proofs: Proofs, absence: Mapping[str, Any]
) -> bool:
    """Finish a release with absence and wipe proofs. Raises when the evidence falls short."""
    if not _in_state(conn, allocation_id, AllocationState.RELEASING):
        return False
    with locks.allocation(conn, allocation_id):
        act = about(act, allocation_id, "released")
        # End the claims first: the schema refuses to sell a slot under a live claim (I4).
        move_claims(conn, allocation_id, "finish", act)
        require_absence(conn, allocation_id, absence, act)
        for slot in held_slots(conn, allocation_id):
            if slot.id not in proofs:
                raise Problem(
                    "proof_missing",
                    expected=f"a wipe proof for slot {slot.id}",
                    found=f"proofs for {', '.join(sorted(proofs)) or 'no slot'}",
                    remedy="treat the run as failed; `gpuaas recover` wipes again",
                )
            _give_back_wiped(conn, slot, proofs[slot.id], allocation_id, act)
        advance(conn, Allocation, allocation_id, "finish", act, columns={"ended_at": clock.now()})
        return True


def release_failed(
    conn: sa.Connection, allocation_id: str, act: Act, *, step: str, error: Mapping[str, Any]
) -> bool:
    """Block the slots until there is evidence. The allocation stays `releasing`."""
    if not _in_state(conn, allocation_id, AllocationState.RELEASING):
        return False
    with locks.allocation(conn, allocation_id):
        act = about(act, allocation_id, f"release failed at {step}", error=dict(error))
        for slot in held_slots(conn, allocation_id):
            if slot.status == SlotState.RELEASING:
                block(conn, slot, allocation_id, act, step=step, error=error)
        # Keep the deadline: the release time limit runs from the first attempt.
        columns = {"error": dict(error), "deadline_at": allocations.c.deadline_at}
        advance(conn, Allocation, allocation_id, "strand", act, columns=columns)
        return True


def cleanup_succeeded(
    conn: sa.Connection, measured: str, act: Act, *, proofs: Proofs, absence: Mapping[str, Any]
) -> bool:
    """Return slots after a proven clean-up. True when at least one slot was in clean-up.

    measured: the allocation whose traces the absence report covers, "" for an allocation without a
    record. The slots may have had any last holder.
    """
    with ExitStack() as scopes:
        locked = [scopes.enter_context(locks.slot(conn, slot_id)) for slot_id in sorted(proofs)]
        cleaning = [slot for slot in locked if slot.status in UNCLEAN_SLOTS]
        if cleaning:
            require_absence(conn, measured, absence, act)
        for slot in cleaning:
            holder = last_holder(conn, slot.id)
            slot_act = about(act, holder, "cleaned up")
            _give_back_wiped(conn, slot, proofs[slot.id], holder, slot_act)
        return bool(cleaning)


def cleanup_failed(
    conn: sa.Connection, slot_ids: Sequence[str], act: Act, *, step: str, error: Mapping[str, Any]
) -> bool:
    """Block slots again after a clean-up without proof, with the reason."""
    blocked = False
    for slot_id in slot_ids:
        slot = rows.get(conn, Slot, slot_id, lock=True)
        if slot.status == SlotState.CLEANUP:
            holder = last_holder(conn, slot_id)
            slot_act = about(act, holder, f"clean-up failed at {step}", error=dict(error))
            block(conn, slot, holder, slot_act, step=step, error=error)
            blocked = True
    return blocked


def fail(conn: sa.Connection, allocation_id: str, act: Act, *, error: Mapping[str, Any]) -> None:
    """End an allocation and its claims as failed."""
    columns = {"error": dict(error), "ended_at": clock.now()}
    advance(conn, Allocation, allocation_id, "fail", act, columns=columns)
    move_claims(conn, allocation_id, "fail", act)
    guest_pool.detach(conn, allocation_id, act)


def block(
    conn: sa.Connection,
    slot: Slot,
    allocation_id: str,
    act: Act,
    *,
    step: str,
    error: Mapping[str, Any],
) -> Slot:
    """Block a slot until there is evidence. Its detail names the allocation and the reason."""
    guest_pool.detach(conn, allocation_id, act)
    reason = str(error.get("found") or error.get("code") or act.reason)
    detail = {"allocation_id": allocation_id, "reason": reason, "step": step}
    if error.get("code"):
        detail["code"] = str(error["code"])
    columns = {
        "health_state": HealthState.FAILED.value,
        "health_detail": detail,
        "available_proof_id": None,
    }
    return advance(conn, Slot, slot.id, "block", act, columns=columns)


def require_absence(
    conn: sa.Connection, allocation_id: str, absence: Mapping[str, Any], act: Act
) -> None:
    """Store the absence report, and raise unless it proves that no traces are left.

    The report of an allocation without a record ("") cannot be stored.
    """
    if allocation_id:
        reports.record_absence(conn, allocation_id, absence, act)
    if absence.get("absent") is not True:
        raise Problem(
            "absence_unproven",
            expected="proof that nothing of the allocation is left on the host",
            found=str(absence.get("checks") or "no answer"),
            remedy="treat the run as failed; `gpuaas recover` verifies again",
        )
    ingress.proven_absent(conn, allocation_id, absence, act)


def _give_back_wiped(
    conn: sa.Connection, slot: Slot, evidence: Mapping[str, Any], holder: str, act: Act
) -> None:
    proof = proof_records.record(conn, slot, ProofKind.WIPE, evidence, allocation_id=holder or None)
    gate.give_back(conn, slot, proof, act)


def advance_together(
    conn: sa.Connection,
    allocation_id: str,
    event: str,
    act: Act,
    *,
    columns: Mapping[str, Any] | None = None,
    on_slots: Mapping[str, Any] | None = None,
) -> None:
    """Apply an event to an allocation, its live claims and its slots."""
    act = about(act, allocation_id)
    advance(conn, Allocation, allocation_id, event, act, columns=columns)
    move_claims(conn, allocation_id, event, act)
    for slot in held_slots(conn, allocation_id):
        advance(conn, Slot, slot.id, event, act, columns=on_slots)


def run_on_slots(
    allocation: Allocation, kind: TaskKind, held: Sequence[Claim], /, **parameters: Any
) -> queue.Enqueue:
    """The task of a run on the slots of an allocation, under the fences of its claims."""
    slots = claims.run_bundles(held)
    return queue.Enqueue(
        kind=kind,
        node_id=allocation.node_id,
        allocation_id=allocation.id,
        parameters={"allocation": {"id": allocation.id}, "slots": slots, **parameters},
        fences={slot["slot_id"]: slot["fence"] for slot in slots},
    )


def about(act: Act, allocation_id: str, reason: str = "", **evidence: object) -> Act:
    """The act with the allocation and more evidence, and with a more exact reason if given."""
    return act.because(
        reason or act.reason, {**act.evidence, **evidence, "allocation_id": allocation_id}
    )


def _in_state(conn: sa.Connection, allocation_id: str, *states: AllocationState) -> bool:
    allocation = rows.get(conn, Allocation, allocation_id, lock=True)
    return allocation.state in states


def move_claims(conn: sa.Connection, allocation_id: str, event: str, act: Act) -> None:
    """Apply an event to every live claim of an allocation."""
    for claim in claims.of_allocation(conn, allocation_id):
        if claim.state in LIVE_CLAIMS:
            ended = event in claims.ENDS
            columns = {"ended_at": clock.now()} if ended else None
            advance(conn, Claim, claim.id, event, act, columns=columns)
    if event == "activate":
        usage.begin(conn, allocation_id)
    elif event != "provision":
        usage.end(conn, allocation_id)
