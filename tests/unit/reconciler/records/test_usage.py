"""Usage: written with the claims, exact to the millisecond, and never changed again."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import host, launch, recovery, slices
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind
from reconciler.records import allocations, usage
from reconciler.records.usage import Period
from tests.unit.reconciler.conftest import Site

pytestmark = pytest.mark.covers("CTRL-14")

ALWAYS = Period(0.0, 4e9)


def backdate(conn: sa.Connection, allocation_id: str, start: float, end: float | None) -> None:
    """Set times that the clock would have written; only without the triggers."""
    on = " ON usage_records" if conn.dialect.name == "postgresql" else ""
    conn.exec_driver_sql(f"DROP TRIGGER IF EXISTS usage_records_keep_update{on}")
    update = sa.update(tables.usage).where(tables.usage.c.allocation_id == allocation_id)
    state = "" if end is None else "released"
    conn.execute(update.values(started_at=start, ended_at=end, end_state=state))


def wipe(sold: Site, conn: sa.Connection, allocation_id: str) -> None:
    """The release of an allocation ends with proof."""
    proofs, absence = sold.proofs(conn, allocation_id), {"absent": True}
    slices.release_succeeded(conn, allocation_id, sold.act, proofs=proofs, absence=absence)


def counted(conn: sa.Connection, start: float, end: float) -> dict[str, int]:
    usage_rows = usage.every(conn, Period(start, end))
    return {row.allocation_id: row.counted_ms for row in usage_rows}


@pytest.mark.covers("CTRL-14")
def test_from_active_to_the_request_of_its_release(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn, 2)
        (running,) = usage.every(conn, ALWAYS)
        assert (running.ended_at, running.end_state, running.gpu_count) == (None, "", 2)
        assert running.started_at == allocations.get(conn, allocation_id).activated_at
        assert [claim["slot_index"] for claim in running.claims] == [0, 1]
        launch.release(conn, allocation_id, sold.act)
        (over,) = usage.every(conn, ALWAYS)
        (requested_at,) = (
            row.at
            for row in journal.history_of(conn, "allocation", allocation_id)
            if row.event == "release"
        )
        assert (over.ended_at, over.end_state) == (requested_at, "released")
        length = round(over.ended_at * 1000) - round(over.started_at * 1000)
        assert over.counted_ms == length
        wipe(sold, conn, allocation_id)
        assert usage.every(conn, ALWAYS) == [over], "the wipe is the provider's"


def test_what_never_became_active_is_not_counted(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        sold.failed(conn)
        launch.release(conn, sold.allocate(conn), sold.act)
        assert usage.every(conn, ALWAYS) == []


def test_force_release_ends_it_although_nobody_answers(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        host.lost(conn, "n1", sold.act)
        recovery.force_release(conn, allocation_id, sold.act)
        (over,) = usage.every(conn, ALWAYS)
        assert over.end_state == "released"
        host.regained(conn, "n1", sold.act)
        recovery.repair(conn, recovery.blocked(conn)[0].id, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE)
        given = sold.proofs(conn, allocation_id)
        assert slices.cleanup_succeeded(
            conn, allocation_id, sold.act, proofs=given, absence={"absent": True}
        )
        assert usage.every(conn, ALWAYS)[0].ended_at == over.ended_at


def test_a_clean_up_that_fails_is_not_counted(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launch.release(conn, allocation_id, sold.act)
        (over,) = usage.every(conn, ALWAYS)
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE)
        slices.release_failed(conn, allocation_id, sold.act, step="nvme_wipe", error={})
        recovery.force_cleanup(conn, allocation_id, sold.act, runtime_verified_absent=True)
        assert usage.every(conn, ALWAYS) == [over]
        assert over.ended_at is not None


def test_a_release_that_an_earlier_version_began_ends_as_it_was_asked(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launch.release(conn, allocation_id, sold.act)
        (over,) = usage.every(conn, ALWAYS)
        backdate(conn, allocation_id, over.started_at, None)
        wipe(sold, conn, allocation_id)
        assert usage.every(conn, ALWAYS) == [over]


@pytest.mark.covers("CTRL-14")
def test_adjacent_periods_add_up_exactly(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        first, second = sold.active(conn), sold.active(conn)
        backdate(conn, first, 1000.0004, 2000.00061)
        backdate(conn, second, 1500.33333, None)
        whole = counted(conn, 900.0, 3000.0)
        assert whole == {first: 1_000_001, second: 1_499_667}
        for cut in (1000.00049, 1500.33349, 1777.77777, 2000.0006, 2999.9999):
            parts = [counted(conn, 900.0, cut), counted(conn, cut, 3000.0)]
            summed = {key: sum(part.get(key, 0) for part in parts) for key in whole}
            assert summed == whole, cut
        assert counted(conn, 2000.001, 2500.0) == {second: 499_999}
        assert counted(conn, 100.0, 1000.0) == {}
        (total,) = usage.totals(conn, Period(900.0, 3000.0))
        assert (total.allocations, total.counted_ms) == (2, sum(whole.values()))
        assert total.gpu_ms == sum(whole.values())
        periods = usage.every(conn, Period(900.0, 3000.0), project_id="p1")
        assert [row.allocation_id for row in periods] == [first, second]
        assert usage.every(conn, Period(900.0, 3000.0), project_id="none") == []


def test_period(sold: Site) -> None:
    with reading(sold.engine) as conn:
        now = usage.period(conn, None, None).end
        clipped = usage.period(conn, -5.0, 4e9)
        assert (clipped.start, now <= clipped.end < now + 60) == (0.0, True)
        assert usage.period(conn, 10.0, 20.0) == Period(10.0, 20.0)
        assert now > 1e9
        with pytest.raises(Problem) as caught:
            usage.period(conn, 20.0, 10.0)
        assert caught.value.code == "period_invalid"


def test_nobody_changes_what_was_sold(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launch.release(conn, allocation_id, sold.act)
        statements = [
            sa.update(tables.usage).values(gpu_count=0),
            sa.update(tables.usage).values(started_at=0.0),
            sa.delete(tables.usage),
            sa.update(tables.claims).values(numa_node=7),
            sa.update(tables.claims).values(gpu_pci_address="0000:00:00.0"),
            sa.delete(tables.claims),
        ]
        for statement in statements:
            with pytest.raises(sa.exc.DBAPIError, match="keeps what was sold"), conn.begin_nested():
                conn.execute(statement)
        if conn.dialect.name == "sqlite":
            (row,) = rows.every(conn, sa.select(tables.usage))
            replace = sa.insert(tables.usage).prefix_with("OR REPLACE").values(**row)
            with pytest.raises(sa.exc.DBAPIError, match="keeps what was sold"):
                conn.execute(replace)
        else:
            with pytest.raises(sa.exc.DBAPIError, match="keeps what was sold"), conn.begin_nested():
                conn.exec_driver_sql("TRUNCATE usage_records")
        wipe(sold, conn, allocation_id)
        reopened = sa.update(tables.usage).values(ended_at=None, end_state="")
        with pytest.raises(sa.exc.DBAPIError, match="keeps what was sold"), conn.begin_nested():
            conn.execute(reopened)
