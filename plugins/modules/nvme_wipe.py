#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Wipe of the disks of slots, proven by reading back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvme_wipe
short_description: Wipe the disks of slots and prove it by reading back
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Erases the disk of each slot on one exclusively opened descriptor, on which identity and use are
    checked first.
  - Tries the methods in order, without those that the controller lacks. A method counts only when
    both ends of the disk, the places of old signatures and drawn samples then read as zeros, past
    every cache.
  - A disk that is not marked dirty must have the planned content at the moment of destruction.
  - Stops arrays and volumes that the host has made of a tenant's disk, unless they also have a
    device of the host. The kernel refuses to stop those that are in use.
  - Marks the disk dirty in the host's ledger before the first byte and clean, with the proof, after
    the last.
  - A disk that is clean by the ledger, has a standing proof and carries no signature is left alone
    and its proof is returned.
  - Refuses with C(stale_fence), C(disk_belongs_to_slot), C(os_disk), C(disk_in_use),
    C(identity_mismatch), C(duplicate_identity), C(device_not_found), C(changed_since_plan),
    C(unexpected_filesystem), C(excluded_model), C(device_unreadable), C(disk_write_protected),
    C(file_unreadable), C(wipe_not_verified), and C(disk_locked) or C(disk_reserved) when a
    password or a reservation of a former tenant is the cause.
options:
  slots:
    description: Slot bundles, each with its C(fence).
    type: list
    elements: dict
    required: true
  methods:
    description: Erase methods in order of preference.
    type: list
    elements: str
    choices: [crypto_erase, user_data_erase, discard, zero_fill]
    default: [crypto_erase, user_data_erase, discard, zero_fill]
  renew:
    description:
      - Accept only a proof that was taken under the slot's current fence. The ledger records only
        uses under a hold; after any other use a new wipe is needed.
    type: bool
    default: false
  raw:
    description:
      - Refuse with C(unexpected_filesystem) a disk that is not marked dirty and carries a
        signature, instead of wiping it. Use it for disks that were empty when they were taken a
        moment ago. Their content was made since, and its destruction is not approved.
    type: bool
    default: false
  exclude_models:
    description:
      - Parts of model names that are never wiped, beyond those known as boot cards. A disk that is
        marked dirty was taken before, and is refused for a boot card only.
    type: list
    elements: str
    default: []
seealso:
  - module: gpuaas.slice.nvme_transition
  - module: gpuaas.slice.gpu_reset
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Wipe the disk of a released slot
  gpuaas.slice.nvme_wipe:
    slots:
      - slot_id: slot-0
        fence: 7
        nvme_device: /dev/disk/by-id/nvme-eui.5e0000000000a000
        nvme_eui: 5e0000000000a000
        nvme_serial: LABNVME0
        nvme_size_bytes: 4294967296
    methods: [user_data_erase, zero_fill]
"""

RETURN = r"""
proofs:
  description: The standing proof of each clean slot, by slot id.
  returned: always
  type: dict
  sample:
    slot-0:
      slot_id: slot-0
      disk: eui.5e0000000000a000
      serial: LABNVME0
      method: user_data_erase
      class: purge
      started_at: "2026-05-01T10:00:00+00:00"
      finished_at: "2026-05-01T10:00:09+00:00"
      size_bytes: 4294967296
      controller_status: {command: format_nvm, secure_erase_setting: 1, status: 0}
      samples: 66
      sample_bytes: 100663296
      attempts: []
      verified: true
      digest: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _mounting,
    _nvme_wipe,
    _proof,
    _slot_use,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slots


@dataclass(frozen=True)
class SlotState:
    """refusals: why the slot's disk must not be touched. written: signatures that are on it.

    dirty: a tenant may have written on this disk. overdue: a new proof is requested, and the last
    proof was taken under an older fence or of another disk.
    """

    slot_id: str
    disk_identity: str = ""
    dirty: bool = False
    overdue: bool = False
    written: tuple[str, ...] = ()
    proof: Mapping[str, Any] | None = None
    stack: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def needs_wipe(self) -> bool:
        return self.dirty or self.overdue or self.proof is None or bool(self.written)


_NEEDED = ("slot_id", "fence", "nvme_device", "nvme_serial", "nvme_eui")


def observe(params: _change.Params) -> list[SlotState]:
    slots = _slots.checked(params["slots"], needed=_NEEDED)
    return [_look(slot, params) for slot in slots]


def _tenants_stack(
    disk: _block.Disk, used: _block.Usage, slots: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Arrays and volumes that the host assembled from a tenant's data, uppermost first.

    Empty when one of them also has a device of the host, or is of another kind. The kernel refuses
    to stop those that are in use.
    """
    stack: list[str] = []
    for name in (disk.kernel_name, *used.children):
        stack += [holder for holder in _usage.holders(name) if holder not in stack]
    below = {name for holder in stack for name in _usage.slaves(holder)} - set(stack)
    if not below <= _tenants_devices(slots):
        return ()
    removable = all(name.startswith(("md", "dm-", "bcache")) for name in stack)
    return tuple(reversed(stack)) if removable else ()


def _tenants_devices(slots: Sequence[Mapping[str, Any]]) -> set[str]:
    """Kernel names of the slots' disks that a tenant may have written to, and their partitions."""
    names: set[str] = set()
    for slot in slots:
        disk = _block.of_slot(slot)
        if _is_tenants(_ledger.load(str(slot["slot_id"])), disk):
            names |= {disk.kernel_name, *_usage.partitions(disk)}
    return names


def _is_tenants(entry: _ledger.Entry, disk: _block.Disk) -> bool:
    return entry.dirty and entry.disk_identity == disk.disk_identity


def _look(slot: Mapping[str, Any], params: _change.Params) -> SlotState:
    renew, raw = params["renew"], params.get("raw", False)
    slot_id = str(slot["slot_id"])
    try:
        entry = _ledger.check(slot_id, int(slot["fence"]))
        disk = _block.of_slot(slot)
        dirty = _is_tenants(entry, disk)
        used = _block.usage(disk, dirty=dirty)
        above = used.md or used.lvm or used.dm or used.holders
        stack = _tenants_stack(disk, used, params["slots"]) if dirty and above else ()
    except Refusal as refusal:
        return SlotState(slot_id, refusals=(refusal,))
    # The profile's list concerns takeover. A model that is added later must not prevent the wipe of
    # a tenant's disk.
    exclude = () if dirty else params.get("exclude_models") or ()
    if stack:
        used = replace(used, md=[], lvm=[], dm=[], holders=[])
    written = _block.written(used.filesystems)
    made = [_unexpected(disk, written)] if raw and written and not dirty else []
    # A mark of the slot's former disk ends with a proof of this one.
    overdue = entry.dirty and not dirty
    return SlotState(
        slot_id=slot_id,
        disk_identity=disk.disk_identity,
        dirty=dirty,
        overdue=overdue or (renew and entry.clean_fence < int(slot["fence"])),
        written=tuple(written),
        proof=_proof.standing(disk.disk_identity),
        stack=stack,
        refusals=(*_slot_use.refusals(disk, slot_id), *_block.refusals(disk, used, exclude), *made),
    )


def _unexpected(disk: _block.Disk, written: Sequence[str]) -> Refusal:
    return Refusal(
        "unexpected_filesystem",
        expected=f"nothing on {disk.disk_identity}, as when it was taken",
        found=", ".join(written),
        remedy="find the origin of the data; discover the node again, which leaves the disk out",
    )


def plan(_params: _change.Params, state: list[SlotState]) -> _change.Plan:
    due = [slot for slot in state if slot.needs_wipe()]
    stacks = {name: slot.slot_id for slot in due for name in slot.stack}
    stop = [_change.Step("stop_device", f"/dev/{name}", of) for name, of in stacks.items()]
    wipe = [
        _change.Step(
            "wipe_disk",
            slot.slot_id,
            before={"dirty": slot.dirty, "written": list(slot.written)},
            after={"dirty": False, "written": []},
            destroys=slot.disk_identity,
        )
        for slot in due
    ]
    return _change.Plan((*stop, *wipe), tuple(row for slot in due for row in slot.refusals))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    stop = step.name == "stop_device"
    of = step.before if stop else step.subject
    slot = next(slot for slot in params["slots"] if str(slot["slot_id"]) == of)
    slot_id, fence = str(slot["slot_id"]), int(slot["fence"])
    if stop:
        _ledger.check(slot_id, fence)
        _mounting.stop_device(step.subject.rpartition("/")[2])
        return None
    disk = _block.of_slot(slot)
    # A tenant's bytes are erased in any form; on a disk without a tenant, only planned content.
    seen = None if step.before["dirty"] else step.before["written"]
    with _block.exclusive(disk, seen=seen) as descriptor:
        _ledger.mark_dirty(slot_id, fence=fence, disk_identity=disk.disk_identity)
        proof = _nvme_wipe.erase(descriptor, disk, params["methods"])
        _ledger.mark_clean(slot_id, fence=fence, disk_identity=disk.disk_identity, proof=proof)
    return proof


def facts(_params: _change.Params, state: list[SlotState]) -> dict[str, Any]:
    return {
        "proofs": {
            slot.slot_id: {**slot.proof, "slot_id": slot.slot_id}
            for slot in state
            if slot.proof is not None and not slot.needs_wipe()
        }
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "slots": {"type": "list", "elements": "dict", "required": True},
            "methods": {
                "type": "list",
                "elements": "str",
                "choices": list(_nvme_wipe.METHODS),
                "default": list(_nvme_wipe.METHODS),
            },
            "renew": {"type": "bool", "default": False},
            "raw": {"type": "bool", "default": False},
            "exclude_models": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
