"""Sender of prepared frames; it runs as root in a guest or on the lab host.

Arguments: a network interface or its MAC, the pause after a frame in seconds, a file with one round
of frames in each line, and a path. Where that path exists, it waits for an order by UDP from the
host: the number of a line to send once, `loop` for the first line again and again, or `stop`.
Elsewhere, as in a guest that was booted again, it loops as soon as the interface is up.
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


def await_order(orders: socket.socket, current: str) -> str:
    """The next order, each of which comes several times; a loop goes on without one."""
    while True:
        orders.setblocking(current != "loop")
        try:
            order = orders.recv(100).decode()
        except BlockingIOError:
            return current
        if order != current:
            return order


def main(named: str, pause: str, file: str, waits: str) -> None:
    rounds = [
        [bytes.fromhex(frame) for frame in json.loads(line)]
        for line in Path(file).read_text().splitlines()
    ]
    orders = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    orders.bind(("0.0.0.0", ORDERS))
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    packets.bind((await_link(named), 0))
    order = "stop" if Path(waits).exists() else "loop"
    while True:
        order = await_order(orders, order)
        if order == "stop":
            continue
        for frame in rounds[0 if order == "loop" else int(order)]:
            # With a full queue, or without a link, the frame is not sent.
            with contextlib.suppress(OSError):
                packets.send(frame)
            time.sleep(float(pause))


main(*sys.argv[1:])
