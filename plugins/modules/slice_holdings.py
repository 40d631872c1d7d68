#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Holdings of this host: all objects of slices, of every allocation."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_holdings
short_description: List everything of slices on a host, for all allocations
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Reads only. Lists every domain with its devices, every QEMU of a slice, the entries of the
    host's ledger, DHCP reservations and leases, bridge ports, guards (flows), rate limits, public
    ingress, seeds, NVRAM files and console logs, and the reasons against giving the devices of the
    approved slots to a guest.
  - It does not know the expected state. The reconciler compares.
  - A part that cannot be read is unknown, with C(known) false, and never empty.
options:
  slots:
    description: The bundles of all approved slots of the host. Fences are not needed.
    type: list
    elements: dict
    required: true
  bridge:
    description: The Open vSwitch bridge.
    type: str
    default: ovsbr0
  mgmt_qos:
    description: >-
      Rate limit (C(rate_kbps), C(burst_kb)) that each running machine's port must have; C(limited)
      of a domain says whether it has it.
    type: dict
requirements:
  - libvirt
  - Open vSwitch
  - nftables
seealso:
  - module: gpuaas.slice.slice_vm_info
  - module: gpuaas.slice.slice_lease_info
extends_documentation_fragment: [gpuaas.slice.read_only]
"""

EXAMPLES = r"""
- name: List everything of slices on the host
  gpuaas.slice.slice_holdings:
    slots: "{{ slice_slots }}"
  register: held
"""

RETURN = r"""
holdings:
  description: >-
    One entry for each part (C(domains), C(processes), C(leases), C(reservations), C(addresses),
    C(ports), C(guards), C(files), C(limits), C(ingress), C(devices)). C(owner) of a port or guard
    is the beginning of the allocation's id, as far as the name has room for it.
  returned: success
  type: dict
  sample: {ports: {known: true, detail: "", found: [{port: gs23bd713b6073, owner: 23bd713b6073}]}}
refused:
  description: >-
    Packets that the guards of slices refused, by kind, each since its guard was loaded. A kind
    without any is left out.
  returned: success
  type: dict
  sample:
    known: true
    detail: ""
    found:
      - allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
        refused: {arp: 3, mac_spoofed: 2000}
identity:
  description: Boot, machine id and host key of the host.
  returned: success
  type: dict
collected_at:
  description: Time of the reading, UTC.
  returned: success
  type: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _qos,
    _slice_holdings,
    _slots,
)

_NEEDED = ("slot_id", "nvme_device", "gpu_pci_address")


def look(params: _change.Params) -> dict[str, Any]:
    slots = _slots.checked(params["slots"], needed=_NEEDED)
    return {
        "collected_at": _host.now(),
        "identity": _host.identity(),
        "holdings": _slice_holdings.look(slots, params["bridge"], _qos.limit(params["mgmt_qos"])),
        "refused": _slice_holdings.refused(),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "slots": {"type": "list", "elements": "dict", "required": True},
            "bridge": {"type": "str", "default": "ovsbr0"},
            "mgmt_qos": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    _change.inform(module, look)


if __name__ == "__main__":
    main()
