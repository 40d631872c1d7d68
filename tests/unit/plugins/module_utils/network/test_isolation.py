"""Isolation of slices, shown by packets: a real switch, a real firewall, guests with root."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import re
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _bridge,
    _firewall,
    _flows,
    _guards,
    _nat,
    _packet_limit,
    _port_filter,
    _refusals,
    _start_hook,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import ATTACKS, Attack
from tests.unit.plugins.module_utils.network.rig import A, B, Rig

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]

SETTLE_S = 0.05
# Kinds of traffic that the filter before the switch refuses.
FILTERED = ("vlan", "arp", "ipv6", "mac_spoofed", "protocol")
NUMBERS = itertools.count()
Rules = Callable[..., frozenset[_flows.Flow]]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rigs.standing() as (machines, _patch):
        yield machines


class Places:
    """Raw sockets at every place that could see a frame. seen: names of places by token."""

    def __init__(self, rig: Rig) -> None:
        inside = {
            A.place: (rig.place(A.place), "eth0"),
            B.place: (rig.place(B.place), "eth0"),
            "host": (rig.host, "ovsbr0"),
            "world": (rig.place("world"), "eth0"),
            "mgmt": (rig.place("mgmt"), "eth0"),
        }
        self.sockets = {name: rigs.packet_socket(*place) for name, place in inside.items()}
        self.macs = {
            place: rigs.hardware_address(rig.host, interface)
            for place, interface in (
                (A.place, "ovsbr0"),
                (B.place, "ovsbr0"),
                ("world", "up0"),
                ("mgmt", "mgmt0"),
            )
        }
        with rigs.inside(rig.host):
            self.service = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.service.bind(("0.0.0.0", frames.PORT))
        self.service.setblocking(False)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in (*self.sockets.values(), self.service):
            handle.close()

    def send(self, attack: Attack, token: bytes) -> None:
        self.sockets[attack.place].send(attack.build(self.macs[attack.place], token))

    def seen(
        self, expected: dict[bytes, frozenset[str]] | None = None, limit_s: float = 10
    ) -> dict[bytes, set[str]]:
        """Places by token, of all frames since the last call.

        Waits until every expected frame was seen, or nothing new for limit_s, and some time longer
        for the others.
        """
        tokens: dict[bytes, set[str]] = {}
        deadline = time.monotonic() + limit_s
        while any(places - tokens.get(t, set()) for t, places in (expected or {}).items()):
            if self._take(tokens):
                deadline = time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                break
            time.sleep(0.005)
        time.sleep(SETTLE_S)
        self._take(tokens)
        return tokens

    def arrived(self, name: str, token: bytes) -> int:
        """Number of frames with the token that a place has received since the last call."""
        number = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                number += token in self.sockets[name].recv(4096)
        return number

    def _take(self, tokens: dict[bytes, set[str]]) -> bool:
        """Read what has arrived; whether anything has."""
        before = sum(map(len, tokens.values()))
        for name, handle in (*self.sockets.items(), ("service", self.service)):
            while True:
                try:
                    data, sender = handle.recvfrom(4096)
                except BlockingIOError:
                    break
                if name != "service" and sender[2] == socket.PACKET_OUTGOING:
                    continue
                for token in re.findall(rb"<[0-9]{6}>", data):
                    tokens.setdefault(token, set()).add(name)
        return sum(map(len, tokens.values())) > before


def violations(rig: Rig, attacks: tuple[Attack, ...] = ATTACKS, limit_s: float = 10) -> list[str]:
    """Every frame that was seen elsewhere than it should be, or not where it should."""
    with Places(rig) as places:
        tokens = {}
        for attack in attacks:
            token = b"<%06d>" % next(NUMBERS)
            tokens[token] = attack
            places.send(attack, token)
        expected = {token: attack.seen for token, attack in tokens.items()}
        seen = places.seen(expected, limit_s)
    return [
        f"{attack.name}: {sorted(seen.get(token, set()))}, expected {sorted(attack.seen)}"
        for token, attack in tokens.items()
        if seen.get(token, set()) - {attack.place} != attack.seen
    ]


@pytest.mark.covers("P9")
def test_every_frame_is_seen_only_where_it_should_be(rig: Rig) -> None:
    assert violations(rig) == []


def refused(rig: Rig, guest: rigs.Guest = A) -> Counter[str]:
    """A guest's counters by kind, as the host reports them."""
    rows = {row["allocation_id"]: row["refused"] for row in _refusals.rows(rigs.NETWORK)}
    assert set(rows) == {A.guard.allocation_id, B.guard.allocation_id}
    return Counter(rows[guest.guard.allocation_id])


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


def filtered(guest: rigs.Guest = A) -> dict[str, int]:
    """Frames of a guest that the filter before the switch refused, by kind."""
    return _port_filter.installed()[guest.guard.port][1]


@pytest.mark.covers("P9")
def test_a_filter_before_the_switch_leaves_it_one_address_of_each_guest(rig: Rig) -> None:
    """A bridge of the kernel takes frames where the switch's kernel part does, and learns."""
    guest = rigs.Guest("rig-a", replace(A.guard, allocation_id=str(uuid.uuid4())))
    port, place = guest.guard.port, rig.place("rig-a")
    rig.run(["ip", "link", "add", "learns", "up", "type", "bridge"])
    rig.run(["ip", "link", "add", port, "type", "veth", "peer", "name", "more", "netns", place])
    rig.run(["ip", "link", "set", port, "up", "master", "learns"])
    rig.run(["ip", "link", "set", "more", "up"], place=place)
    mine = guest.guard.mac
    # A bridge may look into packets, and drops those that are none.
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
                counted = refused(rig)[_refusals.RATE]
            lasted = time.monotonic() - begin
        assert 0 < passed <= rate * (1 + lasted)
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


def connection(
    rig: Rig, place: str, address: str, port: int, *, sport: int = 0
) -> tuple[socket.socket, socket.socket]:
    """A TCP connection from a guest to a server in another place: both ends."""
    with rigs.inside(rig.place(place)):
        listener = socket.create_server((address, port))
    with listener:
        with rigs.inside(rig.place(A.place)):
            client = socket.create_connection(
                (address, port), timeout=30, source_address=(A.guard.ip, sport)
            )
        server, _peer = listener.accept()
    return client, server


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


def test_an_address_that_comes_later_is_refused_too(rig: Rig) -> None:
    rig.run(["ip", "address", "add", "12.0.0.1/24", "dev", "up0"])
    late = Attack("reach a late address", frames.datagram("12.0.0.1"), frozenset({"host"}))
    broadcast = Attack("its broadcast", frames.datagram("12.0.0.255"), frozenset({"host"}))
    try:
        assert violations(rig, (late, broadcast)) == [], "the firewall knows it before the switch"
        assert rig.restore() == [f"guard_port {A.guard.port}", f"guard_port {B.guard.port}"]
        seen_by_nobody = tuple(Attack(each.name, each.build) for each in (late, broadcast))
        assert violations(rig, seen_by_nobody) == []
    finally:
        rig.run(["ip", "address", "del", "12.0.0.1/24", "dev", "up0"])
        rig.restore()


def test_a_host_that_lost_the_way_out_gets_it_back(rig: Rig) -> None:
    rig.run(["iptables", "-t", "nat", "-F"])
    rig.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=0"])
    rig.run(["ip", "address", "flush", "dev", "ovsbr0"])
    rig.read_kernel()
    done = [text.split()[0] for text in _bridge.restore_live(rigs.NETWORK)]
    # The guards name the host's addresses, so they follow the bridge's.
    assert [name for name in done if name != "guard_port"] == [
        "address_interface", "forward_ipv4", "add_nat",
    ]  # fmt: skip
    rig.restore()
    assert violations(rig) == []


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


def client_frame(data: bytes, source: str = "0.0.0.0") -> bytes:
    """A DHCP message from A's MAC."""
    body = frames.udp(source, "255.255.255.255", 68, 67, data)
    packet = frames.ipv4(source, "255.255.255.255", 17, body)
    return frames.ether(A.guard.mac, frames.EVERYONE, 0x0800, packet)


@pytest.mark.covers("I17")
def test_what_a_slice_had_in_the_switch_goes_with_its_guard(rig: Rig) -> None:
    def connections(guest: rigs.Guest) -> str:
        return rig.ask_switch("dpctl/dump-conntrack", f"zone={rig.number(guest)}")

    opened = (
        Attack("A", frames.datagram(rigs.WORLD, sport=23456), frozenset({"host", "world"})),
        Attack("B", frames.Sender(B).datagram(rigs.WORLD, sport=23456),
               frozenset({"host", "world"}), place=B.place),
    )  # fmt: skip
    assert violations(rig, opened) == []
    assert "sport=23456" in connections(A) and "sport=23456" in connections(B)
    _flows.remove("ovsbr0", A.guard.cookie)
    try:
        assert connections(A) == ""
        assert set(_packet_limit.installed("ovsbr0")) == {rig.number(B)}
        assert A.guard.cookie not in _flows.every("ovsbr0")
        assert "sport=23456" in connections(B), "the neighbour keeps its connections"
    finally:
        rig.restore()


def client_message(rig: Rig, data: bytes, *, source: str = "0.0.0.0") -> None:
    """Send a DHCP message from A's port, from A's MAC."""
    with rigs.packet_socket(rig.place(A.place), "eth0") as handle:
        handle.send(client_frame(data, source))


def lease(rig: Rig, guest: rigs.Guest, name: bytes = b"") -> str:
    """The address that dnsmasq offers and leases to a guest of this name; "" without an offer."""
    with rigs.packet_socket(rig.place(guest.place), "eth0") as handle:
        for kind in (1, 3):
            data = frames.dhcp(
                kind,
                guest.guard.mac,
                b"",
                requested=guest.guard.ip if kind == 3 else "",
                name=name,
            )
            body = frames.udp("0.0.0.0", "255.255.255.255", 68, 67, data)
            packet = frames.ipv4("0.0.0.0", "255.255.255.255", 17, body)
            # As clients do: a datagram that met a full buffer, or a limit, is sent again.
            for _try in range(30):
                handle.send(frames.ether(guest.guard.mac, frames.EVERYONE, 0x0800, packet))
                if answer := _dhcp_answer(handle):
                    break
            else:
                return ""
    return answer


def _dhcp_answer(handle: socket.socket) -> str:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            frame = handle.recv(4096)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        if frame[12:14] == b"\x08\x00" and frame[23] == 17 and frame[34:38] == b"\x00\x43\x00\x44":
            return socket.inet_ntoa(frame[42 + 16 : 42 + 20])
    return ""


@pytest.mark.covers("P9", "P10")
def test_a_guest_cannot_speak_dhcp_for_its_neighbour(rig: Rig) -> None:
    assert lease(rig, B) == B.guard.ip
    assert lease(rig, A) == A.guard.ip, "its own address it gets"
    clid = b"\x01" + frames.mac(B.guard.mac)
    probe = _baseline_files.probe_address(rigs.NETWORK["subnet"])
    forged = [
        frames.dhcp(7, B.guard.mac, b"", ciaddr=B.guard.ip, server=rigs.GATEWAY),
        frames.dhcp(4, B.guard.mac, b"", requested=B.guard.ip, server=rigs.GATEWAY),
        frames.dhcp(4, A.guard.mac, b"", requested=B.guard.ip, server=rigs.GATEWAY),
        frames.dhcp(4, A.guard.mac, b"", requested=B.guard.ip, server=rigs.GATEWAY, client_id=clid),
        frames.dhcp(7, A.guard.mac, b"", ciaddr=B.guard.ip, server=rigs.GATEWAY, client_id=clid),
        frames.dhcp(4, _baseline_files.PROBE_MAC, b"", requested=probe, server=rigs.GATEWAY),
        frames.dhcp(1, B.guard.mac, b"", giaddr=rigs.BMC),
        frames.dhcp(1, A.guard.mac, b"", giaddr=rigs.BMC),
    ]
    before = refused(rig)["dhcp_forged"]
    for data in forged:
        client_message(rig, data)
        client_message(rig, data, source=A.guard.ip)
    time.sleep(SETTLE_S)
    assert f"{B.guard.mac} {B.guard.ip}" in rig.leases.read_text()
    assert lease(rig, B) == B.guard.ip, "the neighbour still gets its address"
    assert lease(rig, A) == A.guard.ip
    assert refused(rig)["dhcp_forged"] - before == 10, "three have the guest's own hardware address"
    assert refused(rig, B)["dhcp_forged"] == 0


@pytest.mark.covers("P10")
def test_an_address_that_the_last_tenant_declined_is_leased_to_the_next(rig: Rig) -> None:
    """dnsmasq keeps a declined address back for ten minutes, and a slot keeps its address."""
    assert rig.dhcp is not None
    _host.write("/run/dnsmasq/dnsmasq.pid", str(rig.dhcp.pid))
    _host.write(f"/proc/{rig.dhcp.pid}/comm", "dnsmasq")
    log = rig.folder / "dnsmasq.out"
    assert lease(rig, A) == A.guard.ip
    end = time.monotonic() + 60
    while "disabling DHCP static address" not in log.read_text():
        assert time.monotonic() < end
        client_message(rig, frames.dhcp(4, A.guard.mac, b"", requested=A.guard.ip,
                                        server=rigs.GATEWAY))  # fmt: skip
        time.sleep(SETTLE_S)
    _dnsmasq.remove(A.guard.allocation_id)
    following = str(uuid.uuid4())
    try:
        _dnsmasq.write(_dnsmasq.Reservation(following, A.guard.mac, A.guard.ip))
        assert lease(rig, A) == A.guard.ip
    finally:
        _dnsmasq.remove(following)
        _dnsmasq.write(_dnsmasq.Reservation(A.guard.allocation_id, A.guard.mac, A.guard.ip))


@pytest.mark.covers("P10")
def test_a_guest_that_asks_for_every_address_starves_nobody(rig: Rig) -> None:
    """With hardware addresses that are not its own, and with many clients behind its own."""
    with rigs.packet_socket(rig.place(A.place), "eth0") as handle:
        for number in range(1, 255):
            client, wish = bytes([0, number]), {"requested": f"10.100.0.{number}"}
            wish["server"] = rigs.GATEWAY
            for mac in (f"02:00:00:00:00:{number:02x}", A.guard.mac):
                handle.send(client_frame(frames.dhcp(1, mac, b"", client_id=client)))
                handle.send(client_frame(frames.dhcp(3, mac, b"", client_id=client, **wish)))
    assert (lease(rig, B), lease(rig, A)) == (B.guard.ip, A.guard.ip)
    leased = {tuple(row.split()[1:3]) for row in rig.leases.read_text().splitlines()}
    assert leased <= {(guest.guard.mac, guest.guard.ip) for guest in (A, B)}


@pytest.mark.covers("P10")
def test_a_guest_leaves_the_dhcp_server_to_its_neighbour(rig: Rig) -> None:
    """Its own messages, too, are a part of what one process answers for all guests."""
    log, mine = rig.folder / "dnsmasq.out", f"DHCPDISCOVER(ovsbr0) {A.guard.mac}"
    served, cut = log.read_text().count(mine), refused(rig)["packet_rate"]
    began = time.monotonic()
    with rigs.packet_socket(rig.place(A.place), "eth0") as handle:
        frame = client_frame(frames.dhcp(1, A.guard.mac, b""))
        for _ in range(300):
            handle.send(frame)
            time.sleep(0.004)
    assert lease(rig, B) == B.guard.ip
    lasted = time.monotonic() - began
    answered = log.read_text().count(mine) - served
    assert answered <= _firewall.DHCP_BURST + _firewall.DHCP_RATE * lasted
    assert refused(rig)["packet_rate"] - cut > 100
    assert refused(rig, B)["packet_rate"] == 0


def _asked_until_answered(client: socket.socket, message: bytes) -> tuple[bytes, Any]:
    """The answer and its sender. Earlier messages may have used up the guest's part."""
    for _try in range(30):
        client.sendto(message, ("255.255.255.255", 67))
        with contextlib.suppress(TimeoutError):
            return client.recvfrom(2048)
    raise TimeoutError("no answer")


@pytest.mark.covers("P5", "P9")
def test_a_guest_that_asks_for_a_broadcast_gets_its_answer_alone(rig: Rig) -> None:
    """Its client has no address yet, and an ordinary socket: only a broadcast reaches it."""
    place = rig.place(A.place)
    rig.run(["ip", "address", "flush", "dev", "eth0"], place=place)
    try:
        with rigs.inside(place):
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
            client.bind(("", 68))
        neighbour = rigs.packet_socket(rig.place(B.place), "eth0")
        with client, neighbour:
            client.settimeout(1)
            for kind, requested in ((1, ""), (3, A.guard.ip)):
                message = frames.dhcp(kind, A.guard.mac, b"", requested=requested, flags=0x8000)
                answer, sender = _asked_until_answered(client, message)
                assert sender == (rigs.GATEWAY, 67)
                assert socket.inet_ntoa(answer[16:20]) == A.guard.ip
            time.sleep(SETTLE_S)
            with pytest.raises(BlockingIOError):
                neighbour.recv(4096)
    finally:
        rig.run(["ip", "address", "add", f"{A.guard.ip}/24", "dev", "eth0"], place=place)
        rig.run(["ip", "route", "add", "default", "via", rigs.GATEWAY], place=place)


def question(name: str, kind: int = 1, group: int = 1) -> bytes:
    """A DNS query."""
    labels = b"".join(bytes([len(p)]) + p for p in name.encode().split(b"."))
    head = b"\x12\x34\x01\x00\x00\x01" + bytes(6) + labels + b"\0"
    return head + kind.to_bytes(2, "big") + group.to_bytes(2, "big")


def record(name: str, kind: int, value: bytes) -> bytes:
    """A record of a DNS answer."""
    head = question(name, kind)[12:] + (60).to_bytes(4, "big")
    return head + len(value).to_bytes(2, "big") + value


class InternalZone:
    """A name server in a place, with the names of a site. Addresses are of the rig's networks."""

    A, CNAME, AAAA, SVCB, HTTPS, ANY = 1, 5, 28, 64, 65, 255
    PORT = 5354

    def __init__(self, place: str, address: str) -> None:
        with rigs.inside(place):
            self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.datagrams.bind((address, self.PORT))
            self.streams = socket.create_server((address, self.PORT))
        bmc, private6 = socket.inet_aton(rigs.BMC), socket.inet_pton(socket.AF_INET6, "fd00::9")
        alias = question("bmc.site.test")[12:-4]
        hint = b"\0\1\0" + b"\0\4\0\4" + bmc
        self.records = {
            "bmc": [(self.A, bmc), (self.AAAA, private6)],
            "alias": [(self.CNAME, alias)],
            "mixed": [(self.A, socket.inet_aton(rigs.WORLD)), (self.A, bmc)],
            "tailnet": [(self.A, socket.inet_aton("100.64.0.9"))],
            "closed": [(self.A, socket.inet_aton(rigs.CLOSED))],
            "hint": [(self.HTTPS, hint), (self.SVCB, hint)],
            "public": [(self.A, socket.inet_aton(rigs.WORLD))],
            "storage": [(self.A, socket.inet_aton(rigs.STORAGE))],
            "blocked": [(self.A, socket.inet_aton("127.0.0.2"))],
        }

    def __enter__(self) -> InternalZone:
        for serve in (self._serve_datagrams, self._serve_streams):
            threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        # A thread that waits in a call keeps the socket open otherwise.
        for handle in (self.datagrams, self.streams):
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)
            handle.close()

    def _answer(self, query: bytes) -> bytes:
        name = query[13 : 13 + query[12]].decode()
        end = query.index(b"\0", 12) + 5
        kind = int.from_bytes(query[end - 4 : end - 2], "big")
        full = f"{name}.site.test"
        records = [
            record(full, each, value)
            for each, value in self.records.get(name, ())
            if kind in (each, self.ANY) or each == self.CNAME
        ]
        if name == "alias":
            records.append(record("bmc.site.test", self.A, socket.inet_aton(rigs.BMC)))
        counts = b"\0\1" + len(records).to_bytes(2, "big") + bytes(4)
        return query[:2] + b"\x81\x80" + counts + query[12:end] + b"".join(records)

    def _serve_datagrams(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                query, client = self.datagrams.recvfrom(2048)
                # Empty once the socket is shut.
                if not query:
                    break
                self.datagrams.sendto(self._answer(query), client)

    def _serve_streams(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _peer = self.streams.accept()
                with client:
                    answer = self._answer(client.recv(2048)[2:])
                    client.sendall(len(answer).to_bytes(2, "big") + answer)
                    client.recv(1)


def test_names_lead_to_what_a_guest_may_reach_and_nowhere_else(rig: Rig) -> None:
    """The host's name server knows the site's zones, BMCs included."""
    zone = InternalZone
    refused_names = {
        "bmc": (zone.A, zone.AAAA, zone.ANY),
        "alias": (zone.A,),
        "mixed": (zone.A,),
        "tailnet": (zone.A,),
        "closed": (zone.A,),
        "hint": (zone.HTTPS, zone.SVCB, zone.ANY),
    }
    served = {"public": rigs.WORLD, "storage": rigs.STORAGE, "blocked": "127.0.0.2"}
    rig.stop_dhcp()
    rig.start_dhcp(f"--server={rigs.WORLD}#{zone.PORT}")
    try:
        with zone(rig.place("world"), rigs.WORLD), _udp(rigs.inside(rig.place(B.place))) as handle:
            handle.settimeout(30)

            def ask(name: str, kind: int = zone.A) -> bytes:
                handle.sendto(question(f"{name}.site.test", kind), (rigs.GATEWAY, 53))
                return handle.recv(2048)

            for name, address in served.items():
                assert ask(name).endswith(socket.inet_aton(address)), f"{name} is not served"
            leaks = [
                f"{name} {kind}"
                for name, kinds in refused_names.items()
                for kind in kinds
                if int.from_bytes(ask(name, kind)[6:8], "big")
            ]
            assert leaks == []
            text = question("bmc.site.test")
            with rigs.inside(rig.place(B.place)):
                stream = socket.create_connection((rigs.GATEWAY, 53), timeout=30)
            with stream:
                stream.sendall(len(text).to_bytes(2, "big") + text)
                assert stream.recv(2048)[8:10] == b"\0\0", "bmc by TCP"
    finally:
        rig.stop_dhcp()
        rig.start_dhcp()


def test_a_guest_leaves_the_name_server_to_its_neighbour(rig: Rig) -> None:
    """Names whose server never answers wait for ten seconds, and connections for minutes."""
    rig.stop_dhcp()
    rig.start_dhcp(f"--server={rigs.WORLD}#5353")
    sockets = [rigs.inside(rig.place(name)) for name in ("world", A.place, B.place)]
    server, flooding, neighbour = (_udp(place) for place in sockets)
    connections: list[socket.socket] = []
    try:
        server.bind((rigs.WORLD, 5353))
        server.settimeout(30)
        # An answer from a cache would tell a guest which names its neighbour asks for.
        for guest in (neighbour, flooding):
            guest.sendto(question("secret.example.org"), (rigs.GATEWAY, 53))
            asked_for, client = server.recvfrom(2048)
            assert b"\x06secret" in asked_for
            record = b"\xc0\x0c\0\x01\0\x01\0\0\x0e\x10\0\x04" + socket.inet_aton(rigs.WORLD)
            reply = (
                asked_for[:2]
                + b"\x81\x80\0\x01\0\x01\0\0\0\0"
                + question("secret.example.org")[12:]
            )
            server.sendto(reply + record, client)
            guest.settimeout(30)
            assert guest.recv(2048).endswith(record)
        for number in range(600):
            flooding.sendto(question(f"n{number}.example.org"), (rigs.GATEWAY, 53))
            # The switch in user space loses frames that come faster than it reads.
            time.sleep(0.01 if number % 50 == 0 else 0)
        for _ in range(25):
            with rigs.inside(rig.place(A.place)):
                connections.append(socket.socket())
            connections[-1].setblocking(False)
            connections[-1].connect_ex((rigs.GATEWAY, 53))
        neighbour.sendto(question("mine.example.org"), (rigs.GATEWAY, 53))
        while b"\x04mine" not in server.recv(2048):
            pass
        with rigs.inside(rig.place(B.place)):
            asked = socket.create_connection((rigs.GATEWAY, 53), timeout=30)
        with asked:
            text = question("gpuaas-parity.invalid")
            asked.sendall(len(text).to_bytes(2, "big") + text)
            assert asked.recv(2048)[2:4] == text[:2]
        assert refused(rig)["name_queries"] > 300
        assert refused(rig, B)["name_queries"] == 0
    finally:
        for handle in (server, flooding, neighbour, *connections):
            handle.close()
        rig.stop_dhcp()
        rig.start_dhcp()
        _flows.forget_connections(rig.number(A))


def test_a_guest_cannot_make_a_process_of_the_host_for_each_packet(rig: Rig) -> None:
    """The name server makes one for each connection, however short."""
    opened, began = 0, time.monotonic()
    for _ in range(60):
        with rigs.inside(rig.place(A.place)), socket.socket() as handle:
            # Closed by a reset, it does not count among the connections that are open.
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handle.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                handle.connect((rigs.GATEWAY, 53))
                opened += 1
    assert 0 < opened <= _firewall.RATE * (1 + time.monotonic() - began)


def _udp(place: contextlib.AbstractContextManager[None]) -> socket.socket:
    with place:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def test_names_of_neighbours_and_of_the_host_are_not_served(rig: Rig) -> None:
    assert lease(rig, A, b"neighbour") == A.guard.ip
    lines = map(str.split, Path("/etc/hosts").read_text().splitlines())
    own = next(words[1] for words in lines if len(words) > 1 and words[0] == "127.0.0.1")
    # B asks: the flood above may have used up A's queries of this second.
    with _udp(rigs.inside(rig.place(B.place))) as handle:
        handle.settimeout(30)
        for name, kind, group in (
            (f"{'.'.join(reversed(A.guard.ip.split('.')))}.in-addr.arpa", 12, 1),
            ("version.bind", 16, 3),
            ("neighbour", 1, 1),
            (own, 1, 1),
        ):
            handle.sendto(question(name, kind, group), (rigs.GATEWAY, 53))
            answer = handle.recv(2048)
            assert int.from_bytes(answer[6:8], "big") == 0, f"{name} was answered"


def test_parity_names_every_difference(rig: Rig) -> None:
    state = _guards.observe(rigs.NETWORK)
    assert _guards.plan(rigs.NETWORK, state) == []
    changes: dict[str, tuple[list[str], str]] = {
        "fail mode": (["ovs-vsctl", "set-fail-mode", "ovsbr0", "standalone"], "secure_bridge"),
        "rule that allows all": (["ovs-ofctl", "add-flow", "ovsbr0", "priority=999,actions=NORMAL"],
                                 "remove_flows"),
        "rule of the neighbour": (
            ["ovs-ofctl", "add-flow", "ovsbr0",
             f"cookie={A.guard.cookie},table=10,priority=400,actions=NORMAL"], "guard_port"),
        "lost rule": (["ovs-ofctl", "del-flows", "ovsbr0", f"cookie={B.guard.cookie}/-1,table=10"],
                      "guard_port"),
        "base": (["ovs-ofctl", "del-flows", "ovsbr0", "table=11"], "guard_bridge"),
        "foreign rule": (["ovs-ofctl", "add-flow", "ovsbr0", "cookie=0x77,actions=LOCAL"],
                            "remove_flows"),
        "limit": (["ovs-ofctl", "-OOpenFlow13", "mod-meter", "ovsbr0",
                   f"meter={rig.number(A)},pktps,stats,bands=type=drop,rate=999999"],
                  "guard_port"),
        "connections": (["ovs-appctl", "dpctl/ct-set-limits", f"zone={rig.number(A)},limit=0"],
                        "guard_port"),
        "no limit of connections": (["ovs-appctl", "dpctl/ct-del-limits", f"zone={rig.number(B)}"],
                                    "guard_port"),
        "firewall": (["nft", "flush", "chain", "inet", "gpuaas_slice", "guest_to_world"],
                     "load_firewall"),
        "firewall gone": (["nft", "delete", "table", "inet", "gpuaas_slice"], "load_firewall"),
        "host's limit gone": (["nft", "delete", "table", "inet", "gpuaas_connections"],
                              "limit_connections"),
        "host's limit open": (["nft", "insert", "rule", "inet", "gpuaas_connections",
                               "from_guest", "accept"], "limit_connections"),
        "filter gone": (["nft", "delete", "table", "netdev", f"gpuaas_{A.guard.port}"],
                        "guard_port"),
        "filter open": (["nft", "insert", "rule", "netdev", f"gpuaas_{A.guard.port}",
                         "from_guest", "accept"], "guard_port"),
        "foreign filter": (["nft", "add", "table", "netdev", "gpuaas_gsffffffffffff"],
                           "remove_filter"),
    }  # fmt: skip
    for name, (command, step) in changes.items():
        words = list(command)
        if words[0] == "ovs-vsctl":
            words.insert(1, f"--db=unix:{rig.folder}/db.sock")
        rig.run(words)
        done = [each.split()[0] for each in rig.restore()]
        # Nothing else, so what an earlier round had left would show here. These two take the
        # flows of the ports with them.
        more = done[1:] if name in ("fail mode", "base") else []
        assert done == [step, *more], (name, done)
    assert rig.restore() == []
    assert violations(rig) == []


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
    monkeypatch.setattr(_flows, "rules", lambda *words: MUTANTS[mutants[-1]](real(*words)))
    try:
        while mutants:
            rig.guard(A)
            if not violations(rig, limit_s=0.1):
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
    """As of a controller behind a firewall, which answers nothing that it did not ask for."""
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
        own = socket.create_connection(
            (rigs.WORLD, 7100), timeout=30, source_address=(rigs.UPLINK, 40000)
        )
    with client, server, listener, own:
        accepted, (_address, port) = listener.accept()
        with accepted:
            assert server.getpeername()[1] == 40000 != port
            for sender, receiver in ((client, server), (own, accepted)):
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
    """Readiness and the gateway need this way, and the table of attacks does not go it."""
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
    # The switch is back without flows, and fails closed.
    rig.run(["ip", "link", "set", "ovsbr0", "up"])
    assert violations(rig, silent) == []
    restored = rig.restore()
    assert {text.split()[0] for text in restored} == {"guard_bridge", "guard_port"}
    rig.establish()
    assert violations(rig) == []


DOMAIN = f"gpuaas-slice-{A.guard.allocation_id.replace('-', '')}"
INTERFACE = (
    f"<interface type='bridge'><mac address='{A.guard.mac}'/><source bridge='ovsbr0'/>"
    f"<virtualport type='openvswitch'/><target dev='{A.guard.port}'/></interface>"
)


def defined(*interfaces: str) -> str:
    return f"<domain type='kvm'><devices>{''.join(interfaces)}</devices></domain>"


def test_a_domain_starts_with_its_guard_in_force(rig: Rig) -> None:
    """As after a power loss: the switch has the bridge and nothing else."""
    rig.kill_switch()
    rig.start_switch()
    rig.run(["ovs-vsctl", f"--db=unix:{rig.folder}/db.sock", "set-fail-mode", "ovsbr0",
             "standalone"])  # fmt: skip
    rig.run(["nft", "delete", "table", "inet", "gpuaas_slice"])
    # Kernels before 6.16 delete the chain together with its tap.
    rig.run(["nft", "delete", "chain", "netdev", f"gpuaas_{A.guard.port}", "from_guest"])
    assert _start_hook.start(DOMAIN, defined(INTERFACE)) == 0
    assert "hook ingress" in _port_filter.installed()[A.guard.port][0]
    assert rig.restore() == []
    rig.establish()
    assert violations(rig) == []


def test_a_domain_does_not_start_without_its_guard(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_start_hook, "_DEADLINE_S", 0.3)

    def refusal(*interfaces: str, domain: str = DOMAIN) -> str:
        assert _start_hook.start(domain, defined(*interfaces)) == 1
        return capsys.readouterr().err

    for interfaces in (
        (),
        (INTERFACE, INTERFACE),
        (INTERFACE.replace(A.guard.mac, B.guard.mac),),
        (INTERFACE.replace("ovsbr0", "virbr0"),),
        (INTERFACE.replace(A.guard.port, B.guard.port),),
    ):
        assert "domain_differs" in refusal(*interfaces)
    assert "guard_missing" in refusal(INTERFACE, domain=DOMAIN.replace("23bd", "23be"))
    assert "guard_missing" in refusal(INTERFACE, domain=f"{DOMAIN}-copy")
    kept = _host.path(_object_names.guard_path(A.guard.allocation_id))
    text = kept.read_text()
    kept.write_text(text.replace(A.guard.ip, "10.100.0.1"))
    assert "guard_missing" in refusal(INTERFACE)
    kept.write_text(text)
    # The guard does not come into force.
    monkeypatch.setattr(_guards, "apply", lambda *_words: None)
    _flows.remove("ovsbr0", A.guard.cookie)
    assert "guard_not_in_force" in refusal(INTERFACE)
    monkeypatch.setattr(_flows, "port_number", lambda _port: None)
    assert "port_missing" in refusal(INTERFACE)
    monkeypatch.undo()
    rig.restore()


def test_a_guard_that_an_earlier_slice_left_stands_in_nobodys_way(rig: Rig) -> None:
    """The next slice of the slot has the same addresses, and the firewall a key for each."""
    old = replace(A.guard, allocation_id=str(uuid.uuid4()))
    _guards.save(old)
    try:
        assert rig.restore() == ["load_firewall firewall of the guests"]
        assert lease(rig, A) == A.guard.ip
    finally:
        _guards.forget(old.allocation_id)
        rig.restore()


def test_packets_to_many_places_are_few_flows_of_the_switch(rig: Rig) -> None:
    """Each flow is made by the switch's one daemon, for which all guests wait."""
    rig.ask_switch("revalidator/purge")
    with Places(rig) as places:
        for number in range(1000):
            target = f"{20 + number % 150}.{number % 251}.{number % 241}.{number % 239}"
            ports = {"sport": 1024 + number * 37, "dport": 1024 + number * 41}
            frame = frames.datagram(target, **ports)(places.macs[A.place], b"<000000>")
            places.sockets[A.place].send(frame)
            # The switch in user space loses frames that come faster than it reads.
            time.sleep(0.01 if number % 50 == 0 else 0)
        time.sleep(SETTLE_S)
    assert 0 < rig.ask_switch("dpctl/dump-flows").count("recirc_id") < 300
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
    address, own = ipaddress.IPv4Address(target), sender == A.guard.ip
    if source != A.guard.mac or kind == "ipv6":
        return False
    if kind == "arp":
        return own and target == rigs.GATEWAY
    if kind == "udp" and ports == (68, 67) and target == "255.255.255.255":
        return own or sender == "0.0.0.0"
    if target == rigs.GATEWAY:
        service = (kind in ("tcp", "udp") and ports[1] == 53) or (kind, *ports) == ("udp", 68, 67)
    else:
        private = not address.is_global or address.is_multicast or within(["192.0.0.0/24"], address)
        allowed = within(rigs.NETWORK["allowed_networks"], address) or not private
        service = allowed and not within((*HOSTS, *rigs.NETWORK["denied_networks"]), address)
    return own and service and (kind, ports[0]) != ("udp", 67)


# Addresses and broadcast addresses of the rig's host.
HOSTS = (rigs.UPLINK, rigs.MANAGEMENT, "11.0.0.255", "10.20.0.255")
# Networks whose first and last addresses are tried, with those beside them.
NETWORKS = (
    *(*_baseline_files.PRIVATE, *_baseline_files.NEVER, *rigs.NETWORK["allowed_networks"]),
    *(*rigs.NETWORK["denied_networks"], rigs.NETWORK["subnet"]),
)


def edges(network: str) -> list[str]:
    known = ipaddress.IPv4Network(network)
    first, last = int(known.network_address), int(known.broadcast_address)
    numbers = (max(first - 1, 0), first, last, min(last + 1, 2**32 - 1))
    return [str(ipaddress.IPv4Address(number)) for number in numbers]


def goes_where_it_may(
    rig: Rig, source: str, to: str, protocol: str, sender: str, target: str, ports: tuple[int, int]
) -> None:
    """The switch's own tracer says where a frame goes: exactly what may pass, and to no guest."""
    fields = [f"in_port={rig.number(A)}", f"dl_src={source}", f"dl_dst={to}", protocol]
    if protocol == "arp":
        fields += [f"arp_spa={sender}", f"arp_tpa={target}", f"arp_sha={source}"]
    elif protocol != "ipv6":
        fields += [f"nw_src={sender}", f"nw_dst={target}"]
    if protocol in ("tcp", "udp"):
        fields += [f"{protocol}_src={ports[0]}", f"{protocol}_dst={ports[1]}"]
    shown = rig.ask_switch("ofproto/trace", "--names", "ovsbr0", ",".join(fields))
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


def test_the_firewall_text_is_what_the_kernel_holds(rig: Rig) -> None:
    text = _guards._rules(rigs.NETWORK, _guards._with_probe(rigs.NETWORK))
    assert _firewall.normalized(text) == _firewall.installed()
