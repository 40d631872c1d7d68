"""The order in which rows are locked, so that of two who need the same ones none waits for ever:

    allocation, node, slots by their id, task.

A launch is on nobody's way: it locks free slots and, behind them, the node's key only (KEY SHARE),
which those who change a node leave free. Whoever is found in another order all the same is ended by
the database and repeated (store.engine.retrying; a worker attends its task anew).

The node is locked before it is asked whether one of its slots may be sold: its boot, installation,
mode and state then stand until the answer is committed (I16). Locked to be changed rather than to
be shared: of two who share it, none could change it.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.journal import ENTITIES
from reconciler.db.schema import Allocation, Node, Slot, Task, slots
from reconciler.model.errors import Problem


def hold_node(conn: sa.Connection, node_id: str) -> Node:
    """The node, still until this transaction ends."""
    return rows.get(conn, Node, node_id, lock=True)


def hold_slot(conn: sa.Connection, slot_id: str) -> Slot:
    """The slot, and before it its node."""
    hold_node(conn, rows.get(conn, Slot, slot_id).node_id)
    return rows.get(conn, Slot, slot_id, lock=True)


def hold_slots(conn: sa.Connection, node_id: str) -> list[Slot]:
    """All slots of a node, and before them the node: no launch is under way on it then."""
    hold_node(conn, node_id)
    query = sa.select(slots).where(slots.c.node_id == node_id)
    return rows.every(conn, query.order_by(slots.c.id).with_for_update(), Slot)


def hold_allocation(conn: sa.Connection, allocation_id: str) -> Allocation:
    """The allocation, and behind it its node."""
    allocation = rows.get(conn, Allocation, allocation_id, lock=True)
    hold_node(conn, allocation.node_id)
    return allocation


def hold_task(conn: sa.Connection, task_id: str) -> Task:
    """The task, and before it the allocation or the node that it is about. Not its slots: whoever
    locks one and goes on to its task has come past the same allocation or node.
    """
    task = rows.get(conn, Task, task_id)
    if task.allocation_id:
        hold_allocation(conn, task.allocation_id)
    else:
        hold_node(conn, task.node_id)
    return rows.get(conn, Task, task_id, lock=True)


def require_generation(
    conn: sa.Connection, entity: str, key: str, generations: Collection[int]
) -> None:
    """Hold the record until the transaction ends; refuse unless it is at one of these."""
    if entity == "slot":
        # What is asked for may have to judge it.
        hold_slot(conn, key)
    elif entity == "task":
        # Its end changes what it is about, and that is locked first.
        hold_task(conn, key)
    found = rows.get(conn, ENTITIES[entity].kind, key, lock=True).generation
    if found not in generations:
        raise Problem(
            "precondition_failed",
            412,
            expected=f"{entity} {key} at the generation that If-Match names",
            found=f"generation {found}",
            remedy=f"read the {entity} again, decide anew, and send its ETag",
            detail={"generation": found},
        )
