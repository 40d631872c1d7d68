"""Guest probe: a network namespace on the slice bridge that uses the network like a guest.

It has a test address of the subnet and a guard like a guest's. It asks the host's dnsmasq for an
address and a name, and contacts an address outside. Meanwhile the host records the source address
of the packets that leave. An answer alone does not prove NAT, because a gateway may know the route
back. It exchanges TCP with a service of the probe's own behind NAT. It also sends what its guard
must refuse, and the host listens for that. The probe has its own port, flows, reservation and zone
of connections, so no guest changes its result. It leaves nothing on the host, even if one of its
steps fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _guards,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _dhcp_probe,
    _namespace,
    _tcp_probe,
)

NAMESPACE = PORT = _flows.PROBE_PORT
MAC = _baseline_files.PROBE_MAC

_EVERY_PROTOCOL, _IPV4 = 0x0003, 0x0800
_SO_ATTACH_FILTER = 26
_ECHO_REQUEST, _ECHO_REPLY = 8, 0
_TEXT = b"gpuaas.slice"
_TRIES, _WAIT_S = 3, 1.0
_PAUSE_S, _SETTLE_S = 0.02, 0.1
# The kind of the frame that the guard lets pass.
_PERMITTED = "permitted"


@dataclass(frozen=True)
class Probe:
    """Settings of the guest probe. target: an address, or `address:port` for TCP.

    network: the part of a profile that bootstrap established.
    """

    network: Mapping[str, Any]
    target: str

    @property
    def bridge(self) -> str:
        return str(self.network["bridge"])

    @property
    def bridge_address(self) -> str:
        return str(self.network["address"]).partition("/")[0]

    @property
    def subnet(self) -> str:
        return str(self.network["subnet"])

    @property
    def address(self) -> str:
        """The probe's address, which dnsmasq reserves for it."""
        return _baseline_files.probe_address(self.subnet)


@dataclass(frozen=True)
class Finding:
    """Result of the guest probe. egress_ms: None without an answer. named: dnsmasq answered.

    offered: the address that dnsmasq offers, or "". sources: the source addresses of the packets
    that left the host for the target. forged: kinds of refused frames that reached the host; None
    if its permitted frame did not, so that the guard is not proven. tcp: what is wrong with a TCP
    connection through NAT, "" if nothing is.
    """

    egress_ms: float | None
    named: bool
    offered: str
    sources: tuple[str, ...] = ()
    forged: tuple[str, ...] | None = ()
    tcp: str = ""


def look(probe: Probe) -> Finding:
    """Run the guest probe. Raises Refusal when its namespace cannot be created or removed."""
    with _alone(), _guest(probe):
        with _namespace.named(NAMESPACE):
            names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            outside = _egress_socket(probe.target)
            stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            lease = _dhcp_probe.open_socket(PORT)
            link = _packet_socket(PORT)
        with names, outside, stream, lease, link, _watch(probe.target) as leaving:
            return Finding(
                named=name_server_answers(names, probe.bridge_address),
                offered=_dhcp_probe.offered(lease, MAC, tries=_TRIES, wait_s=_WAIT_S),
                egress_ms=reach(outside, probe.target),
                sources=_sources(leaving, probe.target),
                forged=_forged(link, probe),
                tcp=_tcp_probe.problem(stream),
            )


def _forged(link: socket.socket, probe: Probe) -> tuple[str, ...] | None:
    """Send frames that the guard must refuse, then one that it lets pass."""
    with _packet_socket(probe.bridge) as bridge:
        mark = os.urandom(8)
        frames = _frames(probe, bridge.getsockname()[4], mark)
        seen: set[str] = set()
        for _try in range(_TRIES):
            for frame in frames.values():
                link.send(frame)
            deadline = time.monotonic() + _WAIT_S
            while _PERMITTED not in seen and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                seen |= _marked(bridge, mark, list(frames))
            if _PERMITTED in seen:
                # The switch may decide about the first frame of a kind later than about others.
                time.sleep(_SETTLE_S)
                seen |= _marked(bridge, mark, list(frames))
                return tuple(sorted(seen - {_PERMITTED}))
    return None


def _frames(probe: Probe, bridge_mac: bytes, mark: bytes) -> dict[str, bytes]:
    """A frame of each kind, with the mark and its number in it; the permitted one last."""
    ip, gateway = socket.inet_aton(probe.address), socket.inet_aton(probe.bridge_address)
    other = socket.inet_aton(str(ipaddress.IPv4Address(probe.address) - 1))
    mac, stranger = bytes.fromhex(MAC.replace(":", "")), b"\x02\x67\x73\x70\x72\x63"
    ipv4, arp = struct.pack("!H", _IPV4), b"\x08\x06"

    def echo_of(number: int) -> bytes:
        return echo_request(0x6773, number, mark + bytes([number]))

    udp = struct.pack("!4H", 9, 9, 8 + 10, 0) + mark + bytes([4, 0])
    claim = b"\0\x01\x08\0\x06\x04\0\x02" + mac + gateway + bridge_mac + gateway
    return {
        "mac_spoofed": bridge_mac + stranger + ipv4 + _packet(ip, gateway, 1, echo_of(0)),
        "ip_spoofed": bridge_mac + mac + ipv4 + _packet(other, gateway, 1, echo_of(1)),
        "vlan": bridge_mac + mac + b"\x81\0\0\x05" + ipv4 + _packet(ip, gateway, 1, echo_of(2)),
        "arp": bridge_mac + mac + arp + claim + mark + bytes([3]) + bytes(10),
        "host_service": bridge_mac + mac + ipv4 + _packet(ip, gateway, 17, udp),
        _PERMITTED: bridge_mac + mac + ipv4 + _packet(ip, gateway, 1, echo_of(5)),
    }


def _packet(source: bytes, target: bytes, protocol: int, body: bytes) -> bytes:
    """An IPv4 packet."""
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0)
    head += source + target
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + body


def _marked(handle: socket.socket, mark: bytes, kinds: list[str]) -> set[str]:
    """Kinds of the marked frames that the socket has received."""
    seen = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            _before, present, rest = handle.recv(2048).partition(mark)
            if present and rest and rest[0] < len(kinds):
                seen.add(kinds[rest[0]])
    return seen


def _packet_socket(interface: str) -> socket.socket:
    """A raw socket for all frames of an interface, in the caller's network namespace."""
    handle = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    handle.bind((interface, 0))
    handle.setblocking(False)
    return handle


def echo(target: str) -> float | None:
    """Milliseconds of an ICMP echo from the host itself, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as handle:
        return reach(handle, target)


def reach(handle: socket.socket, target: str) -> float | None:
    """Milliseconds until `target` answers an echo or accepts a connection, or None."""
    host, _sep, port = target.partition(":")
    begin = time.monotonic()
    if port:
        handle.settimeout(_TRIES * _WAIT_S)
        try:
            handle.connect((host, int(port)))
        except OSError:
            return None
        return (time.monotonic() - begin) * 1000
    # A new identifier each time, because a known flow stays translated after its NAT rule is gone.
    identifier = int.from_bytes(os.urandom(2), "big")
    for sequence in range(_TRIES):
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            handle.sendto(echo_request(identifier, sequence), (host, 0))
            if _await_echo(handle, host, identifier):
                return (time.monotonic() - begin) * 1000
    return None


def name_server_answers(handle: socket.socket, server: str) -> bool:
    """Whether dnsmasq answers a query that needs no upstream server."""
    handle.settimeout(_WAIT_S)
    transaction = os.urandom(2)
    for _try in range(_TRIES):
        with contextlib.suppress(OSError):
            handle.sendto(name_query(transaction), (server, 53))
            answer = handle.recv(2048)
            # The first flag bit marks a response.
            if answer[:2] == transaction and answer[2] & 0x80:
                return True
    return False


def echo_request(identifier: int, sequence: int, text: bytes = _TEXT) -> bytes:
    body = struct.pack("!BBHHH", _ECHO_REQUEST, 0, 0, identifier, sequence) + text
    return body[:2] + struct.pack("!H", _checksum(body)) + body[4:]


def _checksum(data: bytes) -> int:
    """The Internet's checksum (RFC 1071)."""
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def name_query(transaction: bytes) -> bytes:
    """A DNS question for the address of a name that dnsmasq refuses by itself."""
    head = transaction + struct.pack("!5H", 0x0100, 1, 0, 0, 0)
    labels = _baseline_files.PROBE_NAME.encode().split(b".")
    name = b"".join(bytes([len(label)]) + label for label in labels)
    return head + name + b"\0" + struct.pack("!2H", 1, 1)


def _await_echo(handle: socket.socket, host: str, identifier: int) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        handle.settimeout(left)
        packet, sender = handle.recvfrom(2048)
        # A raw socket also receives the IP header, and all other echo replies of the namespace.
        message = packet[(packet[0] & 0x0F) * 4 :]
        if (
            sender[0] == host
            and message[0] == _ECHO_REPLY
            and message[4:6] == identifier.to_bytes(2, "big")
        ):
            return True
    return False


def _egress_socket(target: str) -> socket.socket:
    if ":" in target:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)


def _watch(target: str) -> socket.socket:
    """A socket that captures packets from the host to `target`, on every interface, after NAT."""
    handle = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_EVERY_PROTOCOL))
    destination = int(ipaddress.IPv4Address(target.partition(":")[0]))
    # Classic BPF on the IP header: keep packets whose destination (byte 16) matches, drop all
    # others. A busy host's traffic must not push the probe's few packets out of the buffer.
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 16),
            (0x15, 0, 1, destination),
            (6, 0, 0, 65535),
            (6, 0, 0, 0),
        )
    )
    kept = ctypes.create_string_buffer(program)
    length = len(program) // 8
    handle.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", length, ctypes.addressof(kept))
    )
    handle.setblocking(False)
    return handle


def _sources(leaving: socket.socket, target: str) -> tuple[str, ...]:
    """Source addresses of the probe's packets. The host has packets of its own for the target."""
    port = target.partition(":")[2]
    addresses = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            packet, (_name, protocol, direction, *_link) = leaving.recvfrom(2048)
            if protocol != _IPV4 or direction != socket.PACKET_OUTGOING:
                continue
            inside, message = packet[9], packet[(packet[0] & 0x0F) * 4 :]
            if port:
                hit = inside == socket.IPPROTO_TCP and message[2:4] == int(port).to_bytes(2, "big")
            else:
                hit = inside == socket.IPPROTO_ICMP and message[8:] == _TEXT
            if hit:
                addresses.add(socket.inet_ntoa(packet[12:16]))
    return tuple(sorted(addresses))


def _alone() -> AbstractContextManager[None]:
    """Allow only one probe at a time, because two would delete each other's port."""
    return _host.locked("/run/gpuaas/parity", mode=0o700)


@contextlib.contextmanager
def _guest(probe: Probe) -> Iterator[None]:
    if NAMESPACE in _host.listed("/run/netns"):
        _remove()
    loaded = None
    try:
        # A single transaction replaces the port that a killed run may have left.
        port = ["--if-exists", "del-port", PORT, "--", "add-port", probe.bridge, PORT]
        kind = ["--", "set", "interface", PORT, "type=internal", f'mac="{MAC}"']
        _command.run(["ovs-vsctl", "--timeout=10", *port, *kind])
        _command.run(
            ["ip", "-batch", "-"],
            stdin=f"netns add {NAMESPACE}\nlink set {PORT} netns {NAMESPACE}\n",
        )
        number = _flows.await_port(PORT)
        guard = _guards.probe_guard(probe.network)
        rule = _guards.egress_of(probe.network, guard)
        _flows.install(guard, number, _flows.local_addresses(), rule)
        loaded = number
        length = ipaddress.ip_network(probe.subnet).prefixlen
        _command.run(
            ["ip", "-n", NAMESPACE, "-batch", "-"],
            stdin=f"address add {probe.address}/{length} dev {PORT}\n"
            f"link set {PORT} up\n"
            f"route add default via {probe.bridge_address}\n",
        )
        yield
    finally:
        _remove()
        with contextlib.suppress(Refusal):  # without the bridge its flows are gone too
            _flows.remove(probe.bridge, _flows.PROBE_COOKIE, port=loaded)


def _remove() -> None:
    """Idempotent. The port is deleted first: without it the namespace cannot reach the bridge."""
    _command.run(["ovs-vsctl", "--timeout=10", "--if-exists", "del-port", PORT])
    if NAMESPACE in _host.listed("/run/netns"):
        _command.run(["ip", "netns", "delete", NAMESPACE])
