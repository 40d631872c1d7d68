"""A task's own story behind a place in it: its changes of state and the lines of its runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sqlalchemy as sa

from reconciler.domain.states import TaskState
from reconciler.store import rows, tasks
from reconciler.store.leasing import DUE
from reconciler.store.rows import Record
from reconciler.store.tables import history, task_events

# Of each kind, so that no look reads a whole long past at once.
_AT_ONCE = 500
OPEN = (*DUE, TaskState.RUNNING)


@dataclass(frozen=True)
class Place:
    """The last change and the last line that a reader has."""

    change: int = 0
    line: int = 0


@dataclass(frozen=True)
class News:
    """rows: in order, each with its `type` (state, progress) and its `place`; task: as it is now.

    over: the task has ended and these are its last rows.
    """

    task: Record
    rows: list[Record]
    over: bool


def after(conn: sa.Connection, task_id: str, place: Place) -> News:
    """What came after the place. One task is written by one holder: ids are in order of time."""
    task = tasks.get(conn, task_id)
    changes = sa.select(history).where(
        history.c.entity == "task", history.c.entity_id == task_id, history.c.id > place.change
    )
    lines = sa.select(task_events).where(
        task_events.c.task_id == task_id, task_events.c.id > place.line
    )
    found = [
        {"type": kind, **row}
        for kind, query, key in (
            ("state", changes, history.c.id),
            ("progress", lines, task_events.c.id),
        )
        for row in rows.every(conn, query.order_by(key).limit(_AT_ONCE))
    ]
    whole = len(found) < _AT_ONCE
    # At the same instant the lines come first: the end of a task is written after them.
    found.sort(key=lambda row: (row["at"], row["type"]))
    for row in found:
        name = "change" if row["type"] == "state" else "line"
        place = replace(place, **{name: row["id"]})
        row["place"] = place
    return News(task, found, whole and task["state"] not in OPEN)
