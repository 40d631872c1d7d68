"""Rows that go in at once are the rows that would have gone in one by one; a launch is short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from reconciler.db import journal, rows
from reconciler.db.engine import asking, reading, transaction
from reconciler.db.journal import advance
from reconciler.db.rows import batch_insert
from reconciler.db.schema import Project, Slot, outbox, slots
from reconciler.db.schema import history as history_table
from reconciler.lifecycle import launch
from reconciler.model.errors import Problem
from reconciler.records import allocations
from tests.unit.reconciler.conftest import Site

postgresql = pytest.param("postgresql", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", postgresql])
def selling(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site with two slots on sale, on either engine."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sold")
        return
    engine = request.getfixturevalue("postgres_database").restore()
    site = Site(engine)
    site.node()
    yield site
    engine.dispose()


@pytest.mark.covers("CTRL-4", "I3", "I20")
def test_a_launch_is_told_as_it_is_stored(selling: Site) -> None:
    with transaction(selling.engine) as conn:
        told = launch.allocate(conn, selling.launch(2), selling.act)
    with reading(selling.engine) as conn:
        assert told == allocations.get(conn, told.id)
        changes = rows.every(
            conn,
            sa.select(history_table)
            .where(history_table.c.allocation_id == told.id)
            .order_by(history_table.c.id),
        )
        told_of = [(row["entity"], row["target"]) for row in changes]
        slot = [("slot", "reserved"), ("claim", "reserved")]
        assert told_of == [("allocation", "requested"), *slot, *slot, ("task", "queued")]
        topics = sa.select(outbox.c.topic).order_by(outbox.c.id.desc()).limit(6)
        said = [topic.split(".")[0] for topic in conn.execute(topics).scalars()]
        assert said[::-1] == [entity for entity, _ in told_of]


@pytest.mark.covers("I3", "I20")
def test_a_change_whose_telling_failed_is_not_committed(selling: Site) -> None:
    with reading(selling.engine) as conn:
        slot = rows.every(conn, sa.select(slots), Slot)[0]

    def half(conn: sa.Connection) -> None:
        with batch_insert(conn):
            advance(conn, "slot", slot.id, "disable", selling.act)
            raise Problem("test", 409, expected="", found="", remedy="")

    # Even when the failure is forgotten, what was done cannot be committed.
    with pytest.raises(sa.exc.InvalidRequestError), transaction(selling.engine) as conn:
        with pytest.raises(Problem):
            half(conn)
        rows.add(conn, Project, {"id": "other", "name": "other"})
    with reading(selling.engine) as conn:
        assert rows.get(conn, Slot, slot.id) == slot
        assert all(
            change.event != "disable" for change in journal.history_of(conn, "slot", slot.id)
        )


@pytest.mark.postgres
@pytest.mark.covers("CTRL-4")
@pytest.mark.parametrize("selling", [postgresql], indirect=True)
def test_a_launch_takes_five_statements(selling: Site) -> None:
    said: list[str] = []

    def count(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    with transaction(selling.engine) as conn:
        selling.allocate(conn)
        event.listen(conn, "before_cursor_execute", count)
        selling.allocate(conn)
    assert len(said) == 5, "\n".join(said)


@pytest.mark.postgres
@pytest.mark.parametrize("selling", [postgresql], indirect=True)
def test_a_connection_that_the_server_closed_is_replaced(selling: Site) -> None:
    mine = sa.select(sa.func.pg_backend_pid())
    with asking(selling.engine) as conn, asking(selling.engine) as other:
        ended = other.execute(mine).scalar_one()
        assert conn.execute(mine).scalar_one() != ended
    with transaction(selling.engine) as conn:
        kept = conn.execute(mine).scalar_one()
        others = sa.text(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> :own"
            " AND datname = current_database() AND backend_type = 'client backend'"
        )
        assert list(conn.execute(others, {"own": kept}).scalars()) == [True]
    with asking(selling.engine) as conn, asking(selling.engine) as other:
        found = {one.execute(mine).scalar_one() for one in (conn, other)}
    assert len(found) == 2
    assert kept in found
