"""Listener for tokens of attacks on every interface of the lab host, its guests' ports included.

It prints a line for each token: time, interface, direction ("in", "out") and token. An interface
"service" stands for a UDP service that listens on every address of the host. At its end it prints
how many frames it lost.
"""

import re
import select
import signal
import socket
import struct
import sys
import time

PORT = int(sys.argv[1])
# Not in every Python: socket(7), packet(7).
_RCVBUFFORCE, _SOL_PACKET, _STATISTICS = 33, 263, 6


def report(interface: str, direction: str, word: str) -> None:
    print(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.2f} {interface} {direction} {word}")


packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 1 << 25)
packets.setblocking(False)
service = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
service.bind(("0.0.0.0", PORT))
service.setblocking(False)


def take(handle: socket.socket) -> None:
    """Report the tokens of the arrived frames."""
    for _frame in range(1000):
        try:
            data, sender = handle.recvfrom(4096)
        except BlockingIOError:
            return
        if handle is service:
            interface, direction = "service", "in"
        else:
            interface = sender[0]
            direction = "out" if sender[2] == socket.PACKET_OUTGOING else "in"
        for token in set(re.findall(rb"<[0-9]{6}>", data)):
            report(interface, direction, token.decode())


# Raises SystemExit.
signal.signal(signal.SIGTERM, lambda *_signal: sys.exit())
report("-", "listens", "-")
try:
    while True:
        sys.stdout.flush()
        for handle in select.select([packets, service], [], [])[0]:
            take(handle)
finally:
    statistics = packets.getsockopt(_SOL_PACKET, _STATISTICS, 8)
    report("-", "lost", str(struct.unpack("II", statistics)[1]))
