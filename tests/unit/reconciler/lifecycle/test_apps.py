"""The life of an application's instance, its members and their keys, on either database."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import app_operations, apps, invariants, launch, quota
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, queue
from tests.unit.reconciler.conftest import ADMIN, Site, code
from tests.unit.reconciler.lifecycle import test_retention
from tests.unit.reconciler.whole_machines import Machines

pytestmark = pytest.mark.covers("APP-4")
engine = test_retention.engine
KIND = TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"
ERROR = {"code": "home_unsafe", "expected": "a", "found": "b", "remedy": "c"}


class Apps:
    """A project with two whole machines of its own, and the work of a worker on them."""

    def __init__(self, site: Site) -> None:
        self.machines, self.engine = Machines(site), site.engine
        self.machines.machine("m1", 1)
        self.machines.machine("m2", 2)
        with transaction(self.engine) as conn:
            self.first = self.machines.active(conn, node_id="m1")
            self.second = self.machines.active(conn, node_id="m2")

    def wish(self, **fields: Any) -> apps.NewApp:
        values = {
            "project_id": "p1",
            "slug": "slurm-reference",
            "name": "slurm",
            "managed_key": KEY,
            "controller_id": self.first,
            "worker_ids": [self.second],
        }
        return apps.NewApp(**{**values, **fields})

    def create(self, conn: sa.Connection, **fields: Any) -> str:
        return str(apps.create(conn, self.wish(**fields), ADMIN).id)

    def work(
        self, conn: sa.Connection, *, error: dict[str, str] | None = None, limit: int = 9
    ) -> list[Task]:
        """Complete the queued key tasks."""
        taken = leasing.lease(conn, "worker", kinds=[KIND], limit=limit)
        for task in taken:
            given = task.parameters
            assert app_operations.began(conn, given["operation_id"], ADMIN) == ""
            if error:
                app_operations.failed(conn, given["operation_id"], ADMIN, error)
            else:
                placed = given["managed_key"]["state"] == "present"
                ends = given["managed_key"]["expires_at"] if placed else None
                app_operations.succeeded(conn, given["operation_id"], ADMIN, expires_at=ends)
            state = TaskState.FAILED if error else TaskState.SUCCEEDED
            queue.finish(conn, task.id, task.lease_token, state, ADMIN)
        return taken

    def seen(self, conn: sa.Connection, id: str) -> tuple[str, list[str], list[str]]:
        """Status of the instance, its members, and their operations."""
        return (
            apps.get(conn, "p1", id).status,
            [row["status"] for row in apps.members(conn, id)],
            [f"{row.kind} {row.status}" for row in app_operations.every(conn, id)],
        )

    def waits(self, conn: sa.Connection, id: str) -> str:
        reason = apps.waits_for(apps.get(conn, "p1", id), apps.members(conn, id))
        return reason["code"] if reason else ""


@pytest.fixture
def made(site: Site) -> Iterator[Apps]:
    made = Apps(site)
    yield made
    with reading(made.engine) as conn:
        assert invariants.check(conn) == []


def later(conn: sa.Connection, seconds: float) -> None:
    """So much time passes, for keys and operations."""
    for table, name in (
        (tables.app_members, "key_expires_at"),
        (tables.app_operations, "created_at"),
        (tables.app_instances, "ended_at"),
    ):
        conn.execute(sa.update(table).values({name: table.c[name] - seconds}))


def test_an_instance_waits_for_its_keys_and_then_for_its_controller(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        assert made.seen(conn, id) == (
            "deploying",
            ["reconciling", "reconciling"],
            ["member_add accepted", "member_add accepted"],
        )
        assert made.waits(conn, id) == "bootstrap_ssh_pending"
        queued = queue.every(conn, kind=KIND)
        assert {task.allocation_id for task in queued} == {made.first, made.second}
        assert {task.subject_kind for task in queued} == {"allocation"}
        given = queued[0].parameters
        assert given["fence"] == 1
        assert given["managed_key"]["public_key"] == KEY
        assert given["managed_key"]["instance_id"] == id
        left = given["managed_key"]["expires_at"] - clock.read(conn)
        assert app_operations.KEY_S - 60 < left <= app_operations.KEY_S
        made.work(conn)
        assert made.seen(conn, id)[2] == ["member_add succeeded"] * 2
        assert made.waits(conn, id) == "controller_absent"
        controller, worker = apps.members(conn, id)
        assert (controller["role"], worker["role"]) == ("controller", "worker")
        ready = {"phase": "slurm_ready", "slurmctld_state": "up"}
        apps.reported(conn, controller["id"], {"phase": "starting"}, ADMIN, ready=False)
        apps.reported(conn, controller["id"], ready, ADMIN, ready=True)
        assert made.seen(conn, id)[0] == "deploying"
        apps.reported(conn, worker["id"], ready, ADMIN, ready=True)
        assert made.seen(conn, id)[:2] == ("running", ["ready", "ready"])
        assert made.waits(conn, id) == ""
        assert apps.members(conn, id)[0]["detail"] == ready
        changes = [row.target for row in journal.history_of(conn, "app_instance", id)]
        assert changes == ["deploying", "running"]


def test_a_key_that_cannot_be_put_there_fails_its_member_until_it_is_asked_for_again(
    made: Apps,
) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        made.work(conn, error=ERROR)
        assert made.seen(conn, id)[1:] == (["failed"] * 2, ["member_add failed"] * 2)
        assert made.waits(conn, id) == "member_failed"
        failed = app_operations.every(conn, id)[0]
        assert failed.failure == ERROR
        assert apps.members(conn, id)[0]["status_reason"] == "home_unsafe"
        operations = apps.reconcile(conn, "p1", id, ADMIN)
        again = apps.reconcile(conn, "p1", id, ADMIN)
        assert [row.id for row in again] == [row.id for row in operations], "under way already"
        assert made.seen(conn, id)[1] == ["reconciling"] * 2
        assert len(made.work(conn)) == 2
        assert made.waits(conn, id) == "controller_absent"


def test_a_key_is_renewed_before_it_ends_and_a_failure_of_that_is_tried_again(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        made.work(conn)
        for member in apps.members(conn, id):
            apps.reported(conn, member["id"], {}, ADMIN, ready=True)
        assert app_operations.RENEW_KEYS(conn, ADMIN) == 0
        later(conn, app_operations.KEY_S - app_operations.RENEW_S + 60)
        assert app_operations.RENEW_KEYS(conn, ADMIN) == 2
        assert app_operations.RENEW_KEYS(conn, ADMIN) == 0, "under way"
        made.work(conn, error=ERROR)
        assert made.seen(conn, id)[:2] == ("running", ["ready"] * 2), "its key is good still"
        assert app_operations.RENEW_KEYS(conn, ADMIN) == 0, "tried a moment ago"
        later(conn, app_operations.RETRY_S + 1)
        assert app_operations.RENEW_KEYS(conn, ADMIN) == 2
        made.work(conn)
        ends = [row["key_expires_at"] for row in apps.members(conn, id)]
        assert min(ends) - clock.read(conn) > app_operations.KEY_S - 60


def test_stopping_takes_keys_away_and_frees_the_allocations(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        assert code(made.create, conn, name="second") == "allocation_in_app"
        made.work(conn, limit=1)
        apps.stop(conn, "p1", id, ADMIN)
        # Operations that had not begun do not begin; the removal of their keys is requested.
        assert made.seen(conn, id)[2] == [
            "member_add succeeded",
            "member_add failed",
            "bootstrap_ssh_remove accepted",
            "bootstrap_ssh_remove accepted",
        ]
        canceled = queue.every(conn, kind=KIND, state=TaskState.CANCELED)
        assert len(canceled) == 1
        removals = made.work(conn)
        assert {task.parameters["managed_key"]["state"] for task in removals} == {"absent"}
        assert [row["key_expires_at"] for row in apps.members(conn, id)] == [None, None]
        later(conn, app_operations.RETRY_S + 1)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 0
        assert code(apps.stop, conn, "p1", id, ADMIN) == "transition_refused"
        assert code(apps.reconcile, conn, "p1", id, ADMIN) == "app_instance_ended"
        assert made.create(conn) != id, "name and allocations are free"


def test_a_key_that_was_being_put_there_while_its_instance_stopped_goes_again(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn, worker_ids=[])
        (task,) = leasing.lease(conn, "worker", kinds=[KIND])
        given = task.parameters
        assert app_operations.began(conn, given["operation_id"], ADMIN) == ""
        apps.stop(conn, "p1", id, ADMIN)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 0, "its run is not over"
        assert (
            app_operations.began(conn, given["operation_id"], ADMIN) == "its app instance stopped"
        )
        app_operations.succeeded(conn, given["operation_id"], ADMIN, expires_at=9e9)
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 1
        made.work(conn, error=ERROR)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 0, "tried a moment ago"
        later(conn, app_operations.RETRY_S + 1)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 1
        made.work(conn, error=ERROR)
        later(conn, app_operations.KEY_S)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 0, "it has ended by itself"


def test_a_member_goes_with_its_allocation_and_an_instance_with_its_controller(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        made.work(conn, limit=1)
        launch.release(conn, made.second, ADMIN)
        assert app_operations.LET_GO(conn, ADMIN) == 1
        assert made.seen(conn, id)[:2] == ("deploying", ["reconciling", "failed"])
        assert apps.members(conn, id)[1]["status_reason"] == "allocation_ended"
        assert made.waits(conn, id) == "member_failed"
        launch.release(conn, made.first, ADMIN)
        assert apps.reconcile(conn, "p1", id, ADMIN) == []
        assert made.seen(conn, id)[0] == "failed"
        assert app_operations.LET_GO(conn, ADMIN) == 0
        assert code(apps.reconcile, conn, "p1", id, ADMIN) == "app_instance_ended"
        apps.stop(conn, "p1", id, ADMIN)
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 0, "accounts went with their keys"


def test_an_instance_that_failed_lets_its_workers_go_and_takes_its_keys_away(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        made.work(conn)
        launch.release(conn, made.first, ADMIN)
        assert app_operations.LET_GO(conn, ADMIN) == 1
        assert made.seen(conn, id)[0] == "failed"
        assert app_operations.LET_GO(conn, ADMIN) == 1, "of an instance that has failed"
        assert app_operations.RENEW_KEYS(conn, ADMIN) == 0
        assert app_operations.REMOVE_KEYS(conn, ADMIN) == 1
        assert app_operations.LET_GO(conn, ADMIN) == 0
        (removal,) = made.work(conn)
        assert removal.allocation_id == made.second
        assert removal.parameters["managed_key"]["state"] == "absent"
        assert apps.members(conn, id)[1]["key_expires_at"] is None
        again = made.create(conn, name="again", controller_id=made.second, worker_ids=[])
        assert made.seen(conn, again)[0] == "deploying"


def test_no_key_is_asked_for_once_the_controller_is_gone(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        made.work(conn, limit=1)
        (begun,) = leasing.lease(conn, "worker", kinds=[KIND])
        launch.release(conn, made.first, ADMIN)
        assert apps.reconcile(conn, "p1", id, ADMIN) == []
        why = app_operations.began(conn, begun.parameters["operation_id"], ADMIN)
        assert why == "its app instance failed"
        queue.finish(conn, begun.id, begun.lease_token, TaskState.CANCELED, ADMIN)


def test_a_run_for_an_allocation_that_ended_is_not_begun(made: Apps) -> None:
    with transaction(made.engine) as conn:
        made.create(conn, worker_ids=[])
        (task,) = leasing.lease(conn, "worker", kinds=[KIND])
        launch.release(conn, made.first, ADMIN)
        why = app_operations.began(conn, task.parameters["operation_id"], ADMIN)
        assert why.startswith("allocation releasing")
        queue.finish(conn, task.id, task.lease_token, TaskState.CANCELED, ADMIN)


def test_an_operation_whose_task_was_ended_by_others_ends_too(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn)
        for task in queue.every(conn, kind=KIND):
            queue.cancel(conn, task.id, ADMIN)
        assert app_operations.CLOSE(conn, ADMIN) == 2
        assert made.seen(conn, id)[1:] == (["failed"] * 2, ["member_add failed"] * 2)
        assert app_operations.every(conn, id)[0].failure["code"] == "task_canceled"
        assert app_operations.CLOSE(conn, ADMIN) == 0


def test_late_words_of_a_run_decide_nothing(made: Apps) -> None:
    with transaction(made.engine) as conn:
        id = made.create(conn, worker_ids=[])
        (task,) = made.work(conn)
        key = task.parameters["operation_id"]
        assert app_operations.succeeded(conn, key, ADMIN, expires_at=1.0) is False
        assert app_operations.failed(conn, key, ADMIN, ERROR) is False
        assert made.seen(conn, id)[2] == ["member_add succeeded"]
        assert apps.members(conn, id)[0]["key_good"]


def test_what_no_instance_can_be_made_of(made: Apps) -> None:
    with transaction(made.engine) as conn:
        assert code(made.create, conn, worker_ids=[made.first]) == "app_member_repeated"
        assert code(made.create, conn, controller_id="none") == "allocation_not_found"
        assert code(made.create, conn, project_id="none") == "project_not_found"
        launch.release(conn, made.second, ADMIN)
        assert code(made.create, conn) == "allocation_not_active"
        made.create(conn, worker_ids=[])
        assert code(made.create, conn, worker_ids=[]) == "app_instance_exists"
        assert code(apps.get, conn, "p2", "none") == "app_instance_not_found"


def test_two_instances_that_want_the_same_allocation(made: Apps) -> None:
    def attempt(name: str) -> str:
        try:
            return str(retrying(made.engine, lambda conn: made.create(conn, name=name) and "done"))
        except Problem as problem:
            return problem.code
        except sa.exc.IntegrityError:
            return "conflict"

    with ThreadPoolExecutor(4) as pool:
        answers = sorted(pool.map(attempt, ["a", "b", "c", "d"]))
    assert answers.count("done") == 1
    assert set(answers) <= {"done", "allocation_in_app", "conflict"}


def test_in_a_slice_nobody_can_put_a_key(sold: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        wish = apps.NewApp(
            project_id="p1", slug="slurm-reference", name="s", managed_key=KEY, controller_id=key
        )
        id = apps.create(conn, wish, ADMIN).id
        (operation,) = app_operations.every(conn, id)
        assert (operation.status, operation.task_id) == ("failed", None)
        assert operation.failure["code"] == "guest_unreachable_by_design"
        (member,) = apps.members(conn, id)
        assert (member["status"], member["status_reason"]) == (
            "failed",
            "guest_unreachable_by_design",
        )
        (again,) = apps.reconcile(conn, "p1", id, ADMIN)
        assert again.status == "failed"
        # It ends at once, so only time bounds how many are recorded.
        monkeypatch.setattr(quota, "OPERATIONS_PER_HOUR", 2)
        assert code(apps.reconcile, conn, "p1", id, ADMIN) == "rate_exceeded"
        apps.stop(conn, "p1", id, ADMIN)
        assert code(apps.create, conn, wish, ADMIN) == "rate_exceeded"
        assert queue.every(conn, kind=KIND) == []
        assert invariants.check(conn) == []
