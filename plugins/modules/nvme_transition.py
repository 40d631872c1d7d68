#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Take NVMe disks from host storage for slices."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvme_transition
short_description: Take NVMe disks from host storage for slices
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Without O(apply) shows what would be done and changes nothing.
  - With O(apply) unmounts, puts the lines of C(/etc/fstab) out of force after a backup, erases
    signatures and data of each disk on one exclusively opened descriptor, proves it by reading
    back, and writes a manifest.
  - Identity, and what is written on the disk, are read when it is planned and again on the
    descriptor at the moment of destruction. A disk that carries anything else by then is refused.
  - A raw, unmounted disk whose proof still stands is left alone.
  - Refuses with C(device_not_found), C(not_a_whole_disk), C(multipath_member), C(duplicate_device),
    C(kernel_name_not_allowed), C(approval_missing), C(identity_mismatch), C(os_disk),
    C(swap_in_use), C(md_member), C(lvm_member), C(dm_holder), C(held), C(held_open),
    C(qemu_holds_disk), C(unexpected_filesystem), C(disk_belongs_to_slot), C(changed_since_plan),
    C(wipe_not_verified).
options:
  devices:
    description: Disks, as C(/dev/disk/by-id/nvme-eui.*). A dry run also takes kernel names.
    type: list
    elements: str
    required: true
  apply:
    description: Whether to act.
    type: bool
    default: false
  expected:
    description:
      - The approval, by path of O(devices), with C(serial) and C(eui) of each. Needed with
        O(apply).
      - C(filesystems) may name types beyond ext2, ext3, ext4, xfs and vfat that may be destroyed.
    type: dict
    default: {}
  methods:
    description: Erase methods in order of preference.
    type: list
    elements: str
    choices: [crypto_erase, user_data_erase, discard, zero_fill]
    default: [crypto_erase, user_data_erase, discard, zero_fill]
  manifest_directory:
    description: Where the manifest is written.
    type: path
    default: /var/log/gpuaas
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Show what would be done
  gpuaas.slice.nvme_transition:
    devices: [/dev/disk/by-id/nvme-eui.5e0000000000a000]

- name: Take the approved disk
  gpuaas.slice.nvme_transition:
    devices: [/dev/disk/by-id/nvme-eui.5e0000000000a000]
    apply: true
    expected:
      /dev/disk/by-id/nvme-eui.5e0000000000a000: {serial: LABNVME0, eui: 5e0000000000a000}
"""

RETURN = r"""
devices:
  description: Each disk with its identity, what is on it, the steps still open, and its proof when
    none is.
  returned: always
  type: list
  elements: dict
  sample:
    - nvme_device: /dev/disk/by-id/nvme-eui.5e0000000000a000
      identity: eui.5e0000000000a000
      serial: LABNVME0
      mounts: [/share0]
      filesystems: {nvme1n1: gpt, nvme1n1p1: ext4}
      steps:
        - {name: unmount, subject: /share0}
        - {name: erase_disk, subject: /dev/disk/by-id/nvme-eui.5e0000000000a000}
      proof: null
manifest:
  description: The newest manifest that covers one of the disks; empty when there is none.
  returned: always
  type: str
  sample: /var/log/gpuaas/slice-storage-transition-20260417152532.json
applied:
  description: Whether this was more than a dry run.
  returned: always
  type: bool
  sample: true
"""

from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _block,
    _change,
    _command,
    _disk,
    _fstab,
    _proof,
    _transition,
    _wipe,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal


@dataclass(frozen=True)
class State:
    devices: tuple[_transition.Device, ...]
    moment: str


def observe(params: _change.Params) -> State:
    return State(
        devices=tuple(_transition.observe(path) for path in params["devices"]),
        moment=_transition.stamp(),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    expected, apply_it = params["expected"], params["apply"]
    blockers = [
        refusal
        for device in state.devices
        for refusal in _transition.blockers(device, expected.get(device.path), apply=apply_it)
    ]
    blockers += _duplicates(state)
    return _change.Plan(
        steps=tuple(_steps(params, state)) if apply_it else (), blockers=tuple(blockers)
    )


def _steps(params: _change.Params, state: State) -> list[_change.Step]:
    """Every unmount comes before any destruction: a disk that is busy stops all of it in time."""
    steps = [step for device in state.devices for step in _transition.steps(device)]
    return [
        *(step for step in steps if step.destroys is None),
        *_transition.fstab_step(state.devices, state.moment),
        *(step for step in steps if step.destroys is not None),
        *_transition.manifest_step(state.devices, params["manifest_directory"], state.moment),
    ]


def _duplicates(state: State) -> list[Refusal]:
    seen: dict[str, str] = {}
    found = []
    for device in state.devices:
        if device.identity and device.identity in seen:
            found.append(
                Refusal(
                    "duplicate_device",
                    expected="each disk once",
                    found=f"{seen[device.identity]} and {device.path} are {device.identity}",
                    remedy="name each disk by one path",
                )
            )
        seen[device.identity] = device.path
    return found


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "unmount":
        _command.run(["umount", "--", step.subject])
        return None
    if step.name == "disable_fstab":
        _fstab.disable(step.before, backup=step.after["backup"])
        _command.run(["systemctl", "daemon-reload"])
        return {"backup": step.after["backup"]}
    if step.name == "erase_disk":
        return _erase(params, step)
    _transition.write_manifest(step)
    return {"manifest": step.subject}


def _erase(params: _change.Params, step: _change.Step) -> dict[str, Any]:
    approved = params["expected"][step.subject]
    disk = _block.resolve(step.subject)
    _disk.require(disk, identifier=str(approved["eui"]), serial=str(approved["serial"]))
    seen = _block.written(step.before["filesystems"])
    with _block.exclusive(disk, seen=seen) as descriptor:
        proof = _wipe.erase(descriptor, disk, params["methods"])
        _proof.record(disk.identity, proof)
    return proof


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "applied": params["apply"],
        "devices": [_transition.document_of(device) for device in state.devices],
        "manifest": max((device.manifest for device in state.devices), default=""),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "list", "elements": "str", "required": True},
            "apply": {"type": "bool", "default": False},
            "expected": {"type": "dict", "default": {}},
            "methods": {
                "type": "list",
                "elements": "str",
                "choices": list(_wipe.METHODS),
                "default": list(_wipe.METHODS),
            },
            "manifest_directory": {"type": "path", "default": "/var/log/gpuaas"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
