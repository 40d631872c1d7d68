#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Discovery of the parts of a host that could become slots."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_discovery
short_description: Discover the parts of a host that could become slice slots
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads GPUs, NVMe disks, fabric functions, the slice network and the state of bootstrap.
  - Suggests one bundle per GPU, by NUMA node and PCI nearness; advisory until approved.
  - Every reason against a device or the node is a blocker with a stable code.
    A host before bootstrap is described too; it has more blockers.
  - Disks are identified by EUI64 or NGUID, never by kernel name.
  - Reports vendor, product and serial number of the machine.
    The serial number of a virtual machine is empty, because a hypervisor gives any.
options:
  profile:
    description: The hardware profile, which defines GPUs, fabric cards and disks.
    type: dict
    required: true
seealso:
  - module: gpuaas.slice.slice_parity
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Discover the candidates of a host
  gpuaas.slice.slice_discovery:
    profile: "{{ slice_profile }}"
  register: found

- name: Show why the node cannot have slots yet
  ansible.builtin.debug:
    var: found.discovery.candidate_summary
"""

RETURN = r"""
discovery:
  description: The document; its schema is C(contracts/discovery.schema.json).
  returned: always
  type: dict
  sample:
    schema: 1
    profile: lab
    reboot_required: false
    candidate_summary:
      blockers: []
      gpu_devices: 4
      fabric_devices: 1
      nvme_devices: 5
      mounted_nvme_devices: 3
      candidate_slots: 2
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _slice_discovery


def look(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"discovery": _slice_discovery.discover(params["profile"])}


def main() -> None:
    module = AnsibleModule(
        argument_spec={"profile": {"type": "dict", "required": True}},
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
