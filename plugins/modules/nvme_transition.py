#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Takeover of NVMe disks from host storage for slices."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvme_transition
short_description: Take NVMe disks from host storage for slices
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Without O(apply) shows the steps and changes nothing.
  - With O(apply) unmounts, disables the lines of C(/etc/fstab) after a backup, erases
    signatures and data of each disk on one exclusively opened descriptor, proves it by reading
    back, and writes a manifest.
  - Identity and content of the disk are read when it is planned and again on the
    descriptor at the moment of destruction. A disk that carries anything else by then is refused.
  - Nothing is taken that the approval does not name. A mount, filesystem or signature that came
    after it is refused with C(changed_since_approval).
  - A namespace that the host reaches through two controllers without native multipath is two disks
    with one identity, whose uses the kernel does not share. Such a disk is never taken.
  - A disk with data of the operating system, of libvirt or of this collection is never taken, and
    neither is a boot card (Dell BOSS).
  - When a disk is refused after it was unmounted, its mounts and its lines of C(/etc/fstab) are put
    back; those that could not be put back are named.
  - An interrupted erase is restarted under its approval, or under one that names the same disk,
    unless the disk was put to another use since.
  - A raw, unmounted disk whose proof still stands is left alone.
  - Refuses with C(device_not_found), C(not_a_whole_disk), C(multipath_member), C(duplicate_device),
    C(duplicate_identity), C(kernel_name_not_allowed), C(approval_missing), C(identity_mismatch),
    C(os_disk), C(swap_in_use), C(md_member), C(lvm_member), C(dm_holder), C(held), C(held_open),
    C(btrfs_member), C(zfs_pool), C(mount_covered), C(excluded_model), C(qemu_holds_disk),
    C(unexpected_filesystem), C(disk_belongs_to_slot), C(changed_since_approval),
    C(changed_since_plan), C(wipe_not_verified), C(disk_locked), C(disk_reserved),
    C(erase_record_unreadable), C(manifest_unreadable),
    C(proof_unreadable), C(device_unreadable), C(file_unreadable).
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
      - C(mounts) names the mounts that may be unmounted, C(filesystems) the types that may be
        destroyed, each as many times as it occurs, and C(signatures) each signature with its place.
        A dry run returns such an approval for each disk.
      - A dry run refuses types beyond ext2, ext3, ext4, xfs and vfat until C(filesystems) names
        them. C(raw_data) stands for bytes of no known kind, such as a database on the bare disk.
    type: dict
    default: {}
  exclude_models:
    description: Parts of model names that are never taken, beyond those known as boot cards.
    type: list
    elements: str
    default: []
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
seealso:
  - module: gpuaas.slice.nvme_wipe
  - module: gpuaas.slice.slice_disks
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Show the steps
  gpuaas.slice.nvme_transition:
    devices: [/dev/disk/by-id/nvme-eui.5e0000000000a000]

- name: Take the approved disk
  gpuaas.slice.nvme_transition:
    devices: [/dev/disk/by-id/nvme-eui.5e0000000000a000]
    apply: true
    expected:
      /dev/disk/by-id/nvme-eui.5e0000000000a000:
        serial: LABNVME0
        eui: 5e0000000000a000
        mounts: [/share0]
        filesystems: [ext4, gpt]
"""

RETURN = r"""
devices:
  description: Each disk with its identity, its content, the steps still open, its proof when
    none is open, and the approval that would cover it.
  returned: always
  type: list
  elements: dict
  sample:
    - nvme_device: /dev/disk/by-id/nvme-eui.5e0000000000a000
      identity: eui.5e0000000000a000
      serial: LABNVME0
      mounts: [/share0]
      filesystems: {nvme1n1: gpt, nvme1n1p1: ext4}
      approval:
        serial: LABNVME0
        eui: 5e0000000000a000
        mounts: [/share0]
        filesystems: [ext4, gpt]
        signatures: [ext4@1049656#3f1f2f7a2a0b4f6c8d1e5b7a9c0d2e4f]
      steps:
        - {name: unmount, subject: /share0}
        - {name: erase_disk, subject: /dev/disk/by-id/nvme-eui.5e0000000000a000}
      proof: null
manifest:
  description: The newest manifest that covers one of the disks; empty when there is none.
  returned: always
  type: str
  sample: /var/log/gpuaas/slice-storage-transition-20260417152532.txt
applied:
  description: Whether this was more than a dry run.
  returned: always
  type: bool
  sample: true
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _approval,
    _block,
    _content,
    _disk,
    _erase_journal,
    _fstab_entries,
    _mounting,
    _nvme_wipe,
    _proof,
    _takeover,
)


@dataclass(frozen=True)
class State:
    devices: tuple[_takeover.Device, ...]
    moment: str


def observe(params: _change.Params) -> State:
    return State(
        devices=tuple(_takeover.observe(path) for path in params["devices"]),
        moment=_takeover.stamp(),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    expected, apply_it = params["expected"], params["apply"]
    blockers = [
        refusal
        for device in state.devices
        for refusal in _takeover.blockers(
            device,
            expected.get(device.path),
            apply=apply_it,
            exclude_models=params.get("exclude_models", ()),
        )
    ]
    blockers += _duplicates(state)
    return _change.Plan(
        steps=tuple(_steps(params, state)) if apply_it else (), blockers=tuple(blockers)
    )


def _steps(params: _change.Params, state: State) -> list[_change.Step]:
    """All unmounts come before any destruction, so that a busy disk stops the run in time."""
    steps = [step for device in state.devices for step in _takeover.steps(device)]
    return [
        *(step for step in steps if step.destroys is None),
        *_takeover.fstab_step(state.devices, state.moment),
        *(step for step in steps if step.destroys is not None),
        *_takeover.manifest_step(state.devices, params["manifest_directory"], state.moment),
    ]


def _duplicates(state: State) -> list[Refusal]:
    seen: dict[str, str] = {}
    blockers = []
    for device in state.devices:
        if device.disk_identity and device.disk_identity in seen:
            blockers.append(
                Refusal(
                    "duplicate_device",
                    expected="each disk once",
                    found=f"{seen[device.disk_identity]} and {device.path}"
                    f" are {device.disk_identity}",
                    remedy="name each disk by one path",
                )
            )
        seen[device.disk_identity] = device.path
    return blockers


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "unmount":
        _mounting.unmount(step)
        return None
    if step.name == "disable_fstab":
        _fstab_entries.disable(step.before, backup=step.after["backup"])
        _command.run(["systemctl", "daemon-reload"])
        return {"backup": step.after["backup"]}
    if step.name == "erase_disk":
        return _erase(params, step)
    _takeover.write_manifest(step)
    return {"manifest": step.subject}


def _erase(params: _change.Params, step: _change.Step) -> dict[str, Any]:
    approved = params["expected"][step.subject]
    disk = _block.resolve(step.subject)
    _disk.require(disk, identifier=str(approved["eui"]), serial=str(approved["serial"]))
    seen = _block.written(step.before["filesystems"])
    with _block.exclusive(disk, seen=seen) as descriptor:
        _refuse_change(disk, descriptor, step.before["signatures"])
        _erase_journal.record(
            disk, _approval.resumed(approved, _erase_journal.resumable(disk), _block.Usage(), ())
        )
        proof = _nvme_wipe.erase(descriptor, disk, params["methods"])
        _proof.record(disk.disk_identity, proof)
    # A remaining record is void, because the proof is newer.
    with contextlib.suppress(OSError):
        _erase_journal.forget(disk)
    return proof


def _refuse_change(disk: _block.Disk, descriptor: int, seen: Sequence[str]) -> None:
    """Filesystems may have been replaced by others of the same types at the same places."""
    more = sorted(set(_content.described(disk, descriptor)) - set(seen))
    if more:
        raise Refusal(
            "changed_since_plan",
            expected=f"{disk.disk_identity} with the content that was planned",
            found=", ".join(more),
            remedy="find the user of the disk; make a new plan and have it approved",
        )


def recover(
    _params: _change.Params, done: Sequence[_change.Step], failed: _change.Step, refusal: Refusal
) -> Refusal:
    """Restore mounts and fstab lines of disks that are unchanged."""
    gone = [step.destroys for step in done if step.destroys]
    if failed.destroys and (
        refusal.code in _nvme_wipe.UNPROVEN or _erase_journal.has_entry(failed.destroys)
    ):
        gone.append(failed.destroys)
    spare = {identity for identity in gone if identity}
    back, left = _put_lines_back(done, spare)
    mounted, unmounted = _mounting.again(done, spare=spare)
    recovered = [
        f"{word}: {', '.join(subjects)}"
        for word, subjects in (("put back", back + mounted), ("left undone", left + unmounted))
        if subjects
    ]
    if not recovered:
        return refusal
    text = "; ".join([refusal.found, *recovered])
    return Refusal(refusal.code, expected=refusal.expected, found=text, remedy=refusal.remedy)


def _put_lines_back(done: Sequence[_change.Step], spare: set[str]) -> tuple[list[str], list[str]]:
    lines = [
        line
        for step in done
        if step.name == "disable_fstab"
        for identity, lines in step.after["of"].items()
        if identity not in spare
        for line in lines
    ]
    if not lines:
        return [], []
    try:
        _fstab_entries.enable(lines)
        _command.run(["systemctl", "daemon-reload"])
    except (OSError, Refusal) as problem:
        return [], [f"{len(lines)} lines of {_fstab_entries.FILE} ({problem})"]
    return [f"{len(lines)} lines of {_fstab_entries.FILE}"], []


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "applied": params["apply"],
        "devices": [_takeover.document_of(device) for device in state.devices],
        "manifest": max((device.manifest for device in state.devices), default=""),
    }


SUBJECT = _change.Subject(observe, plan, apply, facts, recover=recover)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "list", "elements": "str", "required": True},
            "apply": {"type": "bool", "default": False},
            "expected": {"type": "dict", "default": {}},
            "exclude_models": {"type": "list", "elements": "str", "default": []},
            "methods": {
                "type": "list",
                "elements": "str",
                "choices": list(_nvme_wipe.METHODS),
                "default": list(_nvme_wipe.METHODS),
            },
            "manifest_directory": {"type": "path", "default": "/var/log/gpuaas"},
        },
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()
