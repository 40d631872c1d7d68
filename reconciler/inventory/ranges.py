"""Addresses, and the networks of a site in which they should be."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address


class Ranges:
    """Networks. An address is looked for by its prefixes, because a peer may list very many."""

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network]) -> None:
        self.networks = tuple(networks)
        self._starts: dict[tuple[int, int], set[int]] = {}
        for network in self.networks:
            rest = network.max_prefixlen - network.prefixlen
            start = int(network.network_address) >> rest
            self._starts.setdefault((network.version, rest), set()).add(start)

    def __bool__(self) -> bool:
        return bool(self.networks)

    def __contains__(self, address: IPv4Address | IPv6Address) -> bool:
        return any(
            version == address.version and int(address) >> rest in starts
            for (version, rest), starts in self._starts.items()
        )


def parsed(text: str) -> IPv4Address | IPv6Address | None:
    """The address; None for another text, such as a name."""
    try:
        return ip_address(text)
    except ValueError:
        return None
