"""Recovery of stuck allocations through the API, in the steps of the operators' runbook."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import host, slices
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch

ERROR = {"code": "readiness_failed", "expected": "a lease", "found": "none", "remedy": "recover"}


def failed(stack: Stack) -> str:
    allocation_id = str(launch(stack).json()["id"])
    task = stack.lease()
    with transaction(stack.engine) as conn:
        slices.provision_started(conn, allocation_id, ACT)
        slices.provision_failed(conn, allocation_id, ACT, step="ready", error=ERROR, untouched=None)
    stack.client("admin").post(f"admin/tasks/{task.id}/cancel")
    return allocation_id


def clean(stack: Stack, allocation_id: str, *, key: str = "c", **body: Any) -> Any:
    headers = {"X-Idempotency-Key": key}
    return stack.client("admin").post(
        f"admin/allocations/{allocation_id}/force-cleanup",
        json={"reason": "test", "runtime_verified_absent": False} | body,
        headers=headers,
    )


def slot_of(stack: Stack, allocation_id: str) -> Any:
    admin = stack.client("admin")
    (claim,) = admin.get(f"admin/allocations/{allocation_id}").json()["claims"]
    return admin.get(f"admin/nodes/{NODE}/resource-slots/{claim['slot_id']}").json()


@pytest.mark.covers("CTRL-7")
def test_without_absence_the_slot_stays_blocked(selling: Stack) -> None:
    stuck = failed(selling)
    assert slot_of(selling, stuck)["health_detail"]["allocation_id"] == stuck
    answer = clean(selling, stuck)
    assert answer.status_code == 200, answer.text
    assert answer.json()["state"] == "failed"
    assert [slot["status"] for slot in answer.json()["slots"]] == ["cleanup_blocked"]
    (event,) = _audit(selling)
    assert (event["subject_id"], event["reason"]) == (stuck, "test")
    assert event["detail"]["runtime_verified_absent"] is False


@pytest.mark.covers("CTRL-7")
def test_with_absence_it_passes_through_cleanup(selling: Stack) -> None:
    stuck = failed(selling)
    (slot,) = clean(selling, stuck, runtime_verified_absent=True).json()["slots"]
    assert slot["status"] == "cleanup"
    task = selling.client("admin").get(f"admin/tasks/{slot['task_id']}").json()
    assert (task["kind"], task["state"]) == ("slice.wipe", "queued")


@pytest.mark.covers("CTRL-7")
def test_what_must_not_be_forced(selling: Stack) -> None:
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    for action, body, status, code in (
        (allocation_id, {}, 409, "allocation_active"),
        (allocation_id, {"runtime_verified_absent": True}, 409, "allocation_active"),
        ("none", {}, 404, "allocation_not_found"),
        (allocation_id, {"reason": ""}, 422, "reason_required"),
        (allocation_id, {"runtime_verified_absent": "yes"}, 422, "request_invalid"),
    ):
        problem = refused(selling, partial(clean, selling, action, key=code, **body))
        assert (problem["status"], problem["code"]) == (status, code)


@pytest.mark.covers("CTRL-7")
def test_force_release_keeps_the_slot_blocked(selling: Stack) -> None:
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    path = f"admin/allocations/{allocation_id}/force-release"
    assert selling.client("admin").post(path).json()["code"] == "reason_required"
    answers = selling.client("admin").post(path, json={"reason": "host is gone"})
    assert (answers.status_code, answers.json()["code"]) == (409, "node_reachable")
    with transaction(selling.engine) as conn:
        host.lost(conn, NODE, ACT)
    answer = selling.client("admin").post(path, json={"reason": "host is gone"})
    assert answer.json()["state"] == "released"
    assert slot_of(selling, allocation_id)["status"] == "cleanup_blocked"


@pytest.mark.covers("CTRL-7")
def test_verify_absent_queues_a_look(selling: Stack) -> None:
    stuck = failed(selling)
    answer = selling.client("admin").post(f"admin/allocations/{stuck}/verify-absent")
    assert answer.status_code == 202, answer.text
    task = answer.json()
    assert (task["kind"], task["allocation_id"]) == ("slice.absence_verify", stuck)
    assert (task["subject_kind"], task["subject_id"]) == ("allocation", stuck)


@pytest.mark.covers("CTRL-7")
def test_repair_from_the_slot(selling: Stack) -> None:
    slot = slot_of(selling, failed(selling))
    admin = selling.client("admin")
    answer = admin.post(f"admin/nodes/{NODE}/resource-slots/{slot['id']}/repair")
    assert (answer.status_code, answer.json()["kind"]) == (202, "slice.wipe")


def test_the_list_can_be_narrowed(selling: Stack) -> None:
    allocation_id = launch(selling).json()["id"]
    admin = selling.client("admin")
    for query, ids in (
        ({"project_id": "demo"}, [allocation_id]),
        ({"project_id": "other"}, []),
        ({"node_id": NODE, "state": "requested"}, [allocation_id]),
        ({"state": "active"}, []),
    ):
        rows = admin.get("admin/allocations", params=query).json()["items"]
        assert [row["id"] for row in rows] == ids
    assert admin.get("admin/allocations?state=none").json()["code"] == "request_invalid"


def _audit(stack: Stack) -> Any:
    query = {"action": "admin.allocation.force_cleanup.applied"}
    return stack.client("admin").get("admin/audit", params=query).json()["items"]
