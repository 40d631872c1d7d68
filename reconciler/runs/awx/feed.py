"""The events of a job, in order and once, as the run's progress and output.

AWX saves events with several hands: a later one may be seen before an earlier one, and one may
never come. Each is waited for, but not for ever.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reconciler.runs.events import Recorder
from reconciler.runs.paths import RunPaths


class Feed:
    """Begins with the job's first event each time; progress written before is not written again."""

    def __init__(self, paths: RunPaths, gap_s: float) -> None:
        self.recorder = Recorder(paths.progress, written=_whole_lines(paths.progress))
        self.missing = 0
        # Of the last event that was passed on: what comes next is asked for from here.
        self.counter = 0
        self._gap_s = gap_s
        self._gap_since: float | None = None
        self._early: dict[int, dict[str, Any]] = {}
        paths.output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.output.write_text("")
        self._output = paths.output

    def take(self, events: Iterable[dict[str, Any]], *, last: bool) -> None:
        """last: nothing more will come, so nothing is waited for."""
        for event in events:
            number = event.get("counter")
            if isinstance(number, int) and number > self.counter:
                self._early[number] = event
        while self._early:
            number = min(self._early)
            if number > self.counter + 1 and not last and self._wait():
                return
            self.missing += number - self.counter - 1
            self._gap_since = None
            self._pass(self._early.pop(number))
            self.counter = number

    def _wait(self) -> bool:
        now = time.monotonic()
        self._gap_since = now if self._gap_since is None else self._gap_since
        return now - self._gap_since < self._gap_s

    def _pass(self, event: dict[str, Any]) -> None:
        self.recorder(event)
        if said := event.get("stdout"):
            with self._output.open("a", encoding="utf-8", errors="replace") as handle:
                handle.write(f"{said}\n")


def _whole_lines(progress: Path) -> int:
    """How many lines stand there; a piece of one, left by a crash, is closed off."""
    try:
        text = progress.read_bytes()
    except FileNotFoundError:
        return 0
    if text and not text.endswith(b"\n"):
        with progress.open("ab") as handle:
            handle.write(b"\n")
    return sum(1 for line in text.splitlines() if _is_document(line))


def _is_document(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
