"""Queuing the work that removes what is left in slots, wipes their disks, and proves it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.domain.act import Act
from reconciler.domain.bundle import run_bundle
from reconciler.domain.states import TaskKind
from reconciler.store import rows, tasks
from reconciler.store.lifecycle import advance
from reconciler.store.rows import Record
from reconciler.store.tables import allocations


def begin(conn: sa.Connection, slot: Record, act: Act) -> Record:
    """Into `cleanup`, under the next fence: from its first step on, the host refuses whatever run
    is still alive.
    """
    return advance(conn, "slot", slot["id"], "clean", act, columns={"fence": slot["fence"] + 1})


def wipe(conn: sa.Connection, name: str, cleaning: list[Record], act: Act) -> Record:
    """The task that cleans these slots of one node.

    name: the allocation whose machine and traces are removed with them. One that no record knows
    has no say in the records either; a slot that nobody ever had gives its own id, which is the
    name of nothing on the host.
    """
    return queue(conn, TaskKind.SLICE_WIPE, name, cleaning, act)


def queue(conn: sa.Connection, kind: TaskKind, name: str, found: list[Record], act: Act) -> Record:
    """Work on the host of an allocation, with the slots as the run contract has them."""
    query = sa.select(allocations.c.id, allocations.c.node_id).where(allocations.c.id == name)
    known = rows.first(conn, query)
    parameters: dict[str, Any] = {
        "allocation": {"id": name},
        "slots": [run_bundle(slot, fence=True) for slot in found],
    }
    return tasks.enqueue(
        conn,
        tasks.Enqueue(
            kind=kind,
            node_id=found[0]["node_id"] if found or known is None else known["node_id"],
            subject_kind="allocation" if known else "slot",
            subject_id=name if known else found[0]["id"],
            allocation_id=name if known else None,
            parameters=parameters,
            fences={slot["id"]: slot["fence"] for slot in found},
        ),
        act,
    )
