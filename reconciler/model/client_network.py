"""Network of a client, by which the connections and logins of one machine are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TypeVar

T = TypeVar("T")


def client_network(address: str) -> str:
    """The client's address, or its network of 64 bits, all of which one machine may have.

    An IPv4 address inside IPv6 is the IPv4 address. A text that is no address is its own network.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or ip_network((parsed, 64), strict=False))


def oldest_of_most(networks: Mapping[T, str]) -> T:
    """Of clients with their networks, the oldest first: the oldest of the network with most.

    Where it makes room for a newcomer, a few networks cannot exclude all others.
    """
    share = Counter(networks.values())
    most = max(share.values())
    return next(client for client, network in networks.items() if share[network] == most)
