"""CPU and memory probes: arithmetic with known results, and bandwidth of libc's memmove."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import multiprocessing
import os
import platform
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconciler.benchmark.harness.probe import Failed, Request, Unavailable, ensure_result, metric

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Work = Callable[[], object]

# A linear congruential generator (Knuth's MMIX constants), whose steps depend on each other.
_FACTOR, _TERM, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
_RATIO = 1 - 1e-6
# Passes over the memory per sample. A single pass over a small buffer is too short to measure.
_PASSES = 4


def cpu_deadline_s(request: Request) -> float:
    # For a core ten times slower than the reference of the default size, and the start of the probe
    # on one that is emulated.
    return 120 + 3 * (request.repetitions + 1) * request.cpu_steps / 800_000


def measure_cpu(request: Request) -> dict[str, Any]:
    """Steps per second of a single CPU (integer, float) and of all usable CPUs (integer)."""
    steps, rounds = request.cpu_steps, request.repetitions
    cpus = len(os.sched_getaffinity(0))
    shared = time_on_all_cpus(lambda: partial(integer, steps), rounds)
    metrics = []
    for name, work in (("cpu.integer", integer), ("cpu.float", floating)):
        work(steps)  # warm up: clock speed and the interpreter's specialisation
        rates = [steps / seconds / 1e6 for seconds in _timed(partial(work, steps), rounds)]
        metrics.append(metric(name, "Mstep/s", rates))
    rates = [cpus * steps / seconds / 1e6 for seconds in shared]
    return {
        "tool": {"name": "cpython", "version": platform.python_version()},
        "workload": {"steps": steps, "repetitions": rounds},
        "metrics": [*metrics, metric("cpu.integer_all", "Mstep/s", rates, workers=cpus)],
    }


def memory_deadline_s(request: Request) -> float:
    # For 0.5 GB/s per CPU on a shared slow memory; the preparation writes the buffers once.
    return 120 + 2 * (request.repetitions + 2) * _PASSES * request.memory_bytes / 5e8


def measure_memory(request: Request) -> dict[str, Any]:
    """Bytes copied per second, counted once, by a single CPU and by all usable CPUs."""
    size, rounds = request.memory_bytes, request.repetitions
    cpus = len(os.sched_getaffinity(0))
    _ensure_memory(2 * size * cpus)
    moved = _PASSES * size / 1e9
    # The buffers of the first measurement are gone when the second begins.
    single = [moved / seconds for seconds in _timed(_warm_copy(size), rounds)]
    shared = time_on_all_cpus(lambda: _warm_copy(size), rounds)
    rates = [cpus * moved / seconds for seconds in shared]
    return {
        "tool": {"name": "libc memmove", "version": " ".join(platform.libc_ver()) or "unknown"},
        "workload": {"buffer_bytes": size, "passes": _PASSES, "repetitions": rounds},
        "metrics": [
            metric("memory.copy", "GB/s", single),
            metric("memory.copy_all", "GB/s", rates, workers=cpus),
        ],
    }


def integer(steps: int) -> None:
    """`steps` multiplications and additions modulo 2^64."""
    value = 0
    for _ in range(steps):
        value = (value * _FACTOR + _TERM) & _MASK
    _ensure_calculated("integer", value == jumped(steps), value)


def floating(steps: int) -> None:
    """`steps` multiplications and additions of doubles: a geometric series."""
    value = 0.0
    for _ in range(steps):
        value = value * _RATIO + 1.0
    exact = -math.expm1(steps * math.log1p(-1e-6)) / 1e-6
    _ensure_calculated("float", math.isclose(value, exact, rel_tol=1e-6), value)


def jumped(steps: int) -> int:
    """The generator's state after `steps`, by repeated squaring: no loop shared with the work."""
    factor, term, state = _FACTOR, _TERM, 0
    while steps:
        if steps & 1:
            state = (state * factor + term) & _MASK
        term = (factor + 1) * term & _MASK
        factor = factor * factor & _MASK
        steps >>= 1
    return state


def _ensure_calculated(kind: str, right: bool, value: object) -> None:
    remedy = "this CPU miscalculates: take the machine out of service"
    expected = f"the known result of the {kind} work"
    ensure_result(right, expected=expected, found=str(value), remedy=remedy)


def _warm_copy(size: int) -> Work:
    """Work that copies between two populated buffers of `size` bytes.

    A first pass has set up the page tables and raised the clock speed.
    """
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    source_address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    target_address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    ctypes.memset(source_address, 0xA5, size)
    ctypes.memset(target_address, 0, size)

    def copy() -> None:
        for _ in range(_PASSES):
            ctypes.memmove(target_address, source_address, size)
        # These references keep both buffers mapped while this function exists.
        ensure_result(
            target[0] == source[0] and target[size - 1] == source[size - 1],
            expected="the target to hold what was copied",
            found="other bytes",
            remedy="test the memory of this machine",
        )

    copy()
    return copy


def _ensure_memory(size: int) -> None:
    """Use at most half of the available memory, so that the measurement causes no swapping."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else 0
    if size > available // 2:
        raise Unavailable(
            "memory_short",
            expected=f"{2 * size} bytes of available memory",
            found=f"{available} bytes",
            remedy="capture on an idle machine, or use a smaller size for all captures",
        )


def _timed(work: Work, repetitions: int) -> list[float]:
    """Seconds of each repetition."""
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def time_on_all_cpus(prepare: Callable[[], Work], repetitions: int) -> list[float]:
    """Seconds of each repetition, from the common start to the end of the last process.

    A process is pinned to each usable CPU. prepare() runs in each process before the measurement
    and returns the work. Failed `worker_died`.
    """
    fork = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    processes = []

    def wait() -> None:
        for connection in connections:
            connection.recv_bytes()

    def work() -> None:
        for connection in connections:
            connection.send_bytes(b".")
        wait()

    try:
        for cpu in sorted(os.sched_getaffinity(0)):
            connection, remote = fork.Pipe()
            connections.append(connection)
            processes.append(fork.Process(target=_serve, args=(cpu, prepare, remote, connections)))
            processes[-1].start()
            remote.close()
        wait()
        return _timed(work, repetitions)
    except (EOFError, ConnectionError) as error:
        raise Failed(
            "worker_died",
            expected="every CPU's process to finish its work",
            found="a process ended early; its message is on standard error",
            remedy="check the machine for memory pressure",
        ) from error
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()


def _serve(
    cpu: int, prepare: Callable[[], Work], remote: Connection, inherited: list[Connection]
) -> None:
    """Run the work once for each message, until the connection is closed."""
    # A copy of the other end in this process would hide that it was closed.
    for connection in inherited:
        connection.close()
    os.sched_setaffinity(0, {cpu})
    work = prepare()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            remote.send_bytes(b".")
            remote.recv_bytes()
            work()
