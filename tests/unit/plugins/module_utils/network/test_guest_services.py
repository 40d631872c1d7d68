"""DHCP and DNS of guests: a real dnsmasq, which no guest can use up alone."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _firewall,
    _flows,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.rig import A, B, Rig
from tests.unit.plugins.module_utils.network.traffic import SETTLE_S, client_frame, lease, refused

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]


def client_message(rig: Rig, data: bytes, *, source: str = "0.0.0.0") -> None:
    """Send a DHCP message from A's port, from A's MAC."""
    with rigs.packet_socket(rig.place(A.place), "eth0") as handle:
        handle.send(client_frame(data, source))


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
    """A single process answers all guests, so each guest's valid messages are limited as well."""
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
    """The answer and its sender. Earlier messages may have used up the guest's limit."""
    for _try in range(30):
        client.sendto(message, ("255.255.255.255", 67))
        with contextlib.suppress(TimeoutError):
            return client.recvfrom(2048)
    raise TimeoutError("no answer")


@pytest.mark.covers("P5", "P9")
def test_a_guest_that_asks_for_a_broadcast_gets_its_answer_alone(rig: Rig) -> None:
    """Its client has no address yet and an ordinary socket, so only a broadcast reaches it."""
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
            connection = socket.create_connection((rigs.GATEWAY, 53), timeout=30)
        with connection:
            text = question("gpuaas-parity.invalid")
            connection.sendall(len(text).to_bytes(2, "big") + text)
            assert connection.recv(2048)[2:4] == text[:2]
        assert refused(rig)["name_queries"] > 300
        assert refused(rig, B)["name_queries"] == 0
    finally:
        for handle in (server, flooding, neighbour, *connections):
            handle.close()
        rig.stop_dhcp()
        rig.start_dhcp()
        _flows.forget_connections(rig.number(A))


def test_a_guest_cannot_make_a_process_of_the_host_for_each_packet(rig: Rig) -> None:
    """The name server makes a process for each connection, however short."""
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
    hostname = next(words[1] for words in lines if len(words) > 1 and words[0] == "127.0.0.1")
    # B asks: the flood above may have used up A's queries of this second.
    with _udp(rigs.inside(rig.place(B.place))) as handle:
        handle.settimeout(30)
        for name, kind, group in (
            (f"{'.'.join(reversed(A.guard.ip.split('.')))}.in-addr.arpa", 12, 1),
            ("version.bind", 16, 3),
            ("neighbour", 1, 1),
            (hostname, 1, 1),
        ):
            handle.sendto(question(name, kind, group), (rigs.GATEWAY, 53))
            answer = handle.recv(2048)
            assert int.from_bytes(answer[6:8], "big") == 0, f"{name} was answered"
