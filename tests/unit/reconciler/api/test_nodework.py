"""Work on a node: tasks, and reports of a host beside the task for the next report."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.model.errors import Problem
from reconciler.records import queue
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.api.stack import ACT, IMAGE, NODE, Stack, discovery
from tests.unit.reconciler.api.test_launches import activate, launch

DISK = "/dev/disk/by-id/nvme-eui.5e0000000000a000"
PLAN = f"sha256:{'a' * 64}"
IDENTITY = {"serial": "LABNVME0", "eui": "5e0000000000a000"}
APPROVAL = IDENTITY | {
    "mounts": ["/share 0"],
    "filesystems": ["gpt", "ext4"],
    "signatures": ["ext4@1049656#0f"],
}


@pytest.mark.covers("CTRL-8")
@pytest.mark.parametrize(
    ("noun", "body", "kind", "parameters"),
    [
        ("bootstrap", None, "node.bootstrap", {"allow_reboot": False}),
        ("bootstrap", {"allow_reboot": True}, "node.bootstrap", {"allow_reboot": True}),
        (
            "bootstrap",
            {"plan_only": True},
            "node.bootstrap",
            {"allow_reboot": False, "plan_only": True},
        ),
        (
            "bootstrap",
            {"expected_plan": PLAN},
            "node.bootstrap",
            {"allow_reboot": False, "expected_plan": PLAN},
        ),
        ("slice-topology/discovery", None, "slice.topology_discover", {}),
        ("parity", {"reason": "again"}, "node.parity", {}),
        ("drift", None, "slice.drift_reconcile", {}),
        ("bind-topology", {}, "node.bind_topology", {}),
        (
            "storage-transition",
            {"devices": [DISK]},
            "node.storage_transition",
            {"devices": [DISK], "apply": False, "expected": {}},
        ),
        (
            "storage-transition",
            {"devices": [DISK], "apply": True, "expected": {DISK: IDENTITY}},
            "node.storage_transition",
            {"devices": [DISK], "apply": True, "expected": {DISK: IDENTITY}},
        ),
        (
            "storage-transition",
            {"devices": [DISK], "apply": True, "expected": {DISK: APPROVAL}},
            "node.storage_transition",
            {"devices": [DISK], "apply": True, "expected": {DISK: APPROVAL}},
        ),
    ],
)
def test_queues_one_task(
    prepared: Stack, noun: str, body: Any, kind: str, parameters: dict[str, Any]
) -> None:
    admin = prepared.client("admin")
    answer = admin.post(f"admin/nodes/{NODE}/{noun}", json=body, headers={"X-Correlation-Id": "c"})
    assert answer.status_code == 202, answer.text
    task = answer.json()
    assert (task["kind"], task["parameters"], task["state"]) == (kind, parameters, "queued")
    assert (task["subject_kind"], task["subject_id"]) == ("node", NODE)
    assert task["requested_by"].startswith("admin:admin#")
    assert task["correlation_id"] == "c"
    log = admin.get("admin/audit", params={"action": "admin.task.queued"}).json()["items"]
    assert log[0]["detail"] == {"kind": kind, "task_id": task["id"]}
    assert admin.post(f"admin/nodes/{NODE}/{noun}", json=body).json()["id"] == task["id"]


@pytest.mark.covers("HOST-13")
@pytest.mark.parametrize("noun", ["bootstrap", "slice-topology/discovery", "parity"])
def test_nothing_is_queued_for_a_host_that_never_enrolled(new: Stack, noun: str) -> None:
    """No run could reach it: its task would only wait there, or fail at SSH's words."""
    admin = new.client("admin")
    answer = admin.post(f"admin/nodes/{NODE}/{noun}")
    assert (answer.status_code, answer.json()["code"]) == (409, "node_not_enrolled")
    assert f"`gpuaas nodes userdata {NODE}`" in answer.json()["remedy"]
    admin.post(f"admin/nodes/{NODE}/retire", json={"reason": "gone"})
    answer = admin.post(f"admin/nodes/{NODE}/{noun}")
    assert (answer.status_code, answer.json()["code"]) == (409, "node_not_enrolled")
    assert "`gpuaas nodes add`" in answer.json()["remedy"]
    assert admin.get("admin/tasks").json()["items"] == []


@pytest.mark.covers("CTRL-12", "HOST-1")
def test_a_host_is_not_restarted_under_its_tenants(selling: Stack) -> None:
    admin, path = selling.client("admin"), f"admin/nodes/{NODE}/bootstrap"
    early = admin.post(path, json={"allow_reboot": True}).json()
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    refused = admin.post(path, json={"allow_reboot": True})
    assert (refused.status_code, refused.json()["code"]) == (409, "node_in_use")
    assert admin.post(path, json={}).status_code == 202, "without a reboot nobody is disturbed"
    # A tenant arrived after the request, so the check is repeated when the run begins.
    with transaction(selling.engine) as conn, pytest.raises(Problem) as caught:
        HANDLERS["node.bootstrap"].start(
            open_work(conn, selling.settings, queue.get(conn, early["id"]))
        )
    assert caught.value.code == "node_in_use"


@pytest.mark.covers("HOST-9")
def test_a_dry_run_that_waits_is_not_the_transition(prepared: Stack) -> None:
    admin, path = prepared.client("admin"), f"admin/nodes/{NODE}/storage-transition"
    dry = admin.post(path, json={"devices": [DISK]}).json()
    body = {"devices": [DISK], "apply": True, "expected": {DISK: IDENTITY}}
    wet = admin.post(path, json=body).json()
    assert dry["id"] != wet["id"]
    assert wet["parameters"]["apply"] is True


@pytest.mark.covers("HOST-9")
def test_nothing_is_wiped_without_an_identity(new: Stack) -> None:
    body = {"devices": [DISK, "/dev/nvme1n1"], "apply": True, "expected": {DISK: IDENTITY}}
    answer = new.client("admin").post(f"admin/nodes/{NODE}/storage-transition", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "expected_identity_missing")
    assert "/dev/nvme1n1" in answer.json()["found"]
    assert new.client("admin").get("admin/tasks").json()["items"] == []


@pytest.mark.parametrize("device", ["nvme0n1", "/dev/sda; reboot", "/dev/$(id)", ""])
def test_device_names_are_paths(new: Stack, device: str) -> None:
    path = f"admin/nodes/{NODE}/storage-transition"
    answer = new.client("admin").post(path, json={"devices": [device]})
    assert answer.json()["code"] == "request_invalid"


def test_caches_only_known_images_on_known_nodes(prepared: Stack) -> None:
    admin = prepared.client("admin")
    image = admin.post("admin/images", json=IMAGE).json()["id"]
    path = f"admin/nodes/{NODE}/image-cache"
    task = admin.post(path, json={"image_id": image}).json()
    assert (task["kind"], task["parameters"]) == ("node.image_cache", {"image_id": image})
    assert admin.post(path, json={"image_id": "none"}).json()["code"] == "image_not_found"
    assert admin.post("admin/nodes/none/parity").json()["code"] == "node_not_found"


@pytest.mark.covers("HOST-11")
def test_before_the_first_report(new: Stack) -> None:
    admin = new.client("admin")
    with transaction(new.engine) as conn:
        host.enrolled(conn, NODE, ACT, **discovery()["identity"])
    for noun in ("slice-topology/discovery", "parity"):
        path = f"admin/nodes/{NODE}/{noun}"
        assert admin.get(path).json() == {"document": None, "task": None}
        task = admin.post(path).json()
        assert admin.get(path).json()["task"]["id"] == task["id"]
    assert admin.get("admin/nodes/none/parity").status_code == 404


@pytest.mark.covers("HOST-10", "HOST-11")
def test_a_bare_metal_nodes_report_is_the_one_that_it_was_asked_for(new: Stack) -> None:
    admin = new.client("admin")
    body = {"id": "m1", "address": "192.0.2.8", "profile": "lab", "mode": "baremetal"}
    assert admin.post("admin/nodes", json=body).status_code == 201
    identity = discovery()["identity"]
    with transaction(new.engine) as conn:
        for intent, failures in (("baremetal", 3), ("slice", 0)):
            report = {"intent": intent, "failures": failures, "identity": identity}
            host.record_parity(conn, "m1", report, ACT)
    assert admin.get("admin/nodes/m1/parity").json()["document"]["failures"] == 3


@pytest.mark.covers("HOST-11")
def test_the_latest_report(selling: Stack) -> None:
    admin = selling.client("admin")
    latest = admin.get(f"admin/nodes/{NODE}/slice-topology/discovery").json()
    assert latest["document"] == discovery()
    assert latest["observed_at"].endswith("+00:00")
    assert admin.get(f"admin/nodes/{NODE}/parity").json()["document"]["failures"] == 0
