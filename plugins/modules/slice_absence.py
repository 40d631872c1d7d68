#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Proof that nothing of an allocation is left on this host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_absence
short_description: Whether anything of an allocation is left on this host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Looks for the domain, QEMU processes, NVRAM, seed, console log, DHCP reservation
    and DHCP lease, tracked connections, bridge port, flows, holders of the disks, and guards of
    fabric functions, and whether the PCI functions are bound to vfio-pci and answer.
  - A check that cannot be made proves nothing. It counts as not absent, with C(known) false, and
    RV(absent) is false.
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  slots:
    description: The bundles of the slots that the allocation had. Fences are not needed.
    type: list
    elements: dict
    required: true
  bridge:
    description: The Open vSwitch bridge.
    type: str
    default: ovsbr0
  require_absent:
    description: Fail with C(not_absent) when anything is left or not known.
    type: bool
    default: false
requirements:
  - libvirt
  - Open vSwitch
  - nftables
  - conntrack
seealso:
  - module: gpuaas.slice.slice_remnants
  - module: gpuaas.slice.slice_vm_info
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: Prove that nothing is left
  gpuaas.slice.slice_absence:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots: "{{ slice_slots }}"
    require_absent: true
  register: absence
"""

RETURN = r"""
absent:
  description: Whether every check could be made and found nothing.
  returned: success
  type: bool
checks:
  description: One entry for each trace.
  returned: success
  type: dict
  sample: {domain: {absent: true, known: true, detail: nothing found}}
disk_dirty:
  description: Whether the host's ledger marks a disk as written since its last wipe.
  returned: success
  type: bool
collected_at:
  description: Time of the checks, UTC.
  returned: success
  type: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slice_absence, _slots

_NEEDED = ("slot_id", "nvme_device", "gpu_pci_address", "management_mac", "private_ip")


def look(params: _change.Params) -> dict[str, Any]:
    slots = _slots.checked(params["slots"], needed=_NEEDED)
    collected_at = _host.now()
    checks = _slice_absence.look(params["allocation_id"], slots, params["bridge"])
    # Without slots no disk or device was checked, so nothing is proven.
    absent = bool(slots) and all(check["absent"] for check in checks.values())
    if params["require_absent"] and not absent:
        left = ", ".join(name for name, check in checks.items() if not check["absent"])
        raise Refusal(
            "not_absent",
            expected=f"nothing left of allocation {params['allocation_id']}",
            found=f"left or not known: {left or 'no slots were given'}",
            remedy="read the checks of slice_absence; release or repair the slots",
        )
    dirty = any(_ledger.load(slot["slot_id"]).dirty for slot in slots)
    return {
        "absent": absent,
        "checks": checks,
        "disk_dirty": dirty,
        "collected_at": collected_at,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "slots": {"type": "list", "elements": "dict", "required": True},
            "bridge": {"type": "str", "default": "ovsbr0"},
            "require_absent": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
