"""Filter of a guest's frames before the switch, at the ingress of the guest's tap.

The switch's datapath in the kernel caches a flow for each hardware address, EtherType and ARP
packet, also for those that the guard refuses. A guest that sends random frames would fill that
table and occupy the switch, and a meter acts after the look-up. The kernel runs this chain before
it hands a frame to the switch (`__netif_receive_skb_core` calls netfilter before the device's
`rx_handler`).

It drops what the guard would refuse for these reasons, and ARP packets beyond ARP_RATE; the guard
behind it stays complete. With segmentation offload a datagram is one frame here. Each port has its
own table, because kernels before 6.16 delete a chain together with its tap; the start of the domain
loads it again.
"""

from __future__ import annotations

import ipaddress
import re

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows, _nft

# ARP packets per second of a guest. The datapath caches a flow for each different ARP packet, for
# ten seconds.
ARP_RATE = 50
_TABLE = "gpuaas_"
_TEXT = """\
table netdev {table} {{
  counter vlan_refused {{}}
  counter arp_refused {{}}
  counter ipv6_refused {{}}
  counter mac_spoofed_refused {{}}
  counter protocol_refused {{}}
  counter packet_rate_refused {{}}
  chain arp_from_guest {{
    limit rate over {rate}/second burst {rate} packets counter name packet_rate_refused drop
    ether saddr {mac} arp htype 1 arp ptype 0x0800 arp hlen 6 arp plen 4 \
arp saddr ether {mac} arp saddr ip {ip} arp daddr ip {gateway} accept
    counter name arp_refused drop
  }}
  chain from_guest {{
    type filter hook ingress device "{device}" priority -150; policy drop;
    ether type {{ 0x8100, 0x88a8 }} counter name vlan_refused drop
    ether type 0x0806 goto arp_from_guest
    ether type 0x86dd counter name ipv6_refused drop
    ether saddr != {mac} counter name mac_spoofed_refused drop
    ether type 0x0800 accept
    counter name protocol_refused drop
  }}
}}
"""
_LIST = ["nft", "list", "ruleset", "netdev"]
_LISTED = re.compile(rf"^table netdev {_TABLE}(\w+) \{{\n(.*?)^\}}", re.MULTILINE | re.DOTALL)
_COUNTER = re.compile(r"counter (\w+)_refused \{\s*packets ([0-9]+) bytes [0-9]+\s*\}")


def rules(guard: _flows.Guard, device: str = "") -> str:
    """The port's table. device: another interface, to see how the kernel prints the table."""
    return _TEXT.format(
        table=f"{_TABLE}{guard.port}",
        rate=ARP_RATE,
        mac=_object_names.check_mac(guard.mac),
        ip=ipaddress.IPv4Address(guard.ip),
        gateway=ipaddress.IPv4Interface(guard.address).ip,
        device=device or guard.port,
    )


def table(guard: _flows.Guard) -> _nft.Table:
    return (rules(guard, "lo"), *_LIST)


def installed() -> dict[str, tuple[str, dict[str, int]]]:
    """Text of the table and its counters, by port."""
    listed = _command.run(_LIST).out
    return {
        port: (
            _COUNTER.sub(r"counter \1", text),
            {kind: int(packets) for kind, packets in _COUNTER.findall(text)},
        )
        for port, text in _LISTED.findall(listed)
    }


def normalized(guard: _flows.Guard) -> str:
    """The table as the kernel would print it."""
    tables = dict(_LISTED.findall(_nft.as_listed(table(guard))))
    text = _COUNTER.sub(r"counter \1", tables[guard.port])
    # "lo" occurs only as the device, in whatever form a version of nft prints devices.
    return text.replace('"lo"', f'"{guard.port}"')


def install(guard: _flows.Guard) -> None:
    _nft.load(_nft.without("netdev", f"{_TABLE}{guard.port}") + rules(guard))


def remove(port: str) -> None:
    _nft.load(_nft.without("netdev", f"{_TABLE}{port}"))
