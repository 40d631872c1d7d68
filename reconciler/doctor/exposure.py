"""Check of the site's public addresses that guests reach.

Guests reach no private address but those that their profile allows. Public addresses of hosts, BMCs
and of the site's services are open to them until `network.denied_networks` of the profile names
them. The API and the gateway are left out, because guests and tenants use them; another service at
the same address is a warning, because denying the address would close both.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache
from urllib.parse import urlsplit

from sqlalchemy import Connection

from reconciler import names
from reconciler.doctor import Finding, fail, ok, warn
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
    shared = _open_to_guests(settings) if profiles else set()
    unread: list[str] = []
    exposed = False
    for profile in profiles:
        file = settings.profiles_dir / f"{profile}.yml"
        try:
            offer = Offer.of(hardware_profile(settings.profiles_dir, profile))
        except Problem as problem:
            unread.append(f"{file.name} ({problem.code})")
            continue
        users = {node.id for node in live if node.profile == profile}
        # Name and address. A host's own guests never reach it.
        reached = [
            (name, address)
            for name, host, node_id in targets
            for address in _addresses(host) or ()
            if offer.reaches(address) and users - {node_id}
        ]
        closed = [f"{address} ({name})" for name, address in reached if address not in shared]
        joined = [f"{address} ({name})" for name, address in reached if address in shared]
        exposed |= bool(reached)
        if closed:
            yield fail(
                f"guests of {file.name} reach {_listed(closed)}",
                expected="no public address of another host, a BMC or a service of the site",
                remedy=f"add them to network.denied_networks in {file} and run the bootstrap"
                " playbook on its hosts, also if a firewall of the site keeps guests away",
            )
        if joined:
            yield warn(
                f"guests of {file.name} reach {_listed(joined)}, which is the API's or the"
                " gateway's too",
                expected="an address of its own for what only operators and hosts use",
                remedy="give it another address and add that to network.denied_networks, or keep"
                " guests from its port by a firewall of the site",
            )
    for what, rows, remedy in (
        ("not resolved", unresolved, "correct the name, or its name server; then run it again"),
        ("not read", unread, f"put the profiles into {settings.profiles_dir}, or correct them"),
    ):
        if rows:
            yield warn(
                f"{what}: {_listed(rows)}",
                expected="every name and every profile of a node, to tell what guests reach",
                remedy=remedy,
            )
    if not (exposed or unresolved or unread):
        yield ok("no public address of hosts, BMCs and services that guests reach")


def _open_to_guests(settings: Settings) -> set[str]:
    """Addresses of the API and the gateway."""
    hosts = [
        urlsplit(settings.public_url).hostname or "",
        str(settings.public_address or ""),
        settings.gateway[0],
    ]
    return {address for host in hosts for address in _addresses(host) or ()}


def _listed(rows: list[str]) -> str:
    more = f" and {len(rows) - _NAMED} others" if len(rows) > _NAMED else ""
    return f"{', '.join(rows[:_NAMED])}{more}"


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
