"""Invariant checks: silent about an orderly life, and a name for every planted violation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import host, invariants, launch, recovery, slices
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import claims
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import Machines

pytestmark = pytest.mark.covers("I1", "I2", "I3", "I4", "I10", "I12", "I13", "I16", "I20")


def violations(site: Site) -> list[str]:
    with reading(site.engine) as conn:
        return [
            f"{violation.invariant} {violation.subject.split()[0]}"
            for violation in invariants.check(conn)
        ]


def released(site: Site, conn: sa.Connection) -> None:
    key = site.active(conn)
    launch.release(conn, key, ADMIN)
    given, absent = site.proofs(conn, key), {"absent": True}
    assert slices.release_succeeded(conn, key, ADMIN, proofs=given, absence=absent)


def recovering(site: Site, conn: sa.Connection) -> None:
    key = site.failed(conn)
    recovery.force_cleanup(conn, key, ADMIN, runtime_verified_absent=True)


@pytest.mark.parametrize("stage", [Site.allocate, Site.active, Site.failed, released, recovering])
def test_nothing_to_say(sold: Site, stage: Callable[..., Any]) -> None:
    with transaction(sold.engine) as conn:
        stage(sold, conn)
    assert violations(sold) == []


def test_nothing_to_say_of_a_whole_machine(site: Site) -> None:
    machines = Machines(site)
    machines.machine()
    with transaction(site.engine) as conn:
        key = machines.active(conn)
    assert violations(site) == []
    with transaction(site.engine) as conn:
        launch.release(conn, key, ADMIN)
        assert machines.released(conn, key)
    assert violations(site) == []


def unguarded(conn: sa.Connection) -> None:
    """Drop the triggers and unique indexes of the schema: the checker covers other writers."""
    for kind, condition in (("trigger", "1"), ("index", "sql LIKE 'CREATE UNIQUE%'")):
        query = f"SELECT name FROM sqlite_master WHERE type = '{kind}' AND {condition}"  # noqa: S608
        for (name,) in conn.exec_driver_sql(query).all():
            conn.exec_driver_sql(f"DROP {kind} {name}")


def lost_run(site: Site, conn: sa.Connection) -> None:
    """A run was lost, and its slot is sold as untouched all the same."""
    key = site.allocate(conn)
    site.finish(conn, TaskKind.SLICE_VM_PROVISION, TaskState.LOST)
    evidence = {"disk_written": False, "leftovers": False}
    slot = next(s for s in claims.of_allocation(conn, key)).slot_id
    error = {"code": "canceled"}
    slices.provision_failed(conn, key, ADMIN, step="", error=error, untouched={slot: evidence})


def older_boot(site: Site, conn: sa.Connection) -> None:
    conn.execute(sa.update(tables.nodes).values(boot_id="another"))


def stale_proof(_site: Site, conn: sa.Connection) -> None:
    conn.execute(sa.update(tables.proofs).values(document={"verified": False}))


def another_claim(site: Site, conn: sa.Connection) -> None:
    """The same slot for another claim, which the schema would refuse."""
    site.allocate(conn, 2)
    first, second = conn.execute(sa.select(tables.claims.c.id)).scalars()
    row = conn.execute(sa.select(tables.claims).where(tables.claims.c.id == first)).mappings().one()
    same = {key: row[key] for key in ("slot_id", "nvme_identity", "management_mac")}
    conn.execute(sa.update(tables.claims).where(tables.claims.c.id == second).values(**same))


def high_fence(site: Site, conn: sa.Connection) -> None:
    site.allocate(conn)
    conn.execute(sa.update(tables.claims).values(fence=99))
    conn.execute(sa.update(tables.tasks).values(fences={_any_slot(conn): 99}))


def _any_slot(conn: sa.Connection) -> str:
    return str(conn.execute(sa.select(tables.slots.c.id).limit(1)).scalar_one())


def unseen(site: Site, conn: sa.Connection) -> None:
    site.allocate(conn)
    late = clock.now() - invariants.UNSEEN_S - 10
    conn.execute(sa.update(tables.tasks).values(deadline_at=late))
    conn.execute(sa.update(tables.allocations).values(deadline_at=None))


def reimaged(site: Site, conn: sa.Connection) -> None:
    """The proof is from another installation."""
    conn.execute(sa.update(tables.proofs).values(install_id="another"))


def spoken_against(site: Site, conn: sa.Connection) -> None:
    """The latest discovery lacks the disks, without any consequence."""
    newest = conn.execute(sa.select(sa.func.max(tables.discoveries.c.id))).scalar_one()
    latest = sa.update(tables.discoveries).where(tables.discoveries.c.id == newest)
    conn.execute(latest.values(document={**site.document(0), "nvme": []}))


def gone(site: Site, conn: sa.Connection) -> None:
    """Retired behind the back of those who use it."""
    site.allocate(conn)
    conn.execute(sa.update(tables.nodes).values(state="retired"))


def untold(site: Site, conn: sa.Connection) -> None:
    conn.execute(sa.update(tables.nodes).values(state="draining", deadline_at=clock.now() + 9))


def apart(site: Site, conn: sa.Connection) -> None:
    site.active(conn)
    conn.execute(sa.update(tables.allocations).values(state="released"))


def without_claims(site: Site, conn: sa.Connection) -> None:
    """As of a record from before there were claims, which nothing holds the slot for."""
    site.active(conn)
    conn.execute(sa.update(tables.claims).values(state="released", ended_at=1.0))


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (without_claims, {"I3 allocation", "I3 slot", "I20 claim"}),
        (another_claim, {"I1 slot_id", "I1 nvme_identity", "I1 management_mac", "I3 slot"}),
        (apart, {"I3 allocation", "I20 allocation"}),
        (stale_proof, {"I4 slot"}),
        (high_fence, {"I10 claim", "I10 task"}),
        (unseen, {"I12 task", "I12 allocation"}),
        (lost_run, {"I13 slot"}),
        (older_boot, {"I16 node"}),
        (untold, {"I20 node"}),
        (reimaged, {"I4 slot"}),
        (spoken_against, {"I16 slot"}),
        (gone, {"I3 node", "I20 node"}),
    ],
)
def test_a_lie_is_named(
    sold: Site, lie: Callable[[Site, sa.Connection], None], expected: set[str]
) -> None:
    with transaction(sold.engine) as conn:
        unguarded(conn)
        lie(sold, conn)
    assert set(violations(sold)) == expected


def unrecorded(site: Site, conn: sa.Connection) -> None:
    released(site, conn)
    conn.execute(sa.delete(tables.usage))


def recorded_twice(site: Site, conn: sa.Connection) -> None:
    """The key of the table refuses it; a copied table has none."""
    released(site, conn)
    for statement in (
        "CREATE TABLE copied AS SELECT * FROM usage_records",
        "INSERT INTO copied SELECT * FROM usage_records",
        "DROP TABLE usage_records",
        "ALTER TABLE copied RENAME TO usage_records",
    ):
        conn.exec_driver_sql(statement)


def never_used(site: Site, conn: sa.Connection) -> None:
    """A record for a machine that never became ready."""
    key = site.failed(conn)
    released(site, conn)
    (record,) = conn.execute(sa.select(tables.usage)).mappings()
    conn.execute(sa.insert(tables.usage).values({**record, "allocation_id": key}))


def never_ended(site: Site, conn: sa.Connection) -> None:
    released(site, conn)
    conn.execute(sa.update(tables.usage).values(ended_at=None, end_state=""))


def ended_early(site: Site, conn: sa.Connection) -> None:
    """Its claims went on, without being billed."""
    key = site.active(conn)
    over = {"ended_at": tables.usage.c.started_at + 1.0, "end_state": "released"}
    conn.execute(sa.update(tables.usage).values(over))
    launch.release(conn, key, ADMIN)


def began_late(site: Site, conn: sa.Connection) -> None:
    site.active(conn)
    conn.execute(sa.update(tables.usage).values(started_at=tables.usage.c.started_at + 0.001))


def of_fewer_claims(site: Site, conn: sa.Connection) -> None:
    site.active(conn, 2)
    (record,) = conn.execute(sa.select(tables.usage)).mappings()
    conn.execute(sa.update(tables.usage).values(claims=record["claims"][:1]))


@pytest.mark.covers("CTRL-14")
@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (unrecorded, "0 usage records, ever active"),
        (recorded_twice, "2 usage records, ever active"),
        (never_used, "1 usage records, never active"),
        (never_ended, "usage record with ended_at None"),
        (ended_early, "usage record with ended_at"),
        (began_late, "usage record with started_at"),
        (of_fewer_claims, "usage record with claims"),
    ],
)
def test_usage_that_is_not_what_was_had(
    sold: Site, lie: Callable[[Site, sa.Connection], None], expected: str
) -> None:
    with transaction(sold.engine) as conn:
        unguarded(conn)
        lie(sold, conn)
    with reading(sold.engine) as conn:
        violated = invariants.check(conn)
    assert {(row.invariant, row.subject.split()[0]) for row in violated} == {
        ("CTRL-14", "allocation")
    }
    assert violated[0].found.startswith(expected)
    assert len({row.subject for row in violated}) == 1


@pytest.mark.covers("CTRL-4")
def test_a_whole_machine_without_a_claim(site: Site) -> None:
    """The tenant has it, and nothing keeps the next tenant off."""
    machines = Machines(site)
    machines.machine()
    with transaction(site.engine) as conn:
        key = machines.active(conn)
        unguarded(conn)
        conn.execute(sa.delete(tables.claims))
    with reading(site.engine) as conn:
        (violation,) = invariants.committed_together(conn)
    assert (violation.subject, violation.found) == (f"allocation {key}", "active, with claims none")


def test_a_whole_machine_in_the_wrong_mode(site: Site) -> None:
    """Foreign keys are off for this test: the schema knows it as well."""
    machines = Machines(site)
    machines.machine()
    with transaction(site.engine) as conn:
        machines.active(conn)
    raw = site.engine.raw_connection()
    for statement in ("PRAGMA foreign_keys = OFF", "UPDATE nodes SET mode = 'slice'"):
        raw.cursor().execute(statement)
    raw.cursor().execute("PRAGMA foreign_keys = ON")
    raw.close()
    assert set(violations(site)) == {"I2 claim"}


def test_a_gap_in_the_history(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        host.drain(conn, "n1", ADMIN)
        unguarded(conn)
        row = tables.history.c
        gap = sa.and_(row.entity == "node", row.target == "ready")
        conn.execute(sa.delete(tables.history).where(gap))
    assert violations(sold) == ["I20 node"]


LIES = ({"target": "failed"}, {"source": "running"}, {"entity_id": "x"})


@pytest.mark.parametrize("change", LIES)
def test_a_lie_among_many_is_the_only_one_named(sold: Site, change: dict[str, str]) -> None:
    """However long the past is, a small part of it is held at a time."""
    count, at = 4_000, 2_718
    ids = [f"{number:036}" for number in range(count)]
    given = {"kind": "k", "subject_kind": "node", "node_id": "n1", "state": "succeeded"}
    row = {"entity": "task", "event": "e", "actor": "a"}
    with transaction(sold.engine) as conn:
        unguarded(conn)
        rows = [{**given, "id": key, "subject_id": key} for key in ids]
        conn.execute(sa.insert(tables.tasks), rows)
        for source, target in (("", "queued"), ("queued", "succeeded")):
            step = {**row, "source": source, "target": target}
            conn.execute(sa.insert(tables.history), [{**step, "entity_id": key} for key in ids])
        of_it = sa.and_(
            tables.history.c.entity_id == ids[at], tables.history.c.target == "succeeded"
        )
        conn.execute(sa.update(tables.history).where(of_it).values(**change))
    del rows
    with reading(sold.engine) as conn:
        # Memory that is allocated once and kept is not counted.
        invariants.history_complete(conn)
        tracemalloc.start()
        (violation,) = invariants.history_complete(conn)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert violation.subject == f"task {ids[at]}"
    assert peak < 750_000, "bytes; the last states of all take a third more than this"
