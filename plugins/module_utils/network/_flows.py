"""Guard of a slice's bridge port: OVS flows for the allowed traffic; all other traffic is dropped.

The bridge fails closed (`fail_mode=secure`): without flows it forwards nothing, and no flow uses
NORMAL switching. All traffic of a guest goes to the bridge's own port (the host) or is dropped. Two
slices share no path at layer 2. They share no path through the host at layer 3 either, because the
slice subnet and the host's own addresses are refused as destinations. NAT is no isolation, and
libvirt's filters have no effect on OVS ports.

Tables: 0 divides by input port; 10 takes traffic from a guest; 11 takes a guest's tracked traffic
to the host, 12 that to other machines and 13 its answers to managed ingress; 20 takes traffic from
the host. Each port has a zone of connection tracking with its own number.

The first action of a guest's packet is a meter with the number of its port: a guest sends a limited
number of packets a second. Each kind of refused traffic has a flow of its own, so it is counted
(`_refusals`).

The cookie is derived from the allocation id, so listing and removing a slice's flows is exact. The
bridge's own flows have their own cookie. `_firewall` filters again, in the host's kernel.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _ingress,
    _packet_limit,
    _switch,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network._packet_limit import ofctl

# Connections that a slice may have at once, of all kinds. `_bridge` keeps the kernel's table large
# enough.
CONNECTIONS = 16384

# Marks of connections that the switch keeps: of a guest, and of managed ingress.
_KEPT, _ENTERED = "0x1", "0x2"
_EVERYONE = "ff:ff:ff:ff:ff:ff"
_ZONE_LIMIT = re.compile(r"^zone=([0-9]+),limit=([0-9]+)", re.MULTILINE)
# Fields of a printed flow that change with its traffic.
_STATISTICS = re.compile(r"\b(duration|n_packets|n_bytes|idle_age|hard_age)=[^,\s]+,? ?")

# Parity's probe: a guest without an allocation on a port of its own.
PROBE_ID, PROBE_PORT, PROBE_COOKIE = "probe", "gsparity", "0x1"

CLASSIFY, FROM_GUEST, TRACKED, OUTBOUND, ANSWERS, TO_GUEST = TABLES = (0, 10, 11, 12, 13, 20)


@dataclass(frozen=True)
class Egress:
    """Site's rule for traffic of guests. Networks are IPv4.

    allowed: private networks that guests may reach. denied: public networks that they may not;
    they win over `allowed`. packets_per_second: that each guest may send.
    """

    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    packets_per_second: int = _baseline_files.PACKETS_PER_SECOND


@dataclass(frozen=True)
class Guard:
    """A guarded port with its own addresses.

    address: the bridge's own address with its prefix length, `10.100.0.1/24`.
    """

    allocation_id: str
    bridge: str
    mac: str
    ip: str
    address: str

    @property
    def port(self) -> str:
        if self.allocation_id == PROBE_ID:
            return PROBE_PORT
        return _object_names.port_name(self.allocation_id)

    @property
    def cookie(self) -> str:
        if self.allocation_id == PROBE_ID:
            return PROBE_COOKIE
        return _object_names.cookie(self.allocation_id)


@dataclass(frozen=True)
class Flow:
    """A rule as ovs-ofctl prints it; the order of match fields carries no meaning.

    kind: of the traffic that a dropping rule refuses; the switch does not know it.
    """

    table: int
    priority: int
    match: frozenset[str]
    actions: str
    kind: str = field(default="", compare=False)

    def text(self) -> str:
        match = sorted(self.match, key=_field_order)
        return ",".join([f"table={self.table},priority={self.priority}", *match]) + (
            f",actions={self.actions}"
        )


def check(guard: Guard) -> Guard:
    """The same guard, or a refusal that names the field."""
    _object_names.check_mac(guard.mac)
    try:
        address, bridge = ipaddress.IPv4Address(guard.ip), ipaddress.IPv4Interface(guard.address)
    except ValueError as error:
        raise _object_names.invalid("addresses", "IPv4 addresses", str(error)) from error
    if address not in bridge.network or address == bridge.ip:
        raise _object_names.invalid("ip", f"another address of {bridge.network}", guard.ip)
    return guard


def rules(
    guard: Guard,
    port: int,
    local_addresses: Iterable[str],
    egress: Egress = Egress(),
    ingress: Iterable[_ingress.Rule] = (),
) -> frozenset[Flow]:
    """All flows that guard OpenFlow port number `port`.

    local_addresses: the host's own IPv4 addresses and its networks' broadcast addresses; guests
    must not reach its services there. ingress: the guest's managed ingress, whose clients may be
    in networks that it cannot reach otherwise.
    """
    bridge = ipaddress.IPv4Interface(guard.address)
    gateway, subnet = str(bridge.ip), str(bridge.network)
    source = f"in_port={port},vlan_tci=0x0000/0x1fff,dl_src={guard.mac}"
    from_guest = f"ip,{source},nw_src={guard.ip}"
    dhcp = f"udp,{source},nw_dst=255.255.255.255,tp_src=68,tp_dst=67"
    to_guest = f"in_port=LOCAL,dl_dst={guard.mac}"
    track = f"ct(commit,table={OUTBOUND},zone={port},exec(load:{_KEPT}->NXM_NX_CT_MARK[]))"
    private = _outside((*_baseline_files.PRIVATE, *_baseline_files.NEVER), bridge.network)
    local = _outside(
        local_addresses, bridge.network, *map(ipaddress.IPv4Network, _baseline_files.NEVER)
    )
    return frozenset(
        [
            _flow(CLASSIFY, 100, f"in_port={port}", f"meter:{port},resubmit(,{FROM_GUEST})"),
            # The host would keep fragments of incomplete packets, in memory that guests share.
            _refuse("fragment", 320, f"ip,in_port={port},nw_frag=yes"),
            # A guest must not be a DHCP server.
            _refuse("dhcp_server", 310, f"udp,in_port={port},tp_src=67"),
            _flow(FROM_GUEST, 300, f"{dhcp},nw_src=0.0.0.0", "LOCAL"),
            _flow(FROM_GUEST, 300, f"{dhcp},nw_src={guard.ip}", "LOCAL"),
            _flow(
                FROM_GUEST,
                300,
                f"arp,{source},arp_sha={guard.mac},arp_spa={guard.ip},arp_tpa={gateway}",
                "LOCAL",
            ),
            _flow(
                FROM_GUEST,
                295,
                f"{from_guest},nw_dst={gateway}",
                f"ct(table={TRACKED},zone={port})",
            ),
            *_each(290, from_guest, egress.denied, "drop", "denied_network"),
            *_each(290, from_guest, local - {*egress.denied}, "drop", "host_address"),
            *_each(285, from_guest, egress.allowed, track),
            *_each(280, from_guest, private, "drop", "private_network"),
            *_each(280, from_guest, [subnet], "drop", "neighbour"),
            _flow(FROM_GUEST, 270, from_guest, track),
            _refuse("vlan", 65, f"in_port={port},vlan_tci=0x1000/0x1000"),
            _refuse("arp", 60, f"arp,in_port={port}"),
            _refuse("ipv6", 60, f"ipv6,in_port={port}"),
            _refuse("ip_spoofed", 50, f"ip,in_port={port},dl_src={guard.mac}"),
            _refuse("protocol", 40, f"in_port={port},dl_src={guard.mac}"),
            _refuse("mac_spoofed", 10, f"in_port={port}"),
            _refuse("host_service", 10, f"in_port={port}", table=TRACKED),
            _refuse("connections", 10, f"in_port={port}", table=OUTBOUND),
            _flow(TO_GUEST, 100, f"arp,in_port=LOCAL,arp_tpa={guard.ip}", f"output:{port}"),
            _flow(
                TO_GUEST,
                100,
                f"udp,{to_guest},nw_src={gateway},tp_src=67,tp_dst=68",
                f"output:{port}",
            ),
            # A broadcast answer of DHCP, which `_firewall` has marked with this guest's address.
            _flow(
                TO_GUEST,
                100,
                f"udp,in_port=LOCAL,dl_dst={_EVERYONE},nw_src={guard.ip},nw_dst=255.255.255.255,"
                "tp_src=67,tp_dst=68",
                f"set_field:{gateway}->ip_src,set_field:{guard.mac}->eth_dst,output:{port}",
            ),
            _flow(
                TO_GUEST,
                90,
                f"ip,{to_guest},nw_src={gateway},nw_dst={guard.ip}",
                f"ct(commit,zone={port}),output:{port}",
            ),
            # Answers to connections through NAT; `_firewall` decides which may begin. They are
            # tracked, because a kernel calls TCP invalid that goes on without an answer.
            _flow(
                TO_GUEST,
                80,
                f"ip,{to_guest},nw_dst={guard.ip}",
                f"ct(zone={port}),output:{port}",
            ),
            *_of_ingress(guard, port, ingress, source, to_guest),
        ]
    )


def _of_ingress(
    guard: Guard, port: int, ingress: Iterable[_ingress.Rule], source: str, to_guest: str
) -> Iterator[Flow]:
    """Connections of managed ingress, and the guest's answers in them."""
    enter = f"ct(commit,zone={port},exec(load:{_ENTERED}->NXM_NX_CT_MARK[])),output:{port}"
    for rule in ingress:
        service = f"{rule.protocol},{to_guest},nw_dst={guard.ip},tp_dst={rule.guest_port}"
        answer = f"{rule.protocol},ct_state=-trk,{source},nw_src={guard.ip}"
        answer += f",tp_src={rule.guest_port}"
        for client in map(_name, rule.sources):
            # A match on every address is written without the field.
            sent, to = (f",nw_src={client}", f",nw_dst={client}") if client != _ANY else ("", "")
            yield _flow(TO_GUEST, 85, f"{service}{sent}", enter)
            yield _flow(FROM_GUEST, 287, f"{answer}{to}", f"ct(table={ANSWERS},zone={port})")


def installed(bridge: str, cookie: str) -> frozenset[Flow]:
    """The current flows with this cookie in the switch."""
    return every(bridge, f"cookie={cookie}/-1").get(cookie, frozenset())


def every(bridge: str, match: str = "") -> dict[str, frozenset[Flow]]:
    """All flows of the bridge by cookie; those of the baseline have BASE_COOKIE."""
    flows: dict[str, set[Flow]] = {}
    for cookie, flow, _packets in counted(bridge, match):
        flows.setdefault(cookie, set()).add(flow)
    return {cookie: frozenset(flows_of) for cookie, flows_of in flows.items()}


def counted(bridge: str, match: str = "") -> Iterator[tuple[str, Flow, int]]:
    """Cookie, flow and number of its packets, of all flows of the bridge."""
    for line in ofctl("--no-names", "dump-flows", bridge, *([match] if match else [])).splitlines():
        # Open vSwitch keeps flows of its own in table 254.
        if "actions=" in line and "table=254," not in line:
            cookie = re.match(r"\s*cookie=(0x[0-9a-f]+)", line)
            packets = re.search(r" n_packets=([0-9]+)", line)
            yield (
                cookie[1] if cookie else "0x0",
                _parse(_STATISTICS.sub("", line)),
                int(packets[1]) if packets else 0,
            )


def guards(bridge: str) -> Counter[str]:
    """Number of flows by cookie, one cookie for each allocation."""
    # A flow without a cookie is no slice's; an open bridge has one.
    others = ("0x0", BASE_COOKIE, PROBE_COOKIE)
    return Counter({c: len(flows) for c, flows in every(bridge).items() if c not in others})


@dataclass(frozen=True)
class Load:
    """Flows that replace those with their cookie. stale: other flows that they replace."""

    cookie: str
    flows: frozenset[Flow]
    stale: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        texts = sorted(flow.text() for flow in self.flows)
        deleted = [f"delete {match}" for match in (*self.stale, f"cookie={self.cookie}/-1")]
        return [*deleted, *[f"add cookie={self.cookie},{text}" for text in texts]]


def load_of(
    guard: Guard,
    port: int,
    local_addresses: Iterable[str],
    egress: Egress = Egress(),
    ingress: Iterable[_ingress.Rule] = (),
) -> Load:
    """Set the port's limits; returns its flows for `load`."""
    flows = rules(guard, port, local_addresses, egress, ingress)
    # Both limits come before the flows, so that a run that ends in between leaves the port shut.
    _packet_limit.install(guard.bridge, port, egress.packets_per_second)
    _switch.appctl("dpctl/ct-set-limits", f"zone={port},limit={CONNECTIONS}")
    return of_port(guard, port, flows)


def of_port(guard: Guard, port: int, flows: frozenset[Flow]) -> Load:
    """The port's flows for `load`. Port numbers are reused, so rules that another allocation left
    for this number are deleted too.
    """
    return Load(guard.cookie, flows, (f"in_port={port}", f"out_port={port}"))


def load(bridge: str, *loads: Load) -> None:
    """Replace the flows in one transaction. Open connections keep their state."""
    lines = [line for each in loads for line in each.lines()]
    ofctl("--bundle", "add-flows", bridge, "-", stdin="\n".join(lines) + "\n")
    # The datapath caches decisions for up to half a second; for MPLS they were seen to stay.
    _switch.appctl("revalidator/purge")


def install(
    guard: Guard,
    port: int,
    local_addresses: Iterable[str],
    egress: Egress = Egress(),
    ingress: Iterable[_ingress.Rule] = (),
) -> int:
    """Set the port's limits and replace its rules in one transaction; returns their number."""
    rules_of_port = load_of(guard, port, local_addresses, egress, ingress)
    load(guard.bridge, rules_of_port)
    return len(rules_of_port.flows)


def connection_limits() -> dict[int, int]:
    """Connections that each zone may hold, by number of its port; zones without a limit are left
    out.
    """
    listed = _switch.appctl("dpctl/ct-get-limits")
    return {int(zone): int(limit) for zone, limit in _ZONE_LIMIT.findall(listed)}


def tracks_connections(bridge: str) -> bool:
    """Whether the bridge's datapath has connection tracking with zones."""
    features = _switch.appctl("dpif/show-dp-features", bridge)
    return "CT state: Yes" in features and "CT zone: Yes" in features


def forget_connections(port: int) -> None:
    """Delete the connections in the port's zone, for the next guest with this number."""
    _switch.appctl("dpctl/flush-conntrack", f"zone={port}")


def remove(bridge: str, cookie: str, *, port: int | None = None) -> None:
    """Delete the flows with this cookie, whose port then carries nothing, and the connections and
    the packet limit of that port.

    port: its number, if the caller has loaded the flows with this cookie itself.
    """
    flows = frozenset() if port else installed(bridge, cookie)
    # First, because only the flows tell a run that comes after a killed one which port it was.
    for each in sorted({port} if port else _ports_of(flows)):
        forget_connections(each)
        _packet_limit.remove(bridge, each)
    if int(cookie, 16):
        if port or flows:
            ofctl("del-flows", bridge, f"cookie={cookie}/-1")
        return
    # By table, because Open vSwitch refuses to delete flows of its own, which have the cookie 0.
    tables = sorted({flow.table for flow in flows})
    lines = "".join(f"delete table={table},cookie={cookie}/-1\n" for table in tables)
    if lines:
        ofctl("--bundle", "add-flows", bridge, "-", stdin=lines)


def _ports_of(flows: Iterable[Flow]) -> set[int]:
    """Numbers of the ports that the flows guard."""
    meters = (re.match(r"meter:([0-9]+),resubmit", flow.actions) for flow in flows)
    return {int(meter[1]) for meter in meters if meter}


def port_number(port: str) -> int | None:
    """OpenFlow number of a port; 0 before the switch assigns it, None if the port does
    not exist.
    """
    (rows,) = _switch.rows(("Interface", "ofport", port))
    return number(str(rows[0][0])) if rows else None


def ports() -> dict[str, int]:
    """OpenFlow number of every port of the switch, on any bridge; 0 before the switch
    assigns it.
    """
    (rows,) = _switch.rows(("Interface", "name,ofport", ""))
    return {name: number(str(value)) for name, value in rows}


def await_port(port: str, *, deadline: float = 30) -> int:
    """Wait until the switch has numbered the port."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if assigned := port_number(port):
            return assigned
        time.sleep(0.1)
    raise Refusal(
        "port_missing",
        expected=f"the bridge to have port {port} within {deadline:g} s",
        found="no such port, or one without a number",
        remedy="look at `ovs-vsctl show` and the log of ovs-vswitchd; the VM stays paused",
    )


def remove_port(bridge: str, port: str) -> None:
    _command.run(["ovs-vsctl", "--timeout=10", "--if-exists", "del-port", bridge, port])


def local_addresses() -> list[str]:
    """The host's own IPv4 addresses and its networks' broadcast addresses, from the kernel's
    routing trie.
    """
    addresses: set[str] = set()
    last = ""
    for line in (_host.read("/proc/net/fib_trie") or "").splitlines():
        text = line.strip()
        if text.startswith(("|-- ", "+-- ")):
            last = text[4:].split("/")[0]
        elif text.startswith(("/32 host LOCAL", "/32 link BROADCAST")):
            addresses.add(last)
    return sorted(addresses)


def number(text: str) -> int:
    """OpenFlow number from the switch's database; 0 before it is assigned."""
    return int(text) if text.isdigit() and int(text) < 65280 else 0


def _outside(networks: Iterable[str], *inside: ipaddress.IPv4Network) -> set[str]:
    """The networks (or addresses) that lie in none of the known networks."""
    return {
        network
        for network in networks
        if not any(ipaddress.IPv4Network(network).subnet_of(other) for other in inside)
    }


def _flow(table: int, priority: int, match: str, actions: str) -> Flow:
    return Flow(table, priority, frozenset(match.split(",")) - {""}, actions)


_ANY = "0.0.0.0/0"


def _name(network: str) -> str:
    # The switch prints an address without its length.
    return str(ipaddress.IPv4Network(network)).removesuffix("/32")


def _refuse(kind: str, priority: int, match: str, *, table: int = FROM_GUEST) -> Flow:
    """A rule that drops, and so counts, one kind of traffic."""
    return replace(_flow(table, priority, match, "drop"), kind=kind)


def _each(
    priority: int, match: str, networks: Iterable[str], actions: str, kind: str = ""
) -> list[Flow]:
    names = sorted(set(map(_name, networks)))
    flows = [_flow(FROM_GUEST, priority, f"{match},nw_dst={name}", actions) for name in names]
    return [replace(flow, kind=kind) for flow in flows]


def _parse(line: str) -> Flow:
    left, _sep, actions = line.strip().partition("actions=")
    tokens = [token.strip() for token in left.replace(" ", ",").split(",") if token.strip()]
    match = {token for token in tokens if "=" not in token}
    table, priority = 0, 32768
    for key, _sep, value in (token.partition("=") for token in tokens if "=" in token):
        if key == "priority":
            priority = int(value)
        elif key == "table":
            table = int(value)
        elif key != "cookie":
            match.add(f"{key}={value}")
    return Flow(table, priority, frozenset(match), actions.strip())


def _field_order(field: str) -> tuple[bool, str]:
    """Sort key: the protocol comes first, because the other fields are only valid under it."""
    return ("=" in field, field)


def _new(match: str) -> Flow:
    """A connection that a guest may open to the host."""
    commit = "ct(commit,zone=NXM_NX_CT_ZONE[]),LOCAL"
    return _flow(TRACKED, 90, f"ct_state=+new-inv+trk,{match}", commit)


BASE_COOKIE = "0x2"
# Flows of the bridge itself. Established traffic passes in both directions, because each connection
# was allowed when it began.
BASE = frozenset(
    [
        *[_flow(table, 0, "", "drop") for table in TABLES],
        _flow(CLASSIFY, 100, "in_port=LOCAL", f"resubmit(,{TO_GUEST})"),
        # A connection beyond the slice's limit is not kept, and has no mark.
        _flow(OUTBOUND, 100, f"ct_state=-inv+trk,ct_mark={_KEPT},ip", "LOCAL"),
        _flow(TRACKED, 100, "ct_state=+est-inv+trk,ip", "LOCAL"),
        _flow(TRACKED, 100, "ct_state=+rel-inv+trk,icmp", "LOCAL"),
        _flow(ANSWERS, 100, f"ct_state=+est+rpl-inv+trk,ct_mark={_ENTERED},ip", "LOCAL"),
        # A connection that the guest itself opens from the port of a service.
        _flow(ANSWERS, 10, "", f"resubmit(,{FROM_GUEST})"),
        _new("udp,tp_dst=53"),
        _new("tcp,tp_dst=53"),
        _new("udp,tp_src=68,tp_dst=67"),
        _new("icmp,icmp_type=8"),
    ]
)
# They replace whatever carries their cookie.
BASE_LOAD = Load(BASE_COOKIE, BASE)
