"""Fence of a slice's power actions: only the run with the highest number in the ledger acts.

All runs of power of an allocation have the fence of its claim. A run that counts as lost but is
alive, or hangs on its host, would otherwise act once more beside its successor.
"""

from __future__ import annotations

from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slots


def observe(params: _change.Params) -> dict[str, int]:
    """Power fence of each slot; refused for a run that may not act."""
    if params.get("boot_id"):
        _slots.require_boot(params["boot_id"])
    slots = _slots.checked(params["slots"], needed=("slot_id", "fence", "power_fence"))
    _ledger.check_each(slots)
    return {str(slot["slot_id"]): _ledger.load(str(slot["slot_id"])).power_fence for slot in slots}


def plan(params: _change.Params, state: dict[str, int]) -> _change.Plan:
    steps = [
        _change.Step("fence_power", slot_id, before, int(slot["power_fence"]))
        for slot in params["slots"]
        if (before := state[slot_id := str(slot["slot_id"])]) < int(slot["power_fence"])
    ]
    return _change.Plan(tuple(steps))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    fences = {str(slot["slot_id"]): int(slot["fence"]) for slot in params["slots"]}
    _ledger.raise_power_fence(step.subject, fence=fences[step.subject], power_fence=step.after)
    return None


SUBJECT = _change.Subject(observe, plan, apply)
