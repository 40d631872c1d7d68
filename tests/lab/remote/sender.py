"""Sender of prepared frames; it runs as root in a guest or on the lab host.

Arguments: a network interface or its MAC, the pause after a frame in seconds, a file with one round
of frames in each line, and a path. Where that path exists, it waits for an order by UDP from the
host: a serial number, and the number of a line to send once, `loop` for the first line again and
again, or `stop`. It confirms each order. Elsewhere, as in a guest that was booted again, it loops
as soon as the interface is up, with longer pauses, which leave the guest's processor for the boot.
"""

import contextlib
import fcntl
import json
import socket
import struct
import sys
import time
from pathlib import Path

ORDERS = 4999
# Pauses after a boot, as a multiple.
BOOTING = 5
# ioctl and flag of an interface that is up; group of changes of interfaces (rtnetlink).
_GET_FLAGS, _UP, _LINKS = 0x8913, 1, 1


def interface(named: str) -> str:
    for each in Path("/sys/class/net").iterdir():
        if named in (each.name, (each / "address").read_text().strip()):
            return each.name
    return ""


def is_up(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, _GET_FLAGS, struct.pack("16sh14x", name.encode(), 0))
    return bool(struct.unpack("16sh14x", answer)[1] & _UP)


def await_link(named: str) -> str:
    """The name of the interface, once it is up. At a boot it may appear and be renamed first."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as changes:
        changes.bind((0, _LINKS))
        while True:
            with contextlib.suppress(OSError):
                name = interface(named)
                if name and is_up(name):
                    return name
            changes.recv(65536)


class Orders:
    """Orders of the host. Each comes until it is confirmed, and counts once."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("0.0.0.0", ORDERS))
        self.last = 0

    def take(self, *, wait: bool) -> str:
        """The next order; "" without a new one."""
        self.socket.setblocking(wait)
        try:
            order, host = self.socket.recvfrom(100)
        except BlockingIOError:
            return ""
        with contextlib.suppress(OSError):
            self.socket.sendto(order, host)
        serial, word = order.decode().split()
        if int(serial) <= self.last:
            return ""
        self.last = int(serial)
        return word


def main(named: str, pause: str, file: str, waits: str) -> None:
    rounds = [
        [bytes.fromhex(frame) for frame in json.loads(line)]
        for line in Path(file).read_text().splitlines()
    ]
    orders = Orders()
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    packets.bind((await_link(named), 0))
    order, pause_s = "stop", float(pause)
    if not Path(waits).exists():
        order, pause_s = "loop", float(pause) * BOOTING
    queue: list[bytes] = []
    while True:
        if new := orders.take(wait=order != "loop" and not queue):
            order, pause_s = new, float(pause)
            queue = list(rounds[int(new)]) if new.isdigit() else []
        if order == "loop" and not queue:
            queue = list(rounds[0])
        if queue:
            # With a full queue, or without a link, the frame is not sent.
            with contextlib.suppress(OSError):
                packets.send(queue.pop(0))
            time.sleep(pause_s)


main(*sys.argv[1:])
