"""CPU probe: integer and floating-point work with known results."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

from reconciler.benchmark.harness.parallel import on_all_cpus
from reconciler.benchmark.harness.reasons import Failed
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.harness.series import metric

# A linear congruential generator (Knuth's MMIX constants), whose steps depend on each other.
_FACTOR, _TERM, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
_RATIO = 1 - 1e-6


def deadline_s(request: Request) -> float:
    # For a core ten times slower than the reference of the default size.
    return 30 + 3 * (request.repetitions + 1) * request.cpu_steps / 800_000


def measure(request: Request) -> dict[str, Any]:
    """Steps per second of a single CPU (integer, float) and of all usable CPUs (integer)."""
    steps, rounds = request.cpu_steps, request.repetitions
    all_cpus = len(os.sched_getaffinity(0))
    shared = on_all_cpus(lambda: lambda: integer(steps), rounds)
    return {
        "tool": {"name": "cpython", "version": platform.python_version()},
        "subject": "",
        "workload": {"steps": steps, "repetitions": rounds},
        "metrics": [
            metric("cpu.integer", "Mstep/s", _rates(integer, steps, rounds)),
            metric("cpu.float", "Mstep/s", _rates(floating, steps, rounds)),
            metric(
                "cpu.integer_all",
                "Mstep/s",
                [all_cpus * steps / seconds / 1e6 for seconds in shared],
                workers=all_cpus,
            ),
        ],
    }


def integer(steps: int) -> None:
    """`steps` multiplications and additions modulo 2^64."""
    value = 0
    for _ in range(steps):
        value = (value * _FACTOR + _TERM) & _MASK
    _check("integer", value == jumped(steps), value)


def floating(steps: int) -> None:
    """`steps` multiplications and additions of doubles: a geometric series."""
    value = 0.0
    for _ in range(steps):
        value = value * _RATIO + 1.0
    exact = -math.expm1(steps * math.log1p(-1e-6)) / 1e-6
    _check("float", math.isclose(value, exact, rel_tol=1e-6), value)


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


def _rates(work: Callable[[int], None], steps: int, rounds: int) -> list[float]:
    rates = []
    work(steps)  # warm up: clock speed and the interpreter's specialisation
    for _ in range(rounds):
        began = time.perf_counter()
        work(steps)
        rates.append(steps / (time.perf_counter() - began) / 1e6)
    return rates


def _check(kind: str, right: bool, value: object) -> None:
    if not right:
        raise Failed(
            "result_wrong",
            expected=f"the known result of the {kind} work",
            found=str(value),
            remedy="this CPU miscalculates: take the machine out of service",
        )
