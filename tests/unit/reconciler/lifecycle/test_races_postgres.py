"""Pairs of transactions at once on PostgreSQL: the second sees the changes of the first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import locks, rows
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Allocation, AppInstance, Node, Slot, Task
from reconciler.lifecycle import apps, gate, host, launch, placement, quota
from reconciler.lifecycle import slots as slot_life
from reconciler.model.errors import Problem
from reconciler.model.scheduler.snapshot import Want
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, nodes, projects, queue, slots, tokens
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import slices as slice_kinds
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.lifecycle import test_task_failures

pytestmark = pytest.mark.postgres
engine, sold = test_postgres.engine, test_task_failures.sold
# Time limit of a call that must not wait, and time in which a waiting call must not end.
SOON_S = 20
A_WHILE_S = 0.5
Beside = Callable[[Callable[[], Any]], Future[Any]]


@pytest.fixture
def beside() -> Iterator[Beside]:
    """Do it in a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


@pytest.mark.covers("CTRL-4", "I13")
def test_a_launch_that_a_worker_takes_meanwhile_is_not_withdrawn(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    read = queue.open_of_allocation

    def then_leased(conn: sa.Connection, allocation_id: str) -> list[Task]:
        row = read(conn, allocation_id)
        with transaction(sold.engine) as other:
            leasing.lease(other, "worker")
        return row

    monkeypatch.setattr(queue, "open_of_allocation", then_leased)
    with pytest.raises(Problem, match="generation_conflict"), transaction(sold.engine) as conn:
        launch.release(conn, key, ADMIN)
    with pytest.raises(Problem, match="allocation_not_releasable"):
        retrying(sold.engine, lambda conn: launch.release(conn, key, ADMIN))
    with reading(sold.engine) as conn:
        (task,) = queue.every(conn, allocation_id=key)
        assert (task.state, task.cancel_requested) == ("running", False)
        assert sorted(sold.statuses(conn)) == ["available", "reserved"]


@pytest.mark.covers("CTRL-4", "I4")
@pytest.mark.parametrize("act", ["disable", "withdraw"])
def test_a_slot_that_is_taken_off_sale_while_its_gate_opens_stays_off(
    sold: Site, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    with transaction(sold.engine) as conn:
        slot = slots.of_node(conn, "n1")[0]
        slot_life.disable(conn, slot.id, ADMIN)
        slots.update(conn, slot.id, wanted="available")
    judge, judged = gate.judge, []

    def then_disabled(conn: sa.Connection, row: Slot, *given: Any) -> Any:
        blockers = judge(conn, row, *given)
        if row.id == slot.id and not judged:
            judged.append(row.id)
            with transaction(sold.engine) as other:
                getattr(slot_life, act)(other, slot.id, ADMIN)
        return blockers

    monkeypatch.setattr(gate, "judge", then_disabled)
    with transaction(sold.engine) as conn:
        assert gate.open_gate(conn, "n1", ADMIN)["opened"] == []
    with reading(sold.engine) as conn:
        assert (slots.get(conn, slot.id).status, judged) == ("disabled", [slot.id])


def test_one_host_key_is_not_certified_for_two_hosts_at_once(sold: Site, beside: Beside) -> None:
    key = "ssh-ed25519 AAAA"

    recorded, meet = threading.Event(), threading.Event()

    def enrol(node_id: str, *, waits: bool = False) -> str:
        with transaction(sold.engine) as conn:
            try:
                tokens.check_host_key(conn, node_id, key)
            except Problem as problem:
                return problem.code
            given = {"certificate": "c", "principals": [node_id], "valid_until": 1.0}
            tokens.record_certificate(conn, node_id, ADMIN, serial=node_id, public_key=key, **given)
            if waits:
                recorded.set()
                meet.wait(SOON_S)
        return ""

    with transaction(sold.engine) as conn:
        nodes.create(conn, ADMIN, id="n2")
    first = beside(lambda: enrol("n1", waits=True))
    assert recorded.wait(SOON_S)
    second = beside(lambda: enrol("n2"))
    time.sleep(A_WHILE_S)
    meet.set()
    assert (first.result(SOON_S), second.result(SOON_S)) == ("", "host_key_not_accepted")


def test_two_launches_at_once_do_not_pass_a_quota_together(sold: Site, beside: Beside) -> None:
    with transaction(sold.engine) as conn:
        quota.change(conn, sold.project, {"gpus": 1}, ADMIN)
    with transaction(sold.engine) as conn:
        sold.allocate(conn)

        def second() -> str:
            with transaction(sold.engine) as other:
                return sold.allocate(other)

        waiting = beside(second)
        with pytest.raises(TimeoutError):
            waiting.result(A_WHILE_S)
    with pytest.raises(Problem, match="quota_exceeded"):
        waiting.result(SOON_S)


@pytest.mark.covers("CTRL-8", "I13")
def test_no_run_begins_for_an_allocation_that_has_ended(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        (task,) = queue.every(conn, allocation_id=key)
        work = Work(conn, task, nodes.get(conn, "n1"), {}, Settings())
        with conn.begin_nested() as begun:
            slice_kinds.set_provisioning(work)
            slice_kinds.set_provisioning(work)
            assert allocations.get(conn, key).state == "provisioning", "goes on"
            begun.rollback()
        launch.release(conn, key, ADMIN)
        with pytest.raises(Problem, match="canceled"):
            slice_kinds.set_provisioning(work)


@pytest.mark.covers("CTRL-4", "I20")
def test_a_launch_does_not_wait_for_who_holds_its_node(sold: Site, beside: Beside) -> None:
    """He may be about to wait for its slots."""
    with transaction(sold.engine) as conn:
        rows.get(conn, Node, "n1", lock=True)
        launched = beside(lambda: retrying(sold.engine, sold.allocate))
        assert launched.result(SOON_S)


@pytest.mark.covers("CTRL-3", "CTRL-4", "I16")
@pytest.mark.parametrize("what", ["restarts", "retires"])
def test_what_is_launched_meanwhile_is_no_more_to_be_taken_off_sale(
    sold: Site, beside: Beside, what: str
) -> None:
    def restarts(conn: sa.Connection) -> bool:
        return host.restarted(conn, "n1", ADMIN, since=nodes.get(conn, "n1").boot_id)

    def retires(conn: sa.Connection) -> bool:
        host.lost(conn, "n1", ADMIN)
        with pytest.raises(Problem, match="node_in_use"):
            host.retire(conn, "n1", ADMIN)
        raise _RefusedError

    work = {"restarts": restarts, "retires": retires}[what]
    began = threading.Event()

    def alone() -> bool:
        try:
            with transaction(sold.engine) as conn:
                began.set()
                return work(conn)
        except _RefusedError:
            return True

    with transaction(sold.engine) as conn:
        # Its slot is chosen and locked; the rest of the launch follows.
        placement.reserve(conn, Want(1))
        second = beside(alone)
        assert began.wait(SOON_S)
        with pytest.raises(TimeoutError):
            second.result(A_WHILE_S)
        sold.allocate(conn)
    assert second.result(SOON_S)
    expected = ["disabled" if what == "restarts" else "available", "reserved"]
    with reading(sold.engine) as conn:
        assert sorted(sold.statuses(conn)) == sorted(expected)


class _RefusedError(Exception):
    """Rolls the transaction back."""


@pytest.mark.covers("CTRL-4")
def test_who_waits_for_a_set_keeps_no_part_of_it(sold: Site, beside: Beside) -> None:
    with transaction(sold.engine) as conn:
        held, other = sorted(slots.of_node(conn, "n1"), key=lambda slot: str(slot.id))
    with transaction(sold.engine) as conn:
        rows.get(conn, Slot, held.id, lock=True)
        both = beside(lambda: retrying(sold.engine, lambda conn: sold.allocate(conn, 2)))
        with pytest.raises(TimeoutError):
            both.result(A_WHILE_S)
        with transaction(sold.engine) as third:
            query = sa.select(tables.slots.c.id).where(tables.slots.c.id == other.id)
            assert third.execute(query.with_for_update(skip_locked=True)).all(), "nobody's"
    assert both.result(SOON_S)


def _queued(engine: sa.Engine, kind: TaskKind) -> str:
    item = queue.Enqueue(kind=kind, node_id="n1", subject_kind="node", subject_id=kind.value)
    return retrying(engine, lambda conn: queue.enqueue(conn, item, ADMIN)).id


@pytest.mark.covers("CTRL-9", "I13")
@pytest.mark.parametrize("exclusive_first", [True, False])
def test_an_exclusive_task_and_another_are_not_leased_at_once(
    sold: Site, exclusive_first: bool
) -> None:
    """The first worker has not committed yet, so only the lock of the node shows its lease."""
    kinds = [TaskKind.NODE_BOOTSTRAP, TaskKind.SLICE_ABSENCE_VERIFY]
    first, second = kinds if exclusive_first else reversed(kinds)
    for kind in (first, second):
        _queued(sold.engine, kind)
    with transaction(sold.engine) as conn:
        assert leasing.lease(conn, "one", kinds=[first])
        with transaction(sold.engine) as two:
            assert leasing.lease(two, "two", kinds=[second]) == []
    with transaction(sold.engine) as two:
        assert leasing.lease(two, "two", kinds=[second]) == []


@pytest.mark.covers("CTRL-9", "I13")
def test_a_task_that_another_worker_takes_before_the_lock_is_seen_under_it(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (TaskKind.SLICE_ABSENCE_VERIFY, TaskKind.NODE_BOOTSTRAP):
        _queued(sold.engine, kind)
    lock = locks.free_node

    def lock_late(conn: sa.Connection, node_id: str) -> AbstractContextManager[Node | None]:
        monkeypatch.undo()
        with transaction(sold.engine) as other:
            assert leasing.lease(other, "other", kinds=[TaskKind.SLICE_ABSENCE_VERIFY])
        return lock(conn, node_id)

    monkeypatch.setattr(locks, "free_node", lock_late)
    with transaction(sold.engine) as conn:
        assert leasing.lease(conn, "late", kinds=[TaskKind.NODE_BOOTSTRAP]) == []


@pytest.mark.covers("CTRL-10")
def test_what_another_project_has_is_not_locked(sold: Site) -> None:
    """Its owner would have to wait for a request that is refused."""
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        projects.create(conn, "p2", ADMIN, id="p2")
    fields = {"slug": "slurm", "name": "app", "managed_key": "ssh-ed25519 AAAA"}
    with transaction(sold.engine) as conn:
        mine = apps.NewApp(project_id=sold.project, controller_id=key, **fields)
        instance = apps.create(conn, mine, ADMIN)
    theirs = apps.NewApp(project_id="p2", controller_id=key, **fields)
    with transaction(sold.engine) as owner:
        rows.get(owner, Allocation, key, lock=True)
        rows.get(owner, AppInstance, instance.id, lock=True)
        with pytest.raises(Problem, match="allocation_not_found"), transaction(sold.engine) as conn:
            apps.create(conn, theirs, ADMIN)
        for act in (apps.stop, apps.reconcile):
            with (
                pytest.raises(Problem, match="app_instance_not_found"),
                transaction(sold.engine) as conn,
            ):
                act(conn, "p2", instance.id, ADMIN)
