"""Guard of a slice's bridge port: OVS flows for the allowed traffic; all other traffic is dropped.

NAT is no isolation, and libvirt's filters have no effect on OVS ports. The guard therefore limits a
guest to its own addresses and keeps it away from its neighbours. All traffic of a guest goes to the
bridge's own port (the host) or is dropped. Two slices share no path at layer 2. They share no path
through the host at layer 3 either, because the slice subnet and the host's own addresses are
refused as destinations.

The cookie is derived from the allocation id, so listing and removing a slice's flows is exact.
"""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# TCP services of the guest that the host may reach: the operator's hop and telemetry over SSH.
MANAGED_PORTS = (22,)

_NEVER = ("127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")


@dataclass(frozen=True)
class Guard:
    """A guarded port with its own addresses.

    address: the bridge's own address with its prefix length, `10.100.0.1/24`. denied: further
    destinations (networks or addresses) that guests must not reach.
    """

    allocation_id: str
    bridge: str
    mac: str
    ip: str
    address: str
    denied: tuple[str, ...] = ()

    @property
    def port(self) -> str:
        return _object_names.port_name(self.allocation_id)

    @property
    def cookie(self) -> str:
        return _object_names.cookie(self.allocation_id)


@dataclass(frozen=True)
class Flow:
    """A rule as ovs-ofctl prints it; the order of match fields carries no meaning."""

    priority: int
    match: frozenset[str]
    actions: str

    def text(self) -> str:
        return ",".join([f"priority={self.priority}", *sorted(self.match, key=_field_order)]) + (
            f",actions={self.actions}"
        )


def check(guard: Guard) -> Guard:
    """The same guard, or a refusal that names the field."""
    _object_names.check_mac(guard.mac)
    try:
        address, bridge = ipaddress.IPv4Address(guard.ip), ipaddress.IPv4Interface(guard.address)
        for network in guard.denied:
            ipaddress.IPv4Network(network)
    except ValueError as error:
        raise _object_names.invalid("addresses", "IPv4 addresses", str(error)) from error
    if address not in bridge.network or address == bridge.ip:
        raise _object_names.invalid("ip", f"another address of {bridge.network}", guard.ip)
    return guard


def rules(guard: Guard, port: int, host_addresses: Iterable[str]) -> frozenset[Flow]:
    """All flows that guard OpenFlow port number `port`.

    host_addresses: the host's own IPv4 addresses; guests must not reach its services there.
    """
    bridge = ipaddress.IPv4Interface(guard.address)
    gateway, subnet = str(bridge.ip), str(bridge.network)
    source = f"in_port={port},vlan_tci=0x0000/0x1fff,dl_src={guard.mac}"
    from_guest = f"ip,{source},nw_src={guard.ip}"
    to_host = f"{source},nw_src={guard.ip},nw_dst={gateway}"
    dhcp = f"udp,{source},tp_src=68,tp_dst=67"
    refused = {subnet, *_NEVER, *guard.denied, *_outside(host_addresses, bridge.network)}
    return frozenset(
        [
            _flow(310, f"udp,in_port={port},tp_src=67", "drop"),  # no DHCP server in a guest
            _flow(300, f"{dhcp},nw_src=0.0.0.0,nw_dst=255.255.255.255", "LOCAL"),
            _flow(300, f"{dhcp},nw_src={guard.ip},nw_dst=255.255.255.255", "LOCAL"),
            _flow(300, f"arp,{source},arp_sha={guard.mac},arp_spa={guard.ip}", "LOCAL"),
            _flow(290, f"udp,{to_host},tp_dst=67", "LOCAL"),
            _flow(290, f"udp,{to_host},tp_dst=53", "LOCAL"),
            _flow(290, f"tcp,{to_host},tp_dst=53", "LOCAL"),
            _flow(290, f"icmp,{to_host},icmp_type=8", "LOCAL"),
            _flow(290, f"icmp,{to_host},icmp_type=0", "LOCAL"),
            # Answers only: without a first SYN the host's own sockets accept no connection.
            *[
                _flow(290, f"tcp,{to_host},tp_src={number},tcp_flags=+ack", "LOCAL")
                for number in MANAGED_PORTS
            ],
            *[_flow(280, f"ip,in_port={port},nw_dst={network}", "drop") for network in refused],
            _flow(270, from_guest, "LOCAL"),
            _flow(200, f"in_port={port}", "drop"),  # IPv6 and all other traffic
            _flow(190, f"arp,in_port=LOCAL,arp_tpa={guard.ip}", f"output:{port}"),
            _flow(190, f"ip,in_port=LOCAL,dl_dst={guard.mac},nw_dst={guard.ip}", f"output:{port}"),
            _flow(180, f"dl_dst={guard.mac}", "drop"),
        ]
    )


def installed(bridge: str, allocation_id: str) -> frozenset[Flow]:
    """The current flows of this allocation in the switch."""
    out = _ofctl(
        "--no-names",
        "--no-stats",
        "dump-flows",
        bridge,
        f"cookie={_object_names.cookie(allocation_id)}/-1",
    )
    return frozenset(_parse(line) for line in out.splitlines() if "actions=" in line)


def guards(bridge: str) -> Counter[str]:
    """Number of flows by cookie, one cookie for each allocation. The bridge's own flows
    have none.
    """
    out = _ofctl("--no-names", "--no-stats", "dump-flows", bridge)
    cookies = (line.strip().partition(",")[0].removeprefix("cookie=") for line in out.splitlines())
    return Counter(c for c in cookies if re.fullmatch(r"0x[0-9a-f]+", c) and c != "0x0")


def install(guard: Guard, port: int, host_addresses: Iterable[str]) -> int:
    """Replace the port's rules in one transaction; returns their number.

    Port numbers are reused, so rules that another allocation left for this number are deleted too.
    """
    flows = sorted(rules(guard, port, host_addresses), key=Flow.text)
    lines = [
        f"delete in_port={port}",
        f"delete out_port={port}",
        f"delete cookie={guard.cookie}/-1",
        *[f"add cookie={guard.cookie},{flow.text()}" for flow in flows],
    ]
    _ofctl("--bundle", "add-flows", guard.bridge, "-", stdin="\n".join(lines) + "\n")
    return len(flows)


def remove(bridge: str, allocation_id: str) -> None:
    _ofctl("del-flows", bridge, f"cookie={_object_names.cookie(allocation_id)}/-1")


def port_number(port: str) -> int | None:
    """OpenFlow number of a port; 0 before the switch assigns it, None if the port does
    not exist.
    """
    argv = ["ovs-vsctl", "--timeout=10", "--if-exists", "get", "Interface", port, "ofport"]
    text = _command.run(argv).out.strip()
    if not text:
        return None
    return _number(text)


def ports() -> dict[str, int]:
    """OpenFlow number of every port of the switch, on any bridge; 0 before the switch
    assigns it.
    """
    argv = ["ovs-vsctl", "--timeout=10", "--format=json", "--columns=name,ofport"]
    rows = json.loads(_command.run([*argv, "list", "Interface"]).out)["data"]
    return {name: _number(str(number)) for name, number in rows}


def await_port(port: str, *, deadline: float = 30) -> int:
    """Wait until the switch has numbered the port."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        number = port_number(port)
        if number:
            return number
        time.sleep(0.5)
    raise Refusal(
        "port_missing",
        expected=f"the bridge to have port {port} within {deadline:g} s",
        found="no such port, or one without a number",
        remedy="look at `ovs-vsctl show` and the log of ovs-vswitchd; the VM stays paused",
    )


def remove_port(bridge: str, port: str) -> None:
    _command.run(["ovs-vsctl", "--timeout=10", "--if-exists", "del-port", bridge, port])


def host_addresses() -> list[str]:
    """The host's own IPv4 addresses, from the kernel's routing trie."""
    addresses: set[str] = set()
    last = ""
    for line in (_host.read("/proc/net/fib_trie") or "").splitlines():
        text = line.strip()
        if text.startswith(("|-- ", "+-- ")):
            last = text[4:].split("/")[0]
        elif text.startswith("/32 host LOCAL"):
            addresses.add(last)
    return sorted(addresses)


def _number(text: str) -> int:
    return int(text) if text.isdigit() and int(text) < 65280 else 0


def _outside(addresses: Iterable[str], subnet: ipaddress.IPv4Network) -> set[str]:
    never = [subnet, *map(ipaddress.IPv4Network, _NEVER)]
    return {
        address
        for address in addresses
        if not any(ipaddress.IPv4Address(address) in network for network in never)
    }


def _flow(priority: int, match: str, actions: str) -> Flow:
    return Flow(priority, frozenset(match.split(",")), actions)


def _parse(line: str) -> Flow:
    left, _sep, actions = line.strip().partition("actions=")
    tokens = [token.strip() for token in left.replace(" ", ",").split(",") if token.strip()]
    match = {token for token in tokens if "=" not in token}
    priority = 32768
    for key, _sep, value in (token.partition("=") for token in tokens if "=" in token):
        if key == "priority":
            priority = int(value)
        elif key not in ("cookie", "table"):
            match.add(f"{key}={value}")
    return Flow(priority, frozenset(match), actions.strip())


def _field_order(field: str) -> tuple[bool, str]:
    """Sort key: the protocol comes first, because the other fields are only valid under it."""
    return ("=" in field, field)


def _ofctl(*arguments: str, stdin: str | None = None) -> str:
    return _command.run(["ovs-ofctl", *arguments], stdin=stdin, timeout=30).out
