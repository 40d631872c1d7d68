#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Virtual functions of the fabric cards, with fixed identities, kept over reboots."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sriov_vfs
short_description: Virtual functions of the fabric cards, with fixed identities, kept over reboots
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Makes the same number of SR-IOV virtual functions on each selected card and gives each a MAC (or
    GUID on InfiniBand) that is derived from the card's own address, before anything is bound. For a
    card in a bond, this is its permanent address.
  - Makes the port of each function follow the card's (C(link_state=auto)). On InfiniBand a port is
    down until it is set.
  - Gives each function of an Ethernet card its guard, which the card enforces. Spoof check is on,
    trust is off, and the VLAN is its tenant's (M(gpuaas.slice.slice_vm)) or O(idle_vlan).
    C(gpuaas-slice-fabric.service) restores it within seconds. If its settings
    C(/etc/gpuaas/fabric.json) are lost, it changes nothing and says so (C(settings_unreadable)).
  - Switches off automatic probing, so that no driver of the host takes a virtual function.
  - C(gpuaas-slice-fabric.service) does the same at boot.
  - A site may have virtual functions of its own. How many a card had, and whether drivers were
    probed, is recorded in C(/var/lib/gpuaas/before/fabric.json) by the first run, which is a
    change even when there is nothing else to do. O(count=0) restores exactly that.
  - A card that is served already and that is not in RV(before), since earlier versions kept no
    record, gets no virtual functions back; its step in C(plan) then has C(remembered=false). A
    card that was never changed is left alone.
  - The site's own functions are made anew. On InfiniBand their GUIDs and link states are recorded
    too and set again. A function that the record of an earlier version omits gets no GUID and a
    port that is down. On Ethernet only link states other than C(auto) are recorded.
  - Refuses with C(link_missing), C(wrong_link), C(device_missing), C(interface_missing),
    C(too_many_functions), C(vf_in_use), C(vfs_not_restored), C(before_unreadable).
  - InfiniBand GUIDs and link states have not yet been set on hardware by this module.
options:
  pfs:
    description: PCI addresses of physical functions.
    type: list
    elements: str
    default: []
  pf_ids:
    description:
      - C(vendor:device) ids; every physical function with one of them and with O(link) is selected.
        For the restore O(link) does not matter.
    type: list
    elements: str
    default: []
  link:
    description:
      - Link type of the fabric. A vendor gives one id to InfiniBand and to Ethernet ports, so
        O(pf_ids) without it is refused with C(link_missing), and a card of O(pfs) with another
        with C(wrong_link).
      - A card's link is that of its network interface, and without one that of its PCI class.
    type: str
    choices: ["", infiniband, ethernet]
    default: ""
  count:
    description: Virtual functions per card. With 0 the cards get their earlier state back.
    type: int
    required: true
  idle_vlan:
    description: VLAN of functions without a tenant, on Ethernet. 0 means untagged.
    type: int
    default: 0
  macs:
    description: Identities that are given instead of derived, by C(<card's address>/<index>).
    type: dict
    default: {}
requirements:
  - iproute2
seealso:
  - module: gpuaas.slice.slice_vm
  - module: gpuaas.slice.vfio_bind
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Four virtual functions on every fabric card of the profile
  gpuaas.slice.sriov_vfs:
    pf_ids: ["15b3:a2dc"]
    link: infiniband
    count: 4

- name: Functions whose tenants have a VLAN each, beginning with 3001
  gpuaas.slice.sriov_vfs:
    pf_ids: ["8086:10c9"]
    link: ethernet
    count: 4
    idle_vlan: 3000
"""

RETURN = r"""
vfs:
  description: The virtual functions as the kernel shows them.
  returned: always
  type: list
  elements: dict
  sample:
    - pf: "0000:25:00.0"
      index: 0
      address: "0000:25:10.0"
      identity: "02:1d:77:0e:5b:90"
      link_state: auto
      vlan: 3000
      spoof_check: true
      trust: false
before:
  description: Recorded state of each card before its first change.
  returned: always
  type: dict
  sample: {"0000:25:00.0": {count: 2, autoprobe: true}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _sriov_vfs


def main() -> None:
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "pfs": strings,
            "pf_ids": strings,
            "link": {"type": "str", "choices": ["", *_pci.LINKS], "default": ""},
            "count": {"type": "int", "required": True},
            "idle_vlan": {"type": "int", "default": 0},
            "macs": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    _change.run(module, _sriov_vfs.SUBJECT)


if __name__ == "__main__":
    main()
