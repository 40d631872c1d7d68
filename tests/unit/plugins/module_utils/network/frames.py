"""Frames that a guest with root can send, and the list of attacks with the permitted receivers."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.unit.plugins.module_utils.network import rig
from tests.unit.plugins.module_utils.network.rig import A, B

EVERYONE = "ff:ff:ff:ff:ff:ff"
PORT = 5000
# Length of a packet's first fragment; the switch in user space takes shorter ones for an attack.
BEHIND = 1240
Build = Callable[[str, bytes], bytes]


@dataclass(frozen=True)
class Attack:
    """build(gateway's MAC, token) makes the frame. seen: places that may see it. place: sender.

    kind: the counter of the guard that refuses it; "" for a frame that the guard lets pass.
    """

    name: str
    build: Build
    seen: frozenset[str] = frozenset()
    place: str = A.place
    kind: str = ""


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
    flags: int = 0,
    client_id: bytes = b"",
    name: bytes = b"",
) -> bytes:
    """A BOOTP message of 300 bytes or more; the token is its server host name, `name` the name that
    the client has.
    """
    head = struct.pack(
        "!BBBB4sHH4s4s4s4s16s64s128s",
        *(operation, 1, 6, 0, b"abcd", 0, flags, ip(ciaddr), bytes(4), bytes(4), ip(giaddr)),
        *(mac(hardware), token, b""),
    )
    options = b"\x63\x82\x53\x63" + bytes([53, 1, kind])
    if requested:
        options += b"\x32\x04" + ip(requested)
    if server:
        options += b"\x36\x04" + ip(server)
    if client_id:
        options += bytes([61, len(client_id)]) + client_id
    if name:
        options += bytes([12, len(name)]) + name
    return (head + options + b"\xff").ljust(300, b"\0")


@dataclass(frozen=True)
class Sender:
    """Frames of a guest, each with the guest's own addresses unless others are given."""

    guest: rig.Guest

    def datagram(
        self,
        target: str,
        *,
        source: str = "",
        hardware: str = "",
        to: str = "",
        sport: int = 4000,
        dport: int = PORT,
        tags: tuple[int, ...] = (),
        options: bytes = b"",
    ) -> Build:
        """A UDP packet; `to` is another MAC than the gateway's."""
        nic = self.guest.guard

        def build(gateway: str, token: bytes) -> bytes:
            body = udp(source or nic.ip, target, sport, dport, token)
            packet = ipv4(source or nic.ip, target, 17, body, options=options)
            return ether(hardware or nic.mac, to or gateway, 0x0800, packet, tags=tags)

        return build

    def packet(self, target: str, protocol: int, lead: bytes = b"") -> Build:
        nic = self.guest.guard

        def build(gateway: str, token: bytes) -> bytes:
            return ether(nic.mac, gateway, 0x0800, ipv4(nic.ip, target, protocol, lead + token))

        return build

    def error(self, target: str, of: str) -> Build:
        """An ICMP error that a packet from another address to the public server was too large."""
        nic = self.guest.guard

        def build(gateway: str, token: bytes) -> bytes:
            lost = ipv4(of, rig.WORLD, 6, tcp(of, rig.WORLD, 40000, 443, _ACK, token))
            head = struct.pack("!BBHHH", 3, 4, 0, 0, 68)
            body = head[:2] + struct.pack("!H", checksum(head + lost)) + head[4:] + lost
            return ether(nic.mac, gateway, 0x0800, ipv4(nic.ip, target, 1, body))

        return build

    def segment(self, target: str, sport: int, dport: int, flags: int) -> Build:
        nic = self.guest.guard

        def build(gateway: str, token: bytes) -> bytes:
            body = tcp(nic.ip, target, sport, dport, flags, token)
            return ether(nic.mac, gateway, 0x0800, ipv4(nic.ip, target, 6, body))

        return build

    def fragment(self, target: str, offset: int, *, more: bool = False) -> Build:
        """A part of a UDP datagram, whose second and last part begins at BEHIND."""
        nic = self.guest.guard

        def build(gateway: str, token: bytes) -> bytes:
            head = struct.pack("!4H", 4000, PORT, BEHIND + len(token), 0)
            body = (head + token).ljust(BEHIND, b"\0") if offset == 0 else token
            place = offset // 8 | (0x2000 if more else 0)
            return ether(nic.mac, gateway, 0x0800, ipv4(nic.ip, target, 17, body, fragment=place))

        return build

    def message(
        self, data: Callable[[bytes], bytes], *, source: str, target: str, sport: int
    ) -> Build:
        """A DHCP message in a broadcast."""

        def build(_gateway: str, token: bytes) -> bytes:
            body = udp(source, target, sport, 67 if sport == 68 else 68, data(token))
            packet = ipv4(source, target, 17, body)
            return ether(self.guest.guard.mac, EVERYONE, 0x0800, packet)

        return build

    def announcement(self, sender: tuple[str, str], target: str, *, operation: int = 2) -> Build:
        def build(_gateway: str, token: bytes) -> bytes:
            return arp(
                self.guest.guard.mac, operation, sender, ("00:00:00:00:00:00", target), token
            )

        return build

    def raw(self, kind: int, to: str, lead: bytes = b"") -> Build:
        return lambda _gateway, token: ether(self.guest.guard.mac, to, kind, lead + token)

    def ipv6(self, target_mac: str, protocol: int, lead: bytes) -> Build:
        def build(_gateway: str, token: bytes) -> bytes:
            body = lead + token
            head = struct.pack("!IHBB", 0x60000000, len(body), protocol, 255)
            source, target = ipaddress.IPv6Address("fe80::1"), ipaddress.IPv6Address("ff02::1")
            packet = head + source.packed + target.packed + body
            return ether(self.guest.guard.mac, target_mac, 0x86DD, packet)

        return build


_SYN, _ACK = 0x02, 0x10
_HOST, _WORLD = frozenset({"host"}), frozenset({"host", "world"})
_STORAGE = frozenset({"host", "mgmt"})
# Loose source route through the public server to the BMC (RFC 791).
_ROUTE = bytes([131, 7, 4]) + ip(rig.BMC) + b"\0"


def attacks(attacker: rig.Guest, victim: rig.Guest) -> tuple[Attack, ...]:
    """The attacks of a guest, most of them against another guest, and of outsiders against it."""
    nic, other, send = attacker.guard, victim.guard, Sender(attacker)
    me, neighbour = (nic.mac, nic.ip), (other.mac, other.ip)

    def inbound(source: str) -> Build:
        return send.datagram(nic.ip, source=source, hardware="02:00:00:00:00:99")

    listed = (
        # A guest's own traffic.
        Attack(
            "ask for the gateway by ARP", send.announcement(me, rig.GATEWAY, operation=1), _HOST
        ),
        Attack("send to the Internet", send.datagram(rig.WORLD), _WORLD),
        Attack("send to an allowed private network", send.datagram(rig.STORAGE), _STORAGE),
        Attack("ask for a name", send.datagram(rig.GATEWAY, dport=53), _HOST),
        Attack("ask for a name by TCP", send.segment(rig.GATEWAY, 4001, 53, _SYN), _HOST),
        Attack(
            "ping the gateway",
            lambda gateway, token: ether(
                nic.mac, gateway, 0x0800, ipv4(nic.ip, rig.GATEWAY, 1, icmp(8, token))
            ),
            _HOST,
        ),
        Attack(
            "ask for an address",
            send.message(
                lambda token: dhcp(1, nic.mac, token),
                source="0.0.0.0",
                target="255.255.255.255",
                sport=68,
            ),
            _HOST,
        ),
        # Addresses of others.
        Attack(
            "spoof the neighbour's IP address",
            send.datagram(rig.WORLD, source=other.ip),
            kind="ip_spoofed",
        ),
        Attack(
            "spoof the gateway's IP address",
            send.datagram(rig.WORLD, source=rig.GATEWAY),
            kind="ip_spoofed",
        ),
        Attack(
            "spoof a public IP address",
            send.datagram(rig.WORLD, source="8.8.8.8"),
            kind="ip_spoofed",
        ),
        Attack(
            "spoof the neighbour's MAC",
            send.datagram(rig.WORLD, hardware=other.mac),
            kind="mac_spoofed",
        ),
        Attack(
            "spoof both of the neighbour",
            send.datagram(rig.WORLD, hardware=other.mac, source=other.ip),
            kind="mac_spoofed",
        ),
        Attack(
            "send from the gateway's MAC",
            lambda gateway, token: send.datagram(rig.WORLD, hardware=gateway)(gateway, token),
            kind="mac_spoofed",
        ),
        Attack(
            "send from everyone's MAC",
            send.datagram(rig.WORLD, hardware=EVERYONE),
            kind="mac_spoofed",
        ),
        Attack(
            "answer ARP as the neighbour", send.announcement(neighbour, rig.GATEWAY), kind="arp"
        ),
        Attack(
            "answer ARP for the neighbour's IP",
            send.announcement((nic.mac, other.ip), rig.GATEWAY),
            kind="arp",
        ),
        Attack(
            "answer ARP as the gateway",
            send.announcement((nic.mac, rig.GATEWAY), other.ip),
            kind="arp",
        ),
        Attack(
            "answer ARP with another MAC",
            send.announcement((other.mac, nic.ip), rig.GATEWAY),
            kind="arp",
        ),
        Attack(
            "send ARP with addresses of another length",
            send.raw(0x0806, EVERYONE, struct.pack("!HHBBH", 1, 0x0800, 8, 16, 2)),
            kind="arp",
        ),
        Attack("announce the own address", send.announcement(me, nic.ip), kind="arp"),
        Attack(
            "ask for the neighbour by ARP", send.announcement(me, other.ip, operation=1), kind="arp"
        ),
        # Neighbours.
        Attack(
            "send to the neighbour's MAC", send.datagram(other.ip, to=other.mac), kind="neighbour"
        ),
        Attack(
            "send to the neighbour through the gateway", send.datagram(other.ip), kind="neighbour"
        ),
        Attack(
            "send a public address to the neighbour's MAC",
            send.datagram(rig.WORLD, to=other.mac),
            _HOST,
        ),
        Attack(
            "broadcast in the subnet", send.datagram("10.100.0.255", to=EVERYONE), kind="neighbour"
        ),
        Attack(
            "broadcast everywhere",
            send.datagram("255.255.255.255", to=EVERYONE),
            kind="private_network",
        ),
        Attack(
            "multicast",
            send.datagram("224.0.0.251", to="01:00:5e:00:00:fb"),
            kind="private_network",
        ),
        Attack(
            "serve DHCP",
            send.message(
                lambda token: dhcp(2, other.mac, token, operation=2),
                source=nic.ip,
                target="255.255.255.255",
                sport=67,
            ),
            kind="dhcp_server",
        ),
        Attack(
            "serve DHCP to the Internet",
            send.datagram(rig.WORLD, sport=67, dport=68),
            kind="dhcp_server",
        ),
        # The host.
        Attack("reach a service of the gateway", send.datagram(rig.GATEWAY), kind="host_service"),
        Attack(
            "open SSH of the gateway",
            send.segment(rig.GATEWAY, 4002, 22, _SYN),
            kind="host_service",
        ),
        Attack(
            "answer a connection that is none",
            send.segment(rig.GATEWAY, 22, 40000, _ACK),
            kind="host_service",
        ),
        Attack("reach the host's public address", send.datagram(rig.UPLINK), kind="host_address"),
        Attack(
            "reach the host's management address",
            send.datagram(rig.MANAGEMENT),
            kind="host_address",
        ),
        Attack(
            "broadcast in the uplink's network", send.datagram("11.0.0.255"), kind="host_address"
        ),
        Attack(
            "broadcast in the management network", send.datagram("10.20.0.255"), kind="host_address"
        ),
        Attack("reach the host's loopback", send.datagram("127.0.0.1"), kind="private_network"),
        # The two parts of a packet, which the host would reassemble, and a part that stays alone.
        Attack(
            "send the beginning of a packet",
            send.fragment(rig.WORLD, 0, more=True),
            kind="fragment",
        ),
        Attack("send the end of a packet", send.fragment(rig.WORLD, BEHIND), kind="fragment"),
        Attack(
            "send a later fragment to the gateway",
            send.fragment(rig.GATEWAY, 800),
            kind="fragment",
        ),
        Attack("open a tunnel to the gateway", send.packet(rig.GATEWAY, 47), kind="host_service"),
        Attack(
            "send VXLAN to the gateway", send.datagram(rig.GATEWAY, dport=4789), kind="host_service"
        ),
        # The host would take all of its own tunnel to the server for answers to the guest.
        Attack("open a tunnel to the Internet", send.packet(rig.WORLD, 47), _HOST),
        # The host would lower the largest packet of its own connection, or of its neighbour's.
        Attack(
            "send an error about a connection of the host",
            send.error(rig.GATEWAY, rig.UPLINK),
            kind="host_service",
        ),
        Attack(
            "send an error about a connection of the neighbour",
            send.error(rig.WORLD, other.ip),
            kind="connections",
        ),
        # Private space.
        Attack("reach a BMC", send.datagram(rig.BMC), kind="private_network"),
        Attack(
            "reach the card's own system", send.datagram("192.168.100.2"), kind="private_network"
        ),
        Attack("reach a container network", send.datagram("172.17.0.1"), kind="private_network"),
        Attack("reach shared address space", send.datagram("100.64.0.1"), kind="private_network"),
        Attack(
            "reach the metadata address", send.datagram("169.254.169.254"), kind="private_network"
        ),
        Attack("reach a denied public network", send.datagram(rig.CLOSED), kind="denied_network"),
        # The kernel of the host refuses the option.
        Attack(
            "route through the server to a BMC", send.datagram(rig.WORLD, options=_ROUTE), _HOST
        ),
        # Other protocols.
        Attack("send with a VLAN tag", send.datagram(rig.WORLD, tags=(100,)), kind="vlan"),
        Attack(
            "send with a service tag",
            send.raw(0x88A8, EVERYONE, struct.pack("!HH", 100, 0x0800)),
            kind="vlan",
        ),
        Attack("send with a priority tag", send.datagram(rig.WORLD, tags=(0,)), kind="vlan"),
        Attack("send with two VLAN tags", send.datagram(rig.WORLD, tags=(1, 100)), kind="vlan"),
        Attack(
            "advertise as a router",
            send.ipv6("33:33:00:00:00:01", 58, bytes([134, 0])),
            kind="ipv6",
        ),
        Attack(
            "solicit a neighbour", send.ipv6("33:33:00:00:00:01", 58, bytes([135, 0])), kind="ipv6"
        ),
        Attack("send IPv6", send.ipv6(EVERYONE, 17, b""), kind="ipv6"),
        Attack(
            "send IPv6 with extension headers",
            send.ipv6(EVERYONE, 0, bytes([58, 0, 5, 2, 0, 0, 1, 0, 134, 0])),
            kind="ipv6",
        ),
        Attack("send LLDP", send.raw(0x88CC, "01:80:c2:00:00:0e"), kind="protocol"),
        Attack(
            "send a spanning tree frame",
            send.raw(0x0026, "01:80:c2:00:00:00", b"\x42\x42\x03"),
            kind="protocol",
        ),
        Attack("send MPLS", send.raw(0x8847, EVERYONE), kind="protocol"),
        Attack("ask for a port by 802.1X", send.raw(0x888E, "01:80:c2:00:00:03"), kind="protocol"),
        Attack("bundle links", send.raw(0x8809, "01:80:c2:00:00:02"), kind="protocol"),
        Attack("send RARP", send.raw(0x8035, EVERYONE), kind="protocol"),
        Attack("send PPPoE", send.raw(0x8863, EVERYONE), kind="protocol"),
        # Outsiders. The gateway's MAC is that of the host's interface there.
        Attack("reach a guest from the uplink", inbound(rig.WORLD), place="world", kind="inbound"),
        Attack(
            "reach a guest from the management network",
            inbound(rig.BMC),
            place="mgmt",
            kind="inbound",
        ),
        Attack(
            "reach a guest from an allowed network",
            inbound(rig.STORAGE),
            place="mgmt",
            kind="inbound",
        ),
    )
    return tuple(
        replace(each, place=attacker.place) if each.place == A.place else each for each in listed
    )


datagram = Sender(A).datagram
ATTACKS = attacks(A, B)
