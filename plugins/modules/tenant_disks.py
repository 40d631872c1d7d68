#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Release of a bare-metal tenant's disks from mounts, swap, arrays and mapped devices."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tenant_disks
short_description: Take the disks of a bare-metal tenant out of use
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Takes the lines out of fstab that name the disks, after a backup, turns swap off, unmounts
    the file systems of the disks and of devices stacked on them, and stops arrays and mapped
    devices. Then M(gpuaas.slice.nvme_wipe) can claim them.
  - Nothing is taken away by force. A mount that a process still uses stays, and is refused. It is
    gone after a restart of the machine, because fstab no longer has it.
  - A disk that the tenant was given is the tenant's at any mount point, C(/usr) and
    C(/var/lib) included, unless the running system's root is on it. Any other disk is refused when
    the machine boots from it.
  - Refuses with C(node_in_slice_mode), C(stale_fence), C(os_disk), C(identity_mismatch),
    C(duplicate_identity), C(device_not_found), C(disk_misnamed), C(mount_covered), C(mount_busy),
    C(zfs_pool), C(file_unreadable), and with C(device_unreadable) for a disk that the tenant was
    not given.
options:
  fence:
    description: The fence of the node's claim.
    type: int
    required: true
  disks:
    description: The disks, as for M(gpuaas.slice.baremetal_lease).
    type: list
    elements: dict
    required: true
seealso:
  - module: gpuaas.slice.baremetal_tenant
  - module: gpuaas.slice.nvme_wipe
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Take the disks back
  gpuaas.slice.tenant_disks:
    fence: 4
    disks: "{{ slice_disks }}"
"""

RETURN = r"""
used:
  description: Remaining uses of each disk, by ledger name; empty for a free disk.
  returned: always
  type: dict
  sample: {disk-5e0000000000a000: ["mounted: mounted on /data"]}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _fstab_entries,
    _mounting,
    _takeover,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _whole_machine


@dataclass(frozen=True)
class Use:
    """Use of a disk. stack: devices on it, uppermost first. devices: the disk and its stack."""

    used: _block.Usage
    stack: tuple[str, ...]
    devices: frozenset[str]


@dataclass(frozen=True)
class State:
    """mounts: of all the disks with their owners, in the order of mounting."""

    uses: Mapping[str, Use]
    mounts: tuple[tuple[_usage.Mount, str], ...]
    fstab: tuple[str, ...]
    moment: str
    problems: tuple[Refusal, ...]


def observe(params: _change.Params) -> State:
    entries = _whole_machine.entries(params["disks"])
    problems = [*_host_mode.not_ordinary(), *_whole_machine.stale(params["fence"], entries)]
    uses: dict[str, Use] = {}
    for disk in params["disks"]:
        try:
            there = _block.of_slot(disk)
            given = _given(there, entries[_whole_machine.slot_of(disk)])
            use = _use(there, given=given)
        except Refusal as refusal:
            problems.append(refusal)
            continue
        uses[_whole_machine.slot_of(disk)] = use
        problems += [*_system(there, given=given), *_pools(there, use.used)]
    owners = {name: slot_id for slot_id, use in uses.items() for name in use.devices}
    mounts = _mounts(owners)
    lines = _fstab_entries.lines_of(owners, [mount.point for mount, _of in mounts]) if uses else []
    return State(uses, tuple(mounts), tuple(lines), _takeover.stamp(), tuple(problems))


def _mounts(owners: Mapping[str, str]) -> list[tuple[_usage.Mount, str]]:
    """Mounts in the order in which they were made, because they may be nested across disks."""
    table = _usage.mounts()
    mine: dict[_usage.Mount, str] = {}
    for name, slot_id in owners.items():
        mine |= dict.fromkeys(_usage.mounted([name], table), slot_id)
    return [(mount, mine[mount]) for mount in table if mount in mine]


def _given(there: _block.Disk, entry: _ledger.Entry) -> bool:
    """Whether the tenant got this disk. The ledger marks a disk dirty when it is given away."""
    return entry.dirty and entry.disk_identity == there.disk_identity


def _use(disk: _block.Disk, *, given: bool) -> Use:
    used = _used(disk, given=given)
    stack: list[str] = []
    for name in (disk.kernel_name, *used.children):
        stack += [holder for holder in _usage.holders(name) if holder not in stack]
    devices = frozenset({disk.kernel_name, *used.children, *stack, *used.btrfs})
    return Use(used, tuple(reversed(stack)), devices)


def _used(disk: _block.Disk, *, given: bool) -> _block.Usage:
    """An unreadable sector must not prevent the wipe of a tenant's disk: the wipe may cure it.

    A readable disk is read in full, so that a pool is reported before the wipe fails to claim it.
    """
    try:
        return _block.usage(disk)
    except Refusal as refusal:
        if not given or refusal.code != "device_unreadable":
            raise
        return _block.usage(disk, dirty=True)


def _system(there: _block.Disk, *, given: bool) -> list[Refusal]:
    """Refusal of a system disk, judged by the disk and not by the tenant's mount points.

    A disk that was given away was no system disk then. fstab repeats its mounts at every boot.
    """
    carried = _usage.carries(there, {"/"} if given else _usage.BOOT_POINTS)
    if not carried:
        return []
    return [
        Refusal(
            "os_disk",
            expected=f"{there.label} without the system",
            found=f"mounted from it: {', '.join(carried)}",
            remedy="the machine runs from this disk: have it deployed anew, then clean it",
        )
    ]


def _pools(there: _block.Disk, used: _block.Usage) -> list[Refusal]:
    """Imported pools. A pool may span disks of others, so only its owner may take it apart."""
    return [
        Refusal(
            "zfs_pool",
            expected=f"{there.label} in no imported pool",
            found=f"ZFS pool {name}",
            remedy=f"on the machine: `zpool export {name}`; when it is busy, take its import out "
            "of the boot and restart the machine; then clean up again",
        )
        for name in used.zfs
    ]


def plan(_params: _change.Params, state: State) -> _change.Plan:
    steps = []
    # fstab comes first, so that a disk that stays busy now is free after a restart.
    if state.fstab:
        after = {"backup": _fstab_entries.BACKUP + state.moment}
        steps.append(_change.Step("remove_fstab", _fstab_entries.FILE, list(state.fstab), after))
    swaps = {name: slot_id for slot_id, use in state.uses.items() for name in use.used.swap}
    steps += [_change.Step("swap_off", _path(name), of) for name, of in swaps.items()]
    for mount, slot_id in reversed(state.mounts):
        steps += _mounting.steps([mount], slot_id)
    stacks = {name: slot_id for slot_id, use in state.uses.items() for name in use.stack}
    steps += [_change.Step("stop_device", f"/dev/{name}", of) for name, of in stacks.items()]
    return _change.Plan(tuple(steps), state.problems)


def _path(swap: str) -> str:
    return swap if swap.startswith("/") else f"/dev/{swap}"


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    _ledger.check(_ledger.MACHINE, params["fence"])
    match step.name:
        case "unmount":
            _unmount(step)
        case "swap_off":
            _command.run(["swapoff", "--", _usage.swap_place(step.subject)], timeout=600)
        case "stop_device":
            _mounting.stop_device(step.subject.rpartition("/")[2])
        case "remove_fstab":
            _fstab_entries.remove(step.before, backup=step.after["backup"])
            _command.run(["systemctl", "daemon-reload"])
    return None


def _unmount(step: _change.Step) -> None:
    try:
        _mounting.unmount(step)
    except Refusal as refusal:
        if refusal.code != "command_failed":
            raise
        raise Refusal(
            "mount_busy",
            expected=f"{step.subject} used by no process",
            found=refusal.found,
            remedy="end the processes that use it, or restart the machine, because fstab no longer"
            " mounts it; then clean up again; nothing is taken away by force",
        ) from refusal


def facts(_params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "used": {
            slot_id: [f"{code}: {text}" for code, text in use.used.findings()]
            for slot_id, use in state.uses.items()
        }
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "fence": {"type": "int", "required": True},
            "disks": {"type": "list", "elements": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
