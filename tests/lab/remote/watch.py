"""Give an order to senders, and wait for lines of the listener; it runs on the lab host.

Standard input: JSON. `order`: "" or an order, which each of `addresses` confirms in
`order_limit_s`. `groups`: lines of the listener's `file`, without their time. Of each group a line
is awaited, from time `after` on, for `limit_s`. Prints the file from `offset` on.
"""

import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

ORDERS = 4999
# A frame that goes astray may come a little later.
SETTLE_S = 1.0


def give(order: str, addresses: list[str], limit_s: float) -> None:
    """Repeat the order until all senders have confirmed it.

    The host may not resolve a sender's hardware address at once, and a sender may be busy.
    """
    left, end = set(addresses), time.monotonic() + limit_s
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        handle.settimeout(1)
        while left:
            if time.monotonic() > end:
                sys.exit(f"no confirmation of {order!r} from {sorted(left)}")
            with contextlib.suppress(OSError):
                for address in left:
                    handle.sendto(order.encode(), (address, ORDERS))
            with contextlib.suppress(TimeoutError):
                while left:
                    answer, sender = handle.recvfrom(100)
                    if answer.decode() == order:
                        left.discard(sender[0])


def wait(file: Path, offset: int, groups: list[list[str]], after: float, limit_s: float) -> None:
    missing, end = [set(group) for group in groups], time.monotonic() + limit_s
    with file.open() as lines:
        lines.seek(offset)
        rest = ""
        while True:
            *whole, rest = (rest + lines.read()).split("\n")
            words = (line.split(" ", 1) for line in whole)
            seen = {what for at, what in words if float(at) >= after}
            missing = [group for group in missing if not group & seen]
            if not missing or time.monotonic() > end:
                break
            time.sleep(0.5)


def main(task: dict[str, Any]) -> None:
    file = Path(task["file"])
    if task["order"]:
        give(task["order"], task["addresses"], task["order_limit_s"])
    if task["groups"]:
        wait(file, task["offset"], task["groups"], task["after"], task["limit_s"])
        time.sleep(SETTLE_S)
    text = file.read_text()[task["offset"] :]
    sys.stdout.write(text[: text.rfind("\n") + 1])


main(json.load(sys.stdin))
