"""node.storage_transition: host disks become raw slice disks, with a proof for each."""

from __future__ import annotations

from typing import Any

from reconciler.store import proofs
from reconciler.tasks.handler import Handler, Work


def variables(work: Work) -> dict[str, Any]:
    parameters = work.parameters
    return {
        "slice_devices": parameters["devices"],
        "slice_apply": bool(parameters.get("apply", False)),
        "slice_expected": parameters.get("expected", {}),
    }


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    act = work.act.because("storage transition applied")
    for device in evidence["devices"]:
        if device.get("proof"):
            proofs.record_transition(
                work.conn,
                work.task["node_id"],
                device["proof"],
                act,
                task_id=work.task["id"],
                manifest=str(device.get("manifest") or evidence.get("manifest") or ""),
            )
    return evidence


HANDLER = Handler("transition_storage", variables, succeed, wiped="slice_devices")
