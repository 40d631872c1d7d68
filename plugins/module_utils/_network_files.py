"""The files of the network baseline: what bootstrap writes, and what parity finds edited.

One rendering serves both. Apart from `_baseline`, whose other needs take seconds to load on a host.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import _host

DNSMASQ = "/etc/dnsmasq.d/gpuaas-slice.conf"
RESERVATIONS = f"{_host.STATE_DIRECTORY}/dnsmasq/hosts.d"
LEASES = "/var/lib/misc/dnsmasq.leases"
SYSCTL = "/etc/sysctl.d/60-gpuaas-slice.conf"
# What the service goes by at boot.
SETTINGS = "/etc/gpuaas/network-baseline.json"

FORWARDING = "net.ipv4.ip_forward = 1\n"

Network = Mapping[str, Any]


def settings(network: Network) -> dict[str, Any]:
    """What of a profile's network the boot service is told."""
    named = {key: network[key] for key in ("bridge", "address", "subnet")}
    return {**named, "tmfifo": bool(network.get("tmfifo"))}


def dnsmasq(network: Network) -> str:
    """dnsmasq's configuration: the slice subnet and nothing else of the host."""
    subnet = ipaddress.IPv4Network(network["subnet"])
    own = ipaddress.IPv4Interface(network["address"]).ip
    return "\n".join(
        [
            "# Written by the gpuaas.slice collection; changed by its playbooks only.",
            f"interface={network['bridge']}",
            "except-interface=lo",
            # The bridge may come later than dnsmasq, and the host has resolvers of its own.
            "bind-dynamic",
            "domain-needed",
            "bogus-priv",
            # static: only reserved hosts get an address, so a flood of requests takes none.
            f"dhcp-range={subnet.network_address},static,{subnet.netmask},12h",
            "dhcp-ignore=tag:!known",
            "dhcp-authoritative",
            f"dhcp-option=option:router,{own}",
            f"dhcp-option=option:dns-server,{own}",
            f"dhcp-hostsdir={RESERVATIONS}",
            f"dhcp-leasefile={LEASES}",
            "",
        ]
    )


def unlike(path: str, text: str) -> list[str]:
    """Why a file is not what bootstrap writes; [] when it is."""
    found = _host.read(path)
    if found is None:
        return [f"{path} is missing"]
    if found == text.strip():
        return []
    wanted, there = text.split("\n"), found.split("\n")
    # One line says which edit it was, and lets nobody read a whole foreign file in a report.
    first = next((row for row in there if row not in wanted), "")
    lost = next((row for row in wanted if row not in there), "")
    shown = f"has {first!r}" if first else f"lacks {lost!r}" if lost else "has its lines otherwise"
    return [f"{path} is not what bootstrap writes: {shown}"]


def unlike_settings(network: Network) -> list[str]:
    """The same for the boot service's settings, which are data: their layout does not matter."""
    wanted = settings(network)
    try:
        there = json.loads(_host.read(SETTINGS) or "null")
    except ValueError:
        there = None
    if there is None:
        return [f"{SETTINGS} is missing or unreadable"]
    if there == wanted:
        return []
    kept = there if isinstance(there, dict) else {}
    differing = [key for key in sorted({*wanted, *kept}) if kept.get(key) != wanted.get(key)]
    return [f"{SETTINGS} has another {', '.join(differing)} than the profile"]
