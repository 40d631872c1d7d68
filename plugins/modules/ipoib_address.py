#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The host's own address on the InfiniBand fabric."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ipoib_address
short_description: Give a host its address on the InfiniBand fabric
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes C(/etc/netplan/60-ipoib.yaml) and applies it, once netplan has taken a copy of it and of
    the site's own files together.
  - The file alone proves nothing. Where the interface lacks address or route, the file is applied
    again, and the host must have them within half a minute.
  - The first run records the file of the site that it replaces, or that there was none, in
    C(/var/lib/gpuaas/before/ipoib.json). O(state=absent) restores it or removes ours. A file
    of the site is never removed.
  - Refuses with C(ipoib_invalid), C(netplan_refused), C(ipoib_interface_missing),
    C(ipoib_not_live).
  - Not yet run on hardware.
options:
  interface:
    description: The C(ibp*) interface that owns the address. Required with O(state=present).
    type: str
    default: ""
  address:
    description: The address, with prefix length. Required with O(state=present).
    type: str
    default: ""
  route:
    description: The fabric's subnet, routed over the interface.
    type: str
    default: ""
  state:
    description: Whether the collection gives the host an address on the fabric.
    type: str
    choices: [present, absent]
    default: present
requirements:
  - netplan
seealso:
  - module: gpuaas.slice.sriov_vfs
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Give the host its address on the fabric
  gpuaas.slice.ipoib_address:
    interface: ibp65s0
    address: 10.20.0.7/16
    route: 10.20.0.0/16
"""

RETURN = r"""
done:
  description: Names of the steps that were carried out.
  returned: always
  type: list
  elements: str
  sample: [write_netplan, apply_netplan]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _ipoib_address


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "interface": {"type": "str", "default": ""},
            "address": {"type": "str", "default": ""},
            "route": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _ipoib_address.SUBJECT)


if __name__ == "__main__":
    main()
