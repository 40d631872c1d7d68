"""Tasks as operators read and cancel them."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconciler.db.engine import transaction
from reconciler.records import queue
from reconciler.runs import collect
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import launch


@pytest.mark.covers("CTRL-8")
def test_read(prepared: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    admin = prepared.client("admin")
    queued = admin.post(f"admin/nodes/{NODE}/parity").json()
    assert admin.get(f"admin/tasks/{queued['id']}").json()["output"] == ""
    task = prepared.lease()
    with transaction(prepared.engine) as conn:
        held = (task.id, task.lease_token)
        queue.started(conn, *held, run_id="r", run_directory=str(tmp_path))
        queue.progress(conn, *held, {"at": 1.0, "event": "ok", "task": "look"})
    monkeypatch.setattr(collect, "output", lambda folder, limit: f"{folder} {limit}")

    shown = admin.get(f"admin/tasks/{task.id}").json()
    assert shown["output"] == f"{tmp_path} 20000"
    assert (shown["state"], shown["progress"]["task"]) == ("running", "look")
    assert [event["document"]["event"] for event in shown["events"]] == ["ok"]
    assert "lease_token" not in shown
    assert task.lease_token not in str(shown)


@pytest.mark.parametrize("code", ["awx_silent", "maas_silent", "ufm_silent"])
def test_a_task_that_waits_for_a_service_names_that_and_not_its_host(
    prepared: Stack, code: str
) -> None:
    admin = prepared.client("admin")
    admin.post(f"admin/nodes/{NODE}/parity")
    task = prepared.lease()
    with transaction(prepared.engine) as conn:
        held = (task.id, task.lease_token)
        queue.wait_for_host(conn, *held, "no answer", act=ACT, error={"code": code})
    (listed,) = admin.get("admin/tasks").json()["items"]
    for shown in (listed, admin.get(f"admin/tasks/{task.id}").json()):
        assert shown["waits_for"]["code"] == code


@pytest.mark.covers("CTRL-8")
def test_list_and_cancel(prepared: Stack) -> None:
    admin = prepared.client("admin")
    made = [admin.post(f"admin/nodes/{NODE}/{noun}").json() for noun in ("parity", "bootstrap")]
    assert len(admin.get("admin/tasks", params={"node_id": NODE}).json()["items"]) == 2
    page = admin.get("admin/tasks", params={"kind": "node.parity", "state": "queued"}).json()
    assert [row["id"] for row in page["items"]] == [made[0]["id"]]
    assert admin.get("admin/tasks", params={"limit": 0}).json()["code"] == "request_invalid"

    answer = admin.post(f"admin/tasks/{made[0]['id']}/cancel", json={"reason": "wrong node"})
    assert (answer.json()["state"], answer.json()["state_reason"]) == ("canceled", "wrong node")
    log = admin.get("admin/audit", params={"action": "admin.task.canceled"}).json()["items"]
    assert [row["subject_id"] for row in log] == [made[0]["id"]]
    assert admin.get("admin/tasks/none").json()["code"] == "task_not_found"


@pytest.mark.covers("CTRL-8")
def test_a_canceled_provision_ends_its_allocation(selling: Stack) -> None:
    allocation = launch(selling).json()
    admin = selling.client("admin")
    (task,) = admin.get("admin/tasks", params={"kind": "slice.vm_provision"}).json()["items"]
    ended = admin.post(f"admin/tasks/{task['id']}/cancel", json={"reason": "wrong image"}).json()
    assert (ended["state"], ended["error"]["code"]) == ("canceled", "canceled")
    seen = admin.get(f"admin/allocations/{allocation['id']}").json()
    assert (seen["state"], seen["error"]["found"]) == ("failed", "wrong image")
    assert [claim["state"] for claim in seen["claims"]] == ["failed"]
    slots = admin.get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    assert {slot["status"] for slot in slots} == {"available"}
