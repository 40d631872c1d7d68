"""Cancellation of a task before its run began: its subject no longer waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import baremetal, host, invariants, launch, recovery, slices
from reconciler.lifecycle.task_failures import cancel, locked_subject
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, TaskKind
from reconciler.records import allocations, leasing, nodes, queue, slots
from reconciler.settings import Settings
from reconciler.work.loops import end_overdue
from tests.unit.reconciler.conftest import ADMIN, Database, Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.whole_machines import Machines

pytestmark = pytest.mark.covers("CTRL-8", "I12", "I13")
postgresql = test_postgres.engine

ACT = replace(ADMIN, reason="not wanted")
ABSENT = {"absent": True}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def engine(request: pytest.FixtureRequest, database: Database, template: Path) -> sa.Engine:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return database.restore(template)
    chosen: sa.Engine = request.getfixturevalue("postgresql")
    return chosen


@pytest.fixture
def sold(engine: sa.Engine) -> Iterator[Site]:
    """Two slots on sale; at the end nothing that must always hold is broken."""
    site = Site(engine)
    site.node()
    yield site
    with reading(engine) as conn:
        assert invariants.check(conn) == []


@pytest.fixture
def machines(engine: sa.Engine) -> Machines:
    made = Machines(Site(engine))
    made.machine()
    return made


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Ending a task that never began needs no hardware profile."""
    return Settings(state_dir=tmp_path, profiles_dir=tmp_path)


@pytest.fixture
def ended(engine: sa.Engine, settings: Settings) -> Callable[[TaskKind], Task]:
    """Cancel the only open task of a kind."""

    def end(kind: TaskKind) -> Task:
        with reading(engine) as conn:
            (task,) = [task for task in queue.every(conn, kind=kind) if not task.finished_at]
        return retrying(engine, lambda conn: cancel(conn, task.id, ACT))

    return end


End = Callable[[TaskKind], Task]


def unreached(conn: sa.Connection, kind: TaskKind) -> Task:
    """A worker began the task, and its run never reached the host."""
    (task,) = leasing.lease(conn, "worker", kinds=[kind])
    held = (task.id, task.lease_token)
    queue.started(conn, *held, run_id="r", run_directory="/r")
    return queue.wait_for_host(conn, *held, "Connection refused", act=ACT)


def states(conn: sa.Connection, key: str) -> tuple[str, str, str]:
    """Of an allocation, its only claim, and the slot that this claims."""
    row = allocations.get(conn, key)
    (claim,) = row.claims
    return row.state, claim.state, slots.get(conn, claim.slot_id).status


def test_a_queued_provision_leaves_nothing_behind(sold: Site, ended: End) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    task = ended(TaskKind.SLICE_VM_PROVISION)
    assert (task.state, task.state_reason) == ("canceled", "not wanted")
    with transaction(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "available")
        error = allocations.get(conn, key).error
        assert (error["code"], error["found"]) == ("canceled", "not wanted")
        history = [(row.event, row.actor) for row in journal.history_of(conn, "allocation", key)]
        assert history[-1] == ("fail", f"task:{task.id}")
        assert sold.allocate(conn, 2), "both slots are sold again"
    assert retrying(sold.engine, lambda conn: queue.cancel(conn, task.id, ACT)) == task


def test_its_slot_goes_back_to_a_closed_gate(sold: Site, ended: End) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        since = nodes.get(conn, "n1").boot_id
        assert host.restarted(conn, "n1", ACT, since=since)
    ended(TaskKind.SLICE_VM_PROVISION)
    with transaction(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "disabled")


def test_its_slot_that_was_blocked_meanwhile_waits_for_evidence(sold: Site, ended: End) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        (claim,) = allocations.get(conn, key).claims
        journal.advance(conn, tables.Slot, claim.slot_id, "block", ACT)
    ended(TaskKind.SLICE_VM_PROVISION)
    with transaction(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "cleanup_blocked")


def test_a_provision_that_waits_for_its_host_leaves_nothing_behind(sold: Site, ended: End) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        unreached(conn, TaskKind.SLICE_VM_PROVISION)
        slices.provision_started(conn, key, ACT)
        assert states(conn, key) == ("provisioning", "provisioning", "provisioning")
    ended(TaskKind.SLICE_VM_PROVISION)
    with transaction(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "available")


def test_a_second_attempt_proves_nothing_about_the_first(sold: Site, ended: End) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        conn.execute(sa.update(tables.tasks).values(max_attempts=2))
        (task,) = leasing.lease(conn, "worker")
        slices.provision_started(conn, key, ACT)
        queue.retry(conn, task.id, task.lease_token, "again", seconds=0, act=ACT)
        (fence,) = task.fences.values()
    ended(TaskKind.SLICE_VM_PROVISION)
    with transaction(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "cleanup_blocked")
        (blocked,) = recovery.blocked(conn)
        assert (blocked.health_detail["allocation_id"], blocked.health_detail["step"]) == (
            key,
            "wait for its run",
        )
        assert blocked.fence > fence
    recovered(sold, key)


@pytest.mark.parametrize("waits", [False, True])
def test_a_release_is_finished_by_recovery(sold: Site, ended: End, waits: bool) -> None:
    """The tenant's machine is still there: its slot is blocked, and not freed."""
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        launch.release(conn, key, ACT)
        if waits:
            unreached(conn, TaskKind.SLICE_VM_RELEASE)
    ended(TaskKind.SLICE_VM_RELEASE)
    with reading(sold.engine) as conn:
        assert states(conn, key) == ("releasing", "releasing", "cleanup_blocked")
        assert allocations.get(conn, key).error["code"] == "canceled"
    recovered(sold, key)


def test_a_clean_up_blocks_its_slot_again(sold: Site, ended: End) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        recovery.repair(conn, recovery.blocked(conn)[0].id, ACT)
        assert states(conn, key)[2] == "cleanup"
    ended(TaskKind.SLICE_WIPE)
    with reading(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "cleanup_blocked")
    recovered(sold, key)


def recovered(sold: Site, key: str) -> None:
    """The steps of `gpuaas recover`: forced, wiped, and on sale again."""
    with transaction(sold.engine) as conn:
        recovery.force_cleanup(conn, key, ACT, runtime_verified_absent=True)
        sold.finish(conn, TaskKind.SLICE_WIPE)
        given = sold.proofs(conn, key)
        assert slices.cleanup_succeeded(conn, key, ACT, proofs=given, absence=ABSENT)
        assert states(conn, key) == ("failed", "failed", "available")


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize("waits", [False, True])
def test_a_machine_whose_tenant_never_came_is_free_again(
    machines: Machines, ended: End, waits: bool
) -> None:
    with transaction(machines.engine) as conn:
        key = machines.launch(conn).id
        if waits:
            unreached(conn, TaskKind.BAREMETAL_PROVISION)
            slices.provision_started(conn, key, ACT)
    ended(TaskKind.BAREMETAL_PROVISION)
    with transaction(machines.engine) as conn:
        row = allocations.get(conn, key)
        assert (row.state, row.claims[0].state) == ("failed", "failed")
        node = nodes.get(conn, "m1")
        assert (node.unclean_allocation_id, node.health_detail) == ("", {})
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": ""}


@pytest.mark.covers("CTRL-15")
def test_a_machine_that_keeps_its_tenants_traces_is_cleaned_by_hand(
    machines: Machines, ended: End
) -> None:
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        launch.release(conn, key, machines.act)
    ended(TaskKind.BAREMETAL_RELEASE)
    with transaction(machines.engine) as conn:
        assert allocations.get(conn, key).state == "releasing"
        assert nodes.get(conn, "m1").unclean_allocation_id == key
        baremetal.clean(conn, "m1", machines.act)
        assert machines.released(conn, key)
        assert allocations.get(conn, key).state == "released"
        machines.reinstall(conn)
        assert machines.reasons(conn) == {"m1": ""}


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize(
    ("begins", "to", "kind"),
    [
        (NodeMode.SLICE, NodeMode.BAREMETAL, TaskKind.NODE_CONVERT),
        (NodeMode.BAREMETAL, NodeMode.SLICE, TaskKind.NODE_BOOTSTRAP),
    ],
)
def test_a_conversion_is_asked_for_again(
    engine: sa.Engine, ended: End, begins: NodeMode, to: NodeMode, kind: TaskKind
) -> None:
    def ask(conn: sa.Connection) -> Task:
        host.convert(conn, "m1", to, ACT)
        return queue.enqueue(conn, queue.Enqueue(kind, "m1", "node", "m1"), ACT)

    Machines(Site(engine)).machine(mode=begins)
    first = retrying(engine, ask)
    ended(kind)
    with reading(engine) as conn:
        node = nodes.get(conn, "m1")
        assert (node.mode, node.slice_scheduling) == (f"converting_to_{to}", False)
    again = retrying(engine, ask)
    assert (again.state, again.id != first.id) == ("queued", True)


@pytest.mark.covers("CTRL-9")
def test_a_task_that_no_worker_took_ends_the_same_way(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        conn.execute(sa.update(tables.tasks).values(deadline_at=clock.now() - 1))
    end_overdue(sold.engine, settings)
    with reading(sold.engine) as conn:
        (task,) = queue.every(conn, kind=TaskKind.SLICE_VM_PROVISION)
        assert (task.state, task.error["code"]) == ("canceled", "deadline_passed")
        assert states(conn, key) == ("failed", "failed", "available")


def late(engine: sa.Engine, settings: Settings, table: sa.Table) -> None:
    """The deadlines of all in the table pass, and the leader looks."""
    with transaction(engine) as conn:
        conn.execute(sa.update(table).values(deadline_at=clock.now() - 1))
    end_overdue(engine, settings)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("table", [tables.allocations, tables.slots], ids=["allocation", "slot"])
def test_a_backlog_blocks_no_slot_that_nobody_touched(
    sold: Site, settings: Settings, table: sa.Table, waits: bool
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        if waits:
            unreached(conn, TaskKind.SLICE_VM_PROVISION)
            slices.provision_started(conn, key, ACT)
    late(sold.engine, settings, table)
    with transaction(sold.engine) as conn:
        (task,) = queue.every(conn, kind=TaskKind.SLICE_VM_PROVISION)
        assert task.state == "canceled"
        assert states(conn, key) == ("failed", "failed", "available")
        assert allocations.get(conn, key).error["code"] == "deadline_passed"
        assert sold.allocate(conn, 2), "both slots are sold again"


@pytest.mark.parametrize("attempt", [1, 2])
def test_what_a_worker_has_or_had_is_unknown_past_its_deadline(
    sold: Site, settings: Settings, attempt: int
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        conn.execute(sa.update(tables.tasks).values(max_attempts=2))
        (task,) = leasing.lease(conn, "worker")
        slices.provision_started(conn, key, ACT)
        if attempt == 2:
            queue.retry(conn, task.id, task.lease_token, "again", seconds=0, act=ACT)
    late(sold.engine, settings, tables.allocations)
    with transaction(sold.engine) as conn:
        assert states(conn, key) == ("failed", "failed", "cleanup_blocked")


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize("waits", [False, True])
def test_a_machine_that_nobody_touched_is_free_again_past_its_deadline(
    machines: Machines, settings: Settings, waits: bool
) -> None:
    with transaction(machines.engine) as conn:
        key = machines.launch(conn).id
        if waits:
            unreached(conn, TaskKind.BAREMETAL_PROVISION)
            slices.provision_started(conn, key, ACT)
    late(machines.engine, settings, tables.allocations)
    with transaction(machines.engine) as conn:
        assert allocations.get(conn, key).state == "failed"
        assert nodes.get(conn, "m1").unclean_allocation_id == ""
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": ""}


def test_a_warning_opens_no_writing_transaction(
    sold: Site, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each look would open a transaction for each slot that was left blocked."""
    with transaction(sold.engine) as conn:
        sold.failed(conn)
        host.drain(conn, "n1", ACT)
        for table in (tables.slots, tables.nodes):
            passed = sa.update(table).where(table.c.deadline_at.is_not(None))
            assert conn.execute(passed.values(deadline_at=clock.now() - 1)).rowcount == 1

    def refuse(_engine: sa.Engine) -> Any:
        raise AssertionError("a transaction was opened")

    monkeypatch.setattr("reconciler.work.loops.transaction", refuse)
    monkeypatch.setattr("reconciler.work.loops._OVERDUE_LOG.exception", pytest.fail)
    end_overdue(sold.engine, settings)


@pytest.mark.postgres
def test_a_task_that_is_taken_meanwhile_is_asked_to_end(
    postgresql: sa.Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker takes it between our look and our word: nothing may be freed then.

    SQLite has one writer at a time, so there is no between.
    """
    sold = Site(postgresql)
    sold.node()
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    taken: list[Task] = []

    def slow(*given: Any) -> Any:
        with transaction(sold.engine) as other:
            taken.extend(leasing.lease(other, "worker"))
        return locked_subject(*given)

    monkeypatch.setattr("reconciler.lifecycle.task_failures.locked_subject", slow)
    with reading(sold.engine) as conn:
        (task,) = queue.every(conn, kind=TaskKind.SLICE_VM_PROVISION)
    end = partial(cancel, task_id=task.id, act=ACT)
    with pytest.raises(Problem, match="generation_conflict"), transaction(sold.engine) as conn:
        end(conn)
    with reading(sold.engine) as conn:
        assert states(conn, key) == ("requested", "reserved", "reserved")
    row = retrying(sold.engine, end)
    assert (row.state, row.cancel_requested, len(taken)) == ("running", True, 1)
