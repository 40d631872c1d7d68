"""Batch insert: the same rows as single inserts, and few statements for a launch."""

from __future__ import annotations

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


@pytest.mark.covers("CTRL-4", "I3", "I20")
def test_a_launch_is_told_as_it_is_stored(on_either: Site) -> None:
    with transaction(on_either.engine) as conn:
        answer = launch.allocate(conn, on_either.launch(2), on_either.act)
    with reading(on_either.engine) as conn:
        assert answer == allocations.get(conn, answer.id)
        changes = rows.every(
            conn,
            sa.select(history_table)
            .where(history_table.c.allocation_id == answer.id)
            .order_by(history_table.c.id),
        )
        told_of = [(row["entity"], row["target"]) for row in changes]
        slot = [("slot", "reserved"), ("claim", "reserved")]
        assert told_of == [("allocation", "requested"), *slot, *slot, ("task", "queued")]
        topics = sa.select(outbox.c.topic).order_by(outbox.c.id.desc()).limit(6)
        topics_written = [topic.split(".")[0] for topic in conn.execute(topics).scalars()]
        assert topics_written[::-1] == [entity for entity, _ in told_of]


@pytest.mark.covers("I3", "I20")
def test_a_change_whose_telling_failed_is_not_committed(on_either: Site) -> None:
    with reading(on_either.engine) as conn:
        slot = rows.every(conn, sa.select(slots), Slot)[0]

    def half(conn: sa.Connection) -> None:
        with batch_insert(conn):
            advance(conn, Slot, slot.id, "disable", on_either.act)
            raise Problem("test", 409, expected="", found="", remedy="")

    # Even if the caller drops the failure, the transaction cannot be committed.
    with pytest.raises(sa.exc.InvalidRequestError), transaction(on_either.engine) as conn:
        with pytest.raises(Problem):
            half(conn)
        rows.add(conn, Project, {"id": "other", "name": "other"})
    with reading(on_either.engine) as conn:
        assert rows.get(conn, Slot, slot.id) == slot
        assert all(
            change.event != "disable" for change in journal.history_of(conn, "slot", slot.id)
        )


@pytest.mark.postgres
@pytest.mark.covers("CTRL-4")
@pytest.mark.parametrize("on_either", [postgresql], indirect=True)
def test_a_launch_takes_seven_statements(on_either: Site) -> None:
    statements: list[str] = []

    def count(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    with transaction(on_either.engine) as conn:
        on_either.allocate(conn)
        event.listen(conn, "before_cursor_execute", count)
        on_either.allocate(conn)
    assert len(statements) == 7, "\n".join(statements)


@pytest.mark.postgres
@pytest.mark.parametrize("on_either", [postgresql], indirect=True)
def test_a_connection_that_the_server_closed_is_replaced(on_either: Site) -> None:
    mine = sa.select(sa.func.pg_backend_pid())
    with asking(on_either.engine) as conn, asking(on_either.engine) as other:
        ended = other.execute(mine).scalar_one()
        assert conn.execute(mine).scalar_one() != ended
    with transaction(on_either.engine) as conn:
        kept = conn.execute(mine).scalar_one()
        others = sa.text(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> :own"
            " AND datname = current_database() AND backend_type = 'client backend'"
        )
        assert list(conn.execute(others, {"own": kept}).scalars()) == [True]
    with asking(on_either.engine) as conn, asking(on_either.engine) as other:
        sessions = {session.execute(mine).scalar_one() for session in (conn, other)}
    assert len(sessions) == 2
    assert kept in sessions
