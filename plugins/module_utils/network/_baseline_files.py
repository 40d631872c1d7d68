"""Files of the network baseline, as bootstrap writes them and parity compares them.

Both use the same rendering. This file is separate from `_ovs_nat`, whose imports take seconds to
load on a host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host

DNSMASQ = "/etc/dnsmasq.d/gpuaas-slice.conf"
RESERVATIONS = f"{_host.STATE_DIRECTORY}/dnsmasq/hosts.d"
LEASES = "/var/lib/misc/dnsmasq.leases"
SYSCTL = "/etc/sysctl.d/60-gpuaas-slice.conf"
# Settings file of the boot service (`_boot_units`).
SETTINGS = "/etc/gpuaas/network-baseline.json"

# Suffixes that Debian's service skips in the folder.
_IGNORED = (".dpkg-dist", ".dpkg-old", ".dpkg-new")

# MAC of parity's probe guest, which requests an address and never takes it. Locally administered,
# outside every profile's MAC prefix.
PROBE_MAC = "02:67:73:70:72:62"
# Address of the service that answers the probe's TCP beyond NAT. It is one for documentation
# (RFC 5737), which no network uses.
PROBE_SERVICE = "192.0.2.115"

# Packets that each guest may send, unless the profile says otherwise. A frame of segmentation
# offload counts as one packet.
PACKETS_PER_SECOND = 200_000
# DNS queries per second of each guest.
QUERIES = 50
# Most queries of all guests that wait for an upstream answer. dnsmasq waits for ten seconds, so
# this suffices for eight guests and their bursts.
_OPEN_QUERIES = 8 * QUERIES * 11
# The site's rule for destinations of guests, and the servers that answer their DNS queries.
EGRESS = ("allowed_networks", "denied_networks")
NAME_SERVERS = "name_servers"
# Destinations that no guest reaches unless the site allows it: private and shared address space
# (RFC 1918, RFC 6598), link-local with the metadata address, benchmarking, and the special purposes
# of RFC 6890. Loopback, multicast and the rest of the last block are never allowed.
PRIVATE = (
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("192.0.0.0/24", "192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
)
_LOOPBACK = "127.0.0.0/8"
NEVER = ("0.0.0.0/8", _LOOPBACK, "169.254.0.0/16", "224.0.0.0/3")

# Address of systemd-resolved, and its file with the name servers of the host's networks.
_STUB, _UPLINKS = "127.0.0.53", "/run/systemd/resolve/resolv.conf"
# Both addresses of systemd-resolved.
STUBS = (_STUB, "127.0.0.54")

# dnsmasq answers a query for this name itself, so parity needs no upstream server for it.
PROBE_NAME = "gpuaas-parity.invalid"

# Sizes of the kernel's table of neighbours, one for the whole host. Linux has 1024 entries by
# default. A guest that sends to each address of a large network on the host's link fills them with
# addresses that do not answer. Then the host and all guests reach no new neighbour.
NEIGHBOURS = {
    "net.ipv4.neigh.default.gc_thresh1": 8192,
    "net.ipv4.neigh.default.gc_thresh2": 32768,
    "net.ipv4.neigh.default.gc_thresh3": 65536,
}

SYSCTLS = "".join(
    f"{key} = {value}\n" for key, value in {"net.ipv4.ip_forward": 1, **NEIGHBOURS}.items()
)

# Fields of a network that name its bridge and addresses; the others are its rules.
PLACE = ("bridge", "address", "subnet")

Network = Mapping[str, Any]


def dhcp_lock(wait_s: float = 0) -> AbstractContextManager[None]:
    """Lock of runs that stop or start dnsmasq. It keeps DHCP leases in memory, so their file can be
    changed only while it is stopped, and stays so.
    """
    return _host.locked("/run/gpuaas/dnsmasq", mode=0o700, wait_s=wait_s)


def settings(network: Network) -> dict[str, Any]:
    """The part of a profile's network that the boot service needs."""
    named = {key: network[key] for key in PLACE}
    networks = {key: list(network.get(key) or ()) for key in (*EGRESS, NAME_SERVERS)}
    return {
        **named,
        **networks,
        "packets_per_second": int(network.get("packets_per_second") or PACKETS_PER_SECOND),
        "egress_probe": str(network.get("egress_probe") or ""),
        "tmfifo": bool(network.get("tmfifo")),
    }


def probe_address(subnet: str) -> str:
    """The subnet's last usable address, because slots are numbered from the start."""
    return str(ipaddress.IPv4Network(subnet).broadcast_address - 1)


def dnsmasq(network: Network) -> str:
    """dnsmasq's configuration: the slice subnet and nothing else of the host."""
    subnet = ipaddress.IPv4Network(network["subnet"])
    gateway = ipaddress.IPv4Interface(network["address"]).ip
    return "\n".join(
        [
            "# Written by the gpuaas.slice collection; changed by its playbooks only.",
            f"interface={network['bridge']}",
            "except-interface=lo",
            # The host has resolvers of its own.
            _binding(),
            *_upstream(network),
            *_hidden_addresses(network),
            "domain-needed",
            "bogus-priv",
            # A guest learns no names of neighbours or of the host's files, nor dnsmasq's version.
            "no-hosts",
            "dhcp-ignore-names",
            "no-ident",
            # A cache would show a guest, by faster answers, which names its neighbours query.
            "cache-size=0",
            f"local=/{PROBE_NAME}/",
            f"dns-forward-max={_OPEN_QUERIES}",
            # A guest could send a neighbour's client id; the firewall checks the hardware address.
            "dhcp-ignore-clid",
            # static: only reserved hosts get an address, so a flood of requests takes none.
            f"dhcp-range={subnet.network_address},static,{subnet.netmask},12h",
            "dhcp-ignore=tag:!known",
            "dhcp-authoritative",
            f"dhcp-host={PROBE_MAC},id:*,{probe_address(network['subnet'])}",
            f"dhcp-option=option:router,{gateway}",
            f"dhcp-option=option:dns-server,{gateway}",
            f"dhcp-hostsdir={RESERVATIONS}",
            f"dhcp-leasefile={LEASES}",
            "",
        ]
    )


def _upstream(network: Network) -> list[str]:
    """dnsmasq's options for its name servers: the profile's, else those of the host.

    systemd-resolved answers from /etc/hosts, and with all addresses of the host for the host's
    name, so a guest is served by the servers behind it.
    """
    if servers := network.get(NAME_SERVERS):
        return ["no-resolv", *(f"server={server}" for server in servers)]
    return [f"resolv-file={_UPLINKS}"] if _STUB in name_servers() else []


def name_servers() -> list[str]:
    """The name servers of the host's own resolver."""
    rows = [row.split() for row in (_host.read("/etc/resolv.conf") or "").splitlines()]
    return [row[1] for row in rows if len(row) > 1 and row[0] == "nameserver"]


def _hidden_addresses(network: Network) -> list[str]:
    """dnsmasq's options against addresses that a guest cannot reach, such as those of a site's BMCs
    in its internal zones. A name with such an address does not exist for guests.

    `stop-dns-rebind` would let shared address space and answers to ANY pass, and would refuse names
    of allowed networks. Loopback is no address of the site, and lists of spam senders answer with
    it. Guests have no IPv6, and records of services (HTTPS, SVCB) may contain addresses.
    """
    ranges = [*map(ipaddress.IPv4Network, (*PRIVATE, *NEVER))]
    ranges.remove(ipaddress.IPv4Network(_LOOPBACK))
    for allowed in map(ipaddress.IPv4Network, network.get("allowed_networks") or ()):
        ranges = [part for each in ranges for part in _without(each, allowed)]
    ranges += map(ipaddress.IPv4Network, network.get("denied_networks") or ())
    hidden = [f"bogus-nxdomain={each}" for each in ipaddress.collapse_addresses(ranges)]
    return [*hidden, "filter-AAAA", "filter-rr=HTTPS,SVCB"]


def _without(
    network: ipaddress.IPv4Network, part: ipaddress.IPv4Network
) -> Iterable[ipaddress.IPv4Network]:
    """The rest of a network without a part of it."""
    if network.subnet_of(part):
        return []
    return network.address_exclude(part) if part.subnet_of(network) else [network]


def _binding() -> str:
    """dnsmasq's bind option. `bind-dynamic` lets the bridge appear after dnsmasq's start, unless
    another file has already chosen a mode.

    Ubuntu's libvirt links a file with `bind-interfaces` into the folder, also at each upgrade. With
    both options dnsmasq does not start, and `--test` does not notice.
    """
    folder = _host.path("/etc/dnsmasq.d")
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    others = [f"/etc/dnsmasq.d/{name}" for name in names if not name.endswith(_IGNORED)]
    for path in ("/etc/dnsmasq.conf", *others):
        # dnsmasq skips folders too.
        content = "" if path == DNSMASQ or _host.path(path).is_dir() else _host.kept(path)
        lines = (content or "").splitlines()
        if "bind-interfaces" in (line.split("#")[0].strip() for line in lines):
            return "bind-interfaces"
    return "bind-dynamic"
