"""Progress display for long work: subject, elapsed time and the duration of the last time."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.paths import cache_folder

# A line every ten seconds keeps a log readable. On a terminal, the line is rewritten each second.
LOG_INTERVAL = 10.0
TERMINAL_INTERVAL = 1.0
# Images are built beside each other.
_REMEMBERING = threading.Lock()


def _history() -> Path:
    return cache_folder() / "durations.json"


def last_duration(what: str) -> float | None:
    """Return the seconds that this work took when it last succeeded on this machine."""
    try:
        return float(json.loads(_history().read_text())[what])
    except (OSError, ValueError, KeyError):
        return None


def _remember(what: str, seconds: float) -> None:
    path = _history()
    with _REMEMBERING:
        try:
            durations = json.loads(path.read_text())
        except (OSError, ValueError):
            durations = {}
        durations[what] = round(seconds, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(durations, indent=1, sort_keys=True) + "\n")


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show progress of the enclosed work on stderr and record its duration."""
    before = last_duration(what)
    hint = f" (last time {before:.0f} s)" if before is not None else ""
    terminal = sys.stderr.isatty()
    started = time.monotonic()
    finished = threading.Event()

    def tick() -> None:
        while not finished.wait(TERMINAL_INTERVAL if terminal else LOG_INTERVAL):
            text = f"  … {what}: {time.monotonic() - started:.0f} s{hint}"
            print(
                f"\r{text}\x1b[K" if terminal else text,
                end="" if terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    print(f"  → {what}{hint}", end="" if terminal else "\n", file=sys.stderr, flush=True)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    outcome = "✗"
    try:
        yield
        outcome = "✓"
    finally:
        finished.set()
        ticker.join()
        seconds = time.monotonic() - started
        lead = "\r\x1b[K" if terminal else ""
        print(f"{lead}  {outcome} {what}: {seconds:.1f} s", file=sys.stderr, flush=True)
    _remember(what, seconds)
