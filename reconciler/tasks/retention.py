"""What is old and over goes: rows by the leader, files of runs on the machine that has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine

from reconciler.runs import collect
from reconciler.runs.errors import RunError
from reconciler.runs.paths import runs_directory
from reconciler.settings import Settings
from reconciler.store import retention
from reconciler.store.engine import reading, retrying

log = logging.getLogger("gpuaas.retention")

DAY_S = 86_400.0
# How often a machine looks through its folders of runs.
EVERY_S = 3600.0
# Transactions of one look for each kind of row: the other loops wait meanwhile.
_TRANSACTIONS = 20
# A run's folder begins with the id of its task.
_TASK_ID = len("00000000-0000-0000-0000-000000000000")
_AT_ONCE = 200


def forget(engine: Engine, settings: Settings) -> dict[str, int]:
    """The loop: rows past their age; how many of each kind."""
    works: dict[str, Callable[[Connection], int]] = {
        "events": partial(
            retention.events,
            sent_s=settings.keep_events_days * DAY_S,
            unsent_s=settings.keep_unsent_events_days * DAY_S,
        ),
        "answers": partial(retention.answers, age_s=settings.keep_answers_days * DAY_S),
        "progress": partial(retention.progress, age_s=settings.keep_progress_days * DAY_S),
    }
    gone = {name: _some(engine, work) for name, work in works.items()}
    if any(gone.values()):
        log.info("forgotten: %s", ", ".join(f"{many} {name}" for name, many in gone.items()))
    return gone


def _some(engine: Engine, work: Callable[[Connection], int]) -> int:
    total = 0
    for _ in range(_TRANSACTIONS):
        found = retrying(engine, work)
        total += found
        if found < retention.AT_ONCE:
            break
    return total


def tidy(engine: Engine, settings: Settings, stopping: threading.Event) -> list[str]:
    """Delete this machine's folders of runs whose tasks ended long ago; their names.

    Folders of tasks that the records do not know stay: the records may be an old copy.
    """
    root = runs_directory(settings.state_dir)
    folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    gone: list[str] = []
    for start in range(0, len(folders), _AT_ONCE):
        some = folders[start : start + _AT_ONCE]
        ids = {folder.name[:_TASK_ID] for folder in some}
        with reading(engine) as conn:
            done = retention.done(conn, ids, age_s=settings.keep_runs_days * DAY_S)
        for folder in some:
            if stopping.is_set():
                return gone
            if folder.name[:_TASK_ID] in done and _discarded(folder):
                gone.append(folder.name)
    if gone:
        log.info("deleted the files of %d runs", len(gone))
    return gone


def tidy_on(engine: Engine, settings: Settings, stopping: threading.Event) -> None:
    """Look every so often, until stopping."""
    while not stopping.is_set():
        try:
            tidy(engine, settings, stopping)
        except Exception:
            log.exception("deleting old runs failed; trying again")
        stopping.wait(EVERY_S)


def _discarded(folder: Path) -> bool:
    try:
        collect.discard(folder)
    except RunError as alive:
        # Its task was given up, and it goes on all the same, in AWX perhaps.
        log.warning("run %s is kept: %s", folder.name, alive)
        return False
    return True
