#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Virtual machines of slices on this host, with their devices and guarded ports."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_vm_info
short_description: List the virtual machines of slices on a host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Lists each domain of a slice with its devices, its port and the guard of the port.
  - A QEMU of a slice that libvirt has lost is listed with C(state=absent). Domains that are no
    slice's are left out; M(gpuaas.slice.slice_holdings) has them.
  - Refuses with C(spec_invalid), C(command_failed). If libvirt or the switch does not answer, the
    module fails instead of listing fewer machines.
options:
  allocation_id:
    description: List the machine of this allocation only, a UUID with dashes.
    type: str
  bridge:
    description: The Open vSwitch bridge.
    type: str
    default: ovsbr0
requirements:
  - libvirt
  - Open vSwitch
seealso:
  - module: gpuaas.slice.slice_vm
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: List the machines of a host
  gpuaas.slice.slice_vm_info:
  register: host

- name: Name machines that run without their guard
  ansible.builtin.debug:
    msg: "{{ host.machines | selectattr('pids') | rejectattr('flows') | map(attribute='name') }}"
"""

RETURN = r"""
machines:
  description: The machines, by allocation.
  returned: success
  type: list
  elements: dict
  contains:
    allocation_id: {description: The allocation., type: str}
    name: {description: Name of the domain., type: str}
    state:
      description: State in libvirt's words; C(absent) if libvirt has no such domain.
      type: str
    off_by_guest: {description: Whether the guest powered itself off., type: bool}
    pids: {description: QEMU processes., type: list, elements: int}
    vcpus: {description: Virtual CPUs; 0 without a domain., type: int}
    memory_mib: {description: Memory; 0 without a domain., type: int}
    devices: {description: PCI addresses that it has., type: list, elements: str}
    disks: {description: Block devices; the first one boots., type: list, elements: str}
    macs: {description: MACs of its network interfaces., type: list, elements: str}
    port: {description: Name of its port., type: str}
    ofport: {description: OpenFlow number of the port; 0 without a port., type: int}
    flows: {description: Number of flows that guard the port., type: int}
    guard_kept:
      description: Whether the host restores the guard after a restart of the switch.
      type: bool
  sample:
    - allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
      name: gpuaas-slice-23bd713b60734ef78a512897e902365d
      state: running
      off_by_guest: false
      pids: [4711]
      vcpus: 24
      memory_mib: 65536
      devices: ["0000:43:00.0", "0000:61:10.1"]
      disks: [/dev/disk/by-id/nvme-eui.5e0000000000a000]
      macs: ["52:54:00:64:00:0a"]
      port: gs23bd713b6073
      ofport: 3
      flows: 24
      guard_kept: true
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows, _guards
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _domain, _libvirt, _traces

_ABSENT = {"state": "absent", "off_by_guest": False}
_UNDEFINED: dict[str, Any] = {
    "vcpus": 0, "memory_mib": 0, "hostdevs": [], "disks": [], "nics": [],
}  # fmt: skip


def look(params: _change.Params) -> dict[str, Any]:
    bridge, allocation = params["bridge"], params["allocation_id"]
    if allocation:
        _object_names.hexadecimal(allocation)
    kinds = _traces.looks(bridge)
    domains = {trace.owner: trace.row for trace in kinds["domain"]()}
    processes = [(trace.owner, trace.row["pid"]) for trace in kinds["qemu_process"]()]
    owners = {*domains, *(owner for owner, _pid in processes)}
    ports, flows = _flows.ports(), _flows.guards(bridge)
    return {
        "machines": [
            {
                "allocation_id": owner,
                "name": _object_names.domain_name(owner),
                **{key: domains.get(owner, _ABSENT)[key] for key in _ABSENT},
                "pids": [pid for holder, pid in processes if holder == owner],
                **_definition(domains.get(owner)),
                "port": (port := _object_names.port_name(owner)),
                "ofport": ports.get(port, 0),
                "flows": flows.get(_object_names.cookie(owner), 0),
                "guard_kept": _guards.saved(owner) is not None,
            }
            for owner in sorted(owners - {""})
            if allocation in (None, "", owner)
        ]
    }


def _definition(domain: Mapping[str, Any] | None) -> dict[str, Any]:
    content = _domain.parse(_libvirt.definition(domain["name"])) if domain else _UNDEFINED
    return {
        "vcpus": content["vcpus"],
        "memory_mib": content["memory_mib"],
        "devices": content["hostdevs"],
        "disks": content["disks"],
        "macs": [mac for mac, _bridge, _port in content["nics"]],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str"},
            "bridge": {"type": "str", "default": "ovsbr0"},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
