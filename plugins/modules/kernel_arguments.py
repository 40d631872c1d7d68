#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Kernel arguments and VFIO modules of a slice host, from GRUB to the initramfs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_arguments
short_description: Kernel arguments and VFIO modules of a slice host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Adds the arguments in C(/etc/default/grub.d/60-gpuaas-slice.cfg), unless other GRUB files give
    them already, and runs C(update-grub) when a menu entry lacks one.
  - Loads the VFIO modules, at boot too, and puts them into the initramfs before the drivers that
    would take a GPU.
  - C(update-initramfs) runs only when its inputs changed.
  - Where the machine has an AMD IOMMU, C(intel_iommu=) is left out, since the kernel turns that
    IOMMU on by itself; elsewhere C(amd_iommu=) is.
  - With the tuned profile V(hugepages-1g) it adds pages of 1 GiB, spread evenly over the NUMA nodes
    (C(hugepages=0:256,1:256)), also if the profile was opted in to on this host
    (M(gpuaas.slice.host_tuning)). Refuses with C(hugepages_unsupported), and with
    C(hugepages_leave_no_reserve) when a node would not keep the host's reserve.
  - Does not reboot; reports whether a reboot is needed.
  - Refuses with C(tuning_record_unreadable) where the record of opted-in profiles cannot be read.
  - Refuses with C(machine_leased) while a tenant has the whole machine.
options:
  arguments:
    description: Kernel arguments, in order.
    type: list
    elements: str
    default: []
  tuning:
    description: Tuned profiles of the host; those without kernel arguments change nothing here.
    type: list
    elements: str
    default: []
  hugepages_1g:
    description: Pages and reserve of V(hugepages-1g).
    type: dict
    suboptions:
      pages:
        description: Pages of 1 GiB on the whole host; 512 by default.
        type: int
      reserve_mib:
        description: Memory that every NUMA node keeps for the host; 16384 by default.
        type: int
  in_effect:
    description:
      - Refuse with C(reboot_required), C(kvm_missing) or C(iommu_missing) when this boot lacks any
        of the configured settings or their effect.
    type: bool
    default: false
  state:
    description: V(absent) removes our files and rebuilds the boot menu and initramfs without them.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: gpuaas.slice.host_tuning
  - module: gpuaas.slice.vfio_bind
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Boot with the IOMMU in passthrough mode
  gpuaas.slice.kernel_arguments:
    arguments: [intel_iommu=on, iommu=pt]
  register: boot

- name: The same with memory for eight guests of 64 GiB set aside
  gpuaas.slice.kernel_arguments:
    arguments: [intel_iommu=on, iommu=pt]
    tuning: [hugepages-1g]

- name: Prove that they are in effect
  gpuaas.slice.kernel_arguments:
    arguments: [intel_iommu=on, iommu=pt]
    in_effect: true
"""

RETURN = r"""
arguments:
  description: The arguments as fitted to this machine.
  returned: always
  type: list
  elements: str
running:
  description: Arguments of the running kernel.
  returned: always
  type: list
  elements: str
reboot_required:
  description: Whether a configured setting takes effect only after a reboot, also after a failure.
    In check mode, whether it would.
  returned: always
  type: bool
reboot_reasons:
  description: Those settings, as sentences.
  returned: always
  type: list
  elements: str
kvm:
  description: Whether C(/dev/kvm) is there.
  returned: always
  type: bool
iommu_groups:
  description: Number of IOMMU groups.
  returned: always
  type: int
identity:
  description: Boot id, machine id and public host key.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

SUBJECT = _tenancy.guarded(
    _kernel_arguments.SUBJECT,
    lambda params, plan: bool(plan.steps) or params["state"] == "present",
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "arguments": {"type": "list", "elements": "str", "default": []},
            "tuning": {"type": "list", "elements": "str", "default": []},
            "hugepages_1g": {
                "type": "dict",
                "options": {"pages": {"type": "int"}, "reserve_mib": {"type": "int"}},
            },
            "in_effect": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()
