"""Periodic work of the leader: the loops run only in the process that holds the leader's term.

A loop gets an engine whose writes fail as soon as this process is no longer the leader
(`db.leader`), so it need not check that itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine

from reconciler.db.leader import Deposed, Lease, led_by
from reconciler.settings import Settings
from reconciler.work.deadlines import end_overdue
from reconciler.work.loops import (
    compare_hosts,
    forget,
    play_recovery_cases,
    recover_blocked,
    renew_certificates,
    tend_apps,
)

log = logging.getLogger("gpuaas.loops")


@dataclass(frozen=True)
class Loop:
    """Periodic work without input. every_s is the time from an end to the next start."""

    name: str
    every_s: float
    act: Callable[[Engine, Settings], object]


LOOPS: tuple[Loop, ...] = (
    Loop("overdue", 10.0, end_overdue),
    Loop("recovery", 10.0, recover_blocked),
    # Commands follow each move of a case.
    Loop("recovery_cases", 1.0, play_recovery_cases),
    Loop("drift", 10.0, compare_hosts),
    Loop("certificates", 600.0, renew_certificates),
    Loop("apps", 30.0, tend_apps),
    Loop("retention", 600.0, forget),
)


class Loops:
    """Runs the loops that are due while this process leads. lease: its current term, if any."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        lease: Callable[[], Lease | None],
        loops: Sequence[Loop] = LOOPS,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._lease = lease
        self._loops = loops
        self._due = {loop.name: 0.0 for loop in loops}
        self._stopping = threading.Event()
        # A daemon thread, because its work can be interrupted anywhere.
        self._thread = threading.Thread(target=self._run, name="loops", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.poll_s):
            self.run_due()

    def run_due(self) -> list[str]:
        """Run the loops that are due, if this process leads, and return their names."""
        done = []
        for loop in self._loops:
            lease = self._lease()
            if lease is None or self._due[loop.name] > time.monotonic():
                continue
            try:
                loop.act(led_by(self._engine, lease), self._settings)
                done.append(loop.name)
            except Deposed as deposed:
                log.warning("%s stopped: %s", loop.name, deposed)
            except Exception:
                # The failure of a loop must not stop the others.
                log.exception("%s failed; it runs again later", loop.name)
            self._due[loop.name] = time.monotonic() + loop.every_s
        return done
