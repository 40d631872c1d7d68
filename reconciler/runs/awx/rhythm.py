"""When to ask AWX again: patiently while it is silent, at once when something is wanted of us."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from reconciler.runs.paths import RunPaths

_SLICE_S = 0.1


@dataclass(frozen=True)
class Pace:
    """Seconds.

    every: between two looks. quiet: after which a request for a job that is nowhere to be seen was
    never carried out. AWX gives up a request after 120 s: a lower value could start a job twice.
    gap: a missing event is waited for. saving: events may come after the end of the job. again:
    between two requests to cancel. forsaken: past its deadline a run that cannot be seen is lost.
    """

    every: float = 2.0
    longest: float = 30.0
    quiet: float = 180.0
    gap: float = 15.0
    saving: float = 60.0
    again: float = 10.0
    forsaken: float = 86_400.0


class Leaving(Exception):
    """We were told to go; the job goes on, and whoever looks next follows it."""


class Rhythm:
    """told: whether this process or this run was asked to end; the file `cancel` means the run."""

    def __init__(self, paths: RunPaths, told: Callable[[], bool], pace: Pace) -> None:
        self._paths = paths
        self._told = told
        self._pace = pace
        self._pause = pace.every
        self._said = ""

    @property
    def canceled(self) -> bool:
        return self._paths.cancel.exists()

    def answered(self) -> None:
        if self._said:
            self._say("AWX answers again")
        self._said, self._pause = "", self._pace.every

    def silent(self, error: Exception) -> None:
        """Wait longer each time; what is wrong is said once, in the log of the run's process."""
        if str(error) != self._said:
            self._said = str(error)
            self._say(self._said)
        self.rest(self._pause)
        self._pause = min(self._pause * 2, self._pace.longest)

    def rest(self, seconds: float | None = None) -> None:
        until = time.monotonic() + (self._pace.every if seconds is None else seconds)
        asked = self.canceled
        while time.monotonic() < until:
            if self._told() and not self.canceled:
                raise Leaving
            if self.canceled != asked:
                return
            time.sleep(min(_SLICE_S, self._pace.every))

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
