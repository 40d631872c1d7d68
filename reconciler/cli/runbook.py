"""What a step of `gpuaas recover` found, in lines that a person can judge as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]

# Hosts wrote some of it, and a line of theirs must not look like a step of ours.
_LONGEST = 300


def lines(step: str, found: Record) -> Iterator[str]:
    """The evidence in short, all of which is in the document at the end; each really one line."""
    told = _TOLD.get(step, _whole)
    for line in told(found):
        yield " ".join(line.split())[:_LONGEST]


def _whole(found: Record) -> Iterator[str]:
    yield json.dumps(found)


def _allocation(found: Record) -> Iterator[str]:
    error = found["error"] or {}
    why = _joined(": ", error.get("code"), error.get("found"))
    yield _joined("; ", f"state {found['state']}", why)


def _slots(found: Record) -> Iterator[str]:
    if not found:
        yield "no slot is this allocation's any more"
    for slot_id, slot in found.items():
        detail = slot["health_detail"]
        why = _joined(", ", detail.get("step"), detail.get("code"), detail.get("reason"))
        state = f"slot {slot['slot_index']} ({slot_id}): {slot['status']}, {slot['health_state']}"
        yield _joined("; ", state, why)


def _absence(found: Record) -> Iterator[str]:
    checks = found["checks"]
    left = {name: check for name, check in checks.items() if not _is_absent(check)}
    if found["absent"]:
        yield f"absent: nothing is left on the host by {len(checks)} checks"
    else:
        yield f"not absent: {len(left)} of {len(checks)} checks found something or do not know"
    for name, check in left.items():
        detail = check.get("detail") if isinstance(check, Mapping) else check
        yield f"{name}: {detail}"


def _is_absent(check: object) -> bool:
    return isinstance(check, Mapping) and check.get("absent") is True


def _proofs(found: Record) -> Iterator[str]:
    for slot_id, proof in found.items():
        if proof is None:
            yield f"slot {slot_id}: no proof of its disk"
        else:
            what = f"{proof['kind']} proof {proof['id']}, {proof['method']}"
            yield f"slot {slot_id}: {what} of {proof['disk_identity']} at {proof['created_at']}"


def _forced(found: Record) -> Iterator[str]:
    for slot in found["slots"]:
        task = f"task {slot['task_id']}" if slot["task_id"] else ""
        yield _joined("; ", f"slot {slot['slot_index']}: {slot['status']}", task)
    for task in found["canceled_tasks"]:
        yield f"canceled: task {task}"


def _repair(found: Record) -> Iterator[str]:
    if not found["tasks"]:
        yield "no slot is blocked"
    for slot_id, task_id in found["tasks"].items():
        yield f"slot {slot_id}: task {task_id}"


def _audit(found: Record) -> Iterator[str]:
    for event in found["events"]:
        yield f"{event['at']} {event['actor']}: {event['action']}: {event['reason']}"


def _shut(found: Record) -> Iterator[str]:
    for slot_id, told in found.items():
        codes = ", ".join(str(row["code"]) for row in told["gate"]) or f"wanted {told['wanted']}"
        yield f"slot {slot_id}: {codes}; next: {told['next']}"


def _joined(between: str, *words: object) -> str:
    return between.join(str(word) for word in words if word)


_TOLD: dict[str, Callable[[Record], Iterator[str]]] = {
    "allocation": _allocation,
    "inventory": _slots,
    "run_canceled": _forced,
    "runtime_absence": _absence,
    "disk_evidence": _proofs,
    "force_cleanup": _forced,
    "repair": _repair,
    "runtime_absence_after": _absence,
    "inventory_after": _slots,
    "disk_evidence_after": _proofs,
    "audit": _audit,
    "not_on_sale": _shut,
}
