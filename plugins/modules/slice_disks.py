#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Approved disks of slices, which the host leaves alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_disks
short_description: Keep the host from acting on what tenants write on their disks
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Writes C(/etc/udev/rules.d/62-gpuaas-slice-disks.rules), by which udev makes no array, volume or
    mount of the approved disks, and gives them no name but C(nvme-eui), so that a tenant's label or
    UUID is never taken for that of a disk of the host.
  - Has LVM ignore the approved disks by a block of C(/etc/lvm/lvmlocal.conf). A filter of the
    site's own is kept instead, with a warning.
  - Has mdadm assemble no array but those of its ARRAY lines, by a block of C(mdadm.conf), because
    its script in the initramfs reads all disks. Where an array of the host has no such line, or the
    site has an AUTO line of its own, nothing is written and a warning says so. Another warning
    names the ARRAY lines of arrays that do not run, which may be on a tenant's disk.
  - Has GRUB's C(os-prober) leave all disks alone, and builds the initramfs anew, so that all of it
    holds from the first second of a boot.
  - Warns where the host imports ZFS pools of any disk.
  - Beside the disks of O(slots) it keeps those that a tenant has, or that were not wiped since, by
    the host's ledger.
  - Without slots the files are removed.
  - Refuses with C(spec_invalid), C(ledger_unreadable).
options:
  slots:
    description: The bundles of all approved slots of the node, each with its C(nvme_device).
    type: list
    elements: dict
    default: []
seealso:
  - module: gpuaas.slice.nvme_transition
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Leave the disks of all approved slots to their tenants
  gpuaas.slice.slice_disks:
    slots: "{{ slice_slots }}"

- name: Give them back to the host
  gpuaas.slice.slice_disks:
"""

RETURN = r"""
done:
  description: Names of the steps that were carried out.
  returned: always
  type: list
  elements: str
  sample: [write_rules, filter_lvm, limit_mdadm, quiet_os_prober, update_initramfs]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _slice_disks


def main() -> None:
    module = AnsibleModule(
        argument_spec={"slots": {"type": "list", "elements": "dict", "default": []}},
        supports_check_mode=True,
    )
    _change.run(module, _slice_disks.SUBJECT)


if __name__ == "__main__":
    main()
