"""The past, the reasons for waiting, and the invariants, as PostgreSQL answers them."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.rows import Page
from reconciler.lifecycle import host, invariants, launch, slices
from reconciler.model.states import TaskKind
from reconciler.records import leasing, queue, timeline
from reconciler.records.queue import Position
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres

pytestmark = [pytest.mark.postgres, pytest.mark.covers("CTRL-8")]
engine = test_postgres.engine


INDEXES = {f"ix_{table}_correlation_id" for table in ("state_history", "audit_log", "tasks")}


def test_what_one_request_led_to_is_found_by_index(engine: sa.Engine, site: Site) -> None:
    """Not by reading all that ever happened; the planner is kept from thinking a small site."""
    site.node()
    queries: list[tuple[str, Any]] = []

    def heard(*given: Any) -> None:
        queries.append((given[2], given[3]))

    with reading(engine) as conn:
        sa.event.listen(conn, "before_cursor_execute", heard)
        assert timeline.of(conn, correlation_id=site.act.correlation_id, page=Page(3))
        sa.event.remove(conn, "before_cursor_execute", heard)
        conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
        plan = "\n".join(conn.exec_driver_sql(f"EXPLAIN {queries[0][0]}", queries[0][1]).scalars())
    assert {name for name in INDEXES if name in plan} == INDEXES, plan


def test_a_life_is_told_page_by_page_and_breaks_no_promise(engine: sa.Engine, site: Site) -> None:
    site.node()
    with transaction(engine) as conn:
        key = site.active(conn, 2)
        launch.release(conn, key, site.act)
    with transaction(engine) as conn:
        (task,) = leasing.lease(conn, "w")
        held = (task.id, task.lease_token)
        queue.progress(conn, *held, {"task": "a"}, {"task": "b"}, offset=9)
        waits = queue.wait_for_host(conn, *held, "no route", act=site.act)
        assert host.record_silence(conn, "n1", site.act)
        assert leasing.wait_reasons(conn, [waits])[waits.id]["code"] == "host_unreachable"
    with transaction(engine) as conn:
        assert host.record_answer(conn, "n1", site.act)
        (task,) = leasing.lease(conn, "w", kinds=[TaskKind.SLICE_VM_RELEASE])
        given = site.proofs(conn, key)
        absent = {"absent": True}
        assert slices.release_succeeded(conn, key, site.act, proofs=given, absence=absent)
    with reading(engine) as conn:
        whole = timeline.of(conn, allocation_id=key)
        assert {row["type"] for row in whole} >= {"progress", "state"}
        pages, place = [], ()
        while part := timeline.of(conn, allocation_id=key, page=Page(3, place)):
            pages += part
            place = timeline.ORDER.keys(part[-1])
        assert pages == whole
        assert {row["type"] for row in timeline.of(conn, node_id="n1")} >= {"audit", "state"}
        news = queue.events_after(conn, task.id, Position())
        assert [row["document"]["task"] for row in news.rows if row["type"] == "progress"] == [
            "a",
            "b",
        ]
        assert invariants.check(conn) == []
    with transaction(engine) as conn:
        conn.execute(sa.update(tables.nodes).values(state="draining", deadline_at=1.0))
    with reading(engine) as conn:
        assert {violation.invariant for violation in invariants.check(conn)} == {"I20"}
