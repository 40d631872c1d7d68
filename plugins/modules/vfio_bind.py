#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Binding of approved PCI functions to vfio-pci, now and at every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vfio_bind
short_description: Bind approved PCI functions to vfio-pci, now and at every boot
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Binds each address through C(driver_override), with the other functions of the same card, and
    reads the driver back.
  - PCI-to-PCI bridges keep their driver. Every other function of the IOMMU group must be bound too,
    or have no driver.
  - Records the devices with their ids in C(/etc/gpuaas/vfio-binding.json).
    C(gpuaas-slice-vfio.service) binds them again at boot, before libvirt, and refuses an address
    that has another device. It waits up to 90 seconds for a device that is missing or in use.
  - C(gpuaas-slice-vfio-claim.service) comes before udev at boot. It reserves recorded
    devices that are present and without a driver for vfio-pci, so that a GPU driver of the host
    does not open them. The other service takes devices that a driver in the initramfs took, and
    functions of fabric cards, which are made later. C(/usr/local) must be on
    the root file system for it; parity warns when it did not run.
  - Acts only on a host in slice mode (C(/etc/gpuaas/slice-mode.json)).
  - Refuses with C(machine_leased) while a tenant has the whole machine, with C(not_slice_mode),
    C(device_missing), C(wrong_class), C(group_not_viable), C(slot_leased) and C(device_busy);
    nothing is forced.
options:
  addresses:
    description: Approved PCI addresses. With O(state=unbound), none means every recorded one.
    type: list
    elements: str
    default: []
  gpu_ids:
    description: C(vendor:device) of the hardware profile that count as GPUs.
    type: list
    elements: str
    default: []
  pf_ids:
    description: C(vendor:device) of the physical functions whose virtual functions may be bound.
    type: list
    elements: str
    default: []
  exclusive:
    description: Give devices that are recorded but not in O(addresses) back to the host.
    type: bool
    default: false
  state:
    description: Whether the devices belong to slices or to the host.
    type: str
    choices: [bound, unbound]
    default: bound
seealso:
  - module: gpuaas.slice.sriov_vfs
  - module: gpuaas.slice.kernel_arguments
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Bind the GPUs and fabric functions of the approved slots
  gpuaas.slice.vfio_bind:
    addresses: ["0000:43:00.0", "0000:61:10.1"]
    gpu_ids: ["10de:2335"]
    pf_ids: ["15b3:a2dc"]
    exclusive: true

- name: Give everything back to the host
  gpuaas.slice.vfio_bind:
    state: unbound
"""

RETURN = r"""
bound:
  description: All functions that belong to slices, read back from the kernel.
  returned: always
  type: list
  elements: dict
  sample:
    - {address: "0000:43:00.0", id: "10de:2335", driver: vfio-pci, iommu_group: 37, answers: true}
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _vfio_bind
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _boot_units,
    _change,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy


@dataclass(frozen=True)
class State:
    live: _vfio_bind.State
    installed: tuple[_boot_service.Installed, ...]


def _units(params: _change.Params, live: _vfio_bind.State) -> list[_boot_service.Unit]:
    """Boot services for the record as it will be after this run."""
    bind, release = _vfio_bind.to_bind(params, live), _vfio_bind.to_release(params, live)
    kept = {a: id_ for a, id_ in live.recorded.items() if a not in release}
    kept.update({a: live.devices[a].id for a in bind if a in live.devices})
    services = (_boot_units.BINDING, _boot_units.CLAIM)
    return [dataclasses.replace(unit, settings={"devices": kept}) for unit in services]


def observe(params: _change.Params) -> State:
    live = _vfio_bind.observe(params)
    return State(live, tuple(_boot_service.observe(unit) for unit in _units(params, live)))


def plan(params: _change.Params, state: State) -> _change.Plan:
    live = _vfio_bind.plan(params, state.live)
    steps = list(live.steps)
    for unit, installed in zip(_units(params, state.live), state.installed, strict=True):
        kept = bool(unit.settings["devices"])
        steps += (_boot_service.plan if kept else _boot_service.plan_removal)(unit, installed)
    return _change.Plan(tuple(steps), live.blockers, live.doubts)


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name not in _boot_service.STEPS:
        return _vfio_bind.apply(params, step)
    service = step.subject.partition(" ")[0]
    units = _units(params, _vfio_bind.observe(params))
    _boot_service.apply(next(unit for unit in units if unit.service == service), step)
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return _vfio_bind.facts(params, state.live)


SUBJECT = _tenancy.guarded(
    _change.Subject(observe, plan, apply, facts),
    lambda params, planned: bool(planned.steps or params["addresses"]),
)


def main() -> None:
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "addresses": strings,
            "gpu_ids": strings,
            "pf_ids": strings,
            "exclusive": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["bound", "unbound"], "default": "bound"},
        },
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()
