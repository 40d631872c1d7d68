"""Traffic of the rig: frames of guests, and their receivers."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time
from collections import Counter

from ansible_collections.gpuaas.slice.plugins.module_utils.network import _port_filter, _refusals

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import ATTACKS, Attack
from tests.unit.plugins.module_utils.network.rig import A, B, Rig

SETTLE_S = 0.05
NUMBERS = itertools.count()


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

    def violations(self, attacks: tuple[Attack, ...] = ATTACKS, limit_s: float = 10) -> list[str]:
        """Every frame that was not seen exactly at its permitted places."""
        tokens = {b"<%06d>" % next(NUMBERS): attack for attack in attacks}
        for token, attack in tokens.items():
            self.send(attack, token)
        seen = self.seen({token: attack.seen for token, attack in tokens.items()}, limit_s)
        return [
            f"{attack.name}: {sorted(seen.get(token, set()))}, expected {sorted(attack.seen)}"
            for token, attack in tokens.items()
            if seen.get(token, set()) - {attack.place} != attack.seen
        ]

    def arrived(self, name: str, token: bytes) -> int:
        """Number of frames with the token that a place has received since the last call."""
        number = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                number += token in self.sockets[name].recv(4096)
        return number

    def _take(self, tokens: dict[bytes, set[str]]) -> bool:
        """Read the arrived frames; return whether there were any."""
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
    """Violations by Places, with sockets that are opened for these frames."""
    with Places(rig) as places:
        return places.violations(attacks, limit_s)


def refused(rig: Rig, guest: rigs.Guest = A) -> Counter[str]:
    """A guest's counters by kind, as the host reports them."""
    rows = {row["allocation_id"]: row["refused"] for row in _refusals.rows(rigs.NETWORK)}
    assert set(rows) == {A.guard.allocation_id, B.guard.allocation_id}
    return Counter(rows[guest.guard.allocation_id])


def filtered(guest: rigs.Guest = A) -> dict[str, int]:
    """Frames of a guest that the filter before the switch refused, by kind."""
    return _port_filter.installed()[guest.guard.port][1]


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


def client_frame(data: bytes, source: str = "0.0.0.0") -> bytes:
    """A DHCP message from A's MAC."""
    body = frames.udp(source, "255.255.255.255", 68, 67, data)
    packet = frames.ipv4(source, "255.255.255.255", 17, body)
    return frames.ether(A.guard.mac, frames.EVERYONE, 0x0800, packet)


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
