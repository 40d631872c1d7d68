#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The network baseline of a slice host: OVS bridge, forwarding, NAT, dnsmasq; kept over reboots."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ovs_nat
short_description: Network baseline of a slice host, kept over reboots
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Runs Open vSwitch, gives its bridge an address, switches IPv4 forwarding on, masquerades the
    slice subnet and has dnsmasq serve reservations only (C(/var/lib/gpuaas/dnsmasq/hosts.d)).
  - NAT gives guests' TCP and UDP connections the ports 32768 to 65535 of the host, where no service
    of the host should be, and toward O(allowed_networks) reserved ports for reserved ports. The
    rules have the comment C(gpuaas-slice), but for that of all other packets.
  - The bridge fails closed. Guests reach public addresses, O(allowed_networks), and of the host
    DHCP, DNS and ping; nothing but answers and managed ingress reaches a guest. Open vSwitch and
    the host's firewall (table C(inet gpuaas_slice)) both enforce this. A guest has at most 16,384
    connections, in the switch and in the host's own table (C(inet gpuaas_connections)).
  - To guests, a name with an address that they cannot reach does not exist, so that those of BMCs
    in internal zones of the site stay unknown. Answers have no IPv6 addresses and no records of the
    types HTTPS and SVCB. O(name_servers) hides all of an internal zone.
  - C(gpuaas-slice-network-baseline.service) keeps running, compares the bridge's fail mode, every
    flow and the firewall with the guards of the slices, and restores them within seconds. It
    brings back the bridge, its address, forwarding, NAT, and an Open vSwitch or dnsmasq that was
    stopped, within ten seconds.
  - docker and ufw drop what they do not forward themselves. Three rules with the comment
    C(gpuaas-slice) in iptables' C(INPUT) and C(FORWARD) let guests pass, behind all rules of the
    site and before its policy. No other rule is flushed or moved, not even by a repair.
  - libvirt's start hook C(/etc/libvirt/hooks/qemu.d/gpuaas-slice) puts the guard of a slice in
    force before its domain starts, whoever starts it. Without the guard libvirt aborts the start.
    libvirt looks for hooks only when it starts, so its daemon is restarted once.
  - C(gpuaas-slice-network-baseline.service) repairs the same at boot. It restarts dnsmasq after its
    own start and never waits for it.
  - Migrates the older service C(gpuaas-slice-host-net-baseline) away and removes stale
    C(/etc/dnsmasq.d/gpuaas-gpuaas-slice-*.conf).
  - Before the first change it records in C(/var/lib/gpuaas/before/network.json) whether the host
    forwarded and which of the services ran and were enabled. O(state=absent) removes everything of
    ours and restores that state; services that did not run before are stopped.
  - The card's management link is optional and comes last. C(rshim.service) is started and enabled
    for it. A missing link is a warning (C(tmfifo_missing)) and stops nothing else, neither here
    nor at boot, where the service waits for it after everything else.
  - Refuses with C(network_invalid), C(bridge_name_taken), C(bridge_renamed), C(switch_stopped),
    C(connection_tracking_missing), C(packet_limit_missing), C(connection_limit_missing) and, with
    O(state=absent), C(network_in_use). A configuration that dnsmasq does not accept is never
    installed.
options:
  bridge:
    description: Name of the bridge.
    type: str
    default: ovsbr0
  address:
    description: Address of the bridge, with prefix length.
    type: str
    default: 10.100.0.1/24
  subnet:
    description: Subnet of the slices.
    type: str
    default: 10.100.0.0/24
  tmfifo:
    description: Whether the baseline includes the fabric card's management link (C(tmfifo_net0),
      rshim).
    type: bool
    default: false
  allowed_networks:
    description: >-
      Private IPv4 networks that guests may reach. Without it they reach public addresses only. A
      network that contains an address of the host is refused.
    type: list
    elements: str
    default: []
  denied_networks:
    description: Public IPv4 networks of the site that guests must not reach.
    type: list
    elements: str
    default: []
  name_servers:
    description: >-
      Addresses of the name servers that answer guests' queries. Without it they are those of the
      host, which may know internal zones of the site.
    type: list
    elements: str
    default: []
  packets_per_second:
    description: >-
      Packets that each guest may send a second, from 1000 to 100000000. A frame of segmentation
      offload counts as one packet.
    type: int
    default: 200000
  egress_probe:
    description: >-
      Address, or C(address:port), that parity contacts as a guest, also where it is private; the
      default gateway if empty.
    type: str
    default: ""
  state:
    description: Whether the baseline exists or is fully removed.
    type: str
    choices: [present, absent]
    default: present
requirements:
  - Open vSwitch
  - nftables
  - dnsmasq 2.90 or later
  - netplan
seealso:
  - module: gpuaas.slice.slice_upkeep
  - module: gpuaas.slice.slice_vm
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Network baseline with the default subnet
  gpuaas.slice.ovs_nat:

- name: The same on a host with a BlueField card
  gpuaas.slice.ovs_nat:
    tmfifo: true

- name: Remove it
  gpuaas.slice.ovs_nat:
    state: absent
"""

RETURN = r"""
network:
  description:
    - The network that slices are connected to. C(tmfifo) is the addresses of the card's management
      link, or C(missing), C(no address) or C(not asked for).
  returned: always
  type: dict
  sample:
    bridge: ovsbr0
    address: 10.100.0.1/24
    nat: true
    forwarding: true
    uplink: eno1
    dnsmasq: true
    tmfifo: 192.168.100.1/30
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _ovs_nat, _ovs_nat_removal


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "bridge": {"type": "str", "default": "ovsbr0"},
            "address": {"type": "str", "default": "10.100.0.1/24"},
            "subnet": {"type": "str", "default": "10.100.0.0/24"},
            "tmfifo": {"type": "bool", "default": False},
            "allowed_networks": {"type": "list", "elements": "str", "default": []},
            "denied_networks": {"type": "list", "elements": "str", "default": []},
            "name_servers": {"type": "list", "elements": "str", "default": []},
            "packets_per_second": {"type": "int", "default": 200_000},
            "egress_probe": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    install = module.params["state"] == "present"
    _change.run(module, _ovs_nat.SUBJECT if install else _ovs_nat_removal.SUBJECT)


if __name__ == "__main__":
    main()
