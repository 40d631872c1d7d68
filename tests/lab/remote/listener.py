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
    print(
        f"{time.clock_gettime(time.CLOCK_BOOTTIME):.2f} {interface} {direction} {word}", flush=True
    )


packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 1 << 25)
service = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
service.bind(("0.0.0.0", PORT))


def end(*_signal: object) -> None:
    statistics = packets.getsockopt(_SOL_PACKET, _STATISTICS, 8)
    report("-", "lost", str(struct.unpack("II", statistics)[1]))
    sys.exit()


signal.signal(signal.SIGTERM, end)
report("-", "listens", "-")
while True:
    for handle in select.select([packets, service], [], [])[0]:
        data, sender = handle.recvfrom(4096)
        if handle is service:
            interface, direction = "service", "in"
        else:
            interface = sender[0]
            direction = "out" if sender[2] == socket.PACKET_OUTGOING else "in"
        for token in set(re.findall(rb"<[0-9]{6}>", data)):
            report(interface, direction, token.decode())
