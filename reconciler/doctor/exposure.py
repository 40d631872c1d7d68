"""Check of the site's public addresses that guests reach.

Guests reach no private address but those that their profile allows. Public addresses of hosts, BMCs
and of the site's services are open to them until `network.denied_networks` of the profile names
them. The API and the gateway are left out, because guests and tenants use them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache
from urllib.parse import urlsplit

from sqlalchemy import Connection

from reconciler import names
from reconciler.doctor import Finding, ok, warn
from reconciler.model.errors import Problem
from reconciler.model.hardware import Offer
from reconciler.model.states import NodeState
from reconciler.profiles import hardware_profile
from reconciler.records import nodes
from reconciler.settings import Settings

_SERVICES = ("awx_url", "netbox_url", "maas_url", "ufm_url", "database_url", "redis_url")
# Addresses that a finding names; the remedy is the same for all.
_NAMED = 20
_LOOKUP_S = 5.0
# Of a name that exists, and of an address of IPv6.
_NO_IPV4 = (socket.EAI_NODATA, socket.EAI_ADDRFAMILY)


def guest_reach(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Guests reach no other host, no BMC and no service of the site at a public address."""
    live = [node for node in nodes.every(conn) if node.state != NodeState.RETIRED]
    # A name server that hangs would hold the transaction for longer than the server allows.
    conn.rollback()
    # Name, host or address, and the node whose own guests never reach it.
    targets = [(f"node {node.id}", node.address, node.id) for node in live]
    for node in live:
        targets.append((f"BMC of {node.id}", str((node.netbox or {}).get("bmc_address") or ""), ""))
    for name in _SERVICES:
        host = urlsplit(str(getattr(settings, name))).hostname or ""
        targets.append((f"GPUAAS_{name.upper()}", host, ""))
    profiles = sorted({node.profile for node in live} - {""})
    unresolved = [
        f"{host} ({name})" for name, host, _ in targets if profiles and _addresses(host) is None
    ]
    unread: list[str] = []
    exposed = False
    for profile in profiles:
        try:
            offer = Offer.of(hardware_profile(settings.profiles_dir, profile))
        except Problem as problem:
            unread.append(f"{profile}.yml ({problem.code})")
            continue
        users = {node.id for node in live if node.profile == profile}
        reached = [
            f"{address} ({name})"
            for name, host, node_id in targets
            for address in _addresses(host) or ()
            if offer.reaches(address) and users - {node_id}
        ]
        if reached:
            exposed = True
            more = f" and {len(reached) - _NAMED} others" if len(reached) > _NAMED else ""
            yield warn(
                f"guests of {profile}.yml reach {', '.join(reached[:_NAMED])}{more}",
                expected="no public address of another host, a BMC or a service of the site",
                remedy=f"add them to network.denied_networks in"
                f" {settings.profiles_dir / profile}.yml and run the bootstrap playbook on its"
                " hosts; nothing if a firewall of the site keeps guests away",
            )
    for what, rows, remedy in (
        ("not resolved", unresolved, "correct the name, or its name server; then run it again"),
        ("not read", unread, f"put the profiles into {settings.profiles_dir}, or correct them"),
    ):
        if rows:
            more = f" and {len(rows) - _NAMED} others" if len(rows) > _NAMED else ""
            yield warn(
                f"{what}: {', '.join(rows[:_NAMED])}{more}",
                expected="every name and every profile of a node, to tell what guests reach",
                remedy=remedy,
            )
    if not (exposed or unresolved or unread):
        yield ok("no public address of hosts, BMCs and services that guests reach")


@cache
def _addresses(host: str) -> tuple[str, ...] | None:
    """IPv4 addresses of a host, () for a name without any, None for one that was not resolved.
    Guests have no IPv6.
    """
    if not host:
        return ()
    try:
        return tuple(names.addresses(host.partition("/")[0], _LOOKUP_S))
    except (OSError, ValueError) as failure:
        return () if getattr(failure, "errno", None) in _NO_IPV4 else None
