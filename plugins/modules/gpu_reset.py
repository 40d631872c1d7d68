#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Reset and scrub of the GPUs of slots between tenants, with evidence."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_reset
short_description: Reset and scrub the GPUs of slots between tenants, with evidence
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Resets the GPU of each slot by the first of O(methods) that the kernel offers and that reaches
    no device of another slot, while VFIO holds the device, so that no guest can have it.
  - Reads back identity, base addresses, boot register, power state, driver, link and error counts,
    and scrubs the memory by O(scrub).
  - Records the evidence in the host's ledger. It stands until a guest or the host gets the GPU.
    A GPU with standing evidence is left alone.
  - A reset that does not return is left to the kernel after two minutes and fails with
    C(gpu_reset_hangs).
  - Refuses with C(stale_fence), C(slot_leased), C(not_bound), C(device_missing), C(device_in_use),
    C(device_not_answering), C(group_not_viable), C(gpu_reset_unsupported), C(gpu_reset_failed),
    C(gpu_reset_hangs), C(gpu_not_restored), C(gpu_errors), C(gpu_changed),
    C(gpu_scrub_unsupported), C(gpu_scrub_failed).
options:
  slots:
    description: Slot bundles. With O(allocation_id), each with its C(fence).
    type: list
    elements: dict
    required: true
  allocation_id:
    description:
      - The allocation that gives the slots back. Every slot must then have evidence that was taken
        under its fence, and a slot that another allocation has leased is refused.
      - Without it, leased slots are left alone, and a GPU that cannot be reset is a warning,
        because only its own slot depends on it.
    type: str
    default: ""
  methods:
    description: Reset methods in order of preference.
    type: list
    elements: str
    choices: [flr, bus]
    default: [flr, bus]
  scrub:
    description:
      - V(nvidia) waits until an H100 or H200 reports that its boot has cleared its memory.
      - V(edu) overwrites buffer and registers of QEMU's edu device and reads them back.
      - V(none) scrubs nothing, and the evidence says so.
    type: str
    choices: [none, nvidia, edu]
    default: none
seealso:
  - module: gpuaas.slice.nvme_wipe
  - module: gpuaas.slice.vfio_bind
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Reset the GPU of a released slot
  gpuaas.slice.gpu_reset:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots:
      - {slot_id: slot-0, fence: 7, gpu_pci_address: "0000:43:00.0"}
    methods: [bus]
    scrub: nvidia
"""

RETURN = r"""
proofs:
  description: The standing evidence of each slot, by slot id.
  returned: always
  type: dict
  sample:
    slot-0:
      gpu:
        address: "0000:43:00.0"
        id: "10de:2335"
        method: bus
        boot: "0x180000a1"
        link: {speed: 32.0 GT/s PCIe, width: "16"}
        errors: {fatal: 0, nonfatal: 0, correctable: 0}
        scrub: {method: nvidia, boot_complete: true, memory_clear_finished: true}
        fence: 7
        started_at: "2026-05-01T10:00:00+00:00"
        finished_at: "2026-05-01T10:00:04+00:00"
        verified: true
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _gpu_reset,
    _gpu_scrub,
    _slots,
)


@dataclass(frozen=True)
class SlotState:
    """evidence: of the last reset, None without one that stands. refusals: why the GPU cannot be
    reset now.
    """

    slot_id: str
    address: str
    evidence: Mapping[str, Any] | None = None
    refusals: tuple[Refusal, ...] = ()


def observe(params: _change.Params) -> list[SlotState]:
    allocation = params["allocation_id"]
    needed = ("slot_id", "gpu_pci_address", *(("fence",) if allocation else ()))
    states = [_look(slot, params) for slot in _slots.checked(params["slots"], needed=needed)]
    return [state for state in states if state is not None]


def _look(slot: Mapping[str, Any], params: _change.Params) -> SlotState | None:
    slot_id, address = str(slot["slot_id"]), str(slot["gpu_pci_address"])
    allocation = params["allocation_id"]
    try:
        entry = _ledger.check(slot_id, int(slot["fence"])) if allocation else _ledger.load(slot_id)
        if not allocation and entry.allocation_id:
            return None
        if entry.allocation_id not in ("", allocation):
            raise _ledger.not_its_holder(entry, allocation)
        evidence = _ledger.standing_gpu(slot_id, address)
    except Refusal as refusal:
        return SlotState(slot_id, address, refusals=(refusal,))
    if evidence is not None and _suffices(evidence, slot, params):
        return SlotState(slot_id, address, evidence)
    return SlotState(slot_id, address, refusals=tuple(_slots.passthrough([address])))


def _suffices(evidence: Mapping[str, Any], slot: Mapping[str, Any], params: _change.Params) -> bool:
    """The ledger does not record a machine that was started by hand, so the fence counts too."""
    late = bool(params["allocation_id"]) and int(evidence["fence"]) < int(slot["fence"])
    by_profile = evidence["method"] in params["methods"]
    return not late and by_profile and evidence["scrub"]["method"] == params["scrub"]


def plan(params: _change.Params, state: list[SlotState]) -> _change.Plan:
    due = [slot for slot in state if slot.evidence is None]
    refusals = tuple(refusal for slot in due for refusal in slot.refusals)
    if params["allocation_id"]:
        return _change.Plan(tuple(_step(slot) for slot in due), refusals)
    fit = [slot for slot in due if not slot.refusals]
    return _change.Plan(tuple(_step(slot, soft=True) for slot in fit), doubts=refusals)


def _step(slot: SlotState, *, soft: bool = False) -> _change.Step:
    return _change.Step("reset_gpu", slot.slot_id, "used", "reset", slot.address, soft)


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any]:
    slot = next(slot for slot in params["slots"] if str(slot["slot_id"]) == step.subject)
    address = str(slot["gpu_pci_address"])
    fence = _ledger.load(step.subject).fence
    if params["allocation_id"]:
        fence = int(slot["fence"])
    # A reset that fails, or never returns, ends the evidence of an earlier one.
    entry = _ledger.mark_gpu_used(step.subject, fence=fence)
    evidence = _gpu_reset.clear(address, params["methods"], params["scrub"], entry.gpu)
    _ledger.mark_gpu_reset(step.subject, fence=fence, evidence={**evidence, "fence": fence})
    return evidence


def facts(_params: _change.Params, state: list[SlotState]) -> dict[str, Any]:
    return {"proofs": {s.slot_id: {"gpu": dict(s.evidence)} for s in state if s.evidence}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "slots": {"type": "list", "elements": "dict", "required": True},
            "allocation_id": {"type": "str", "default": ""},
            "methods": {
                "type": "list",
                "elements": "str",
                "choices": list(_gpu_reset.METHODS),
                "default": list(_gpu_reset.METHODS),
            },
            "scrub": {"type": "str", "choices": list(_gpu_scrub.METHODS), "default": "none"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
