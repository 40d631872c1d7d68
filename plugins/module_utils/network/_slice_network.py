"""State of the slice network, with every reason why guests would have no network.

A false success is the worst failure here: for example, a missing NAT rule while all services are
active. The checks therefore read the state that carries traffic, never the state of a service.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import (
    Blocker,
    Refusal,
    blocker,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files, _iptables

NEIGHBOURS = _baseline_files.NEIGHBOURS
# The link of the fabric's card to this host, and the card's end.
TMFIFO, TMFIFO_ADDRESS, TMFIFO_PEER = "tmfifo_net0", "192.168.100.1/30", "192.168.100.2"
_DATABASE = "/run/openvswitch/db.sock"

STALE_RESERVATIONS = "gpuaas-gpuaas-slice-*.conf"
_TRANSLATIONS = {"MASQUERADE", "SNAT"}
# Rule options that do not restrict which traffic of the subnet is translated.
_LOCAL_ONLY = re.compile(r" ! -[od] \S+")
_HARMLESS = {"-m", "--comment", "--random", "--random-fully", "--to-source"}


@dataclass(frozen=True)
class Interface:
    """A network interface: whether it is up, and its addresses as `a.b.c.d/n`."""

    up: bool
    addresses: tuple[str, ...]


def interfaces() -> dict[str, Interface]:
    """Every interface by name, IPv4 and IPv6 addresses together."""
    listed = json.loads(_command.run(["ip", "-j", "address", "show"]).out or "[]")
    return {
        str(entry["ifname"]): Interface(
            up="UP" in entry.get("flags", []),
            addresses=tuple(
                f"{info['local']}/{info['prefixlen']}"
                for info in entry.get("addr_info", [])
                if "local" in info
            ),
        )
        for entry in listed
        if "ifname" in entry
    }


def switch_runs() -> bool:
    """Whether Open vSwitch answers."""
    return _host.path(_DATABASE).exists()


def bridges() -> list[str]:
    """Names of the bridges of Open vSwitch; none while it does not run."""
    if not switch_runs():
        return []
    return _command.run(["ovs-vsctl", "--timeout=20", "list-br"]).out.split()


def ports(bridge: str) -> list[str]:
    """Names of the ports of a bridge of Open vSwitch, without its own."""
    return _command.run(["ovs-vsctl", "--timeout=20", "list-ports", bridge]).out.split()


def translates(rule: str, subnet: str) -> bool:
    """Whether `rule` translates all outgoing traffic of `subnet`."""
    # `! -o bridge` and `! -d subnet` only exempt traffic that stays inside.
    words = shlex.split(_LOCAL_ONLY.sub("", rule))
    options = dict(itertools.pairwise(words))
    if options.get("-j") not in _TRANSLATIONS or "!" in words:
        return False
    try:
        source = ipaddress.ip_network(options.get("-s", ""))
    except ValueError:
        return False
    used = {word for word in words if word.startswith("-")} - {"-A", "-s", "-j"}
    return source == ipaddress.ip_network(subnet) and used <= _HARMLESS


def forwarding() -> bool:
    return _host.read("/proc/sys/net/ipv4/ip_forward") == "1"


def neighbours() -> dict[str, int]:
    """Sizes of the kernel's table of neighbours by key; {} where they cannot be set."""
    files = {key: _host.path(f"/proc/sys/{key.replace('.', '/')}") for key in NEIGHBOURS}
    # In a container the table is its host's.
    return {key: int(file.read_text()) for key, file in files.items() if os.access(file, os.W_OK)}


def small_neighbours(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes that must grow, with their new value. A site's larger ones stay."""
    return {key: NEIGHBOURS[key] for key, size in sizes.items() if size < NEIGHBOURS[key]}


def stale_reservations() -> list[str]:
    """Per-slice files of older releases: a duplicate in them stops dnsmasq for all guests."""
    return _host.matching("/etc/dnsmasq.d", STALE_RESERVATIONS)


def dnsmasq_pid() -> int:
    """The process of the system's dnsmasq (not libvirt's own); 0 when it does not run."""
    pid = _host.read("/run/dnsmasq/dnsmasq.pid") or ""
    alive = pid.isdigit() and _host.read(f"/proc/{pid}/comm") == "dnsmasq"
    return int(pid) if alive else 0


def ways(destination: str) -> list[tuple[str, ...]]:
    """Interfaces of each IPv4 route to exactly this network; several for a multipath route.

    Not from /proc/net/route, which shows only the first hop of a multipath route.
    """
    shown = _command.run(["ip", "-j", "-4", "route", "show", "table", "main"]).out
    rows = [row for row in json.loads(shown or "[]") if _network(row["dst"]) == destination]
    hops = [row.get("nexthops", [row]) for row in rows]
    return [by for path in hops if (by := tuple(hop["dev"] for hop in path if "dev" in hop))]


def gateway() -> str:
    """The default gateway, or ""."""
    for row in (_host.read("/proc/net/route") or "").splitlines()[1:]:
        words = row.split()
        # Flag 2 is RTF_GATEWAY.
        if len(words) > 7 and words[1] == words[7] == "00000000" and int(words[3], 16) & 2:
            return _dotted(words[2])
    return ""


def observe(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The `slice_network` part of the discovery document."""
    network, fabric = profile["network"], profile["fabric"]
    route, interface = str(fabric.get("route") or ""), str(fabric.get("interface") or "")
    by_name = interfaces()
    bridge = by_name.get(network["bridge"])
    rules = _rules_if_any()
    led = ways(route) if route else []
    state: dict[str, Any] = {
        "bridge": {
            "name": network["bridge"],
            "present": bridge is not None,
            "up": bool(bridge and bridge.up),
            "addresses": list(bridge.addresses) if bridge else [],
        },
        "nat": {
            "present": any(translates(rule, network["subnet"]) for rule in rules),
            "rules": rules,
        },
        "forwarding": forwarding(),
        "dnsmasq": {"running": bool(dnsmasq_pid()), "stale": stale_reservations()},
        "fabric_route": {
            # A missing site setting must not look like hardware without a fabric.
            "required": "fabric_route" not in profile.get("not_applicable", ()),
            "present": any(not interface or {*way} == {interface} for way in led),
            "route": route,
        },
        "tmfifo": {
            "required": bool(network.get("tmfifo")),
            "present": TMFIFO in by_name,
            "addresses": list(by_name[TMFIFO].addresses) if TMFIFO in by_name else [],
        },
    }
    state["blockers"] = _blockers(state, network)
    return state


def _blockers(state: Mapping[str, Any], network: Mapping[str, Any]) -> list[Blocker]:
    bridge, blockers = state["bridge"], []
    if not bridge["up"] or network["address"] not in bridge["addresses"]:
        shown = f"{bridge['name']}: present={bridge['present']} up={bridge['up']}"
        detail = f"{shown} addresses={','.join(bridge['addresses'])}"
        blockers.append(blocker("missing_ovsbr0", detail))
    if not state["nat"]["present"]:
        blockers.append(blocker("missing_nat", f"no rule translates {network['subnet']}"))
    if not state["forwarding"]:
        blockers.append(blocker("missing_forwarding", "net.ipv4.ip_forward is not 1"))
    if not state["dnsmasq"]["running"]:
        blockers.append(blocker("missing_dnsmasq", "dnsmasq does not run"))
    if state["dnsmasq"]["stale"]:
        blockers.append(blocker("stale_reservations", ", ".join(state["dnsmasq"]["stale"])))
    route = state["fabric_route"]
    if route["required"] and not route["present"]:
        shown = f"no route to {route['route']}" if route["route"] else "the profile names none"
        blockers.append(blocker("missing_fabric_route", shown))
    return blockers


def _rules_if_any() -> Sequence[str]:
    """Before bootstrap iptables may be missing; that counts as no rule, which is a blocker."""
    try:
        return _iptables.listed("POSTROUTING", "nat")
    except Refusal:
        return []


def _network(shown: str) -> str:
    """A network in iproute2's form, which omits the prefix length of a single address."""
    return str(ipaddress.ip_network("0.0.0.0/0" if shown == "default" else shown))


def _dotted(little_endian: str) -> str:
    return str(ipaddress.IPv4Address(bytes.fromhex(little_endian)[::-1]))
