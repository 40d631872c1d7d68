"""Readiness of a guest as its own probes report it over the hypervisor's channel.

The root of the guest writes the answers, so they are hostile. Only a known probe under the nonce of
this run, with known numbers in range, is accepted. Too many bytes or stray lines end the run.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _object_names

# Longest line, most bytes of all lines, and most lines that are no answer of this run: after a lost
# connection, old answers and half a line may come first.
LINE_BYTES, TOTAL_BYTES, STRAY_LINES = 1 << 16, 1 << 20, 16
_DETAIL_CHARACTERS = 300
_PAUSE_S = 1.0
# The request is sent again, because a restarted guest loses it. A guest that already has it repeats
# its answers.
_RESEND_S = 10.0

# Numbers that each probe must report, with their largest value.
PROBES: Mapping[str, Mapping[str, int]] = {
    "egress": {"seconds": 600},
    "gpu_compute": {"gpus": 64, "memory_bytes": 1 << 50},
    "rdma": {"devices": 256, "active_ports": 1024},
}

REMEDIES = {
    "egress": "look at the host's NAT and at the address that egress_target names",
    "gpu_compute": "look at the guest's driver and at the GPU (kernel logs of guest and host)",
    "rdma": "look at the guest's RDMA packages and at the fabric's link and partition",
}

Results = dict[str, dict[str, Any]]


class _Rejected(Exception):
    """A guest whose answers are not read any further."""


class Inquiry:
    """Probes that a guest is asked, also while something else of it is waited for.

    probes: the settings of each. deadlines: seconds after `start` (monotonic).
    """

    def __init__(
        self,
        allocation_id: str,
        probes: Mapping[str, Mapping[str, Any]],
        deadlines: Mapping[str, float],
        *,
        start: float,
    ) -> None:
        self._probes, self._deadlines, self._start = probes, deadlines, start
        ends = {name: start + seconds for name, seconds in deadlines.items()}
        self._exchange = _Exchange(allocation_id, probes, ends)
        self._results: Results = {}

    def results(self, alive: Callable[[], bool]) -> Results:
        """The result of each probe: `{ok, detail, values, seconds, deadline_s}`.

        alive: whether the guest still runs.
        """
        while self._missing():
            if alive():
                self.listen(_PAUSE_S)
            else:
                self._end("the guest's QEMU has ended")
        return {
            name: {**self._results[name], "deadline_s": self._deadlines[name]}
            for name in self._probes
        }

    def listen(self, wait_s: float) -> None:
        """Take what the guest answers within `wait_s`. Of a guest that has been rejected, or has
        answered everything, nothing is read any more.
        """
        missing = self._missing()
        if not missing:
            time.sleep(wait_s)
            return
        left = min(self._deadlines[name] for name in missing) - self._elapsed()
        try:
            for name, answer in self._exchange.answers(max(min(wait_s, left), 0.01)):
                # Only the first answer counts, so that a guest cannot take one back.
                self._results.setdefault(name, {**answer, "seconds": round(self._elapsed(), 1)})
        except _Rejected as reason:
            self._end(str(reason))

    def close(self) -> None:
        self._exchange.close()

    def _missing(self) -> list[str]:
        now = self._elapsed()
        for name, deadline in self._deadlines.items():
            if name not in self._results and now >= deadline:
                self._results[name] = _failed(f"no answer within {deadline:g} s", now)
        return [name for name in self._probes if name not in self._results]

    def _end(self, reason: str) -> None:
        for name in self._probes:
            self._results.setdefault(name, _failed(reason, self._elapsed()))
        self.close()

    def _elapsed(self) -> float:
        return time.monotonic() - self._start


class _Exchange:
    """Connection to the channel's socket, which is opened again when QEMU has closed it.

    ends: of the time for each probe, monotonic.
    """

    def __init__(
        self,
        allocation_id: str,
        probes: Mapping[str, Mapping[str, Any]],
        ends: Mapping[str, float],
    ) -> None:
        self._path = str(_host.path(_object_names.channel_path(allocation_id, "readiness")))
        self._probes = probes
        self._ends = ends
        self._nonce = secrets.token_hex(16)
        self._socket: socket.socket | None = None
        self._sent_at = 0.0
        self._pending, self._total, self._stray = b"", 0, 0

    def answers(self, wait_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Answers of this run that have arrived within `wait_s`."""
        try:
            connection = self._connection()
            connection.settimeout(wait_s)
            data = connection.recv(LINE_BYTES)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            time.sleep(wait_s)
            return []
        self._total += len(data)
        if self._total > TOTAL_BYTES:
            raise _Rejected(f"more than {TOTAL_BYTES} bytes from the guest")
        *lines, self._pending = (self._pending + data).split(b"\n")
        if max(map(len, (*lines, self._pending))) > LINE_BYTES:
            raise _Rejected(f"a line of more than {LINE_BYTES} bytes from the guest")
        return [answer for line in lines if (answer := self._parsed(line))]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._pending = None, b""

    def _connection(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(_PAUSE_S)
                connection.connect(self._path)
            except OSError:
                connection.close()
                raise
            self._socket, self._sent_at = connection, 0.0
        if not self._sent_at or time.monotonic() - self._sent_at > _RESEND_S:
            self._sent_at = time.monotonic()
            # If the guest reads nothing, the buffer is full and already has the request.
            with contextlib.suppress(TimeoutError):
                self._socket.sendall(self._request())
        return self._socket

    def _request(self) -> bytes:
        """The probes with the seconds that are left of their time, within which the guest tries
        again what may pass by itself, such as a link that comes up late.
        """
        now = time.monotonic()
        probes = {
            name: {**settings, "within_s": round(max(self._ends[name] - now, 0), 1)}
            for name, settings in self._probes.items()
        }
        return json.dumps({"nonce": self._nonce, "probes": probes}).encode() + b"\n"

    def _parsed(self, line: bytes) -> tuple[str, dict[str, Any]] | None:
        """A probe and its answer; None for a line that is no answer of this run."""
        try:
            document = json.loads(line, parse_constant=_refuse_constant)
            name, answer = document["probe"], _answer(document, self._probes)
            if document["nonce"] == self._nonce:
                return name, answer
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        self._stray += 1
        if self._stray > STRAY_LINES:
            raise _Rejected(f"{self._stray} lines from the guest that are no answer")
        return None


def _answer(document: Mapping[str, Any], probes: Mapping[str, Any]) -> dict[str, Any]:
    """The checked answer to a probe that was asked; ValueError, LookupError or TypeError."""
    name, ok, detail, values = (document[key] for key in ("probe", "ok", "detail", "values"))
    if not (isinstance(ok, bool) and isinstance(detail, str) and isinstance(values, dict)):
        raise TypeError("the types of an answer")
    limits = PROBES[name] if name in probes else {}
    if name not in probes or set(values) != (set(limits) if ok else set()):
        raise LookupError("a probe that was asked, with its numbers")
    for key, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN is in no range.
        if not number or not 0 <= value <= limits[key]:
            raise ValueError("a number in range")
    text = "".join(c for c in detail[:_DETAIL_CHARACTERS] if c.isprintable())
    gpus, functions = (int(probes[name].get(key, 0)) for key in ("gpus", "functions"))
    if ok and values.get("gpus", gpus) != gpus:
        ok, text = False, f"{values['gpus']:g} GPUs compute, expected {gpus}"
    elif ok and values.get("active_ports", functions) < functions:
        ok, text = False, f"{values['active_ports']:g} ports are active, expected {functions}"
    return {"ok": ok, "detail": text, "values": values}


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _failed(detail: str, now: float) -> dict[str, Any]:
    return {"ok": False, "detail": detail, "values": {}, "seconds": round(now, 1)}
