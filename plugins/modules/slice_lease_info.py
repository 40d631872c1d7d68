#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Holds of this host: slots, the whole machine, and reserved addresses."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_lease_info
short_description: List which allocations hold slots and addresses of a host
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Lists the host's ledger, which has the holder, the highest fence and the state of
    the disk of each slot, and the addresses that dnsmasq reserves.
  - Refuses with C(spec_invalid), C(ledger_unreadable), C(file_unreadable). An unreadable entry is
    never left out.
options:
  allocation_id:
    description: List the holds of this allocation only, a UUID with dashes.
    type: str
seealso:
  - module: gpuaas.slice.slice_lease
  - module: gpuaas.slice.slice_vm
  - module: gpuaas.slice.baremetal_lease
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: List the holds of all allocations
  gpuaas.slice.slice_lease_info:
  register: holds

- name: Take the next fence of a slot
  ansible.builtin.set_fact:
    next_fence: "{{ (holds.leases | selectattr('slot_id', 'eq', 'slot-0') | first).fence + 1 }}"
"""

RETURN = r"""
leases:
  description: >-
    Ledger entries of the slots that the host has seen, by slot id. C(allocation_id) is empty if
    nobody holds the slot; C(dirty) says that its disk was not wiped since a tenant had it.
  returned: success
  type: list
  elements: dict
  sample:
    - slot_id: slot-0
      fence: 7
      allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
      disk: eui.5e0000000000a000
      dirty: true
      dirty_at: "2026-11-22T10:00:00+00:00"
machine:
  description: >-
    Ledger entry of the machine as a whole, in the same form. It is returned with O(allocation_id)
    too, because no other allocation can have a slot of a machine that is held as a whole.
  returned: success
  type: dict
  sample: {slot_id: machine, fence: 0, allocation_id: "", dirty: false}
reservations:
  description: Reserved addresses. C(leased) says whether the guest has fetched the address.
  returned: success
  type: list
  elements: dict
  sample:
    - allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
      mac: "52:54:00:64:00:0a"
      ip: 10.100.0.10
      leased: true
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq


def look(params: _change.Params) -> dict[str, Any]:
    allocation = params["allocation_id"]
    if allocation:
        _object_names.hexadecimal(allocation)
    leased = {(entry.mac, entry.ip) for entry in _dnsmasq.leases()}
    return {
        "leases": [
            entry.document()
            for entry in _ledger.entries()
            if entry.slot_id != _ledger.MACHINE and allocation in (None, "", entry.allocation_id)
        ],
        "machine": _ledger.load(_ledger.MACHINE).document(),
        "reservations": [
            {
                "allocation_id": entry.name,
                "mac": entry.mac,
                "ip": entry.ip,
                "leased": (entry.mac, entry.ip) in leased,
            }
            for entry in _dnsmasq.reservations()
            if allocation in (None, "", entry.name)
        ],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={"allocation_id": {"type": "str"}}, supports_check_mode=True
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
