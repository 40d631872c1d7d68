"""The task that puts an application's key on a member's host: real store, scripted runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, leader
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import AppOperation
from reconciler.lifecycle import app_operations, apps, launch
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, queue
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work import loops, worker
from reconciler.work.loops import LOOPS
from tests.unit.reconciler.conftest import ADMIN
from tests.unit.reconciler.lifecycle.test_apps import ERROR, KEY
from tests.unit.reconciler.whole_machines import Machines
from tests.unit.reconciler.work.conftest import Attend, Runs, attending
from tests.unit.reconciler.work.test_unreachable import SILENT

pytestmark = pytest.mark.covers("APP-4")

KIND = TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY


@pytest.fixture
def instance(machines: Machines) -> tuple[str, str]:
    """An instance on a machine of its own, and the machine's allocation."""
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        wish = apps.NewApp(
            project_id="p1", slug="slurm-reference", name="s", managed_key=KEY, controller_id=key
        )
        return str(apps.create(conn, wish, ADMIN).id), key


@pytest.fixture
def attend(machines: Machines, settings: Settings, runs: Runs) -> Attend:
    """Lease the next task of a key and bring it to its end."""
    return attending(machines.engine, settings, runs, KIND)


def answers(runs: Runs, *, present: bool = True) -> None:
    # A host may say any time, even a time beyond any date.
    ends = 2**53 - 1 if present else 0
    runs.ends(evidence={"managed_key": {"present": present, "expires_at": ends}})


def member(engine: sa.Engine, id: str) -> dict[str, Any]:
    with transaction(engine) as conn:
        (row,) = apps.members(conn, id)
        return row


def operation(engine: sa.Engine, id: str) -> AppOperation:
    """The latest."""
    with transaction(engine) as conn:
        return app_operations.every(conn, id)[-1]


def test_the_key_is_put_there_and_taken_away(
    machines: Machines, instance: tuple[str, str], runs: Runs, attend: Attend
) -> None:
    id, allocation_id = instance
    answers(runs)
    assert attend().state == "succeeded"
    (spec,) = runs.launched
    assert spec.playbook == "managed_key"
    contract.check_vars("managed_key", spec.variables)
    assert spec.variables["slice_allocation"] == {"id": allocation_id, "username": "alice"}
    given = spec.variables["slice_managed_key"]
    assert (given["instance_id"], given["public_key"], given["state"]) == (id, KEY, "present")
    assert member(machines.engine, id)["key_expires_at"] == given["expires_at"]
    assert operation(machines.engine, id).status == "succeeded"
    with transaction(machines.engine) as conn:
        apps.stop(conn, "p1", id, ADMIN)
    answers(runs, present=False)
    assert attend().state == "succeeded"
    assert runs.launched[1].variables["slice_managed_key"]["state"] == "absent"
    assert member(machines.engine, id)["key_expires_at"] is None


def test_a_host_that_refuses_fails_the_operation_by_its_code(
    machines: Machines, instance: tuple[str, str], runs: Runs, attend: Attend
) -> None:
    runs.ends("failed", step="Put the key in its place", error=ERROR, evidence={})
    assert attend().error["code"] == "home_unsafe"
    ended = operation(machines.engine, instance[0])
    assert (ended.status, ended.failure) == ("failed", ERROR)
    assert member(machines.engine, instance[0])["status"] == "failed"


def test_a_run_that_is_lost_fails_it_too_and_blocks_nothing(
    machines: Machines, instance: tuple[str, str], runs: Runs, attend: Attend
) -> None:
    id, allocation_id = instance
    runs.ends("lost")
    assert attend().state == "lost"
    assert operation(machines.engine, id).failure["code"] == "run_lost"
    with transaction(machines.engine) as conn:
        assert allocations.get(conn, allocation_id).state == "active"
        apps.reconcile(conn, "p1", id, ADMIN)
    answers(runs)
    assert attend().state == "succeeded"


def test_a_host_that_does_not_answer_is_waited_for(
    machines: Machines, instance: tuple[str, str], runs: Runs, attend: Attend
) -> None:
    """The seed's symptom: accepted, and never applied; the task says the reason."""
    id, _ = instance
    runs.outcome = SILENT
    assert attend().state == "waiting"
    assert operation(machines.engine, id).status == "running"
    with transaction(machines.engine) as conn:
        conn.execute(sa.update(tables.tasks).values(not_before=clock.now() - 1))
        conn.execute(sa.update(tables.nodes).values(state="ready"))
    answers(runs)
    assert attend().state == "succeeded"
    assert operation(machines.engine, id).status == "succeeded"
    assert [spec.run_id for spec in runs.launched][1].endswith("-1-1")


def test_no_run_begins_for_an_instance_that_was_stopped_or_an_allocation_that_ended(
    machines: Machines,
    instance: tuple[str, str],
    runs: Runs,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    id, allocation_id = instance
    with transaction(machines.engine) as conn:
        (task,) = leasing.lease(conn, "worker", kinds=[KIND])
        launch.release(conn, allocation_id, ADMIN)
    worker.attend(machines.engine, settings, task, threading.Event())
    assert runs.launched == []
    with transaction(machines.engine) as conn:
        assert queue.get(conn, task.id).state == "canceled"
    assert operation(machines.engine, id).failure["code"] == "canceled"
    loops.tend_apps(machines.engine, settings)
    assert member(machines.engine, id)["left_at"]
    with transaction(machines.engine) as conn:
        assert apps.get(conn, "p1", id).status == "failed"


def test_the_leader_renews_a_key_before_it_ends(
    machines: Machines, instance: tuple[str, str], runs: Runs, attend: Attend, settings: Settings
) -> None:
    assert [loop.act for loop in LOOPS if loop.name == "apps"] == [loops.tend_apps]
    answers(runs)
    attend()
    loops.tend_apps(machines.engine, settings)
    with transaction(machines.engine) as conn:
        assert len(queue.every(conn, kind=KIND)) == 1
        conn.execute(sa.update(tables.app_members).values(key_expires_at=clock.now() + 600))
        earlier = tables.app_operations.c.created_at - 3600
        conn.execute(sa.update(tables.app_operations).values(created_at=earlier))
    loops.tend_apps(machines.engine, settings)
    runs.outcome = None
    answers(runs)
    assert attend().state == "succeeded"
    ended = operation(machines.engine, instance[0])
    assert (ended.kind, ended.status) == ("bootstrap_ssh_reconcile", "succeeded")
    assert ended.requested_by == "reconciler"


def test_one_member_that_cannot_be_looked_after_keeps_no_other_waiting(
    machines: Machines,
    instance: tuple[str, str],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = machines.site.document

    def of_another_machine(number: int) -> dict[str, Any]:
        report = document(number)
        report["identity"]["machine_id"] = "2" * 32
        return report

    # Each installation has a machine id of its own.
    monkeypatch.setattr(machines.site, "document", of_another_machine)
    machines.machine("m2", 2, profile="lab")
    with transaction(machines.engine) as conn:
        key = machines.active(conn, node_id="m2")
        wish = apps.NewApp(
            project_id="p1", slug="slurm-reference", name="t", managed_key=KEY, controller_id=key
        )
        # It comes first in the order in which they are looked at.
        broken, well = sorted([instance[0], str(apps.create(conn, wish, ADMIN).id)])
        for allocation_id in (instance[1], key):
            launch.release(conn, allocation_id, ADMIN)
    left = app_operations.left

    def planted(conn: sa.Connection, row: Any, *given: Any) -> None:
        left(conn, row, *given)
        if row.id == broken:
            raise ValueError("planted")

    monkeypatch.setattr(app_operations, "left", planted)
    loops.tend_apps(machines.engine, settings)
    assert member(machines.engine, broken)["left_at"] is None
    assert member(machines.engine, well)["status"] == "failed"


def test_a_leader_that_was_deposed_looks_after_nobody(
    machines: Machines, instance: tuple[str, str], settings: Settings
) -> None:
    term = leader.Term(leader.LOOPS, "another", 1, 5.0)
    with transaction(machines.engine) as conn:
        launch.release(conn, instance[1], ADMIN)
    with pytest.raises(leader.Deposed):
        loops.tend_apps(leader.led_by(machines.engine, term), settings)
    assert member(machines.engine, instance[0])["left_at"] is None


def test_an_unreadable_answer_is_a_failure(
    machines: Machines, instance: tuple[str, str], runs: Runs, attend: Attend
) -> None:
    runs.ends(evidence={})
    assert attend().error["code"] == "outcome_unreadable"
    assert operation(machines.engine, instance[0]).status == "failed"
