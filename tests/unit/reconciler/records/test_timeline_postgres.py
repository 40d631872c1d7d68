"""Timeline, reasons for waiting and invariants on PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.rows import Page
from reconciler.lifecycle import host, invariants, launch, quota, slices
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, queue, timeline
from reconciler.records.queue import Position
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import test_postgres

pytestmark = [pytest.mark.postgres, pytest.mark.covers("CTRL-8")]
engine = test_postgres.engine


PAGE = Page(3)
READS: dict[str, tuple[Callable[[sa.Connection], object], set[str]]] = {
    "timeline of a request": (
        lambda conn: timeline.of(conn, correlation_id="c", page=PAGE),
        {f"ix_{table}_correlation_id" for table in ("state_history", "audit_log", "tasks")},
    ),
    "timeline of a node": (
        lambda conn: timeline.of(conn, node_id="n1", page=PAGE),
        {"ix_state_history_node_id", "ix_audit_log_subject_id"},
    ),
    "timeline of an allocation, second page": (
        lambda conn: timeline.of(conn, allocation_id="a", page=Page(3, (1.0, "audit", 1))),
        {"ix_state_history_allocation_id", "ix_audit_log_subject_id", "ix_tasks_allocation_id"},
    ),
    "tasks": (lambda conn: queue.every(conn, page=PAGE), {"ix_tasks_created_at"}),
    "allocations": (
        lambda conn: allocations.every(conn, page=PAGE),
        {"ix_allocations_created_at"},
    ),
    "allocations of a project": (
        lambda conn: allocations.every(conn, project_id="p2", page=PAGE),
        {"ix_allocations_project_id"},
    ),
    "limits of a launch": (
        lambda conn: quota.used(conn, "p1"),
        {"ix_allocations_live"},
    ),
    "deadlines": (
        journal.overdue,
        {
            f"ix_{table}_deadline_at"
            for table in ("tasks", "allocations", "claims", "ingress_rules")
        },
    ),
}


# Copies of the allocation that ended long ago.
ENDED = """
INSERT INTO allocations SELECT (jsonb_populate_record(
  a, jsonb_build_object('id', 'old-' || g, 'state', 'released', 'created_at', g))).*
FROM allocations a, generate_series(1, 2000) g;
ANALYZE allocations
"""


@pytest.mark.parametrize("read", READS)
def test_what_is_asked_often_does_not_read_all_that_ever_happened(
    engine: sa.Engine, site: Site, read: str
) -> None:
    """The planner is kept from thinking a small site: it reads a whole table only where it must."""
    site.node()
    with transaction(engine) as conn:
        site.active(conn, 1)
        conn.exec_driver_sql(ENDED)
    act, indexes = READS[read]
    statements: list[tuple[str, Any]] = []

    def note(*given: Any) -> None:
        statements.append((given[2], given[3]))

    with reading(engine) as conn:
        sa.event.listen(conn, "before_cursor_execute", note)
        act(conn)
        sa.event.remove(conn, "before_cursor_execute", note)
        conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
        plan = "\n".join(
            line
            for statement, values in statements
            for line in conn.exec_driver_sql(f"EXPLAIN {statement}", values).scalars()
        )
    assert {name for name in indexes if name in plan} == indexes, plan
    assert not re.search("Seq Scan on (state_history|audit_log|tasks|allocations)", plan), plan


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
