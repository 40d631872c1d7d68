"""Task queue: which tasks may run beside others, and the rights of the lease holder."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.rows import Page
from reconciler.db.schema import Task
from reconciler.lifecycle import host
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, nodes, projects, queue, timeline
from tests.unit.reconciler.conftest import ADMIN, Site, code


def put(
    conn: sa.Connection, site: Site, kind: TaskKind, subject: str = "n1", **fields: Any
) -> Task:
    subject_kind = "node" if subject == "n1" else "allocation"
    item = queue.Enqueue(kind, "n1", subject_kind, subject, **fields)
    return queue.enqueue(conn, item, site.act)


def lease(conn: sa.Connection, **named: Any) -> list[str]:
    return [task.kind for task in leasing.lease(conn, "w1", limit=10, **named)]


def test_same_work_is_queued_once(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        first = put(conn, sold, TaskKind.NODE_PARITY)
        assert put(conn, sold, TaskKind.NODE_PARITY).id == first.id
        other = put(conn, sold, TaskKind.NODE_PARITY, parameters={"intent": "baremetal"})
        assert other.id != first.id
        assert lease(conn) == ["node.parity"]
        assert put(conn, sold, TaskKind.NODE_PARITY).id != first.id


def test_provisions_run_beside_each_other_but_not_beside_a_bootstrap(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.SLICE_VM_PROVISION, "a1")
        put(conn, sold, TaskKind.SLICE_VM_PROVISION, "a2")
        put(conn, sold, TaskKind.SLICE_WIPE, "a2")
        put(conn, sold, TaskKind.NODE_BOOTSTRAP)
        put(conn, sold, TaskKind.SLICE_VM_PROVISION, "a3")
        assert lease(conn) == ["slice.vm_provision", "slice.vm_provision"]
        for task in queue.every(conn, state=TaskState.RUNNING):
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, sold.act)
        # a3 came after the bootstrap and does not overtake it; the wipe came before it.
        assert lease(conn) == ["slice.wipe"]
        (wipe,) = queue.every(conn, state=TaskState.RUNNING)
        queue.finish(conn, wipe.id, wipe.lease_token, TaskState.LOST, sold.act)
        assert lease(conn) == ["node.bootstrap"]
        assert lease(conn) == []


@pytest.mark.covers("CTRL-8")
def test_priority_kinds_and_unreachable_nodes(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.SLICE_WIPE, "a1")
        put(conn, sold, TaskKind.SLICE_VM_RELEASE, "a2", priority=5)
        assert lease(conn, kinds=[TaskKind.NODE_PARITY]) == []
        host.lost(conn, "n1", sold.act)
        # A renewed certificate goes over SSH too.
        put(conn, sold, TaskKind.NODE_ENROL)
        assert lease(conn) == []
        host.regained(conn, "n1", sold.act)
        assert lease(conn) == ["slice.vm_release", "slice.wipe", "node.enrol"]


@pytest.mark.covers("CTRL-9")
def test_only_the_holder_decides_and_only_once(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.NODE_PARITY)
        (task,) = leasing.lease(conn, "w1")
        token, task_id = task.lease_token, task.id
        queue.started(conn, task_id, token, run_id="r1", run_directory="runs/r1")
        queue.progress(conn, task_id, token, {"step": "look", "percent": 10})
        assert code(queue.heartbeat, conn, task_id, "other") == "stale_lease"
        assert code(queue.heartbeat, conn, task_id, "") == "stale_lease"
        conn.execute(sa.update(tables.tasks).values(lease_expires_at=clock.now() - 1))
        (again,) = leasing.lease(conn, "w2")
        assert (again.id, again.run_directory) == (task_id, "runs/r1")
        assert (again.started_at, again.deadline_at) == (task.started_at, task.deadline_at)
        finish = queue.finish
        assert code(finish, conn, task_id, token, TaskState.FAILED, sold.act) == "stale_lease"
        done = finish(
            conn, task_id, again.lease_token, TaskState.SUCCEEDED, sold.act, result={"a": 1}
        )
        assert (done.state, done.result, done.lease_owner) == ("succeeded", {"a": 1}, "")
        assert code(finish, conn, task_id, "", TaskState.SUCCEEDED, sold.act) == "stale_lease"
        assert [row.document["step"] for row in queue.events(conn, task_id)] == ["look"]
        types = [row["type"] for row in timeline.of(conn, node_id="n1", page=Page(10))]
        assert "progress" in types
        assert "state" in types


@pytest.mark.covers("CTRL-8")
def test_wait_retry_resume_abandon(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.NODE_PARITY)
        conn.execute(sa.update(tables.tasks).values(max_attempts=2))
        (task,) = leasing.lease(conn, "w1")
        reason = "the node does not answer"
        waiting = queue.wait_for_host(conn, task.id, task.lease_token, reason, act=sold.act)
        assert (waiting.state, waiting.state_reason) == ("waiting", reason)
        assert lease(conn) == []
        assert queue.resume(conn, "n1") == 1
        (task,) = leasing.lease(conn, "w1")
        again = queue.retry(conn, task.id, task.lease_token, "x", seconds=0, act=sold.act)
        assert (again.state, again.attempt) == ("queued", 2)
        (task,) = leasing.lease(conn, "w1")
        token = task.lease_token
        retry = queue.retry
        named = {"seconds": 0, "act": sold.act}
        assert code(retry, conn, task.id, token, "x", **named) == "attempts_exhausted"
        assert leasing.lease(conn, "w2") == []
        assert queue.abandon(conn, "w1") == 1
        assert [row.id for row in leasing.lease(conn, "w2")] == [task.id]


@pytest.mark.covers("CTRL-8")
def test_cancel(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        queued = put(conn, sold, TaskKind.NODE_PARITY)
        assert queue.cancel(conn, queued.id, sold.act).state == "canceled"
        assert queue.cancel(conn, queued.id, sold.act).state == "canceled"
        put(conn, sold, TaskKind.NODE_PARITY)
        (task,) = leasing.lease(conn, "w1")
        assert queue.cancel(conn, task.id, sold.act).state == "running"
        assert queue.heartbeat(conn, task.id, task.lease_token).cancel_requested


def queue_unreachable_work(
    conn: sa.Connection, site: Site, state: TaskState = TaskState.QUEUED
) -> None:
    """Queue more tasks for an unreachable node than a lease reads at once."""
    nodes.create(conn, site.act, id="n2")
    conn.execute(
        sa.update(tables.nodes).where(tables.nodes.c.id == "n2").values(state="unreachable")
    )
    for number in range(60):
        subject = f"a{number}"
        item = queue.Enqueue(TaskKind.SLICE_WIPE, "n2", "allocation", subject, priority=9)
        queue.enqueue(conn, item, site.act)
    conn.execute(sa.update(tables.tasks).values(state=state))


@pytest.mark.covers("CTRL-8")
@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.WAITING])
def test_a_node_that_does_not_answer_starves_no_other(sold: Site, state: TaskState) -> None:
    with transaction(sold.engine) as conn:
        queue_unreachable_work(conn, sold, state)
        put(conn, sold, TaskKind.NODE_PARITY)
        assert lease(conn) == ["node.parity"]


def test_a_busy_subject_and_a_busy_node_starve_no_other(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        nodes.create(conn, sold.act, id="n2")
        put(conn, sold, TaskKind.SLICE_WIPE, "a1")
        assert lease(conn) == ["slice.wipe"]
        for number in range(60):
            put(conn, sold, TaskKind.SLICE_WIPE, "a1", priority=9, deadline_s=number)
            put(conn, sold, TaskKind.SLICE_WIPE, "a1", priority=9, parameters={"n": number})
        put(conn, sold, TaskKind.NODE_BOOTSTRAP, priority=8)
        elsewhere = queue.Enqueue(TaskKind.NODE_PARITY, "n2", "node", "n2")
        queue.enqueue(conn, elsewhere, sold.act)
        assert lease(conn) == ["node.parity"]


@pytest.mark.covers("CTRL-8")
def test_a_project_keeps_the_workers_from_no_other(sold: Site) -> None:
    """Such as by restarts of machines that never answer: each holds a worker for many minutes."""

    def queue_power(conn: sa.Connection, allocation_id: str) -> None:
        item = queue.Enqueue(TaskKind.SLICE_VM_POWER, "n1", allocation_id=allocation_id)
        queue.enqueue(conn, item, sold.act)

    with transaction(sold.engine) as conn:
        projects.create(conn, "other", ADMIN, id="other")
        greedy = [sold.active(conn), sold.active(conn)]
        row = conn.execute(sa.select(tables.allocations)).mappings().first()
        others = rows.new_id()
        ended = {"id": others, "project_id": "other", "state": "released", "ended_at": 1.0}
        rows.insert(conn, tables.allocations, {**dict(row or {}), **ended})
        for key in (*greedy, others):
            queue_power(conn, key)
        put(conn, sold, TaskKind.NODE_PARITY)

        def lease_one() -> Task:
            (task,) = leasing.lease(conn, "w1")
            return task

        first = lease_one()
        assert first.allocation_id == greedy[0]
        assert [lease_one().allocation_id for _ in range(2)] == [others, None]
        assert lease_one().allocation_id == greedy[1]


@pytest.mark.covers("CTRL-9")
def test_a_run_is_taken_over_only_where_its_files_are(sold: Site) -> None:
    """Another machine cannot see whether it lives, and would start it a second time."""
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.NODE_PARITY)
        (task,) = leasing.lease(conn, "w1", runner="here")
        assert task.runner == "here"
        queue.started(conn, task.id, task.lease_token, run_id="r1", run_directory="runs/r1")
        queue.abandon(conn, "w1")
        assert leasing.lease(conn, "w2", runner="there") == []
        (task,) = leasing.lease(conn, "w3", runner="here")
        journal.advance(conn, Task, task.id, "wait", sold.act, columns={"lease_token": ""})
        assert leasing.lease(conn, "w2", runner="there") == [], "its run may still be alive"
        (task,) = leasing.lease(conn, "w3", runner="here")
        token = task.lease_token
        queue.retry(conn, task.id, token, "another run", seconds=0, act=sold.act)
        (task,) = leasing.lease(conn, "w2", runner="there")
        assert (task.runner, task.attempt) == ("there", 2)


def test_not_before(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.NODE_PARITY, not_before_s=60)
        assert lease(conn) == []


@pytest.mark.covers("CTRL-9")
def test_schema_lets_one_run_per_subject(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        put(conn, sold, TaskKind.NODE_PARITY)
        put(conn, sold, TaskKind.SLICE_TOPOLOGY_DISCOVER)
    with pytest.raises(sa.exc.IntegrityError), transaction(sold.engine) as conn:
        conn.execute(sa.update(tables.tasks).values(state="running"))


@pytest.mark.covers("CTRL-9")
def test_what_was_queued_in_the_same_instant_goes_in_the_order_of_queueing(sold: Site) -> None:
    """The database's clock may see no difference between them."""
    kinds = (TaskKind.NODE_PARITY, TaskKind.NODE_BOOTSTRAP, TaskKind.NODE_IMAGE_CACHE)
    with transaction(sold.engine) as conn:
        queued = [
            queue.enqueue(conn, queue.Enqueue(kinds[number % 3], "n1", "x", f"{number}"), sold.act)
            for number in range(30)
        ]
        conn.execute(sa.update(tables.tasks).values(created_at=1.0))
        ids = [task.id for task in queued]
        assert [task.id for task in queue.open_of_node(conn, "n1")] == ids
        assert [task.id for task in queue.every(conn)] == ids[::-1]
        # An exclusive task, first in line, keeps the tasks behind it from going before it.
        reasons = leasing.wait_reasons(conn, queued)
        assert reasons[ids[2]]["code"] == "exclusive_first"
        taken = []
        while leased := leasing.lease(conn, "w"):
            taken.append(leased[0].id)
            held = (leased[0].id, leased[0].lease_token)
            queue.finish(conn, *held, TaskState.SUCCEEDED, sold.act)
    assert taken == ids
