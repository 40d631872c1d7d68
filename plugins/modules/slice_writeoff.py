#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Write-off of slots whose devices have died: their holds end."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_writeoff
short_description: Give up the holds of slots whose devices have died
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - A slot whose disk has died cannot be wiped, so its last allocation never gives its hold back,
    and the host stays a slice host for ever. The reconciler withdraws such a slot; this module
    retires its entry in the host's ledger.
  - Only entries that name the given allocation are touched. Their fence goes up to the given one,
    and the former allocation and the reason are kept with them.
  - A dirty mark stays. If the disk comes back, it counts as not wiped.
  - Refuses with C(stale_fence), C(slot_leased) while another allocation has the slot, and
    C(domain_present) while anything of the allocation's VM is there.
options:
  slots:
    description: The slots that were written off.
    type: list
    elements: dict
    required: true
    suboptions:
      slot_id:
        description: The slot.
        type: str
        required: true
      fence:
        description: Its fence since it was written off.
        type: int
        required: true
      allocation_id:
        description: The last allocation that had it, a UUID with dashes.
        type: str
        required: true
      reason:
        description: The evidence, such as C(no disk any more).
        type: str
        required: true
seealso:
  - module: gpuaas.slice.slice_lease
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Give up the hold of a slot whose disk has died
  gpuaas.slice.slice_writeoff:
    slots:
      - slot_id: slot-0
        fence: 9
        allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
        reason: no disk any more
"""

RETURN = r"""
written_off:
  description: Ids of the slots whose entry is marked as given up.
  returned: always
  type: list
  elements: str
  sample: [slot-0]
"""

from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt, _pinning

# Read from files, because libvirt may be removed from the host when a conversion is repeated.
_DOMAINS = ("/etc/libvirt/qemu", "/run/libvirt/qemu")


@dataclass(frozen=True)
class State:
    """held: slots of each allocation, given or not. plans: resources promised to it.

    machines: the existing domains, by allocation.
    """

    entries: dict[str, _ledger.Entry]
    held: dict[str, list[str]]
    plans: dict[str, Any]
    machines: dict[str, str]


def observe(params: _change.Params) -> State:
    named = sorted({str(slot["allocation_id"]) for slot in params["slots"]})
    names = {allocation_id: _object_names.domain_name(allocation_id) for allocation_id in named}
    return State(
        entries={slot["slot_id"]: _ledger.load(slot["slot_id"]) for slot in params["slots"]},
        held={
            allocation_id: [
                e.slot_id for e in _ledger.entries() if e.allocation_id == allocation_id
            ]
            for allocation_id in named
        },
        plans={allocation_id: _pinning.recorded(allocation_id) for allocation_id in named},
        machines={allocation_id: name for allocation_id, name in names.items() if _there(name)},
    )


def _there(name: str) -> bool:
    files = [_host.path(f"{folder}/{name}.xml") for folder in _DOMAINS]
    return any(file.exists() for file in files) or bool(_libvirt.processes(name))


def plan(params: _change.Params, state: State) -> _change.Plan:
    steps: list[_change.Step] = []
    blockers: list[Refusal] = []
    for slot in params["slots"]:
        entry, allocation = state.entries[slot["slot_id"]], slot["allocation_id"]
        if not entry.allocation_id:
            continue
        blockers += _refusals(slot, entry, state)
        after = {"allocation_id": "", "fence": slot["fence"], "reason": slot["reason"]}
        before = {"allocation_id": allocation, "fence": entry.fence}
        steps.append(_change.Step("give_up_lease", entry.slot_id, before, after))
    gone = {step.subject for step in steps}
    for allocation, promised in state.plans.items():
        if promised is not None and not set(state.held[allocation]) - gone:
            steps.append(_change.Step("forget_plan", allocation, promised, None))
            if allocation in state.machines:
                blockers.append(_present(allocation, state))
    return _change.Plan(tuple(steps), tuple(blockers))


def _refusals(slot: dict[str, Any], entry: _ledger.Entry, state: State) -> list[Refusal]:
    blockers = entry.stale(slot["fence"])
    if entry.allocation_id != slot["allocation_id"]:
        blockers.append(_ledger.not_its_holder(entry, slot["allocation_id"]))
    elif entry.allocation_id in state.machines:
        blockers.append(_present(entry.allocation_id, state))
    return blockers


def _present(allocation: str, state: State) -> Refusal:
    return Refusal(
        "domain_present",
        expected=f"no domain or QEMU of allocation {allocation}",
        found=state.machines[allocation],
        remedy="remove the VM first (slice_vm with state=absent)",
    )


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "forget_plan":
        _pinning.forget(step.subject)
        return None
    (slot,) = (slot for slot in params["slots"] if slot["slot_id"] == step.subject)
    _ledger.give_up(
        step.subject,
        fence=slot["fence"],
        allocation_id=slot["allocation_id"],
        reason=slot["reason"],
    )
    return None


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    given_up = [entry.slot_id for entry in state.entries.values() if entry.written_off]
    return {"written_off": sorted(given_up)}


# A plan made meanwhile would count on resources that are being given up, or be lost with them.
SUBJECT = _change.Subject(observe, plan, apply, facts, exclusive=lambda _params: _pinning.locked())


def main() -> None:
    text, number = {"type": "str", "required": True}, {"type": "int", "required": True}
    options = {"slot_id": text, "fence": number, "allocation_id": text, "reason": text}
    module = AnsibleModule(
        argument_spec={
            "slots": {"type": "list", "elements": "dict", "required": True, "options": options},
        },
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()
