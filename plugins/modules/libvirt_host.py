#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""libvirt, reachable for its own guests."""

from __future__ import annotations

DOCUMENTATION = r"""
module: libvirt_host
short_description: Keep libvirt running for slices, with its directory readable by QEMU
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Sets libvirt's state directory to mode 0755, because with mode 0700 QEMU cannot read the keys of
    its own domain.
  - Writes a block of C(/etc/libvirt/qemu.conf) that has guests confined, filtered by seccomp, and
    their console logs limited. A value that the site sets before the block stays in force, and
    parity names it.
  - Lets guests read the CPUs of the host's NUMA nodes where AppArmor confines them, by a block of
    C(/etc/apparmor.d/local/abstractions/libvirt-qemu). QEMU needs it for pages of 1 GiB.
  - Has AppArmor's compiler, which libvirt starts several times for each guest, leave out a step
    that costs half of its time and changes nothing of what it makes, by a block of
    C(/etc/apparmor/parser.conf) where that file exists.
  - Stops libvirt's own network C(default), at every boot too, unless a machine of the site is on
    it. No slice uses it, and its bridge brings a DHCP and a DNS server.
  - The daemon ends by itself when idle, so its socket is kept active instead.
  - The first run records libvirt's earlier state in C(/var/lib/gpuaas/before/libvirt.json), which
    is a change even when there is nothing else to do. O(state=absent) restores that state. libvirt
    stays installed, and unchanged without a record.
  - O(state=absent) removes QEMU's logs of slices from C(/var/log/libvirt/qemu).
options:
  directory:
    description: libvirt's state directory; set to mode 0755.
    type: path
    default: /var/lib/libvirt
  state:
    description: Whether libvirt serves slices or has its earlier state.
    type: str
    choices: [present, absent]
    default: present
requirements:
  - libvirt
seealso:
  - module: gpuaas.slice.slice_vm
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Prepare libvirt
  gpuaas.slice.libvirt_host:
"""

RETURN = r"""
done:
  description: Names of the steps that were carried out.
  returned: always
  type: list
  elements: str
  sample: [enable_libvirt, start_socket]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _libvirt_host
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "default": "/var/lib/libvirt"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, _libvirt_host.SUBJECT)


if __name__ == "__main__":
    main()
