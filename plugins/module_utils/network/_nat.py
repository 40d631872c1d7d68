"""Translation of the guests' addresses to those of the host, by rules of iptables' POSTROUTING.

NAT keeps the source port of a guest if the range of its rule allows it. Then the kernel takes all
packets of the guest's peer to that port of the host for answers to the guest. Even a new connection
to a service of the host would reach the guest. So a guest's TCP and UDP ports become PORTS, where
no service listens: Linux gives these ports to connections of the host, and skips those of guests.
One slice has half as many connections, so that none can take all ports toward a destination.

A service that believes clients with a reserved port only, such as an NFS server, may be in
`allowed_networks`. Toward these a reserved port of a guest becomes one of RESERVED.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _iptables

TABLE, CHAIN = "nat", "POSTROUTING"
PORTS, RESERVED = (32768, 65535), (665, 1023)
# Ports from which a client is believed. Clients of NFS use RESERVED (sunrpc.min_resvport).
_BELIEVED = "512:1023"
_LISTENING = "0A"

Network = Mapping[str, Any]


def rules(network: Network) -> list[str]:
    """The rules as `iptables -S` writes them, the one for all other packets last.

    network: bridge, subnet and allowed networks. The host's own packets to guests, DHCP among them,
    keep their ports.
    """
    guests, out = f"-A {CHAIN} -s {network['subnet']}", f"! -o {network['bridge']}"
    near = sorted({*valid(network.get("allowed_networks") or ())})
    return [
        *(
            f"{guests} -d {each} {out} -p {protocol} -m {protocol} --sport {_BELIEVED}"
            f" {_iptables.MARK} {_to(RESERVED)}"
            for each in near
            for protocol in ("tcp", "udp")
        ),
        *(f"{guests} {out} -p {each} {_iptables.MARK} {_to(PORTS)}" for each in ("tcp", "udp")),
        f"{guests} -j MASQUERADE",
    ]


def _to(ports: tuple[int, int]) -> str:
    return f"-j MASQUERADE --to-ports {ports[0]}-{ports[1]}"


def valid(names: Iterable[str]) -> Iterator[ipaddress.IPv4Network]:
    """Those of the names that are networks."""
    for name in names:
        # `_guards.problems` refuses the others by name.
        with contextlib.suppress(ValueError):
            yield ipaddress.IPv4Network(name)


def installed(network: Network) -> list[str]:
    """Our rules on this host, also those of an earlier release and of other allowed networks."""
    return [rule for rule in _listed() if _is_ours(rule, network)]


def is_established(network: Network) -> bool:
    return not _changes(network, _listed(), rules(network))


def establish(network: Network) -> None:
    _iptables.commit(_changes(network, _listed(), rules(network)), TABLE)


def remove(network: Network) -> None:
    _iptables.commit(_changes(network, _listed(), []), TABLE)


def problems(network: Network, listed: Sequence[str]) -> list[str]:
    """Reasons why the rules of the chain do not translate guests as they must."""
    ours = rules(network)
    problems = [f"{CHAIN} lacks {rule}" for rule in ours if rule not in listed]
    if not problems and _changes(network, listed, ours):
        problems.append(f"the rules for {network['subnet']} in {CHAIN} are out of their place")
    before = itertools.takewhile(lambda rule: not _is_ours(rule, network), listed)
    # Bootstrap puts ours before a rule that translates to the same address, and only before such.
    return problems + [
        f"{rule} comes first and lets guests use any port of the host: restrict it to ports"
        f" {PORTS[0]}-{PORTS[1]} for tcp and udp"
        for rule in before
        if _translates(rule, network) == "SNAT"
    ]


def services() -> list[str]:
    """Addresses of the host's TCP services on PORTS, which guests can cut off from their clients.

    Sockets of UDP do not show which of them are clients, which have such ports.
    """
    listening = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (_host.read(path) or "").splitlines()[1:]:
            _number, local, _remote, state, *_rest = line.split()
            address, _colon, port = local.partition(":")
            if state == _LISTENING and PORTS[0] <= int(port, 16) <= PORTS[1]:
                listening |= {f"{ip}:{int(port, 16)}" for ip in _reachable(address)}
    return sorted(listening)


def _reachable(digits: str) -> Iterator[str]:
    """The IPv4 address, in the kernel's order of bytes, if others reach it."""
    if int(digits, 16) == 0:
        yield str(ipaddress.IPv4Address(0))
    # An IPv4 address in a socket of IPv6 is written behind this.
    elif len(digits) == 8 or digits.startswith("0000000000000000FFFF0000"):
        address = ipaddress.IPv4Address(bytes.fromhex(digits[-8:])[::-1])
        if not address.is_loopback:
            yield str(address)


def _listed() -> list[str]:
    try:
        return _iptables.listed(CHAIN, TABLE)
    except Refusal as refusal:
        if refusal.code != "command_missing":
            raise
        # iptables creates the rules, so a host without iptables cannot have them.
        return []


def _changes(network: Network, listed: Sequence[str], ours: Sequence[str]) -> list[str]:
    theirs = [rule for rule in listed if not _is_ours(rule, network)]
    # A rule of the site that translates to the same address would keep the ports.
    places = (
        n
        for n, rule in enumerate(listed)
        if _is_ours(rule, network) or _translates(rule, network) == "MASQUERADE"
    )
    return _iptables.changes(CHAIN, listed, theirs, ours, next(places, len(listed)))


def _is_ours(rule: str, network: Network) -> bool:
    return _iptables.MARK in rule or rule == rules(network)[-1]


def _translates(rule: str, network: Network) -> str:
    """Target of a rule of the site that may give guests a port of a service, or ""."""
    try:
        words = shlex.split(rule)
        options = dict(itertools.pairwise(words))
        source = ipaddress.IPv4Network(options.get("-s", "0.0.0.0/0"))
        concerns = source.overlaps(ipaddress.IPv4Network(network["subnet"])) or "! -s" in rule
        ports = options.get("--to-ports") or options.get("--to-source", "").partition(":")[2]
        concerns = concerns and int(ports.partition("-")[0] or 0) < PORTS[0]
    except ValueError:
        return ""
    target = options.get("-j", "")
    return target if concerns and target in ("MASQUERADE", "SNAT") else ""
