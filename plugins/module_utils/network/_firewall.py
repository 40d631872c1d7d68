"""Firewall of the slice bridge in the host's kernel, a second filter behind the OVS guard.

The guard names the host's addresses as they were when it was loaded. The kernel decides about a
destination by its current addresses and routes (`fib`), so an address that comes later is refused
as well. Only this firewall sees the content of DHCP packets: a guest may use its own hardware
address and no other. It puts the guest's address into a broadcast answer as its source, by which
the switch finds the guest's port. Managed ingress is the only traffic that begins outside. Each
packet of such a connection must match its rule, in both directions, so the removal of the rule cuts
the connection.

The table has its own chains. It drops, and never accepts for others: a site's own firewall decides
after it. It is replaced as a whole in one transaction.

NAT tells guests and host apart by the ports of TCP and UDP and the identifiers of ICMP. Of any
other protocol the host would take all packets of a guest's peer for answers to the guest, also
those of its own tunnel to that peer. So guests send no others.

All guests share the host's dnsmasq, which limits open DNS queries and connections and is the DHCP
server too. Each guest has its own limits for DNS queries, DNS connections and DHCP messages.

Each kind of refused traffic has a counter for each guest. If the guard counts a kind of the same
name, the counter here has only what passed the guard.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _ingress,
    _nft,
)

TABLE = "gpuaas_slice"
_LIST = ["nft", "--stateless", "list", "table", "inet", TABLE]
# Kinds of refused traffic, and the field of a packet that names the guest.
KINDS = {
    "dhcp_forged": "ether saddr",
    "host_address": "ip saddr",
    "host_service": "ip saddr",
    "inbound": "ip daddr",
    "name_queries": "ip saddr",
    "packet_rate": "ether saddr",
    "private_network": "ip saddr",
}
_COUNTER = re.compile(r"counter (\w+)_([a-z0-9]+) \{\s*packets ([0-9]+) bytes")

# Concurrent TCP connections of a guest to the name server, which serves 20 in all.
_TCP_QUERIES = 2
# New TCP connections of a guest to the name server a second. The server starts a process for each.
RATE = 10
# DHCP messages of a guest in a second, and at once: a client sends a few when it starts. dnsmasq
# logs each of them with its answer.
DHCP_RATE, DHCP_BURST = 1, 10

# Offsets in bits from the UDP header: relay address (giaddr) and hardware address (chaddr).
_RELAY, _HARDWARE = "@th,256,32", "@th,288,48"

_TEXT = """\
table inet {table} {{
{counters}{refusals}  chain input {{
    type filter hook input priority -150; policy accept;
    iifname "{bridge}" goto guest_to_host
  }}
  chain guest_to_host {{
    meta nfproto != ipv4 drop
{clients}    udp dport 67 goto refuse_dhcp_forged
    ip daddr != {gateway} goto refuse_host_service
{queries}    ct state established,related return
    ct state invalid goto refuse_host_service
    udp dport 53 return
    tcp dport 53 return
    icmp type echo-request return
    goto refuse_host_service
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
    meta nfproto != ipv4 drop
    meta l4proto != {{ icmp, tcp, udp }} goto refuse_host_service
    fib daddr type {{ local, broadcast, anycast, multicast }} goto refuse_host_address
    oifname "{bridge}" goto refuse_host_address
{denied}    ct status dnat ct direction reply goto ingress
    ct state established,related return
    ct state invalid goto refuse_private_network
{allowed}    ip daddr {{ {private} }} goto refuse_private_network
  }}
  chain world_to_guest {{
    ct status dnat ct direction original goto ingress
    ct state established,related return
    goto refuse_inbound
  }}
  chain ingress {{
{entries}    goto refuse_inbound
  }}
}}
"""


Ingress = Collection[tuple[_flows.Guard, _ingress.Rule]]


def rules(
    network: Mapping[str, Any],
    guests: Collection[_flows.Guard],
    probe: tuple[str, Collection[str]],
    ingress: Ingress = (),
) -> str:
    """The table as text for `nft -f -`.

    network: bridge, address, and the site's allowed and denied networks. guests: guards of those
    that may ask for their address. probe: address of parity's probe and its targets.
    """
    egress = egress_of(network)
    ranges = (*_baseline_files.PRIVATE, *_baseline_files.NEVER)
    guests = sorted(guests, key=lambda guard: guard.port)
    return _nft.without("inet", TABLE) + _TEXT.format(
        table=TABLE,
        bridge=network["bridge"],
        gateway=ipaddress.IPv4Interface(network["address"]).ip,
        counters="".join(
            f"  counter {kind}_{guard.port} {{}}\n" for kind in KINDS for guard in guests
        ),
        refusals="".join(_refusal(kind, guests) for kind in KINDS),
        clients="".join(map(_client, guests)),
        queries="".join(map(_queries, guests)),
        answers="".join(map(_answer, guests)),
        denied=_destinations(egress.denied, "goto refuse_private_network"),
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
    return _nft.listed(_LIST)


def refused() -> dict[str, Counter[str]]:
    """Refused packets by port of the guest and kind, since the table was loaded."""
    counters = _command.run(["nft", "list", "counters", "table", "inet", TABLE], ok=(0, 1)).out
    by_port: dict[str, Counter[str]] = {}
    for kind, port, packets in _COUNTER.findall(counters):
        by_port.setdefault(port, Counter())[kind] = int(packets)
    return by_port


def table(text: str) -> _nft.Table:
    return (text, *_LIST)


def normalized(text: str) -> str:
    """The table as the kernel would print it."""
    return _nft.as_listed(table(text))


def remove() -> None:
    _nft.load(_nft.without("inet", TABLE))


def _refusal(kind: str, guests: Collection[_flows.Guard]) -> str:
    """Chain that counts a packet for its guest and drops it, also without a known guest."""
    field = KINDS[kind]
    # A guard left by an earlier slice has the same addresses as that of the current slice.
    ports = {
        _object_names.check_mac(each.mac) if field.startswith("ether") else _ip(each): each.port
        for each in guests
    }
    counters = ", ".join(f'{key} : "{kind}_{port}"' for key, port in ports.items())
    return (
        f"  chain refuse_{kind} {{\n    counter name {field} map {{ {counters} }}\n    drop\n  }}\n"
    )


def _ip(guard: _flows.Guard) -> str:
    return str(ipaddress.IPv4Address(guard.ip))


def _digits(guard: _flows.Guard) -> str:
    return "0x" + _object_names.check_mac(guard.mac).replace(":", "")


def _client(guard: _flows.Guard) -> str:
    request = f"    udp dport 67 ether saddr {guard.mac} {_RELAY} 0 {_HARDWARE} {_digits(guard)}"
    return f"{request} {_over(DHCP_RATE, DHCP_BURST)} goto refuse_packet_rate\n{request} return\n"


def _queries(guard: _flows.Guard) -> str:
    """Limits of a guest's DNS queries. They come before the rule for established connections,
    because all queries from one source port are a single connection.
    """
    of_guest = f"    ip saddr {_ip(guard)}"
    refuse = "goto refuse_name_queries\n"
    return (
        f"{of_guest} udp dport 53 {_over(_baseline_files.QUERIES)} {refuse}"
        f"{of_guest} tcp dport 53 ct state new {_over(RATE)} {refuse}"
        f"{of_guest} tcp dport 53 ct state new ct count over {_TCP_QUERIES} {refuse}"
    )


def _over(rate: int, burst: int = 0) -> str:
    return f"limit rate over {rate}/second burst {burst or rate} packets"


def _answer(guard: _flows.Guard) -> str:
    return f"    {_HARDWARE} {_digits(guard)} ip saddr set {_ip(guard)} return\n"


def _probe(address: str, targets: Collection[str]) -> str:
    return _destinations(targets, "return", match=f"ip saddr {address} ")


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


def _destinations(networks: Collection[str], verdict: str, *, match: str = "") -> str:
    if not networks:
        return ""
    names = sorted({ipaddress.IPv4Network(name) for name in networks})
    return f"    {match}ip daddr {{ {', '.join(map(str, names))} }} {verdict}\n"
