"""Firewall of the slice bridge in the host's kernel: the second wall behind the OVS guard.

The guard names the host's addresses as they were when it was loaded. The kernel decides about a
destination by its current addresses and routes (`fib`), so an address that comes later is refused
as well. Only this wall sees the content of DHCP packets: a guest may speak for its own hardware
address, and for no other. Nothing begins from outside but managed ingress.

The table has its own chains. It drops, and never accepts for others: a site's own firewall decides
after it. It is replaced as a whole in one transaction.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows

TABLE = "gpuaas_slice"
_LIST = ["nft", "--stateless", "list", "table", "inet", TABLE]

# Offsets in bits from the UDP header: relay address (giaddr) and hardware address (chaddr).
_RELAY, _HARDWARE = "@th,256,32", "@th,288,48"

_TEXT = """\
table inet {table}
delete table inet {table}
table inet {table} {{
  counter dhcp_forged {{}}
  counter host_refused {{}}
  counter local_refused {{}}
  counter private_refused {{}}
  counter inbound_refused {{}}
  chain input {{
    type filter hook input priority -150; policy accept;
    iifname "{bridge}" goto guest_to_host
  }}
  chain guest_to_host {{
    meta nfproto != ipv4 counter name host_refused drop
{clients}    udp dport 67 counter name dhcp_forged drop
    ip daddr != {gateway} counter name host_refused drop
    ct state established,related return
    ct state invalid counter name host_refused drop
    udp dport 53 return
    tcp dport 53 return
    icmp type echo-request return
    counter name host_refused drop
  }}
  chain forward {{
    type filter hook forward priority -150; policy accept;
    iifname "{bridge}" goto guest_to_world
    oifname "{bridge}" goto world_to_guest
  }}
  chain guest_to_world {{
    meta nfproto != ipv4 counter name host_refused drop
    fib daddr type {{ local, broadcast, anycast, multicast }} counter name local_refused drop
    oifname "{bridge}" counter name local_refused drop
{denied}    ct state established,related return
    ct state invalid counter name private_refused drop
{allowed}    ip daddr {{ {private} }} counter name private_refused drop
  }}
  chain world_to_guest {{
    ct state established,related return
    ct status dnat return
    counter name inbound_refused drop
  }}
}}
"""


def rules(network: Mapping[str, Any], macs: Collection[str], probe: tuple[str, str]) -> str:
    """The table as text for `nft -f -`.

    network: bridge, address, and the site's allowed and denied networks. macs: hardware addresses
    of the guests that may ask for an address. probe: address of parity's probe and its target.
    """
    egress = egress_of(network)
    ranges = (*_flows.PRIVATE, *_flows.NEVER)
    return _TEXT.format(
        table=TABLE,
        bridge=network["bridge"],
        gateway=ipaddress.IPv4Interface(network["address"]).ip,
        clients="".join(_client(_object_names.check_mac(mac)) for mac in sorted(macs)),
        denied=_destinations(egress.denied, "counter name private_refused drop"),
        allowed=_probe(*probe) + _destinations(egress.allowed, "return"),
        private=", ".join(sorted(ranges, key=ipaddress.IPv4Network)),
    )


def egress_of(network: Mapping[str, Any]) -> _flows.Egress:
    """The site's rule for destinations in a profile's `network`."""
    return _flows.Egress(
        allowed=tuple(network.get("allowed_networks") or ()),
        denied=tuple(network.get("denied_networks") or ()),
    )


def installed() -> str | None:
    """The table as the kernel prints it, without counters; None without the table."""
    try:
        listed = _command.run(_LIST, ok=(0, 1))
    except Refusal as refusal:
        if refusal.code != "command_missing":
            raise
        # nft makes the table, so a host without nft cannot have it.
        return None
    return listed.out if listed.rc == 0 else None


def normalized(text: str) -> str:
    """The text as the kernel would print it, from an empty network namespace of its own."""
    command = ["unshare", "--net", "sh", "-c", f"nft -f - && {' '.join(_LIST)}"]
    return _command.run(command, stdin=text).out


def install(text: str) -> None:
    _command.run(["nft", "-f", "-"], stdin=text)


def remove() -> None:
    # Adding first makes the removal of a missing table succeed.
    install(f"table inet {TABLE}\ndelete table inet {TABLE}\n")


def _client(mac: str) -> str:
    digits = mac.replace(":", "")
    return f"    udp dport 67 ether saddr {mac} {_RELAY} 0 {_HARDWARE} 0x{digits} return\n"


def _probe(address: str, target: str) -> str:
    return f"    ip saddr {address} ip daddr {target} return\n" if target else ""


def _destinations(networks: Collection[str], verdict: str) -> str:
    if not networks:
        return ""
    names = sorted({ipaddress.IPv4Network(name) for name in networks})
    return f"    ip daddr {{ {', '.join(map(str, names))} }} {verdict}\n"
