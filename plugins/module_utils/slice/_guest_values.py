"""Values that a guest reports of itself: reading its channel, and checking the values.

The root of a guest writes the channel, so everything in it is hostile. Only known names, numbers
within limits and known words pass. Time and allocation come from this host.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host

# Longest line; a longer one is dropped. It is also the most that a round reads from a guest.
LONGEST = 64 * 1024
GPUS = 16
_BYTES = 2**53 - 1

# Largest value by name; the smallest is 0, and an integer as limit takes integers only. The
# reconciler has the same limits (`model/slice_telemetry.py`).
GUEST: Mapping[str, float] = {
    "uptime_s": 1e10,
    "cpus": 4096,
    "load_1": 1e6,
    "load_5": 1e6,
    "load_15": 1e6,
    "memory_total_bytes": _BYTES,
    "memory_available_bytes": _BYTES,
    "disk_total_bytes": _BYTES,
    "disk_free_bytes": _BYTES,
    "xid": 1_000_000,
}
GPU: Mapping[str, float] = {
    "index": GPUS - 1,
    "utilisation_percent": 100.0,
    "memory_used_bytes": _BYTES,
    "memory_total_bytes": _BYTES,
    "temperature_c": 1000.0,
    "power_w": 1e5,
    "ecc_corrected": _BYTES,
    "ecc_uncorrected": _BYTES,
}
# Whether CUDA initialises in the guest.
CUDA = frozenset({"ready", "failed", "absent"})


def accept(line: bytes) -> dict[str, Any] | None:
    """The accepted values of a line; None when it is no JSON object."""
    try:
        document = json.loads(line)
    # A deeply nested text exhausts the parser's stack.
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    values: dict[str, Any] = _numbers(document, GUEST)
    if isinstance(document.get("cuda"), str) and document["cuda"] in CUDA:
        values["cuda"] = document["cuda"]
    gpus: dict[int, dict[str, float]] = {}
    rows = document.get("gpus")
    for row in rows[:GPUS] if isinstance(rows, list) else ():
        numbers = _numbers(row, GPU) if isinstance(row, dict) else {}
        if "index" in numbers:
            gpus[int(numbers["index"])] = numbers
    values["gpus"] = [gpus[index] for index in sorted(gpus)]
    return values


def _numbers(document: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, float]:
    return {
        name: document[name]
        for name, highest in limits.items()
        # Neither a bool nor NaN counts as a number here.
        if type(document.get(name)) in (int, type(highest)) and 0 <= document[name] <= highest
    }


class Channel:
    """This host's end of a guest's channel, on which QEMU listens.

    values, received_at: of the newest accepted line, with this host's time.
    """

    def __init__(self, path: str) -> None:
        self.values: dict[str, Any] | None = None
        self.received_at = 0.0
        self._path = path
        self._socket: socket.socket | None = None
        self._pending = b""
        self._overlong = False

    def read(self) -> None:
        """Take what the guest has written, without waiting for more."""
        try:
            data = self._connection().recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            # QEMU has ended, has not started, or has no such channel. The next round tries again.
            self.close()
            return
        if not data:
            self.close()
            return
        *lines, rest = (self._pending + data).split(b"\n")
        if lines and self._overlong:
            # The end of a line whose beginning was dropped.
            del lines[0]
            self._overlong = False
        self._overlong = self._overlong or len(rest) > LONGEST
        self._pending = b"" if self._overlong else rest
        # Only the newest line is parsed, so that a flood of lines costs no more than one.
        newest = next((line for line in reversed(lines) if line), b"")
        values = accept(newest) if 0 < len(newest) <= LONGEST else None
        if values is not None:
            self.values, self.received_at = values, time.time()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._pending, self._overlong = None, b"", False

    def _connection(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                connection.connect(str(_host.path(self._path)))
            except OSError:
                with contextlib.suppress(OSError):
                    connection.close()
                raise
            self._socket = connection
        return self._socket
