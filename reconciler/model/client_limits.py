"""Limits of clients: how often each may do something, and the network by which it is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TypeVar

T = TypeVar("T")

_LARGEST = 10_000


class Buckets:
    """Token buckets. The time until which what each has done is paid for, at so much a second."""

    def __init__(self) -> None:
        self._paid: dict[str, float] = {}

    def wait_s(self, name: str, per_s: float, burst: float, amount: float = 1) -> float:
        """How long so much more would have to wait; zero or less if it need not."""
        return self._next(name, amount / per_s) - time.monotonic() - burst / per_s

    def count(self, name: str, per_s: float, amount: float = 1) -> None:
        """Count so much more, whether it had to wait or not."""
        paid = self._next(name, amount / per_s)
        if len(self._paid) >= _LARGEST:
            now = time.monotonic()
            self._paid = {key: until for key, until in self._paid.items() if until > now}
        self._paid[name] = paid

    def _next(self, name: str, seconds: float) -> float:
        return max(time.monotonic(), self._paid.get(name, 0.0)) + seconds


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
