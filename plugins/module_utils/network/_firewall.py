"""Firewall of the slice bridge in the host's kernel: the second wall behind the OVS guard.

The guard names the host's addresses as they were when it was loaded. The kernel decides about a
destination by its current addresses and routes (`fib`), so an address that comes later is refused
as well. Only this wall sees the content of DHCP packets: a guest may speak for its own hardware
address, and for no other. A broadcast answer is given the source address of the guest that it is
for, by which the switch knows that guest's port. Nothing begins from outside but managed ingress.
Each packet of such a connection needs its rule, in both directions, so the removal of a rule cuts
it.

The table has its own chains. It drops, and never accepts for others: a site's own firewall decides
after it. It is replaced as a whole in one transaction.

All guests share the host's name server, which has a number of open queries and of connections. Each
guest has its own part of both (`_baseline_files.QUERIES`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _ingress,
)

TABLE = "gpuaas_slice"
_LIST = ["nft", "--stateless", "list", "table", "inet", TABLE]

# Connections of a guest to the name server at a time, which serves 20 in all.
_TCP_QUERIES = 2

# Offsets in bits from the UDP header: relay address (giaddr) and hardware address (chaddr).
_RELAY, _HARDWARE = "@th,256,32", "@th,288,48"

_TEXT = """\
table inet {table}
delete table inet {table}
table inet {table} {{
  counter dhcp_forged {{}}
  counter host_refused {{}}
  counter dns_refused {{}}
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
{queries}    ct state established,related return
    ct state invalid counter name host_refused drop
    udp dport 53 return
    tcp dport 53 return
    icmp type echo-request return
    counter name host_refused drop
  }}
  chain output {{
    type filter hook output priority -150; policy accept;
    oifname "{bridge}" ip daddr 255.255.255.255 udp sport 67 udp dport 68 goto dhcp_broadcast
  }}
  chain dhcp_broadcast {{
{answers}  }}
{forwards}  chain forward {{
    type filter hook forward priority -150; policy accept;
    iifname "{bridge}" goto guest_to_world
    oifname "{bridge}" goto world_to_guest
  }}
  chain guest_to_world {{
    meta nfproto != ipv4 counter name host_refused drop
    fib daddr type {{ local, broadcast, anycast, multicast }} counter name local_refused drop
    oifname "{bridge}" counter name local_refused drop
{denied}    ct status dnat ct direction reply goto ingress
    ct state established,related return
    ct state invalid counter name private_refused drop
{allowed}    ip daddr {{ {private} }} counter name private_refused drop
  }}
  chain world_to_guest {{
    ct status dnat ct direction original goto ingress
    ct state established,related return
    counter name inbound_refused drop
  }}
  chain ingress {{
{entries}    counter name inbound_refused drop
  }}
}}
"""


Ingress = Collection[tuple[_flows.Guard, _ingress.Rule]]


def rules(
    network: Mapping[str, Any],
    guests: Mapping[str, str],
    probe: tuple[str, str],
    ingress: Ingress = (),
) -> str:
    """The table as text for `nft -f -`.

    network: bridge, address, and the site's allowed and denied networks. guests: IPv4 address by
    hardware address, of the guests that may ask for it. probe: address of parity's probe and its
    target.
    """
    egress = egress_of(network)
    ranges = (*_flows.PRIVATE, *_flows.NEVER)
    return _TEXT.format(
        table=TABLE,
        bridge=network["bridge"],
        gateway=ipaddress.IPv4Interface(network["address"]).ip,
        clients="".join(_client(_object_names.check_mac(mac)) for mac in sorted(guests)),
        queries="".join(_queries(ip) for _mac, ip in sorted(guests.items())),
        answers="".join(_answer(mac, ip) for mac, ip in sorted(guests.items())),
        denied=_destinations(egress.denied, "counter name private_refused drop"),
        allowed=_probe(*probe) + _destinations(egress.allowed, "return"),
        private=", ".join(sorted(ranges, key=ipaddress.IPv4Network)),
        forwards=_forwards(network["bridge"], ingress),
        entries="".join(_entry(guard, rule) for guard, rule in ingress),
    )


def egress_of(network: Mapping[str, Any]) -> _flows.Egress:
    """The site's rule for traffic of guests in a profile's `network`."""
    settings = _baseline_files.settings({"bridge": "", "address": "", "subnet": "", **network})
    return _flows.Egress(
        allowed=tuple(settings["allowed_networks"]),
        denied=tuple(settings["denied_networks"]),
        packets_per_second=settings["packets_per_second"],
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


def _queries(ip: str) -> str:
    """A guest's part of the name server. Also in open connections, which one port keeps for all."""
    of_guest = f"    ip saddr {ipaddress.IPv4Address(ip)}"
    rate = (
        f"limit rate over {_baseline_files.QUERIES}/second burst {_baseline_files.QUERIES} packets"
    )
    refuse = "counter name dns_refused drop\n"
    return (
        f"{of_guest} udp dport 53 {rate} {refuse}"
        f"{of_guest} tcp dport 53 ct state new ct count over {_TCP_QUERIES} {refuse}"
    )


def _answer(mac: str, ip: str) -> str:
    digits = mac.replace(":", "")
    return f"    {_HARDWARE} 0x{digits} ip saddr set {ipaddress.IPv4Address(ip)} return\n"


def _probe(address: str, target: str) -> str:
    return f"    ip saddr {address} ip daddr {target} return\n" if target else ""


def _forwards(bridge: str, ingress: Ingress) -> str:
    """Chain that translates the destination of managed ingress; "" without rules."""
    if not ingress:
        return ""
    lines = [
        f'    iifname != {{ "lo", "{bridge}" }} ip saddr {_sources(rule)}'
        f" ip daddr {rule.public_address} {rule.protocol} dport {rule.public_port}"
        f" dnat ip to {guard.ip}:{rule.guest_port}"
        f' comment "{_object_names.domain_name(guard.allocation_id)} {rule.id}"\n'
        for guard, rule in ingress
    ]
    hook = "    type nat hook prerouting priority -110; policy accept;\n"
    return f"  chain prerouting {{\n{hook}{''.join(lines)}  }}\n"


def _entry(guard: _flows.Guard, rule: _ingress.Rule) -> str:
    """Packets of the rule's connections in both directions, and errors about them."""
    between = (
        f"ct original ip saddr {_sources(rule)} ct original ip daddr {rule.public_address}"
        f" ct reply ip saddr {guard.ip}"
    )
    ports = f"ct original proto-dst {rule.public_port} ct reply proto-src {rule.guest_port}"
    return (
        f"    meta l4proto {rule.protocol} {between} {ports} return\n"
        f"    meta l4proto icmp ct state related {between} return\n"
    )


def _sources(rule: _ingress.Rule) -> str:
    return f"{{ {', '.join(rule.sources)} }}"


_COMMENT = re.compile(rf'comment "({_object_names.PREFIX}[0-9a-f]{{32}}) ([0-9a-f-]{{36}})"')


def forwarded() -> list[tuple[str, str]]:
    """Allocation and id of each rule of managed ingress in the kernel."""
    return sorted((_object_names.owner(n), id) for n, id in _COMMENT.findall(installed() or ""))


def _destinations(networks: Collection[str], verdict: str) -> str:
    if not networks:
        return ""
    names = sorted({ipaddress.IPv4Network(name) for name in networks})
    return f"    ip daddr {{ {', '.join(map(str, names))} }} {verdict}\n"
