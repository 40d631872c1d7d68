"""Connections of each guest in the host's own table: their limit, and their end with the slice.

The switch limits the connections in a slice's zone (`_flows.CONNECTIONS`). The host's kernel tracks
each of them again, and a guest can end the entry in the zone alone. For example, it resets the
connection by a frame to another hardware address. The switch believes the frame, and the kernel
drops it untracked, so the host's entry stays for days, with its port of NAT. Therefore the host has
a limit of its own. It counts the connections that a guest opens and those of managed ingress to it.

The count lives in a table of its own, because `_firewall` is replaced with each slice that starts
or ends, and a new count begins at zero. The table does not depend on the guests. Its chains come
after those of `_firewall`, because the kernel counts a packet also if a later rule drops it.

The kernel walks all connections of a guest to count them, so only the first packet of a connection
is counted, also of one that has no answer yet. For a guest at its limit new connections are refused
without counting for PAUSE_MS.
"""

from __future__ import annotations

import ipaddress
import re

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows, _nft

TABLE = "gpuaas_connections"
# Kind of refused traffic (`_refusals`).
KIND = "host_connections"
PAUSE_MS = 10

_LIST = ["nft", "--stateless", "--terse", "list", "table", "inet", TABLE]
_REFUSED = re.compile(r"([0-9.]{7,15}) counter packets ([0-9]+)")
# Addresses of a guest in an entry: it opened the connection, or it answers. Of managed ingress the
# original destination is the public address.
_SIDES = ("--orig-src", "--reply-src")

# A rule with a full set does not match, so each refusal is a rule without a set.
_OF_GUEST = """\
  chain {way}_guest {{
    ip {field} @full goto refuse_{way}_guest
    add @connections {{ ip {field} ct count over {limit} }} goto over_{way}_guest
  }}
  chain over_{way}_guest {{
    add @full {{ ip {field} }}
    goto refuse_{way}_guest
  }}
  chain refuse_{way}_guest {{
    update @refused {{ ip {field} counter }}
    drop
  }}
"""
_TEXT = """\
table inet {table} {{
  set connections {{
    type ipv4_addr
    size 65535
    flags dynamic
  }}
  set full {{
    type ipv4_addr
    size 65535
    flags dynamic,timeout
    timeout {pause}ms
  }}
  set refused {{
    type ipv4_addr
    size 65535
    flags dynamic
  }}
{chains}  chain input {{
    type filter hook input priority -149; policy accept;
    iifname "{bridge}" ct state new ct status ! confirmed goto from_guest
  }}
  chain forward {{
    type filter hook forward priority -149; policy accept;
    iifname "{bridge}" ct state new ct status ! confirmed goto from_guest
    oifname "{bridge}" ct state new ct status ! confirmed goto to_guest
  }}
}}
"""


def rules(bridge: str) -> str:
    """The table as text for `nft -f -`."""
    ways = (("from", "saddr"), ("to", "daddr"))
    limit = _flows.CONNECTIONS
    chains = "".join(_OF_GUEST.format(way=way, field=field, limit=limit) for way, field in ways)
    text = _TEXT.format(table=TABLE, pause=PAUSE_MS, chains=chains, bridge=bridge)
    return _nft.without("inet", TABLE) + text


def table(bridge: str) -> _nft.Table:
    return (rules(bridge), *_LIST)


def installed() -> str | None:
    """The table as the kernel prints it, without its counts; None without the table."""
    return _nft.listed(_LIST)


def normalized(bridge: str) -> str:
    """The table as the kernel would print it, or a refusal of a kernel that cannot count."""
    try:
        return _nft.as_listed(table(bridge))
    except Refusal as refusal:
        if refusal.code != "command_failed":
            raise
        raise Refusal(
            "connection_limit_missing",
            expected="nftables of the host to count connections by address",
            found=refusal.found,
            remedy="boot a kernel that has the module nft_connlimit, then run the bootstrap "
            "playbook again",
        ) from refusal


def install(bridge: str) -> None:
    """Load the table. Its counts begin at zero."""
    _nft.load(rules(bridge))


def remove() -> None:
    _nft.load(_nft.without("inet", TABLE))


def refused() -> dict[str, int]:
    """Packets beyond the limit by the guest's address, since the slice's start."""
    listed = _command.run(["nft", "list", "set", "inet", TABLE, "refused"], ok=(0, 1)).out
    return {address: int(packets) for address, packets in _REFUSED.findall(listed)}


def number(ip: str) -> int:
    """Number of the guest's connections in the host's table."""
    # Exit code 1 is a failure here, also when there is no connection.
    listed = (_command.run(["conntrack", "-L", side, ip]).out for side in _SIDES)
    return sum(1 for out in listed for line in out.splitlines() if line.strip())


def forget(ip: str) -> None:
    """Delete the guest's connections, so that the next holder of the address inherits no state.

    First the host's own, such as an answer of DNS that the guest has never taken: the kernel would
    send it again for minutes, and track it anew.
    """
    address = str(ipaddress.IPv4Address(ip))
    _command.run(["ss", "--kill", "--tcp", "--", "state", "connected", "dst", address])
    for side in _SIDES:
        # Exit code 1 also means that no connection existed.
        _command.run(["conntrack", "-D", side, address], ok=(0, 1))
    # Adding first makes the removal of a missing counter succeed. Without the table there is none.
    element = f"element inet {TABLE} refused {{ {address} }}\n"
    _command.run(["nft", "-f", "-"], stdin=f"add {element}delete {element}", ok=(0, 1))
