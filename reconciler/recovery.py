"""The runbook for a slot stuck in `cleanup_blocked`, as one act with evidence at every step.

The order is that of the operators' runbook (seed 000): inventory, allocation, absence on the
host, disk evidence, force-cleanup with an idempotency key, audit event, inventory again. Where the
host still holds something of the failed VM, the allocation is failed first and the slots go through
cleanup, so that absence and wipe are measured, not claimed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from reconciler.client import Client
from reconciler.model.errors import Problem
from reconciler.wait_timeout import WaitTimeout

Record = dict[str, Any]
OnStep = Callable[[str, Record], None]
# Keeps what a step found, and gives it back.
Note = Callable[[str, Record], Record]

# For a look at the host that cannot begin, which is the host's silence more often than not.
UNBEGUN_S = 300
BUILDING = ("requested", "provisioning")
# A slot leaves its clean-up for these only with the proof of a clean disk.
RECOVERED = ("available", "disabled")
AUDIT_ACTION = "admin.allocation.force_cleanup.applied"


def recover(client: Client, allocation_id: str, reason: str, on_step: OnStep) -> Record:
    """Bring the slots of a failed allocation back, or stop where a person must decide.

    Returns the evidence of each step by name; under `not_on_sale` the slots that are clean while
    their gate is closed, each with what to do next. Raises Problem: the service's own refusals, or
    `slots_not_recovered` when a slot did not come back, `cleanup_unfinished` when one is still
    being cleaned past its deadline. The detail has the evidence until then, under the same name.
    """
    evidence: Record = {}

    def note(step: str, found: Record) -> Record:
        evidence[step] = found
        on_step(step, found)
        return found

    try:
        _follow(client, allocation_id, reason, note)
    except Problem as problem:
        # Who must decide needs what has been seen.
        problem.detail["evidence"] = evidence
        raise
    return evidence


def _follow(client: Client, allocation_id: str, reason: str, note: Note) -> None:
    allocation = client.get(f"/admin/allocations/{allocation_id}")
    note("allocation", {"state": allocation["state"], "error": allocation.get("error")})
    _refuse(allocation)
    claimed = {claim["slot_id"] for claim in allocation["claims"] if claim["slot_id"]}
    node_id = allocation["node_id"]
    held = note("inventory", _held(allocation, _inventory(client, node_id, claimed)))
    _refuse_release_under_way(allocation, held)
    mine = set(held)

    if allocation["state"] in BUILDING:
        # Its run may be alive, and nothing else can be done on the host before that has ended.
        note("run_canceled", _force(client, allocation_id, reason, absent=False))
    absence = note("runtime_absence", _absence(client, allocation_id, reason))
    note("disk_evidence", _proofs(_inventory(client, node_id, mine)))
    released = allocation["state"] == "released"
    if not released:
        note("force_cleanup", _force(client, allocation_id, reason, absence["absent"]))
    if released or not absence["absent"]:
        # A forced release and the seed leave the slots blocked here; repair removes what is left,
        # wipes and verifies.
        note("repair", _repair(client, node_id, mine, reason))
        _settled(client, node_id, mine)
        note("runtime_absence_after", _absence(client, allocation_id, reason))
    after = note("inventory_after", _settled(client, node_id, mine))
    note("disk_evidence_after", _proofs(after))
    note(
        "audit",
        {
            "events": client.get("/admin/audit", action=AUDIT_ACTION, subject_id=allocation_id)[
                "items"
            ][:1]
        },
    )

    shut = [key for key, slot in after.items() if slot["status"] == "disabled"]
    if shut:
        # Clean, which is what this was about; why it is not sold yet is another matter.
        note("not_on_sale", {key: _gate(client, node_id, key) for key in shut})
    stuck = {key: slot["status"] for key, slot in after.items() if slot["status"] not in RECOVERED}
    if stuck:
        raise Problem(
            "slots_not_recovered",
            409,
            expected="every slot of the allocation proven clean",
            found=", ".join(f"{key} {status}" for key, status in stuck.items()),
            remedy="read the slot's health_detail and the task that failed; the host needs a look",
        )


def _refuse(allocation: Record) -> None:
    """Before anything is asked of a host: what only a person can decide about."""
    for wrong, code, found, remedy in (
        (
            allocation["capacity_shape"] == "baremetal",
            "allocation_baremetal",
            "a bare-metal allocation",
            "`gpuaas nodes clean-machine` removes and verifies in one go",
        ),
        (
            allocation["state"] == "active",
            "allocation_active",
            "an active allocation: its tenant may be using it",
            "look into its runtime first; then release it, or force its release",
        ),
    ):
        if wrong:
            raise Problem(
                code,
                409,
                expected="a failed, unfinished or stuck slice allocation",
                found=found,
                remedy=remedy,
            )


def _refuse_release_under_way(allocation: Record, held: Record) -> None:
    if allocation["state"] == "releasing" and any(
        slot["status"] == "releasing" for slot in held.values()
    ):
        raise Problem(
            "allocation_releasing",
            409,
            expected="a release that has failed",
            found="one that is under way",
            remedy="wait until it has ended",
        )


def _gate(client: Client, node_id: str, slot_id: str) -> Record:
    """Why a clean slot is not sold, and the command that comes next."""
    slot = client.get(f"/admin/nodes/{node_id}/resource-slots/{slot_id}")
    codes = [str(row["code"]) for row in slot["gate"]]
    if slot["wanted"] == "disabled" or "launches_failed" in codes:
        command = f"gpuaas slots enable {node_id} {slot_id} --reason WHY"
    elif any(code.startswith("proof_") for code in codes):
        command = f"gpuaas nodes transition {node_id} --device {slot['nvme_device']}"
    else:
        command = f"gpuaas nodes discover {node_id} && gpuaas nodes parity {node_id}"
    return {"gate": slot["gate"], "wanted": slot["wanted"], "next": command}


def _force(client: Client, allocation_id: str, reason: str, absent: bool) -> Record:
    body = {"reason": reason, "runtime_verified_absent": absent}
    path = f"/admin/allocations/{allocation_id}/force-cleanup"
    forced: Record = client.post(path, body, key=str(uuid.uuid4()))
    return forced


def _held(allocation: Record, slots: Record) -> Record:
    """Those that no later tenant has taken over: what happens to the others is not ours to undo."""
    if allocation["state"] not in ("failed", "released"):
        return slots
    return {
        slot_id: slot
        for slot_id, slot in slots.items()
        if slot["health_detail"].get("allocation_id", allocation["id"]) == allocation["id"]
        and slot["status"] in ("cleanup_blocked", "cleanup", "available", "disabled")
    }


def _inventory(client: Client, node_id: str, mine: set[str]) -> Record:
    slots = list(client.items(f"/admin/nodes/{node_id}/resource-slots"))
    wanted = (
        "slot_index",
        "status",
        "status_since",
        "deadline_at",
        "health_state",
        "health_detail",
        "last_proof",
    )
    return {slot["id"]: {key: slot[key] for key in wanted} for slot in slots if slot["id"] in mine}


def _proofs(slots: Record) -> Record:
    return {slot_id: slot["last_proof"] for slot_id, slot in slots.items()}


def _absence(client: Client, allocation_id: str, reason: str) -> Record:
    path = f"/admin/allocations/{allocation_id}/verify-absent"
    task = client.post(path, {"reason": reason})
    ended = client.wait(task["id"], unbegun_s=UNBEGUN_S)
    if ended["state"] != "succeeded":
        error = ended.get("error") or {}
        raise Problem(
            "absence_unknown",
            409,
            expected="the host to say what is left of the allocation",
            found=f"the look ended as {ended['state']}: {error.get('found', '')}",
            remedy="bring the host back first; unknown never frees a slot",
        )
    absence: Record = ended["result"]["absence"]
    return absence


def _repair(client: Client, node_id: str, mine: set[str], reason: str) -> Record:
    tasks = {}
    for slot_id, slot in _inventory(client, node_id, mine).items():
        if slot["status"] == "cleanup_blocked":
            path = f"/admin/nodes/{node_id}/resource-slots/{slot_id}/repair"
            tasks[slot_id] = client.post(path, {"reason": reason})["id"]
    return {"tasks": tasks}


def _settled(client: Client, node_id: str, mine: set[str]) -> Record:
    """The slots once none of them is in cleanup any more.

    A slot's deadline there follows its task's, and some disks take hours: what is past it, the
    service blocks. Problem `cleanup_unfinished` when it does not.
    """
    patience: dict[str, WaitTimeout] = {}
    while True:
        found = _inventory(client, node_id, mine)
        cleaning = {key: slot for key, slot in found.items() if slot["status"] == "cleanup"}
        if not cleaning:
            return found
        late = [
            f"slot {slot['slot_index']} ({key}), until {slot['deadline_at']}"
            for key, slot in cleaning.items()
            if patience.setdefault(key, WaitTimeout()).ends(
                slot["status_since"], slot["deadline_at"]
            )
        ]
        if late:
            raise _unfinished(node_id, late)
        time.sleep(1)


def _unfinished(node_id: str, late: list[str]) -> Problem:
    return Problem(
        "cleanup_unfinished",
        504,
        expected="the clean-up of every slot to have ended by its deadline",
        found=f"still in cleanup: {', '.join(late)}",
        remedy="it goes on, and nothing is wrong with the slots yet: `gpuaas tasks list --node"
        f" {node_id}` shows the task and what it waits for, `gpuaas doctor` whether the service is"
        " well; recover again when it has ended",
    )
