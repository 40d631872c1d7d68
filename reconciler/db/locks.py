"""Row locks as scopes, in the order in which every transaction takes them:

    allocation, node, slots by their id, task.

Two transactions that need the same rows then never wait for each other in a circle. A scope shows
which rows are locked while its body runs; the database releases them when the transaction ends. A
scope inside another scope may lock what is locked already, or what comes later in the order.
Anything else raises `LockOrderError`, on both engines.

A launch blocks nobody: it locks free slots and, after them, only the key of their node (KEY
SHARE), which does not conflict with a change of the node. A transaction that the database ends
because of a deadlock all the same is repeated (`db.engine.retrying`; a worker attends its task
anew).

The node is locked before it is decided whether one of its slots may be sold: its boot,
installation, mode and state then stay as they are until the decision is committed (I16). The lock
is exclusive, because of two transactions that share a row neither could change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.journal import ENTITIES
from reconciler.db.schema import Allocation, IngressRule, Node, Slot, Task
from reconciler.db.schema import slots as slot_table
from reconciler.model.errors import Problem

_OPEN = "gpuaas_lock_scopes"


class LockOrderError(RuntimeError):
    """A scope was entered against the order: a mistake in the code, not a matter of data."""


class _Rank(IntEnum):
    ALLOCATION = 0
    NODE = 1
    SLOT = 2
    TASK = 3


def take_turn(conn: sa.Connection, name: str) -> None:
    """Wait until no other transaction has taken the turn of this name.

    It is for counts that no row stands for. SQLite has one writer at a time anyway.
    """
    if conn.dialect.name == "postgresql":
        key = sa.func.hashtextextended(f"gpuaas {name}", 0)
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))


@contextmanager
def node(conn: sa.Connection, node_id: str) -> Iterator[Node]:
    """Lock a node."""
    with _scope(conn, _Rank.NODE, node_id):
        yield rows.get(conn, Node, node_id, lock=True)


@contextmanager
def free_node(conn: sa.Connection, node_id: str) -> Iterator[Node | None]:
    """Lock a node unless another transaction has locked it; None then."""
    query = sa.select(Node.TABLE).where(Node.TABLE.c.id == node_id)
    with _scope(conn, _Rank.NODE, node_id):
        locked = query.with_for_update(key_share=True, skip_locked=True)
        yield rows.first(conn, locked, Node)


@contextmanager
def slot(conn: sa.Connection, slot_id: str) -> Iterator[Slot]:
    """Lock a slot, and its node before it."""
    node_id = rows.get(conn, Slot, slot_id).node_id
    with node(conn, node_id), _scope(conn, _Rank.SLOT, slot_id):
        yield rows.get(conn, Slot, slot_id, lock=True)


@contextmanager
def slots(conn: sa.Connection, node_id: str) -> Iterator[list[Slot]]:
    """Lock a node and then all of its slots: no launch is under way on it then."""
    query = sa.select(slot_table).where(slot_table.c.node_id == node_id)
    with node(conn, node_id):
        locked = rows.every(conn, query.order_by(slot_table.c.id).with_for_update(), Slot)
        with _scope(conn, _Rank.SLOT, *(row.id for row in locked)):
            yield locked


@contextmanager
def allocation(conn: sa.Connection, allocation_id: str) -> Iterator[Allocation]:
    """Lock an allocation, and its node after it."""
    with _scope(conn, _Rank.ALLOCATION, allocation_id):
        row = rows.get(conn, Allocation, allocation_id, lock=True)
        with node(conn, row.node_id):
            yield row


@contextmanager
def task(conn: sa.Connection, task_id: str) -> Iterator[Task]:
    """Lock a task, and before it the allocation or the node that it is about.

    Not its slots: every transaction that locks one of them and then the task has locked the same
    allocation or node first.
    """
    row = rows.get(conn, Task, task_id)
    subject: AbstractContextManager[object] = (
        allocation(conn, row.allocation_id) if row.allocation_id else node(conn, row.node_id)
    )
    with subject, _scope(conn, _Rank.TASK, task_id):
        yield rows.get(conn, Task, task_id, lock=True)


@contextmanager
def ingress_rule(conn: sa.Connection, rule_id: str) -> Iterator[IngressRule]:
    """Lock a rule of public ingress, and before it the allocation that it is about."""
    with allocation(conn, rows.get(conn, IngressRule, rule_id).allocation_id):
        yield rows.get(conn, IngressRule, rule_id, lock=True)


# Of an entity that a caller changes by a condition, the scope that its change needs. A slot may
# have to be judged, and the end of a task changes its subject.
_SCOPES: dict[str, Callable[[sa.Connection, str], AbstractContextManager[object]]] = {
    "slot": slot,
    "task": task,
    "ingress_rule": ingress_rule,
}


def require_generation(
    conn: sa.Connection, entity: str, key: str, generations: Collection[int]
) -> None:
    """Lock the record until the transaction ends; refuse any other generation."""
    scope = _SCOPES[entity](conn, key) if entity in _SCOPES else nullcontext()
    with scope:
        generation = rows.get(conn, ENTITIES[entity].kind, key, lock=True).generation
    if generation not in generations:
        raise Problem(
            "precondition_failed",
            412,
            expected=f"{entity} {key} at the generation that If-Match names",
            found=f"generation {generation}",
            remedy=f"read the {entity} again, decide anew, and send its ETag",
            detail={"generation": generation},
        )


@contextmanager
def _scope(conn: sa.Connection, rank: _Rank, *ids: str) -> Iterator[None]:
    """Note what is locked while the body runs, unless it is out of order."""
    # The list is kept here: a connection that is lost meanwhile has another `info`, or none.
    open_keys: list[tuple[_Rank, str]] = conn.info.setdefault(_OPEN, [])
    fresh = [key for key in ((rank, id) for id in ids) if key not in open_keys]
    for key in fresh:
        _require_order(open_keys, key)
    open_keys.extend(fresh)
    try:
        yield
    finally:
        del open_keys[len(open_keys) - len(fresh) :]


def _require_order(open_keys: Collection[tuple[_Rank, str]], key: tuple[_Rank, str]) -> None:
    rank, id = key
    for held_rank, held_id in open_keys:
        late_slot = rank == held_rank == _Rank.SLOT and id < held_id
        if rank < held_rank or late_slot:
            raise LockOrderError(
                f"{rank.name.lower()} {id} is locked inside the scope of"
                f" {held_rank.name.lower()} {held_id}, which comes after it in the order"
            )
