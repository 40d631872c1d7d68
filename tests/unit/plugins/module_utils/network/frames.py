"""Frames that a guest with root can send, and the list of attacks with who may see each of them."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass

from tests.unit.plugins.module_utils.network import rig
from tests.unit.plugins.module_utils.network.rig import A, B

EVERYONE = "ff:ff:ff:ff:ff:ff"
PORT = 5000
Build = Callable[[str, bytes], bytes]


@dataclass(frozen=True)
class Attack:
    """build(gateway's MAC, token) makes the frame. seen: places that may see it. place: sender."""

    name: str
    build: Build
    seen: frozenset[str] = frozenset()
    place: str = A.place


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def ip(text: str) -> bytes:
    return ipaddress.IPv4Address(text).packed


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ether(source: str, target: str, kind: int, body: bytes, *, tags: tuple[int, ...] = ()) -> bytes:
    vlan = b"".join(struct.pack("!HH", 0x8100, tag) for tag in tags)
    return (mac(target) + mac(source) + vlan + struct.pack("!H", kind) + body).ljust(60, b"\0")


def ipv4(
    source: str, target: str, protocol: int, body: bytes, *, fragment: int = 0, options: bytes = b""
) -> bytes:
    head = (
        struct.pack(
            "!BBHHHBBH4s4s",
            *(
                0x45 + len(options) // 4,
                0,
                20 + len(options) + len(body),
                1,
                fragment,
                64,
                protocol,
                0,
            ),
            *(ip(source), ip(target)),
        )
        + options
    )
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def udp(source: str, target: str, sport: int, dport: int, data: bytes) -> bytes:
    length = 8 + len(data)
    head = struct.pack("!HHHH", sport, dport, length, 0)
    pseudo = ip(source) + ip(target) + struct.pack("!BBH", 0, 17, length)
    total = checksum(pseudo + head + data) or 0xFFFF
    return head[:6] + struct.pack("!H", total) + data


def tcp(source: str, target: str, sport: int, dport: int, flags: int, data: bytes = b"") -> bytes:
    head = struct.pack("!HHIIBBHHH", sport, dport, 1, 1, 0x50, flags, 8192, 0, 0)
    pseudo = ip(source) + ip(target) + struct.pack("!BBH", 0, 6, len(head) + len(data))
    return head[:16] + struct.pack("!H", checksum(pseudo + head + data)) + head[18:] + data


def icmp(kind: int, data: bytes) -> bytes:
    head = struct.pack("!BBHHH", kind, 0, 0, 7, 1)
    return head[:2] + struct.pack("!H", checksum(head + data)) + head[4:] + data


def arp(
    source: str, operation: int, sender: tuple[str, str], target: tuple[str, str], token: bytes
) -> bytes:
    body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
    body += mac(sender[0]) + ip(sender[1]) + mac(target[0]) + ip(target[1])
    return ether(source, EVERYONE, 0x0806, body + token)


def dhcp(
    kind: int,
    hardware: str,
    token: bytes,
    *,
    ciaddr: str = "0.0.0.0",
    requested: str = "",
    server: str = "",
    giaddr: str = "0.0.0.0",
    operation: int = 1,
    client_id: bytes = b"",
) -> bytes:
    """A BOOTP message of 300 bytes or more; the token is its server host name."""
    head = struct.pack(
        "!BBBB4sHH4s4s4s4s16s64s128s",
        *(operation, 1, 6, 0, b"abcd", 0, 0, ip(ciaddr), bytes(4), bytes(4), ip(giaddr)),
        *(mac(hardware), token, b""),
    )
    options = b"\x63\x82\x53\x63" + bytes([53, 1, kind])
    if requested:
        options += b"\x32\x04" + ip(requested)
    if server:
        options += b"\x36\x04" + ip(server)
    if client_id:
        options += bytes([61, len(client_id)]) + client_id
    return (head + options + b"\xff").ljust(300, b"\0")


def datagram(
    target: str,
    *,
    source: str = A.guard.ip,
    hardware: str = A.guard.mac,
    to: str = "",
    sport: int = 4000,
    dport: int = PORT,
    tags: tuple[int, ...] = (),
    options: bytes = b"",
) -> Build:
    """A UDP packet from A; `to` is another MAC than the gateway's."""

    def build(gateway: str, token: bytes) -> bytes:
        body = udp(source, target, sport, dport, token)
        packet = ipv4(source, target, 17, body, options=options)
        return ether(hardware, to or gateway, 0x0800, packet, tags=tags)

    return build


def segment(target: str, sport: int, dport: int, flags: int) -> Build:
    def build(gateway: str, token: bytes) -> bytes:
        body = tcp(A.guard.ip, target, sport, dport, flags, token)
        return ether(A.guard.mac, gateway, 0x0800, ipv4(A.guard.ip, target, 6, body))

    return build


def message(data: Callable[[bytes], bytes], *, source: str, target: str, sport: int) -> Build:
    """A DHCP message in a broadcast from A's own MAC."""

    def build(_gateway: str, token: bytes) -> bytes:
        body = udp(source, target, sport, 67 if sport == 68 else 68, data(token))
        return ether(A.guard.mac, EVERYONE, 0x0800, ipv4(source, target, 17, body))

    return build


def announcement(sender: tuple[str, str], target: str, *, operation: int = 2) -> Build:
    def build(_gateway: str, token: bytes) -> bytes:
        return arp(A.guard.mac, operation, sender, ("00:00:00:00:00:00", target), token)

    return build


def raw(kind: int, to: str, lead: bytes = b"") -> Build:
    return lambda _gateway, token: ether(A.guard.mac, to, kind, lead + token)


def ipv6(target_mac: str, protocol: int, lead: bytes) -> Build:
    def build(_gateway: str, token: bytes) -> bytes:
        body = lead + token
        head = struct.pack("!IHBB", 0x60000000, len(body), protocol, 255)
        source, target = ipaddress.IPv6Address("fe80::1"), ipaddress.IPv6Address("ff02::1")
        return ether(A.guard.mac, target_mac, 0x86DD, head + source.packed + target.packed + body)

    return build


def _inbound(source: str) -> Build:
    return datagram(A.guard.ip, source=source, hardware="02:00:00:00:00:99")


_SELF, _NEIGHBOUR = (A.guard.mac, A.guard.ip), (B.guard.mac, B.guard.ip)
_SYN, _ACK = 0x02, 0x10
_HOST, _WORLD = frozenset({"host"}), frozenset({"host", "world"})
_STORAGE = frozenset({"host", "mgmt"})
# Loose source route through the public server to the BMC (RFC 791).
_ROUTE = bytes([131, 7, 4]) + ip(rig.BMC) + b"\0"

ATTACKS = (
    # A guest's own traffic.
    Attack("ask for the gateway by ARP", announcement(_SELF, rig.GATEWAY, operation=1), _HOST),
    Attack("send to the Internet", datagram(rig.WORLD), _WORLD),
    Attack("send to an allowed private network", datagram(rig.STORAGE), _STORAGE),
    Attack("ask for a name", datagram(rig.GATEWAY, dport=53), _HOST),
    Attack("ask for a name by TCP", segment(rig.GATEWAY, 4001, 53, _SYN), _HOST),
    Attack(
        "ping the gateway",
        lambda gateway, token: ether(
            A.guard.mac, gateway, 0x0800, ipv4(A.guard.ip, rig.GATEWAY, 1, icmp(8, token))
        ),
        _HOST,
    ),
    Attack(
        "ask for an address",
        message(
            lambda token: dhcp(1, A.guard.mac, token),
            source="0.0.0.0",
            target="255.255.255.255",
            sport=68,
        ),
        _HOST,
    ),
    # Addresses of others.
    Attack("spoof the neighbour's IP address", datagram(rig.WORLD, source=B.guard.ip)),
    Attack("spoof the gateway's IP address", datagram(rig.WORLD, source=rig.GATEWAY)),
    Attack("spoof a public IP address", datagram(rig.WORLD, source="8.8.8.8")),
    Attack("spoof the neighbour's MAC", datagram(rig.WORLD, hardware=B.guard.mac)),
    Attack(
        "spoof both of the neighbour",
        datagram(rig.WORLD, hardware=B.guard.mac, source=B.guard.ip),
    ),
    Attack("answer ARP as the neighbour", announcement(_NEIGHBOUR, rig.GATEWAY)),
    Attack(
        "answer ARP for the neighbour's IP", announcement((A.guard.mac, B.guard.ip), rig.GATEWAY)
    ),
    Attack("answer ARP as the gateway", announcement((A.guard.mac, rig.GATEWAY), B.guard.ip)),
    Attack("answer ARP with another MAC", announcement((B.guard.mac, A.guard.ip), rig.GATEWAY)),
    Attack("announce the own address", announcement(_SELF, A.guard.ip)),
    Attack("ask for the neighbour by ARP", announcement(_SELF, B.guard.ip, operation=1)),
    # Neighbours.
    Attack("send to the neighbour's MAC", datagram(B.guard.ip, to=B.guard.mac)),
    Attack("send to the neighbour through the gateway", datagram(B.guard.ip)),
    Attack(
        "send a public address to the neighbour's MAC", datagram(rig.WORLD, to=B.guard.mac), _HOST
    ),
    Attack("broadcast in the subnet", datagram("10.100.0.255", to=EVERYONE)),
    Attack("broadcast everywhere", datagram("255.255.255.255", to=EVERYONE)),
    Attack("multicast", datagram("224.0.0.251", to="01:00:5e:00:00:fb")),
    Attack(
        "serve DHCP",
        message(
            lambda token: dhcp(2, B.guard.mac, token, operation=2),
            source=A.guard.ip,
            target="255.255.255.255",
            sport=67,
        ),
    ),
    Attack("serve DHCP to the Internet", datagram(rig.WORLD, sport=67, dport=68)),
    # The host.
    Attack("reach a service of the gateway", datagram(rig.GATEWAY)),
    Attack("open SSH of the gateway", segment(rig.GATEWAY, 4002, 22, _SYN)),
    Attack("answer a connection that is none", segment(rig.GATEWAY, 22, 40000, _ACK)),
    Attack("reach the host's public address", datagram(rig.UPLINK)),
    Attack("reach the host's management address", datagram(rig.MANAGEMENT)),
    Attack("broadcast in the uplink's network", datagram("11.0.0.255")),
    Attack("broadcast in the management network", datagram("10.20.0.255")),
    Attack("reach the host's loopback", datagram("127.0.0.1")),
    Attack(
        "send a later fragment to the gateway",
        lambda gateway, token: ether(
            A.guard.mac, gateway, 0x0800, ipv4(A.guard.ip, rig.GATEWAY, 17, token, fragment=100)
        ),
    ),
    # Private space.
    Attack("reach a BMC", datagram(rig.BMC)),
    Attack("reach the card's own system", datagram("192.168.100.2")),
    Attack("reach a container network", datagram("172.17.0.1")),
    Attack("reach shared address space", datagram("100.64.0.1")),
    Attack("reach the metadata address", datagram("169.254.169.254")),
    Attack("reach a denied public network", datagram(rig.CLOSED)),
    # The kernel of the host refuses the option.
    Attack("route through the server to a BMC", datagram(rig.WORLD, options=_ROUTE), _HOST),
    # Other protocols.
    Attack("send with a VLAN tag", datagram(rig.WORLD, tags=(100,))),
    Attack("send with a priority tag", datagram(rig.WORLD, tags=(0,)), frozenset()),
    Attack("send with two VLAN tags", datagram(rig.WORLD, tags=(1, 100))),
    Attack("advertise as a router", ipv6("33:33:00:00:00:01", 58, bytes([134, 0]))),
    Attack("solicit a neighbour", ipv6("33:33:00:00:00:01", 58, bytes([135, 0]))),
    Attack("send IPv6", ipv6(EVERYONE, 17, b"")),
    Attack("send LLDP", raw(0x88CC, "01:80:c2:00:00:0e")),
    Attack("send a spanning tree frame", raw(0x0026, "01:80:c2:00:00:00", b"\x42\x42\x03")),
    Attack("send MPLS", raw(0x8847, EVERYONE)),
    Attack("send RARP", raw(0x8035, EVERYONE)),
    Attack("send PPPoE", raw(0x8863, EVERYONE)),
    # Outsiders. The gateway's MAC is that of the host's interface there.
    Attack("reach a guest from the uplink", _inbound(rig.WORLD), place="world"),
    Attack("reach a guest from the management network", _inbound(rig.BMC), place="mgmt"),
    Attack("reach a guest from an allowed network", _inbound(rig.STORAGE), place="mgmt"),
)
