"""Scopes of row locks: the order in which they may be entered, on SQLite as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import locks
from reconciler.db.engine import transaction
from reconciler.db.locks import LockOrderError
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode
from reconciler.records import claims, nodes, queue, slots
from tests.unit.reconciler.conftest import Site

Scope = Callable[[], AbstractContextManager[Any]]


@pytest.fixture
def conn(sold: Site) -> Iterator[sa.Connection]:
    with transaction(sold.engine) as conn:
        yield conn


@pytest.fixture
def scopes(sold: Site, conn: sa.Connection) -> dict[str, Scope]:
    """A scope of each kind, by name, around the same allocation of node n1."""
    key = sold.allocate(conn)
    (task,) = queue.every(conn, allocation_id=key)
    low, high = sorted(slot.id for slot in slots.of_node(conn, "n1"))
    nodes.create(conn, sold.act, id="n2", mode=NodeMode.SLICE)
    return {
        "allocation": lambda: locks.allocation(conn, key),
        "node": lambda: locks.node(conn, "n1"),
        "other node": lambda: locks.node(conn, "n2"),
        "low slot": lambda: locks.slot(conn, low),
        "high slot": lambda: locks.slot(conn, high),
        "slots": lambda: locks.slots(conn, "n1"),
        "task": lambda: locks.task(conn, task.id),
    }


def test_scopes_yield_what_they_lock(sold: Site, conn: sa.Connection) -> None:
    key = sold.allocate(conn)
    (claim,) = claims.of_allocation(conn, key)
    (task,) = queue.every(conn, allocation_id=key)
    with locks.allocation(conn, key) as allocation, locks.node(conn, "n1") as node:
        assert (allocation.id, node.id) == (key, "n1")
    with locks.task(conn, task.id) as locked, locks.allocation(conn, key):
        assert locked == task
    with locks.slot(conn, str(claim.slot_id)) as slot:
        assert (slot.id, slot.node_id) == (claim.slot_id, "n1")
    with locks.slots(conn, "n1") as every:
        assert [slot.id for slot in every] == sorted(slot.id for slot in slots.of_node(conn, "n1"))


@pytest.mark.parametrize(
    "order",
    [
        ("allocation", "node", "low slot", "high slot", "task"),
        ("allocation", "slots"),
        ("allocation", "other node", "node"),
        ("task", "allocation"),
        ("slots", "low slot", "high slot", "slots"),
        ("low slot", "low slot", "node"),
        ("allocation", "allocation"),
    ],
)
def test_in_order_or_locked_already(scopes: dict[str, Scope], order: tuple[str, ...]) -> None:
    enter(scopes, order)


@pytest.mark.parametrize(
    "order",
    [
        ("node", "allocation"),
        ("low slot", "allocation"),
        ("low slot", "other node"),
        ("high slot", "low slot"),
        ("high slot", "slots"),
        ("task", "low slot"),
        ("task", "other node"),
        ("slots", "allocation"),
    ],
)
def test_out_of_order(scopes: dict[str, Scope], order: tuple[str, ...]) -> None:
    with pytest.raises(LockOrderError, match="which comes after it in the order"):
        enter(scopes, order)
    # Nothing is left open by the refusal.
    enter(scopes, ("allocation", "slots"))


def test_a_scope_that_has_ended_is_no_obstacle(scopes: dict[str, Scope]) -> None:
    with scopes["task"]():
        pass
    with pytest.raises(Problem), scopes["high slot"]():
        raise Problem("test", 409, expected="", found="", remedy="")
    enter(scopes, ("allocation", "low slot"))


def test_each_connection_has_scopes_of_its_own(sold: Site, scopes: dict[str, Scope]) -> None:
    with (
        scopes["task"](),
        sold.engine.connect() as other,
        other.execution_options(gpuaas_reading=True).begin(),
        locks.node(other, "n1"),
    ):
        pass


def enter(scopes: dict[str, Scope], order: Any) -> None:
    """Enter each scope inside the previous scope."""
    first, *rest = order
    with scopes[first]():
        if rest:
            enter(scopes, rest)
