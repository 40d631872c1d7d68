"""Isolation of slices, shown by packets: a real switch, a real firewall, guests with root."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import resource
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _guards,
    _nat,
    _packet_limit,
    _port_filter,
    _refusals,
    _switch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import ATTACKS, Attack
from tests.unit.plugins.module_utils.network.rig import A, B, Rig
from tests.unit.plugins.module_utils.network.traffic import (
    NUMBERS,
    SETTLE_S,
    Places,
    connection,
    filtered,
    refused,
    violations,
)

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]

# Processor time of the file with all its programs, so that it ends in this time on any machine that
# is not busy. It takes a third of it.
BOUND_S = 15


@pytest.fixture(scope="module", autouse=True)
def bounded() -> Iterator[None]:
    """Set up before the rig, and so ended after the switch, whose time counts when it has ended."""
    before = processor_time()
    yield
    assert processor_time() - before < BOUND_S


def processor_time() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


# Kinds of traffic that the filter before the switch refuses.
FILTERED = ("vlan", "arp", "ipv6", "mac_spoofed", "protocol")
Rules = Callable[..., frozenset[_flows.Flow]]


@pytest.mark.covers("P9")
def test_every_frame_is_seen_only_where_it_should_be(rig: Rig) -> None:
    assert violations(rig) == []


def test_each_refused_frame_is_counted_by_its_kind(rig: Rig) -> None:
    rig.guard(A)
    before = refused(rig)
    # Without the others, to whose answers the guest's own kernel replies.
    refusable = tuple(attack for attack in ATTACKS if attack.kind)
    assert violations(rig, refusable) == []
    expected = Counter(attack.kind for attack in refusable)
    # The switch in user space reads a frame before the filter, so both refuse it here.
    expected += Counter({kind: expected[kind] for kind in FILTERED})
    limit = time.monotonic() + 60
    # The switch adds the packets of its datapath to the flows every half second.
    while (counted := refused(rig) - before) != expected and time.monotonic() < limit:
        time.sleep(0.1)
    assert counted == expected


@pytest.mark.covers("P9")
def test_a_filter_before_the_switch_leaves_it_one_address_of_each_guest(rig: Rig) -> None:
    """Shown with a kernel bridge, which takes frames where the switch does and learns addresses."""
    guest = rigs.Guest("rig-a", replace(A.guard, allocation_id=str(uuid.uuid4())))
    port, place = guest.guard.port, rig.place("rig-a")
    rig.run(["ip", "link", "add", "learns", "up", "type", "bridge"])
    rig.run(["ip", "link", "add", port, "type", "veth", "peer", "name", "more", "netns", place])
    rig.run(["ip", "link", "set", port, "up", "master", "learns"])
    rig.run(["ip", "link", "set", "more", "up"], place=place)
    mine = guest.guard.mac
    # A bridge may inspect packets, and drops invalid packets.
    body = frames.udp(guest.guard.ip, rigs.WORLD, 1, 5000, b"")
    packet = frames.ipv4(guest.guard.ip, rigs.WORLD, 17, body)

    def learnt() -> int:
        shown = rig.run(["bridge", "-j", "fdb", "show", "dev", port, "dynamic"]).stdout
        return sum("master" in row for row in json.loads(shown or "[]"))

    def send() -> None:
        with rigs.packet_socket(place, "more") as handle:
            for number in range(300):
                stranger = f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"
                handle.send(frames.ether(stranger, frames.EVERYONE, 0x0800, packet))
                handle.send(frames.ether(mine, frames.EVERYONE, 0x9000 + number, b""))
                handle.send(frames.ether(mine, frames.EVERYONE, 0x0806, b"%d" % number))
            handle.send(frames.ether(mine, frames.EVERYONE, 0x0800, packet))

    try:
        _port_filter.install(guest.guard)
        limit = time.monotonic() + 60
        while "state forwarding" not in rig.run(["bridge", "link", "show", "dev", port]).stdout:
            assert time.monotonic() < limit
        send()
        assert learnt() == 1, "its own"
        counted = filtered(guest)
        assert (counted["mac_spoofed"], counted["protocol"]) == (300, 300)
        assert counted["arp"] + counted["packet_rate"] == 300
        assert counted["packet_rate"] > 0
        _port_filter.remove(port)
        send()
        assert learnt() > 250, "what the switch would keep without it"
        _port_filter.install(guest.guard)
    finally:
        for link in (port, "learns"):
            rig.run(["ip", "link", "delete", link])
    assert rig.restore() == [f"remove_filter {port}"]


def test_a_flood_is_cut_to_the_limit_and_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rate, sent = 100, 500
    monkeypatch.setitem(rigs.NETWORK, "packets_per_second", rate)
    assert rig.restore() == [f"guard_port {A.guard.port}", f"guard_port {B.guard.port}"]
    try:
        assert _packet_limit.installed("ovsbr0")[rig.number(A)] == rate
        with Places(rig) as places:
            frame = frames.datagram(rigs.WORLD)(places.macs[A.place], b"<000000>")
            begin, passed = time.monotonic(), 0
            for number in range(sent):
                places.sockets[A.place].send(frame)
                # The switch in user space loses frames that come faster than it reads.
                time.sleep(0.02 if number % 50 == 0 else 0)
            counted, ends = 0, [time.monotonic() + seconds for seconds in (3, 60)]
            # Some may be lost, but not all.
            while passed + counted < sent and time.monotonic() < ends[not (passed and counted)]:
                passed += places.arrived("world", b"<000000>")
                counted = _packet_limit.dropped("ovsbr0").get(rig.number(A), 0)
                time.sleep(0.02)
            lasted = time.monotonic() - begin
        # The meter lets one second's packets pass at once, and some more, by its own clock.
        assert 0 < passed <= rate * (1.2 + lasted)
        assert refused(rig)[_refusals.RATE] > 0
    finally:
        monkeypatch.undo()
        rig.restore()
    assert _packet_limit.installed("ovsbr0")[rig.number(A)] == 200_000


def test_the_host_reaches_the_guest_and_only_answers_come_back(rig: Rig) -> None:
    with rigs.inside(rig.place(A.place)):
        listener = socket.create_server((A.guard.ip, 22))
    with listener:
        with rigs.inside(rig.host):
            client = socket.create_connection((A.guard.ip, 22), timeout=30)
        server, (peer, _port) = listener.accept()
        server.sendall(b"SSH-2.0-guest\r\n")
        assert client.recv(100) == b"SSH-2.0-guest\r\n"
        assert peer == rigs.GATEWAY
        server.close()
        client.close()


def test_rules_are_replaced_under_an_open_connection(rig: Rig) -> None:
    client, server = connection(rig, "world", rigs.WORLD, 7000)
    received: list[bytes] = []

    def read() -> None:
        while data := server.recv(65536):
            received.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with client:
        for number in range(8):
            client.sendall(b"%04d" % number)
            rig.guard(A)
    reader.join(60)
    server.close()
    assert b"".join(received) == b"".join(b"%04d" % number for number in range(8))


def test_a_guest_without_its_guard_is_cut_off(rig: Rig) -> None:
    client, server = connection(rig, "world", rigs.WORLD, 7001)
    with client, server:
        server.settimeout(0.3)
        _flows.remove("ovsbr0", A.guard.cookie)
        try:
            client.sendall(b"still there?")
            with pytest.raises(TimeoutError):
                server.recv(100)
        finally:
            restored = rig.restore()
        assert restored == [f"guard_port {A.guard.port}"]
        server.settimeout(30)
        assert server.recv(100) == b"still there?", "the guest sends it again"


def test_random_hardware_addresses_reach_nobody(rig: Rig) -> None:
    flood = tuple(
        Attack(
            "flood", frames.datagram(rigs.WORLD, hardware=f"02:00:00:00:{n >> 8:02x}:{n & 255:02x}")
        )
        for n in range(2000)
    )
    before = filtered()
    assert violations(rig, flood) == []
    assert filtered()["mac_spoofed"] - before["mac_spoofed"] == len(flood)
    before = filtered()
    assert violations(rig, tuple(attack for attack in ATTACKS if attack.seen)) == []
    assert filtered() == before, "nothing that is allowed is filtered"


# Connections of a guest are counted in its own zone of the switch.
def test_a_guest_cannot_fill_the_connection_table(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_flows, "CONNECTIONS", 50)
    rig.guard(A)
    try:
        flood = tuple(
            Attack("connect", frames.datagram(rigs.WORLD, sport=10000 + n)) for n in range(200)
        )
        passed = len(violations(rig, flood))
        shown = rig.run(["ovs-appctl", "dpctl/ct-get-limits"]).stdout
        assert "limit=50" in shown
        assert 0 < passed <= 50
    finally:
        monkeypatch.undo()
        _flows.forget_connections(rig.number(A))
        rig.guard(A)


# A mutant of the rules must be seen by the table of attacks.
def _without(field: str, *, table: int = _flows.FROM_GUEST) -> Rules:
    def change(flow: _flows.Flow) -> _flows.Flow:
        passes = flow.table == table and flow.actions != "drop"
        match = frozenset(m for m in flow.match if not (passes and m.split("=")[0] == field))
        return _flows.Flow(flow.table, flow.priority, match, flow.actions)

    return lambda flows: frozenset(map(change, flows))


def _drop(unwanted: Callable[[_flows.Flow], bool]) -> Rules:
    return lambda flows: frozenset(flow for flow in flows if not unwanted(flow))


def _acts(actions: str, chosen: Callable[[_flows.Flow], bool]) -> Rules:
    return lambda flows: frozenset(
        _flows.Flow(f.table, f.priority, f.match, actions) if chosen(f) else f for f in flows
    )


MUTANTS: dict[str, Rules] = {
    "any source address": _without("nw_src"),
    "any source MAC": _without("dl_src"),
    "any ARP address": _without("arp_spa"),
    "any ARP hardware": _without("arp_sha"),
    "any ARP target": _without("arp_tpa"),
    "tags pass": _without("vlan_tci"),
    "fragments pass": _drop(lambda flow: flow.kind == "fragment"),
    "a guest may serve DHCP": _drop(lambda flow: flow.priority == 310),
    "the rest is switched": _acts(
        "NORMAL", lambda flow: (flow.table, flow.priority) == (_flows.FROM_GUEST, 10)
    ),
    "guests send to guests": _acts(
        f"resubmit(,{_flows.TO_GUEST})", lambda flow: flow.table == _flows.CLASSIFY
    ),
    "the gateway is open": _acts("LOCAL", lambda flow: flow.priority == 295),
    "the host is open": _drop(lambda flow: flow.priority == 290),
    "private space is open": _drop(lambda flow: flow.priority == 280),
    "no way out": _drop(lambda flow: flow.priority == 270),
    "no allowed network": _drop(lambda flow: flow.priority == 285),
    "no name server": _drop(lambda flow: flow.priority == 295),
    "no DHCP": _drop(lambda flow: flow.priority == 300),
}


@pytest.mark.covers("P9")
def test_every_mutant_of_the_guard_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, mutants, unnoticed = _flows.rules, list(MUTANTS), []
    number, local = rig.number(A), _flows.local_addresses()
    egress = _guards.egress_of(rigs.NETWORK, A.guard)
    right = _flows.load_of(A.guard, number, local, egress)
    monkeypatch.setattr(_flows, "rules", lambda *words: MUTANTS[mutants[-1]](real(*words)))
    try:
        with Places(rig) as places:
            while mutants:
                # Without the limits, which are the same for all.
                mutant = _flows.rules(A.guard, number, local, egress)
                _flows.load("ovsbr0", replace(right, flows=mutant))
                if not places.violations(limit_s=0.1):
                    unnoticed.append(mutants[-1])
                mutants.pop()
    finally:
        monkeypatch.undo()
        rig.guard(A)
    assert unnoticed == []


# Services of the host by protocol and port, 0 for the protocols without ports: GRE and ESP.
SERVICES = (
    *((socket.IPPROTO_TCP, port) for port in (22, 600, 9100, 32767)),
    *((socket.IPPROTO_UDP, port) for port in (68, 4789)),
    *((protocol, 0) for protocol in (socket.IPPROTO_GRE, socket.IPPROTO_ESP)),
)
_KINDS = {socket.IPPROTO_TCP: socket.SOCK_STREAM, socket.IPPROTO_UDP: socket.SOCK_DGRAM}


@pytest.mark.covers("P9")
def test_a_guest_cannot_take_the_hosts_clients_away(rig: Rig) -> None:
    """A client could be a controller behind a firewall that drops unrequested packets."""
    world, send = rig.place("world"), frames.Sender(A)
    silent = "table ip silent {\nchain input {\ntype filter hook input priority 0; policy accept;\n"
    silent += "tcp flags & (syn | ack) == syn drop\nudp dport 20000-20099 drop\n}\n}\n"
    rig.run(["nft", "-f", "-"], place=world, input=silent)
    clients = dict(zip(SERVICES, range(20000, 20099), strict=False))
    tokens = {service: b"<%06d>" % next(NUMBERS) for service in SERVICES}
    try:
        with Places(rig) as places:
            for (protocol, port), client in clients.items():
                build = send.packet(rigs.WORLD, protocol, bytes(8))
                if protocol == socket.IPPROTO_TCP:
                    build = send.segment(rigs.WORLD, port, client, 0x02)
                elif protocol == socket.IPPROTO_UDP:
                    build = send.datagram(rigs.WORLD, sport=port, dport=client)
                frame = build(places.macs[A.place], tokens[protocol, port])
                places.sockets[A.place].send(frame)
            expected = {
                token: frozenset({"host", "world"} if port else {"host"})
                for (_protocol, port), token in tokens.items()
            }
            seen = places.seen(expected)
        lost = [each for each, client in clients.items() if not serves(rig, *each, client)]
        assert lost == []
        assert {token: seen.get(token, set()) for token in expected} == expected, "it did leave"
    finally:
        rig.run(["nft", "delete", "table", "ip", "silent"], place=world)


def serves(rig: Rig, protocol: int, port: int, client_port: int, limit_s: float = 10) -> bool:
    """Whether a service of the host hears a client of the public network."""
    kind = _KINDS.get(protocol, socket.SOCK_RAW)
    with rigs.inside(rig.host):
        service = socket.socket(socket.AF_INET, kind, protocol)
    with rigs.inside(rig.place("world")):
        client = socket.socket(socket.AF_INET, kind, protocol)
    with service, client:
        service.bind((rigs.UPLINK, port))
        client.bind((rigs.WORLD, client_port if port else 0))
        for end in (service, client):
            end.settimeout(limit_s)
        if kind == socket.SOCK_STREAM:
            service.listen()
            return client.connect_ex((rigs.UPLINK, port)) == 0
        client.sendto(b"heard?".rjust(14, b"\0"), (rigs.UPLINK, port))
        with contextlib.suppress(TimeoutError):
            return service.recv(100).endswith(b"heard?")
    return False


@pytest.mark.covers("P9")
def test_the_host_connects_from_a_port_that_a_guest_has(rig: Rig) -> None:
    client, server = connection(rig, "world", rigs.WORLD, 7100, sport=40000)
    with rigs.inside(rig.place("world")):
        listener = socket.create_server((rigs.WORLD, 7100))
    with rigs.inside(rig.host):
        host_socket = socket.create_connection(
            (rigs.WORLD, 7100), timeout=30, source_address=(rigs.UPLINK, 40000)
        )
    with client, server, listener, host_socket:
        accepted, (_address, port) = listener.accept()
        with accepted:
            assert server.getpeername()[1] == 40000 != port
            for sender, receiver in ((client, server), (host_socket, accepted)):
                sender.sendall(b"mine")
                assert receiver.recv(100) == b"mine"


def test_a_reserved_port_stays_reserved_toward_an_allowed_network(rig: Rig) -> None:
    """A server of NFS refuses clients with other ports."""
    for place, address, sport, ports in (
        ("mgmt", rigs.STORAGE, 600, _nat.RESERVED),
        ("world", rigs.WORLD, 601, _nat.PORTS),
    ):
        client, server = connection(rig, place, address, 2049, sport=sport)
        with client, server:
            assert ports[0] <= server.getpeername()[1] <= ports[1]


# Kinds that the firewall refuses too, if the guard lets them pass.
SECOND = ("host_address", "host_service", "private_network", "denied_network", "neighbour")
OPEN = _acts("LOCAL", lambda f: f.table in (_flows.FROM_GUEST, _flows.TRACKED, _flows.OUTBOUND))


@pytest.mark.covers("P9")
def test_behind_an_open_guard_the_firewall_holds_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames come to the host's bridge then, and to none of its services and networks."""
    real = _flows.rules
    attacks = tuple(
        replace(attack, seen=frozenset({"host"})) if attack.kind in SECOND else attack
        for attack in ATTACKS
        if attack.kind in SECOND or attack.seen
    )
    try:
        monkeypatch.setattr(_flows, "rules", lambda *words: OPEN(real(*words)))
        rig.guard(A)
        assert violations(rig, attacks) == []
    finally:
        monkeypatch.undo()
        rig.guard(A)


def test_a_mutant_that_keeps_the_host_from_its_guest_is_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness and the gateway need connections to guests, which the table of attacks lacks."""
    real, mutant = _flows.rules, _drop(lambda f: (f.table, f.priority) == (_flows.TO_GUEST, 90))
    monkeypatch.setattr(_flows, "rules", lambda *words: mutant(real(*words)))
    try:
        rig.guard(A)
        with pytest.raises(TimeoutError), rigs.inside(rig.host):
            socket.create_connection((A.guard.ip, 22), timeout=0.3)
    finally:
        monkeypatch.undo()
        rig.guard(A)


def test_without_the_firewall_outsiders_reach_guests(rig: Rig) -> None:
    """The attack from outside is held by the firewall alone, so the test can fail."""
    rig.run(["nft", "delete", "table", "inet", "gpuaas_slice"])
    try:
        assert any("from the uplink" in text for text in violations(rig))
    finally:
        rig.restore()
    assert violations(rig) == []


@pytest.mark.covers("P9")
def test_nothing_passes_during_and_after_a_crash_of_the_switch(rig: Rig) -> None:
    silent = tuple(Attack(each.name, each.build, place=each.place) for each in ATTACKS)
    rig.kill_switch()
    assert violations(rig, silent) == []
    rig.start_switch()
    # The switch is back without flows, and fails closed. Its bridge is another device.
    rig.run(["ip", "link", "set", "ovsbr0", "up"])
    with Places(rig) as places:
        assert places.violations(silent) == []
        assert rig.restore() == ["guard_bridge ovsbr0 flows"]
        rig.establish()
        assert places.violations() == []


def test_packets_to_many_places_are_few_flows_of_the_switch(rig: Rig) -> None:
    """Each flow is made by the switch's single daemon, for which all guests wait."""
    _switch.appctl("revalidator/purge")
    with Places(rig) as places:
        for number in range(1000):
            target = f"{20 + number % 150}.{number % 251}.{number % 241}.{number % 239}"
            ports = {"sport": 1024 + number * 37, "dport": 1024 + number * 41}
            frame = frames.datagram(target, **ports)(places.macs[A.place], b"<000000>")
            places.sockets[A.place].send(frame)
            # The switch in user space loses frames that come faster than it reads.
            time.sleep(0.01 if number % 50 == 0 else 0)
        time.sleep(SETTLE_S)
    assert 0 < _switch.appctl("dpctl/dump-flows").count("recirc_id") < 300
    _flows.forget_connections(rig.number(A))


def test_a_port_without_a_guard_carries_nothing(rig: Rig) -> None:
    _guards.forget(B.guard.allocation_id)
    try:
        assert rig.restore()[0] == f"remove_flows flows {B.guard.cookie}"
        mine = Attack("send", lambda gateway, token: frames.ether(
            B.guard.mac, gateway, 0x0800,
            frames.ipv4(B.guard.ip, rigs.WORLD, 17,
                        frames.udp(B.guard.ip, rigs.WORLD, 1, 5000, token))))  # fmt: skip
        with Places(rig) as places:
            places.sockets[B.place].send(mine.build(places.macs[A.place], b"<123456>"))
            assert places.seen() == {}
    finally:
        rig.admit(B)


def within(networks: Iterable[str], address: ipaddress.IPv4Address) -> bool:
    return any(address in ipaddress.IPv4Network(network) for network in networks)


def may_pass(source: str, kind: str, sender: str, target: str, ports: tuple[int, int]) -> bool:
    """Whether a guest's new frame may come to the host, by the registry of special addresses."""
    address, genuine = ipaddress.IPv4Address(target), sender == A.guard.ip
    if source != A.guard.mac or kind == "ipv6":
        return False
    if kind == "arp":
        return genuine and target == rigs.GATEWAY
    if kind == "udp" and ports == (68, 67) and target == "255.255.255.255":
        return genuine or sender == "0.0.0.0"
    if target == rigs.GATEWAY:
        service = (kind in ("tcp", "udp") and ports[1] == 53) or (kind, *ports) == ("udp", 68, 67)
    else:
        private = not address.is_global or address.is_multicast or within(["192.0.0.0/24"], address)
        allowed = within(rigs.NETWORK["allowed_networks"], address) or not private
        service = allowed and not within((*HOSTS, *rigs.NETWORK["denied_networks"]), address)
    return genuine and service and (kind, ports[0]) != ("udp", 67)


# Addresses and broadcast addresses of the rig's host.
HOSTS = (rigs.UPLINK, rigs.MANAGEMENT, "11.0.0.255", "10.20.0.255")
# Networks whose first and last addresses are tried, with those beside them.
NETWORKS = (
    *(*_baseline_files.PRIVATE, *_baseline_files.NEVER, *rigs.NETWORK["allowed_networks"]),
    *(*rigs.NETWORK["denied_networks"], rigs.NETWORK["subnet"]),
)


def edges(network: str) -> list[str]:
    subnet = ipaddress.IPv4Network(network)
    first, last = int(subnet.network_address), int(subnet.broadcast_address)
    numbers = (max(first - 1, 0), first, last, min(last + 1, 2**32 - 1))
    return [str(ipaddress.IPv4Address(number)) for number in numbers]


def goes_where_it_may(
    rig: Rig, source: str, to: str, protocol: str, sender: str, target: str, ports: tuple[int, int]
) -> None:
    """By the switch's own tracer, exactly the permitted frames reach the host, and none a guest."""
    fields = [f"in_port={rig.number(A)}", f"dl_src={source}", f"dl_dst={to}", protocol]
    if protocol == "arp":
        fields += [f"arp_spa={sender}", f"arp_tpa={target}", f"arp_sha={source}"]
    elif protocol != "ipv6":
        fields += [f"nw_src={sender}", f"nw_dst={target}"]
    if protocol in ("tcp", "udp"):
        fields += [f"{protocol}_src={ports[0]}", f"{protocol}_dst={ports[1]}"]
    shown = _switch.appctl("ofproto/trace", "--names", "ovsbr0", ",".join(fields))
    acts = re.findall(r"Datapath actions: (.*)", shown)
    assert acts
    for text in acts:
        assert A.guard.port not in text and B.guard.port not in text, shown
    reached = any("ovsbr0" in text for text in acts)
    assert reached == may_pass(source, protocol, sender, target, ports), shown


HOSTS_MAC = "02:00:00:00:00:fe"


@pytest.mark.covers("P9")
def test_every_special_network_is_refused_to_its_edges(rig: Rig) -> None:
    for target in {edge for network in NETWORKS for edge in edges(network)}:
        goes_where_it_may(rig, A.guard.mac, HOSTS_MAC, "tcp", A.guard.ip, target, (4000, 443))


@pytest.mark.covers("P9")
@settings(max_examples=150)
@given(
    source=st.sampled_from([*[A.guard.mac] * 4, B.guard.mac, "02:00:00:00:00:01"]),
    to=st.sampled_from([HOSTS_MAC, B.guard.mac, frames.EVERYONE, "01:00:5e:00:00:fb"]),
    sender=st.one_of(
        st.sampled_from([*[A.guard.ip] * 4, "0.0.0.0", B.guard.ip]), st.ip_addresses(v=4).map(str)
    ),
    target=st.one_of(
        st.ip_addresses(v=4).map(str),
        st.sampled_from([B.guard.ip, rigs.GATEWAY, rigs.WORLD, "255.255.255.255", *HOSTS]),
    ),
    protocol=st.sampled_from(["tcp", "udp", "icmp", "arp", "ip,nw_proto=47", "ipv6"]),
    ports=st.tuples(
        st.one_of(st.integers(0, 65535), st.sampled_from([67, 68])),
        st.sampled_from([22, 53, 67, 68, 443]),
    ),
)
def test_any_frame_of_a_guest_goes_to_the_host_or_nowhere(
    rig: Rig, source: str, to: str, protocol: str, sender: str, target: str, ports: tuple[int, int]
) -> None:
    goes_where_it_may(rig, source, to, protocol, sender, target, ports)
