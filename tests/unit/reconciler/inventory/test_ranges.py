"""Addresses in the networks of a site."""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.inventory.ranges import Ranges

_Address = IPv4Address | IPv6Address
# Few addresses, so that many are inside.
_ADDRESSES = st.one_of(
    st.integers(0, 300).map(lambda number: ip_address((10 << 24) + number)),
    st.integers(0, 300).map(lambda number: ip_address((0xFD << 120) + number)),
)


def _network(address: _Address, free: int) -> IPv4Network | IPv6Network:
    return ip_network((address, address.max_prefixlen - free), strict=False)


@pytest.mark.covers("ECO-2", "ECO-3")
@given(st.lists(st.builds(_network, _ADDRESSES, st.integers(0, 32)), max_size=4), _ADDRESSES)
def test_an_address_is_found_where_the_library_finds_it(
    networks: list[IPv4Network | IPv6Network], address: _Address
) -> None:
    assert (address in Ranges(networks)) == any(address in network for network in networks)
