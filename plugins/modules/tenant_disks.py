#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Take the disks of a bare-metal tenant out of whatever use the tenant made of them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tenant_disks
short_description: Take the disks of a bare-metal tenant out of use
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Unmounts what is mounted from the disks and from what is stacked on them, turns swap off, stops
    arrays and mapped devices, and takes the lines out of fstab that name them. Then
    M(gpuaas.slice.nvme_wipe) can claim them.
  - Nothing is taken away by force. A mount that a process still uses stays, and is refused.
  - Refuses with C(node_in_slice_mode), C(stale_fence), C(os_disk), C(identity_mismatch),
    C(device_not_found), C(disk_misnamed).
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
  description: What still uses each disk, by ledger name; empty for a free one.
  returned: always
  type: dict
  sample: {disk-5e0000000000a000: ["mounted: mounted on /data"]}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _block,
    _change,
    _command,
    _fstab,
    _host,
    _lease,
    _transition,
    _usage,
    _whole_machine,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal


@dataclass(frozen=True)
class Use:
    """How one disk is used. stack: devices on it, the uppermost first. points: last mount first."""

    used: _block.Usage
    stack: tuple[str, ...]
    points: tuple[str, ...]


@dataclass(frozen=True)
class State:
    uses: Mapping[str, Use]
    fstab: tuple[str, ...]
    moment: str
    problems: tuple[Refusal, ...]


def observe(params: _change.Params) -> State:
    entries = _whole_machine.entries(params["disks"])
    problems = [*_whole_machine.slice_mode(), *_whole_machine.stale(params["fence"], entries)]
    uses: dict[str, Use] = {}
    names: set[str] = set()
    for disk in params["disks"]:
        try:
            there = _block.of_slot(disk)
        except Refusal as refusal:
            problems.append(refusal)
            continue
        use = _use(there)
        uses[_whole_machine.slot_of(disk)] = use
        names |= {there.kernel_name, *use.used.children, *use.stack}
        if use.used.os_disk:
            problems += _block.refusals(there, use.used)
    points = [point for use in uses.values() for point in use.points]
    lines = _fstab.lines_of(names, points) if uses else []
    return State(uses, tuple(lines), _transition.stamp(), tuple(problems))


def _use(disk: _block.Disk) -> Use:
    used = _block.usage(disk)
    stack: list[str] = []
    for name in (disk.kernel_name, *used.children):
        stack += [holder for holder in _usage.holders(name) if holder not in stack]
    below = {disk.kernel_name, *used.children, *stack}
    numbers = {_host.read(f"/sys/class/block/{name}/dev") for name in below}
    mine = [m for m in _usage.mounts() if m.devt in numbers or _usage.node_name(m.source) in below]
    return Use(used, tuple(reversed(stack)), tuple(m.point for m in reversed(mine)))


def plan(_params: _change.Params, state: State) -> _change.Plan:
    steps = []
    for slot_id, use in state.uses.items():
        steps += [_change.Step("unmount", point, slot_id, None) for point in use.points]
        steps += [_change.Step("swap_off", f"/dev/{name}", slot_id) for name in use.used.swap]
        steps += [_change.Step("stop_device", f"/dev/{name}", slot_id) for name in use.stack]
    if state.fstab:
        after = {"backup": _fstab.BACKUP + state.moment}
        steps.append(_change.Step("remove_fstab", _fstab.FILE, list(state.fstab), after))
    return _change.Plan(tuple(steps), state.problems)


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    _lease.check(_whole_machine.MACHINE, params["fence"])
    match step.name:
        case "unmount":
            _command.run(["umount", "--", step.subject])
        case "swap_off":
            _command.run(["swapoff", "--", step.subject], timeout=600)
        case "stop_device":
            _stop(step.subject.rpartition("/")[2])
        case "remove_fstab":
            _remove_lines(step.before, backup=step.after["backup"])
            _command.run(["systemctl", "daemon-reload"])
    return None


def _remove_lines(lines: list[str], *, backup: str) -> None:
    """Without the tenant's lines the file is what it was before, to the byte."""
    text = _host.path(_fstab.FILE).read_text()
    _host.write(backup, text, mode=0o600)
    kept = [line for line in text.splitlines(keepends=True) if line.rstrip("\n") not in lines]
    _host.write(_fstab.FILE, "".join(kept))


def _stop(name: str) -> None:
    if name.startswith("md"):
        _command.run(["mdadm", "--stop", f"/dev/{name}"])
        return
    mapped = _host.read(f"/sys/class/block/{name}/dm/name") or name
    _command.run(["dmsetup", "remove", "--", mapped])


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
