"""Guest probe: a network namespace on the slice bridge that uses the network like a guest.

It has a test address of the subnet and a guard like a guest's. It asks the host's dnsmasq for an
address and a name, and contacts an address outside. Meanwhile the host records the source address
of the packets that leave. An
answer alone does not prove NAT, because a gateway may know the route back. The probe leaves nothing
on the host, even if one of its steps fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _flows,
    _guards,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _dhcp_probe

NAMESPACE = PORT = _flows.PROBE_PORT
MAC = _baseline_files.PROBE_MAC

_CLONE_NEWNET = 0x40000000
_EVERY_PROTOCOL, _IPV4 = 0x0003, 0x0800
_SO_ATTACH_FILTER = 26
_ECHO_REQUEST, _ECHO_REPLY = 8, 0
_TRIES, _WAIT_S = 3, 1.0


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
    that left the host for the target.
    """

    egress_ms: float | None
    named: bool
    offered: str
    sources: tuple[str, ...] = ()


def look(probe: Probe) -> Finding:
    """Run the guest probe. Raises Refusal when its namespace cannot be created or removed."""
    with _alone(), _guest(probe):
        with _inside(NAMESPACE):
            names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            outside = _egress_socket(probe.target)
            lease = _dhcp_probe.open_socket(PORT)
        with names, outside, lease, _watch(probe.target) as leaving:
            return Finding(
                named=name_server_answers(names, probe.bridge_address),
                offered=_dhcp_probe.offered(lease, MAC, tries=_TRIES, wait_s=_WAIT_S),
                egress_ms=reach(outside, probe.target),
                sources=_sources(leaving),
            )


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


def echo_request(identifier: int, sequence: int) -> bytes:
    body = struct.pack("!BBHHH", _ECHO_REQUEST, 0, 0, identifier, sequence) + b"gpuaas.slice"
    words = struct.unpack(f"!{len(body) // 2}H", body)
    total = sum(words)
    total = (total >> 16) + (total & 0xFFFF)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    return body[:2] + struct.pack("!H", checksum) + body[4:]


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


def _sources(leaving: socket.socket) -> tuple[str, ...]:
    addresses = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            packet, (_name, protocol, direction, *_link) = leaving.recvfrom(2048)
            if protocol == _IPV4 and direction == socket.PACKET_OUTGOING:
                addresses.add(socket.inet_ntoa(packet[12:16]))
    return tuple(sorted(addresses))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Allow only one probe at a time, because two would delete each other's port."""
    lock = _host.path("/run/gpuaas-parity.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _guest(probe: Probe) -> Iterator[None]:
    if NAMESPACE in _host.listed("/run/netns"):
        _remove()
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
            _flows.remove(probe.bridge, _flows.PROBE_COOKIE)


def _remove() -> None:
    """Idempotent. The port is deleted first: without it the namespace cannot reach the bridge."""
    _command.run(["ovs-vsctl", "--timeout=10", "--if-exists", "del-port", PORT])
    if NAMESPACE in _host.listed("/run/netns"):
        _command.run(["ip", "netns", "delete", NAMESPACE])


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Sockets created inside belong to the namespace for their whole life."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(_host.path(f"/run/netns/{namespace}"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(here)
    finally:
        os.close(here)


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise Refusal(
            "namespace_refused",
            expected="to enter a network namespace",
            found=os.strerror(number),
            remedy="run as root on the host itself, not in a container",
        )
