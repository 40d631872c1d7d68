"""DHCP probe that takes no DHCP lease: it sends a DISCOVER and waits for an OFFER (RFC 2131).

A running DHCP server may listen and answer DNS queries, and still give no guest an address.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time

SERVER = ("255.255.255.255", 67)
CLIENT_PORT = 68

_REQUEST, _REPLY = 1, 2
_ETHERNET, _MAC_BYTES = 1, 6
_COOKIE = b"\x63\x82\x53\x63"
_DISCOVER = b"\x35\x01\x01"
_OFFER = b"\x35\x01\x02"
_END = b"\xff"
# Fixed BOOTP layout of 236 bytes; the code uses the transaction id, chaddr and options.
_HEAD = struct.Struct("!BBBB4sHH4s4s4s4s16s64s128s")


def open_socket(interface: str) -> socket.socket:
    """A DHCP client socket on `interface`, in the caller's network namespace."""
    handle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        # Bound to any address, because the answer is a broadcast. The interface is the limit.
        handle.bind(("", CLIENT_PORT))
    except OSError:
        handle.close()
        raise
    return handle


def offered(handle: socket.socket, mac: str, *, tries: int, wait_s: float) -> str:
    """The address that a server offers this MAC; "" without an offer."""
    for _try in range(tries):
        transaction = os.urandom(4)
        with contextlib.suppress(OSError):
            handle.sendto(discover(transaction, mac), SERVER)
            if address := _await_offer(handle, transaction, wait_s):
                return address
    return ""


def discover(transaction: bytes, mac: str) -> bytes:
    """A DISCOVER packet, padded to 300 bytes because the oldest servers need that."""
    none = bytes(4)
    hardware = bytes.fromhex(mac.replace(":", ""))
    head = _HEAD.pack(
        *(_REQUEST, _ETHERNET, _MAC_BYTES, 0, transaction, 0, 0),
        *(none, none, none, none, hardware, b"", b""),
    )
    return (head + _COOKIE + _DISCOVER + _END).ljust(300, b"\0")


def offer(transaction: bytes, packet: bytes) -> str:
    """The address in an OFFER for `transaction`; "" for every other packet."""
    options = packet[_HEAD.size :]
    if len(packet) < _HEAD.size or not options.startswith(_COOKIE):
        return ""
    fields = _HEAD.unpack_from(packet)
    # dnsmasq, like every known server, sends the message type as the first option.
    if fields[0] != _REPLY or fields[4] != transaction or not options[4:].startswith(_OFFER):
        return ""
    return socket.inet_ntoa(fields[8])


def _await_offer(handle: socket.socket, transaction: bytes, wait_s: float) -> str:
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        handle.settimeout(left)
        if address := offer(transaction, handle.recv(2048)):
            return address
    return ""
