#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Hold of an allocation on this whole machine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: baremetal_lease
short_description: Give this whole machine to one allocation, and take it back
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Records in the host's ledger which allocation holds the machine and its disks, under the
    fence of the node's claim. A fence lower than the highest seen is refused.
  - V(held) takes the machine; it is refused on a slice host, while a slot is leased, and unless
    each disk identifies itself as the approved one, is unused and is no disk of the system.
  - Each disk must have been taken over under its identity (M(gpuaas.slice.nvme_transition)) and
    still be as its last wipe proof says. A disk without a standing proof, or with a partition or a
    signature on it, is refused and left as it is. The exception is one that this allocation's own
    interrupted wipe left dirty.
  - V(given) records durably, before the tenant has an account, that the disks are the tenant's. It
    is refused when one of them has been written to since its wipe.
  - V(ending) shuts out every run with an older fence and marks every disk dirty. The tenant was
    root, so earlier ledger entries of the disks do not count. It is refused while another
    allocation holds the machine.
  - V(released) gives the machine back; refused while one of its disks is dirty, unless that one
    is in O(written_off). Such a disk stays dirty in the ledger, so that no tenant gets it unwiped
    should it come back. Refuses with C(disk_present) when one of them is there.
  - Refuses with C(node_in_slice_mode), C(boot_changed), C(stale_fence), C(slot_leased),
    C(disk_dirty), C(disk_belongs_to_slot), C(disk_misnamed), C(identity_mismatch),
    C(duplicate_identity), C(disk_in_use), C(os_disk), C(unexpected_filesystem), C(not_clean),
    C(device_not_found), C(machine_not_held).
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  fence:
    description: The fence of the node's claim.
    type: int
    required: true
  disks:
    description: >-
      The disks that go with the machine, each with C(slot_id) (C(disk-) and its EUI),
      C(nvme_device), C(nvme_serial), C(nvme_eui) and C(nvme_size_bytes).
    type: list
    elements: dict
    required: true
  written_off:
    description: Disks that went with the machine and have died since, in the form of O(disks).
    type: list
    elements: dict
    default: []
  state:
    description: Hold of the allocation on the machine.
    type: str
    choices: [held, given, ending, released]
    default: held
  boot_id:
    description: >-
      The boot under which the machine was discovered. Required with O(state=held); under another
      boot nothing is taken.
    type: str
seealso:
  - module: gpuaas.slice.baremetal_tenant
  - module: gpuaas.slice.slice_lease
  - module: gpuaas.slice.slice_lease_info
extends_documentation_fragment: [gpuaas.slice.change]
attributes:
  idempotent:
    description: A second run plans nothing, except V(ending) for disks that were wiped since.
    support: partial
"""

EXAMPLES = r"""
- name: Take the machine for an allocation
  gpuaas.slice.baremetal_lease:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    fence: 3
    disks: "{{ slice_disks }}"
    boot_id: 0b0f3b4e-4f0e-4d6a-8f0c-2f6d1f1f7a51
"""

RETURN = r"""
given:
  description: Whether the tenant may use the machine, so that nothing may be wiped.
  returned: always
  type: bool
dirty:
  description: Ledger names of the disks on which a tenant's bytes may be.
  returned: always
  type: list
  elements: str
slots:
  description: The disks as slots with their fence, as M(gpuaas.slice.nvme_wipe) wants them.
  returned: always
  type: list
  elements: dict
"""

from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import disk_identity
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _whole_machine

MACHINE = _ledger.MACHINE


@dataclass(frozen=True)
class State:
    """entries: of the machine and of its disks. problems: reasons against O(state)."""

    entries: dict[str, _ledger.Entry]
    problems: tuple[Refusal, ...] = ()

    def holder(self) -> str:
        return self.entries[MACHINE].allocation_id

    def given_to(self, allocation_id: str) -> bool:
        return self.holder() == allocation_id and self.entries[MACHINE].dirty


def observe(params: _change.Params) -> State:
    dead = params.get("written_off") or []
    entries = _whole_machine.entries([*params["disks"], *dead])
    allocation, target = params["allocation_id"], params["state"]
    problems = [*_host_mode.not_ordinary(), *_whole_machine.stale(params["fence"], entries)]
    state = State(entries)
    if target == "held" and not problems and not state.given_to(allocation):
        problems += _boot(params["boot_id"])
        problems += _whole_machine.unfit(params["disks"], allocation)
    if target == "given" and state.holder() != allocation:
        problems.append(_not_held(allocation, state.holder()))
    elif target == "given" and not state.given_to(allocation):
        problems += _whole_machine.remade(params["disks"])
    if target == "ending" and state.holder() not in ("", allocation):
        # The records may be older than this host: its disks are another tenant's.
        problems.append(_ledger.not_its_holder(entries[MACHINE], allocation))
    if target == "released":
        spared = {MACHINE, *map(_whole_machine.slot_of, dead)}
        problems += [
            _still_dirty(e) for e in entries.values() if e.dirty and e.slot_id not in spared
        ]
    problems += _whole_machine.alive(dead)
    return State(entries, tuple(problems))


def plan(params: _change.Params, state: State) -> _change.Plan:
    steps = {"held": _hold, "given": _give, "ending": _end, "released": _release}
    return _change.Plan(tuple(steps[params["state"]](params, state)), state.problems)


def _hold(params: _change.Params, state: State) -> list[_change.Step]:
    after = {"allocation_id": params["allocation_id"], "fence": params["fence"]}
    return [
        _change.Step("hold", name, before, after)
        for name, entry in state.entries.items()
        if (before := {key: entry.document()[key] for key in after}) != after
    ]


def _give(_params: _change.Params, state: State) -> list[_change.Step]:
    # The machine comes last, because its mark implies that all others exist.
    order = sorted(state.entries.values(), key=lambda entry: entry.slot_id == MACHINE)
    return [_change.Step("mark_dirty", e.slot_id, False, True) for e in order if not e.dirty]


def _end(params: _change.Params, state: State) -> list[_change.Step]:
    fence = params["fence"]
    steps = []
    for entry in state.entries.values():
        if entry.slot_id != MACHINE and not entry.dirty:
            steps.append(_change.Step("mark_dirty", entry.slot_id, False, True))
        elif entry.fence < fence:
            steps.append(_change.Step("raise_fence", entry.slot_id, entry.fence, fence))
    return steps


def _release(params: _change.Params, state: State) -> list[_change.Step]:
    """Entries of another allocation stay, because it may hold the machine by now.

    The machine's mark is removed even when the tenant deleted the name from the ledger. The mark of
    a dead disk stays.
    """
    allocation_id = params["allocation_id"]
    return [
        _change.Step("release", entry.slot_id, entry.allocation_id, "")
        for entry in state.entries.values()
        if entry.allocation_id == allocation_id
        or (entry.slot_id == MACHINE and entry.dirty and not entry.allocation_id)
    ]


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    fence, allocation = params["fence"], params["allocation_id"]
    disks = [*params["disks"], *(params.get("written_off") or [])]
    identities = {_whole_machine.slot_of(row): disk_identity(str(row["nvme_eui"])) for row in disks}
    disk = identities.get(step.subject, "")
    if step.name == "hold":
        _ledger.hold(step.subject, fence=fence, allocation_id=allocation, disk_identity=disk)
    elif step.name == "raise_fence":
        _ledger.raise_fence(step.subject, fence=fence)
    elif step.name == "mark_dirty":
        _ledger.mark_dirty(step.subject, fence=fence, disk_identity=disk)
    elif step.name == "release":
        if step.subject == MACHINE:
            _ledger.mark_clean(MACHINE, fence=fence, disk_identity="", proof={})
        _ledger.release(step.subject, fence=fence)
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "given": state.given_to(params["allocation_id"]),
        "dirty": [entry.slot_id for entry in _disks(state) if entry.dirty],
        "slots": [{**disk, "fence": params["fence"]} for disk in params["disks"]],
    }


def _disks(state: State) -> list[_ledger.Entry]:
    return [entry for name, entry in state.entries.items() if name != MACHINE]


def _boot(discovered: str | None) -> list[Refusal]:
    boot_id = _host.identity()["boot_id"]
    if boot_id and boot_id == discovered:
        return []
    return [
        Refusal(
            "boot_changed",
            expected=f"the boot of the last discovery, {discovered or 'not named'}",
            found=f"boot {boot_id or 'unknown'}",
            remedy="discover the node again; the host has been restarted since",
        )
    ]


def _not_held(allocation: str, holder: str) -> Refusal:
    return Refusal(
        "machine_not_held",
        expected=f"this machine held by {allocation}",
        found=f"held by {holder}" if holder else "held by no allocation",
        remedy="take the machine first (state=held)",
    )


def _still_dirty(entry: _ledger.Entry) -> Refusal:
    return Refusal(
        "disk_dirty",
        expected=f"the wipe of {entry.disk_identity} before the machine is given back",
        found=f"marked dirty at {entry.dirty_at}",
        remedy="wipe it first (nvme_wipe); without its proof the node stays off sale",
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "fence": {"type": "int", "required": True},
            "disks": {"type": "list", "elements": "dict", "required": True},
            "written_off": {"type": "list", "elements": "dict", "default": []},
            "state": {
                "type": "str",
                "choices": ["held", "given", "ending", "released"],
                "default": "held",
            },
            "boot_id": {"type": "str"},
        },
        required_if=[("state", "held", ["boot_id"])],
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
