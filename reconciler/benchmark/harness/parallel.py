"""Timing of the same work on all CPUs at the same time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from reconciler.benchmark.harness.reasons import Failed


def on_all_cpus(prepare: Callable[[], Callable[[], Any]], repetitions: int) -> list[float]:
    """Seconds of each repetition, from the common start to the end of the last process.

    A process is pinned to each usable CPU. prepare() runs in each process before the measurement
    and returns the work.
    """
    cpus = sorted(os.sched_getaffinity(0))
    workers = [_Worker(cpu, prepare) for cpu in cpus]
    try:
        for worker in workers:
            worker.wait()
        seconds = []
        for _ in range(repetitions):
            began = time.perf_counter()
            for worker in workers:
                worker.go()
            for worker in workers:
                worker.wait()
            seconds.append(time.perf_counter() - began)
        return seconds
    finally:
        # Dismiss all before joining any: a process inherits the pipes of earlier processes.
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.join()


class _Worker:
    """A process that runs its work once for each byte it receives, and answers with a byte."""

    def __init__(self, cpu: int, prepare: Callable[[], Callable[[], Any]]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._commands)
            os.close(self._answers)
            _serve(cpu, prepare, commands, answers)
        os.close(commands)
        os.close(answers)

    def go(self) -> None:
        # `wait` reports a process that has died.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, b".")

    def wait(self) -> None:
        if os.read(self._answers, 1) != b".":
            raise Failed(
                "worker_died",
                expected="every CPU's process to finish its work",
                found="a process ended early; its message is on standard error",
                remedy="check the machine for memory pressure",
            )

    def dismiss(self) -> None:
        os.close(self._commands)
        os.close(self._answers)

    def join(self) -> None:
        os.waitpid(self._pid, 0)


def _serve(cpu: int, prepare: Callable[[], Callable[[], Any]], commands: int, answers: int) -> None:
    try:
        os.sched_setaffinity(0, {cpu})
        work = prepare()
        os.write(answers, b".")
        while os.read(commands, 1):
            work()
            os.write(answers, b".")
    except BaseException as error:
        os.write(2, f"worker on CPU {cpu}: {error!r}\n".encode())
    finally:
        os._exit(0)
