"""Network of a client, by which the connections and logins of one machine are counted."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network


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
