"""Readiness probes, run inside a guest: they answer the host over a virtio-serial port.

The cloud seed carries this file into the guest, so it imports the standard library only. The host
sends a line with a nonce and the probes; the guest answers a line for each probe, with that nonce.
The probes run side by side, each in a process of its own, because a broken driver may hang or crash
it. A probe that may still pass is tried again until shortly before its deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

PORT = "/dev/virtio-ports/org.gpuaas.readiness.0"
_LINE_BYTES = 65536
_PAUSE_S = 2.0
_TIMEOUT_S = 300.0
# What a last try and the host's next look take; the host asks again every 10 s.
_MARGIN_S = 45.0
_DETAIL_CHARACTERS = 300
_DEVICES = Path("/sys/bus/pci/devices")

# CUDA's error while the Fabric Manager of the host has not brought NVLink up.
_SYSTEM_NOT_READY = 802
# Bytes written to each GPU's memory and read back.
_SAMPLE_BYTES = 64 << 20

# Registers of QEMU's edu device, the stand-in for a GPU (QEMU: docs/specs/edu.rst).
_EDU = ("0x1234", "0x11e8")
_EDU_LIVENESS, _EDU_FACTORIAL, _EDU_STATUS, _EDU_BYTES = 0x04, 0x08, 0x20, 4096
_EDU_SOURCE, _EDU_TARGET, _EDU_COUNT, _EDU_COMMAND = 0x80, 0x88, 0x90, 0x98
_EDU_RUN, _EDU_TO_MEMORY, _EDU_BUFFER = 0x1, 0x2, 0x40000
# A page has room for both ends of a copy.
_EDU_SAMPLE = 2048
# The command register of PCI's configuration space, and its bit that lets a device reach memory.
_COMMAND, _BUS_MASTER = 0x04, 0x4

Values = dict[str, float]


class Failed(Exception):
    """A probe that did not pass, with the reason."""


class NotYet(Failed):
    """As Failed, for a reason outside of the guest that may pass."""


def egress(settings: Mapping[str, Any]) -> Values:
    """A TCP connection to an address outside."""
    host, port = str(settings["target"]).rsplit(":", 1)
    begin = time.monotonic()
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            return {"seconds": round(time.monotonic() - begin, 3)}
    except OSError as problem:
        raise NotYet(_named(problem)) from problem


def gpu_compute(settings: Mapping[str, Any]) -> Values:
    """Every GPU of the guest computes and keeps what is written to its memory."""
    return _edu() if settings["driver"] == "edu" else _cuda()


def rdma(settings: Mapping[str, Any]) -> Values:
    """RDMA devices by ibv_devinfo, with an active port for each function of the guest."""
    done = subprocess.run(["ibv_devinfo"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Failed(f"ibv_devinfo ends with {done.returncode}: {done.stderr.strip()}")
    devices = len(re.findall(r"^hca_id:", done.stdout, re.MULTILINE))
    active = len(re.findall(r"^\s*state:\s+PORT_ACTIVE", done.stdout, re.MULTILINE))
    needed = max(int(settings.get("functions", 1)), 1)
    if active < needed:
        raise NotYet(f"{devices} RDMA devices, {active} of {needed} ports active")
    return {"devices": devices, "active_ports": active}


PROBES: Mapping[str, Callable[[Mapping[str, Any]], Values]] = {
    "egress": egress,
    "gpu_compute": gpu_compute,
    "rdma": rdma,
}


def _cuda() -> Values:
    """cuInit, then a pattern in the memory of each device. nvidia-smi can pass without cuInit."""
    library = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if result := getattr(library, name)(*arguments):
            text = ctypes.c_char_p()
            library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text))
            failure = NotYet if result == _SYSTEM_NOT_READY else Failed
            raise failure(f"{name}: error {result} {(text.value or b'').decode(errors='replace')}")

    call("cuInit", ctypes.c_uint(0))
    count, memory = ctypes.c_int(), 0
    call("cuDeviceGetCount", ctypes.byref(count))
    for index in range(count.value):
        device, context, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        address, size = ctypes.c_ulonglong(), ctypes.c_size_t(_SAMPLE_BYTES)
        call("cuMemAlloc_v2", ctypes.byref(address), size)
        call("cuMemsetD8_v2", address, ctypes.c_ubyte(0xA5), size)
        back = ctypes.create_string_buffer(_SAMPLE_BYTES)
        call("cuMemcpyDtoH_v2", back, address, size)
        if back.raw.count(b"\xa5") != _SAMPLE_BYTES:
            raise Failed(f"GPU {index} does not keep what is written to its memory")
        call("cuMemFree_v2", address)
        call("cuDevicePrimaryCtxRelease_v2", device)
        memory += total.value
    return {"gpus": count.value, "memory_bytes": memory}


def _edu() -> Values:
    """Each edu device computes 10! and keeps what is written to its buffer. It is left as a scrub
    leaves it.
    """
    gpus = 0
    for device in sorted(_DEVICES.iterdir()):
        if tuple((device / name).read_text().strip() for name in ("vendor", "device")) != _EDU:
            continue
        (device / "enable").write_text("1")
        _let_reach_memory(device)
        descriptor = os.open(device / "resource0", os.O_RDWR | os.O_SYNC)
        with mmap.mmap(descriptor, _EDU_BYTES) as registers:
            os.close(descriptor)
            with memoryview(registers) as view, view.cast("I") as words, view.cast("Q") as longs:
                _edu_computes(device.name, words)
                _edu_remembers(device.name, words, longs)
        gpus += 1
    return {"gpus": gpus, "memory_bytes": gpus * 2 * _EDU_SAMPLE}


def _let_reach_memory(device: Path) -> None:
    with (device / "config").open("r+b", buffering=0) as config:
        config.seek(_COMMAND)
        command = int.from_bytes(config.read(2), "little") | _BUS_MASTER
        config.seek(_COMMAND)
        config.write(command.to_bytes(2, "little"))


def _edu_computes(name: str, words: memoryview) -> None:
    inverse = 0xFFFFFFFF - _edu_store(words, _EDU_LIVENESS, 0x12345678)
    factorial = _edu_store(words, _EDU_FACTORIAL, 10)
    _edu_store(words, _EDU_LIVENESS, 0xFFFFFFFF)
    _edu_store(words, _EDU_FACTORIAL, 0)
    if (inverse, factorial) != (0x12345678, 3628800):
        raise Failed(f"{name} computes {factorial} for 10!")


def _edu_remembers(name: str, words: memoryview, longs: memoryview) -> None:
    """Copy a pattern into both halves of the buffer and back, then zeros."""

    def copy(source: int, target: int, command: int = 0) -> None:
        longs[_EDU_SOURCE // 8], longs[_EDU_TARGET // 8] = source, target
        longs[_EDU_COUNT // 8] = _EDU_SAMPLE
        longs[_EDU_COMMAND // 8] = command | _EDU_RUN
        _edu_wait(words, _EDU_COMMAND)

    with mmap.mmap(-1, _EDU_BYTES) as page:
        base, pattern = _physical_address(page), os.urandom(_EDU_SAMPLE)
        for half in (_EDU_BUFFER, _EDU_BUFFER + _EDU_SAMPLE):
            page[:_EDU_SAMPLE] = pattern
            copy(base, half)
            copy(half, base + _EDU_SAMPLE, _EDU_TO_MEMORY)
            kept = page[_EDU_SAMPLE:] == pattern
            page[:] = bytes(_EDU_BYTES)
            copy(base, half)
            if not kept:
                raise Failed(f"{name} does not keep what is written to its memory")


def _physical_address(page: mmap.mmap) -> int:
    """The page's present address on the bus: a guest has no IOMMU. The page is not swapped out."""
    anchor = ctypes.c_char.from_buffer(page)
    address = ctypes.addressof(anchor)
    del anchor
    page[:] = bytes(_EDU_BYTES)
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), _EDU_BYTES):
        raise OSError(ctypes.get_errno(), "mlock")
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // _EDU_BYTES * 8)
        entry = int.from_bytes(pagemap.read(8), "little")
    frame = entry & ((1 << 55) - 1)
    if not entry >> 63 or not frame:
        raise Failed("the kernel hides where memory is: the probe runs as root")
    return frame * _EDU_BYTES


def _edu_store(words: memoryview, register: int, value: int) -> int:
    """Write a register, and read it when the device no longer computes."""
    words[register // 4] = value
    _edu_wait(words, _EDU_STATUS)
    return int(words[register // 4])


def _edu_wait(words: memoryview, register: int) -> None:
    """Wait for the register's first bit, by which the device says that it works, to be cleared."""
    end = time.monotonic() + 20
    while words[register // 4] & 1:
        if time.monotonic() > end:
            raise Failed("the device works for 20 s without an end")
        time.sleep(0.01)


def run(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a probe, in this process."""
    try:
        return {"ok": True, "detail": "", "values": PROBES[name](settings)}
    except Exception as problem:
        detail = str(problem) if isinstance(problem, Failed) else _named(problem)
        again = {"again": True} if isinstance(problem, NotYet) else {}
        return {"ok": False, "detail": detail[:_DETAIL_CHARACTERS], "values": {}, **again}


def _apart(probes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each probe with its result as it comes, in a process of its own with a time limit."""
    running = {}
    for name, settings in probes.items():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _answer(name, settings, writer)
        os.close(writer)
        running[reader] = (name, child)
    end = time.monotonic() + _TIMEOUT_S
    while running:
        ready = select.select([*running], [], [], max(end - time.monotonic(), 0))[0]
        for reader in ready or [*running]:
            name, child = running.pop(reader)
            text = os.read(reader, _LINE_BYTES) if ready else b""
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            why = "ended without an answer" if ready else f"no answer within {_TIMEOUT_S:g} s"
            yield name, json.loads(text) if text else {"ok": False, "detail": why, "values": {}}
    _reap()


def _reap() -> None:
    """Forget processes that have ended. One that hangs in a driver does not, and is not waited
    for.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(name: str, settings: Mapping[str, Any], writer: int) -> NoReturn:
    try:
        # A process that hangs must not keep the port.
        os.closerange(3, writer)
        os.closerange(writer + 1, 1 << 16)
        os.write(writer, json.dumps(run(name, settings)).encode())
    finally:
        os._exit(0)


def _results(probes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each probe with its result. What may still pass is tried again until shortly before its
    deadline, so that the host hears the reason.
    """
    begin, pending = time.monotonic(), dict(probes)
    while pending:
        for name, result in _apart(dict(pending)):
            left = probes[name].get("within_s", 0) - (time.monotonic() - begin)
            if not (result.pop("again", False) and left > _MARGIN_S):
                del pending[name]
                yield name, result
        if pending:
            time.sleep(_PAUSE_S)


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


class Service:
    """Answers to requests. A repeated nonce gets the same answers without new probes."""

    def __init__(self) -> None:
        self._nonce = ""
        self._answers: list[dict[str, Any]] = []

    def handle(self, line: bytes, send: Callable[[bytes], None]) -> None:
        try:
            request = json.loads(line)
            nonce, probes = str(request["nonce"]), dict(request["probes"])
        except (ValueError, LookupError, TypeError):
            return  # half a line, from before a connection ended
        if nonce != self._nonce:
            self._nonce, self._answers = nonce, []
            for name, result in _results({n: s for n, s in probes.items() if n in PROBES}):
                answer = {"nonce": nonce, "probe": name, **result}
                self._answers.append(answer)
                send(json.dumps(answer).encode() + b"\n")
            return
        for answer in self._answers:
            send(json.dumps(answer).encode() + b"\n")


def serve(path: str) -> None:
    """Answer requests as long as the port exists."""
    while not Path(path).exists():
        time.sleep(_PAUSE_S)
    service, pending = Service(), b""
    descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY)

    def send(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    while True:
        data = os.read(descriptor, 4096)
        if not data:  # the host is not connected
            pending = b""
            _reap()
            time.sleep(_PAUSE_S)
            continue
        *lines, pending = (pending + data).split(b"\n")
        pending = pending[-_LINE_BYTES:]
        # While the guest booted the host has repeated its request. Only the newest has the time
        # that is left.
        if lines and not select.select([descriptor], [], [], 0)[0]:
            service.handle(lines[-1], send)


def main(arguments: list[str]) -> int:
    serve(arguments[0] if arguments else PORT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
