"""Applications through the API: visibility, refusals, and the addresses of members."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db.engine import transaction
from reconciler.db.schema import Allocation, allocations
from reconciler.lifecycle import app_operations, apps
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import leasing, queue
from reconciler.trust import ca
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, KEY, Stack
from tests.unit.reconciler.api.test_baremetal import launch as launch_metal
from tests.unit.reconciler.api.test_baremetal import let_in, metal
from tests.unit.reconciler.api.test_launches import activate, launch

pytestmark = pytest.mark.covers("APP-4")
__all__ = ["metal"]

PATH = "projects/demo/app-instances"
KIND = TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY
PLANTED = {"phase": "slurm_ready", "slurmctld_state": "up", "host": "192.0.2.9", "pci": "0000:1"}


@pytest.fixture
def allocation(metal: Stack) -> str:
    """A whole machine that its tenant can use."""
    mine = str(launch_metal(metal).json()["id"])
    let_in(metal, mine)
    return mine


def body(allocation: str, **changes: Any) -> dict[str, Any]:
    return {
        "slug": "slurm-reference",
        "name": "slurm",
        "managed_key": KEY,
        "controller_allocation_id": allocation,
        **changes,
    }


def create(stack: Stack, allocation: str, key: str = "k", who: str = "member", **more: Any) -> Any:
    headers = {"X-Idempotency-Key": key}
    return stack.client(who).post(PATH, json=body(allocation, **more), headers=headers)


def put_there(stack: Stack) -> None:
    """Complete the queued key tasks as a worker does."""
    with transaction(stack.engine) as conn:
        for task in leasing.lease(conn, "w", kinds=[KIND], limit=9):
            given = task.parameters
            app_operations.began(conn, given["operation_id"], ACT)
            ends = float(given["managed_key"]["expires_at"])
            app_operations.succeeded(conn, given["operation_id"], ACT, expires_at=ends)
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)


@pytest.mark.covers("CTRL-1")
def test_the_paths_of_the_runbook(metal: Stack, allocation: str) -> None:
    answer = create(metal, allocation)
    assert answer.status_code == 201, answer.text
    made, member = answer.json(), metal.client("member")
    assert (made["status"], made["slug"]) == ("deploying", "slurm-reference")
    assert made["managed_key"] == KEY.rpartition(" ")[0], "without its comment"
    at = f"{PATH}/{made['id']}"
    shown = member.get(at)
    assert shown.json()["waits_for"]["code"] == "bootstrap_ssh_pending"
    assert shown.headers["ETag"] == '"0"'
    assert [row["id"] for row in member.get(PATH).json()["items"]] == [made["id"]]
    (operation,) = member.get(f"{at}/member-operations").json()["items"]
    assert (operation["kind"], operation["status"]) == ("member_add", "accepted")
    put_there(metal)
    assert member.get(at).json()["waits_for"]["code"] == "controller_absent"
    with transaction(metal.engine) as conn:
        (row,) = apps.members(conn, made["id"])
        apps.reported(conn, row["id"], PLANTED, ACT, ready=True)
    assert member.get(at).json()["status"] == "running"
    (controller,) = member.get(f"{at}/members").json()["items"]
    assert (controller["role"], controller["status"]) == ("controller", "ready")
    detail = controller["adapter_detail"]
    assert (detail["phase"], detail["slurmctld_state"]) == ("slurm_ready", "up")
    assert (detail["bootstrap_ssh"], detail["slurmd_state"]) == ("ready", "")


def test_reconcile_answers_with_operations_whose_tasks_are_queued(
    metal: Stack, allocation: str
) -> None:
    at = f"{PATH}/{create(metal, allocation).json()['id']}/bootstrap-ssh/reconcile"
    put_there(metal)
    member = metal.client("member")
    headers = {"Idempotency-Key": "r", "X-Correlation-Id": "runbook-1"}
    answer = member.post(at, headers=headers)
    assert answer.status_code == 202, answer.text
    (operation,) = answer.json()["operations"]
    assert (operation["kind"], operation["status"]) == ("bootstrap_ssh_reconcile", "accepted")
    assert operation["correlation_id"] == "runbook-1"
    task = metal.client("admin").get(f"admin/tasks/{operation['task_id']}").json()
    assert (task["kind"], task["state"]) == (KIND, "queued")
    assert (task["allocation_id"], task["correlation_id"]) == (allocation, "runbook-1")
    again = member.post(at, headers=headers)
    assert again.json() == answer.json()
    assert again.headers["Idempotency-Replayed"] == "true"
    other = member.post(at, headers={"Idempotency-Key": "s"}).json()
    assert other == answer.json(), "it is under way"


@pytest.mark.covers("CTRL-10", "APP-5")
def test_a_member_dials_its_tenants_address_and_an_admin_sees_the_transports(
    metal: Stack, allocation: str
) -> None:
    made = create(metal, allocation).json()
    with transaction(metal.engine) as conn:
        (row,) = apps.members(conn, made["id"])
        apps.reported(conn, row["id"], PLANTED, ACT, ready=False)
    at = f"{PATH}/{made['id']}/members"
    answer = metal.client("member").get(at)
    (mine,) = answer.json()["items"]
    assert mine["connection"] == {
        "host": "203.0.113.9",
        "port": 22,
        "username": "tenant",
        "known_hosts": "",
    }
    assert mine["adapter_detail"]["host"] == "203.0.113.9"
    assert mine["adapter_detail"]["hostname"] == "metal-1"
    for hidden in ("192.0.2.9", "0000:", "5e0000000000a001", "dash.example"):
        assert hidden not in answer.text
    (seen,) = metal.client("admin").get(at).json()["items"]
    assert seen["adapter_detail"]["host"] == "192.0.2.9"
    assert seen["connection"] == mine["connection"]


def test_behind_a_gateway_a_member_dials_the_gateway(metal: Stack, allocation: str) -> None:
    """As it does for the allocation itself."""
    metal.settings = metal.settings.model_copy(update={"member_address": "gate.example:2222"})
    ca.open_trust(metal.settings.state_dir)
    with transaction(metal.engine) as conn:
        keys = rows.get(conn, Allocation, allocation).connection | {"host_keys": [KEY]}
        conn.execute(sa.update(allocations).values(connection=keys))
    at = f"{PATH}/{create(metal, allocation).json()['id']}/members"
    answer = metal.client("member").get(at)
    (mine,) = answer.json()["items"]
    shown = metal.client("member").get(f"projects/demo/allocations/{allocation}").json()
    assert mine["connection"] == shown["connection"]
    assert mine["adapter_detail"]["host"] == "gate.example"
    assert "203.0.113.9" not in answer.text


@pytest.mark.covers("CTRL-10")
def test_a_failure_shows_its_code_and_no_address(metal: Stack, allocation: str) -> None:
    made = create(metal, allocation).json()
    at = f"{PATH}/{made['id']}"
    error = {"code": "host_unreachable", "found": "ssh: connect to host 192.0.2.9 port 22"}
    with transaction(metal.engine) as conn:
        (task,) = leasing.lease(conn, "w", kinds=[KIND])
        app_operations.failed(conn, task.parameters["operation_id"], ACT, error)
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ACT, error=error)
    member = metal.client("member")
    shown = [member.get(f"{at}{part}") for part in ("", "/members", "/member-operations")]
    assert shown[0].json()["waits_for"] == {
        "code": "member_failed",
        "detail": "controller: host_unreachable",
    }
    assert shown[2].json()["items"][0]["failure_code"] == "host_unreachable"
    assert [answer for answer in shown if "192.0.2.9" in answer.text] == []


def test_stop_is_guarded_and_frees_the_allocation(metal: Stack, allocation: str) -> None:
    made = create(metal, allocation).json()
    member, at = metal.client("member"), f"{PATH}/{made['id']}/stop"
    old = refused(metal, lambda: member.post(at, headers={"If-Match": '"7"'}))
    assert (old["status"], old["code"]) == (412, "precondition_failed")
    stopped = member.post(at, headers={"If-Match": '"0"'}, json={"reason": "done"})
    assert (stopped.json()["status"], stopped.headers["ETag"]) == ("stopped", '"1"')
    assert member.get(f"{PATH}/{made['id']}").json()["waits_for"] is None
    ended = refused(
        metal,
        lambda: member.post(
            f"{PATH}/{made['id']}/bootstrap-ssh/reconcile", headers={"Idempotency-Key": "x"}
        ),
    )
    assert (ended["status"], ended["code"]) == (409, "app_instance_ended")
    assert create(metal, allocation, key="k2").status_code == 201


def test_in_a_slice_the_operation_fails_by_name(selling: Stack) -> None:
    mine = launch(selling).json()["id"]
    waits = refused(selling, lambda: create(selling, mine, key="early"))
    assert (waits["status"], waits["code"]) == (409, "allocation_not_active")
    activate(selling, mine)
    made = create(selling, mine)
    assert made.status_code == 201, made.text
    member, at = selling.client("member"), f"{PATH}/{made.json()['id']}"
    (operation,) = member.get(f"{at}/member-operations").json()["items"]
    assert (operation["status"], operation["task_id"]) == ("failed", None)
    assert operation["failure_code"] == "guest_unreachable_by_design"
    (controller,) = member.get(f"{at}/members").json()["items"]
    assert controller["connection"]["host"] == "gate.example"
    assert "192.0.2.7" not in str(controller)


@pytest.mark.covers("CTRL-10")
def test_another_project_has_none_of_it(metal: Stack, allocation: str) -> None:
    made, stranger = create(metal, allocation).json(), metal.client("stranger")
    at = "projects/other/app-instances"
    for part in ("stop", "bootstrap-ssh/reconcile"):
        answer = stranger.post(f"{at}/{made['id']}/{part}", headers={"Idempotency-Key": part[:4]})
        assert (answer.status_code, answer.json()["code"]) == (404, "app_instance_not_found")
    theirs = stranger.post(at, json=body(allocation), headers={"Idempotency-Key": "steal"})
    assert (theirs.status_code, theirs.json()["code"]) == (404, "allocation_not_found")
    for part in ("", "/machines"):
        assert stranger.get(f"{at}{part}").json()["items"] == []


def test_machines_say_with_what_an_application_on_them_is_refused(
    metal: Stack, allocation: str
) -> None:
    member, at = metal.client("member"), f"{PATH}/machines"
    (usable,) = member.get(at).json()["items"]
    assert (usable["allocation_id"], usable["code"], usable["reason"]) == (allocation, "", "")
    create(metal, allocation)
    (used,) = member.get(at).json()["items"]
    again = create(metal, allocation, "again", name="another").json()
    assert (used["code"], used["reason"]) == (again["code"], f"{again['found']}: {again['remedy']}")


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"slug": "unknown"}, "request_invalid"),
        ({"name": "a b"}, "request_invalid"),
        ({"managed_key": f'command="id" {KEY}'}, "request_invalid"),
        ({"managed_key": f"{KEY}\n{KEY}"}, "request_invalid"),
        ({"managed_key": "ssh-ed25519 ****"}, "request_invalid"),
        ({"controller_allocation_id": "../x"}, "request_invalid"),
        ({"controller_allocation_id": "none"}, "allocation_not_found"),
        ({"worker_allocation_ids": ["none"]}, "allocation_not_found"),
        ({"worker_allocation_ids": ["a"] * 65}, "request_invalid"),
        ({"host": "192.0.2.9"}, "request_invalid"),
    ],
)
def test_bad_wishes(metal: Stack, allocation: str, wrong: dict[str, Any], code: str) -> None:
    assert refused(metal, lambda: create(metal, allocation, **wrong))["code"] == code


def test_lists_are_paged(metal: Stack, allocation: str) -> None:
    made = create(metal, allocation).json()
    put_there(metal)
    member, at = metal.client("member"), f"{PATH}/{made['id']}"
    for number in range(2):
        headers = {"Idempotency-Key": f"r{number}"}
        assert member.post(f"{at}/bootstrap-ssh/reconcile", headers=headers).status_code == 202
        put_there(metal)
    first = member.get(f"{at}/member-operations", params={"limit": 2}).json()
    rest = member.get(f"{at}/member-operations", params={"cursor": first["next"]}).json()
    kinds = [row["kind"] for row in first["items"] + rest["items"]]
    assert kinds == ["member_add", "bootstrap_ssh_reconcile", "bootstrap_ssh_reconcile"]
