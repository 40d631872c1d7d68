"""Pages of the timeline, against a sort of all its rows."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.db.rows import Page
from reconciler.db.schema import audit_log, history, task_events, tasks
from reconciler.model.states import TaskKind
from reconciler.records import queue, timeline
from tests.unit.reconciler.conftest import Site

pytestmark = pytest.mark.covers("CTRL-8")

Place = tuple[float, str, int]
# Few of each, so that rows of all types have the same time.
_TIMES = st.sampled_from([0.1, 0.1 + 0.2, 0.3, 1e9 / 3])
_SUBJECTS = st.sampled_from(["a", "b"])
_ROWS = st.lists(
    st.tuples(st.sampled_from(["audit", "progress", "state"]), _TIMES, _SUBJECTS), max_size=12
)
# A cursor may name a type that no row has.
_PLACES = st.tuples(
    _TIMES,
    st.sampled_from(["", "audit", "b", "progress", "state", "z"]),
    st.integers(-1, 40),
)
_CHANGE = {"entity": "slot", "entity_id": "s", "event": "e", "target": "t", "actor": "x"}


def insert(conn: sa.Connection, site: Site, rows: list[tuple[str, float, str]]) -> list[Place]:
    """Places of the rows with the subject "a", the newest first."""
    task_ids: dict[str, str] = {}
    for subject in ("a", "b"):
        item = queue.Enqueue(TaskKind.NODE_PARITY, "n1", parameters={"subject": subject})
        key = task_ids[subject] = queue.add(conn, item, site.act).id
        # Afterwards, so that the task's own history belongs to neither.
        update = sa.update(tasks).where(tasks.c.id == key)
        conn.execute(update.values(correlation_id=subject))
    places: list[Place] = []
    for kind, at, subject in rows:
        table = {"audit": audit_log, "progress": task_events, "state": history}[kind]
        fields: dict[str, Any] = {
            "audit": {"actor": "x", "action": "y", "subject_kind": "slot", "subject_id": "s"},
            "progress": {"task_id": task_ids[subject], "document": {}},
            "state": _CHANGE,
        }[kind]
        if kind != "progress":
            fields = {**fields, "correlation_id": subject}
        insertion = sa.insert(table).values(at=at, **fields).returning(table.c.id)
        number = conn.execute(insertion).scalar_one()
        if subject == "a":
            places.append((at, kind, number))
    return sorted(places, reverse=True)


@pytest.mark.parametrize("types", [("state", "progress", "audit"), ("progress", "state")])
def test_pages_have_each_row_once(on_either: Site, types: tuple[str, ...]) -> None:
    @settings(max_examples=40)
    @given(_ROWS, st.integers(1, 5), _PLACES)
    def check(rows: list[tuple[str, float, str]], limit: int, forged: Place) -> None:
        with on_either.engine.connect() as conn:
            places = [place for place in insert(conn, on_either, rows) if place[1] in types]

            def read(page: Page | None) -> list[Place]:
                entries = timeline.of(conn, correlation_id="a", types=types, page=page)
                return [timeline.ORDER.keys(entry) for entry in entries]

            assert read(None) == places
            after: Place | tuple[()] = ()
            for start in range(0, len(places) + 1, limit):
                page = places[start : start + limit]
                assert read(Page(limit, after)) == page
                after = page[-1] if page else after
            assert read(Page(limit, forged)) == [row for row in places if row < forged][:limit]
            conn.rollback()

    check()
