"""The same work on several CPUs at once, timed from the start of all to the end of the last."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from reconciler.benchmark.harness.reasons import Failed


def together(prepare: Callable[[], Callable[[], Any]], repetitions: int) -> list[float]:
    """Seconds of each repetition with one process pinned to each usable CPU.

    prepare() runs in each process before the clock does and returns the work.
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
        # All first: each process also holds the question pipes of those made before it.
        for worker in workers:
            worker.dismiss()
        for worker in workers:
            worker.join()


class _Worker:
    """A process that does its work once for each byte it gets, and answers each with a byte."""

    def __init__(self, cpu: int, prepare: Callable[[], Callable[[], Any]]) -> None:
        asked, self._ask = os.pipe()
        self._answered, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._ask)
            os.close(self._answered)
            _serve(cpu, prepare, asked, answer)
        os.close(asked)
        os.close(answer)

    def go(self) -> None:
        # `wait` reports a process that is gone.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._ask, b".")

    def wait(self) -> None:
        if os.read(self._answered, 1) != b".":
            raise Failed(
                "worker_died",
                expected="every CPU's process to finish its work",
                found="one ended early; its message is on standard error",
                remedy="look for memory pressure on the machine",
            )

    def dismiss(self) -> None:
        os.close(self._ask)
        os.close(self._answered)

    def join(self) -> None:
        os.waitpid(self._pid, 0)


def _serve(cpu: int, prepare: Callable[[], Callable[[], Any]], asked: int, answer: int) -> None:
    try:
        os.sched_setaffinity(0, {cpu})
        work = prepare()
        os.write(answer, b".")
        while os.read(asked, 1):
            work()
            os.write(answer, b".")
    except BaseException as error:
        os.write(2, f"worker on CPU {cpu}: {error!r}\n".encode())
    finally:
        os._exit(0)
