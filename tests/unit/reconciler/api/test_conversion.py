"""Conversion of a slice host to bare metal and back, refused while a tenant is on the node."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import gate, host, recovery, slices
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import slots as slot_life
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, SlotState, TaskKind, TaskState
from reconciler.records import claims, nodes, proofs, queue
from reconciler.records import slots as slot_records
from reconciler.runs import contract
from reconciler.runs.collect import Outcome
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import settle
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, discovery
from tests.unit.reconciler.api.test_launches import launch

pytestmark = pytest.mark.covers("HOST-15")

PATH = f"admin/nodes/{NODE}/conversion"
SLOTS = f"admin/nodes/{NODE}/resource-slots"
IDENTITY = {"identity": discovery()["identity"]}
REPORT = {"intent": "slice", "warnings": 0, "checks": [], **wipes.proven(discovery())}


def mode(stack: Stack) -> str:
    return str(stack.client("admin").get(f"admin/nodes/{NODE}").json()["mode"])


def finish(stack: Stack) -> dict[str, Any]:
    """The node's task ends well, as its handler records it."""
    task = stack.lease()
    with transaction(stack.engine) as conn:
        work = open_work(conn, stack.settings, task)
        return HANDLERS[task.kind].succeed(work, {"identity": discovery()["identity"]})


def test_a_slice_host_becomes_bare_metal_and_a_slice_host_again(selling: Stack) -> None:
    admin = selling.client("admin")
    answer = admin.post(
        PATH, json={"to": "baremetal", "allow_reboot": True, "reason": "sold whole"}
    )
    assert (answer.status_code, answer.json()["kind"]) == (202, "node.convert")
    assert mode(selling) == "converting_to_baremetal"
    # Off sale before anything happens on the host.
    slots = admin.get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    assert {slot["status"] for slot in slots} == {"disabled"}
    finish(selling)
    assert mode(selling) == "baremetal"
    for noun, body in (("bootstrap", {}), ("bind-topology", {})):
        refused = admin.post(f"admin/nodes/{NODE}/{noun}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (409, "node_is_baremetal")
    answer = admin.post(PATH, json={"to": "slice", "allow_reboot": True})
    assert (answer.json()["kind"], mode(selling)) == ("node.bootstrap", "converting_to_slice")
    with transaction(selling.engine) as conn:
        node = nodes.get(conn, NODE)
        assert (node.mode, node.slice_scheduling) == ("converting_to_slice", False)


def test_asking_again_goes_on_with_the_conversion(selling: Stack) -> None:
    """A conversion that failed half way is asked for again; the node never left it."""
    admin = selling.client("admin")
    first = admin.post(PATH, json={"to": "baremetal"}).json()
    assert admin.post(PATH, json={"to": "baremetal"}).json()["id"] == first["id"]
    assert mode(selling) == "converting_to_baremetal"


def test_a_conversion_asked_for_twice_leaves_the_next_tenant_alone(selling: Stack) -> None:
    """The second request met the running task, and its own waited until the machine was sold."""
    admin = selling.client("admin")
    first = admin.post(PATH, json={"to": "baremetal", "allow_reboot": True}).json()
    task = selling.lease()
    second = admin.post(PATH, json={"to": "baremetal", "allow_reboot": True}).json()
    assert task.id == first["id"] != second["id"]
    with transaction(selling.engine) as conn:
        work = open_work(conn, selling.settings, task)
        HANDLERS[task.kind].succeed(work, {"identity": discovery()["identity"]})
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)
        again = open_work(conn, selling.settings, queue.get(conn, second["id"]))
        with pytest.raises(Problem) as caught:
            HANDLERS[task.kind].start(again)
        assert caught.value.code == "canceled"


@pytest.mark.parametrize(("to", "back"), [("baremetal", "slice"), ("slice", "baremetal")])
def test_a_conversion_that_cannot_end_is_turned_round(selling: Stack, to: str, back: str) -> None:
    """As to slices on a machine without an IOMMU. Its task, which waits, begins no run."""
    admin = selling.client("admin")
    if to == "slice":
        admin.post(PATH, json={"to": "baremetal"})
        finish(selling)
    waiting = admin.post(PATH, json={"to": to}).json()["id"]
    answer = admin.post(PATH, json={"to": back})
    assert (answer.status_code, mode(selling)) == (202, f"converting_to_{back}")
    with transaction(selling.engine) as conn:
        former, task = queue.get(conn, waiting), queue.get(conn, answer.json()["id"])
        with pytest.raises(Problem) as caught:
            HANDLERS[former.kind].start(open_work(conn, selling.settings, former))
        assert caught.value.code == "canceled"
        HANDLERS[task.kind].start(open_work(conn, selling.settings, task))


def test_a_machine_of_bare_metal_is_not_prepared_for_slices(selling: Stack) -> None:
    """Disks, GPUs and image were asked for before the conversion, and the host did not answer
    since. Its next tenant would find the image on its disk.
    """
    kinds = (
        TaskKind.NODE_STORAGE_TRANSITION,
        TaskKind.NODE_BIND_TOPOLOGY,
        TaskKind.NODE_IMAGE_CACHE,
    )
    with transaction(selling.engine) as conn:
        tasks = [queue.enqueue(conn, queue.Enqueue(kind, NODE), ACT) for kind in kinds]
        for task in tasks:
            HANDLERS[task.kind].start(open_work(conn, selling.settings, task))
        host.convert(conn, NODE, NodeMode.BAREMETAL, ACT)
        for task in tasks:
            with pytest.raises(Problem) as caught:
                HANDLERS[task.kind].start(open_work(conn, selling.settings, task))
            assert caught.value.code == "canceled"


def test_a_dead_slot_goes_to_the_host_with_the_conversion(selling: Stack) -> None:
    """Its last tenant never gave its lease back: nothing there can be wiped any more."""
    key = launch(selling).json()["id"]
    why = ACT.because("{{ lookup('pipe', 'id') }}: given up")
    with transaction(selling.engine) as conn:
        slices.provision_started(conn, key, ACT)
        error = {"code": "readiness_failed", "found": "no lease"}
        slices.provision_failed(conn, key, ACT, step="slice_ready", error=error)
        (slot,) = claims.held_slots(conn, key)
        document = discovery()
        alive = [disk for disk in document["nvme"] if disk["identity"] != slot.nvme_identity]
        host.record_discovery(conn, NODE, {**document, "nvme": alive}, ACT)
        dead = slot_life.withdraw(conn, slot.id, why)
        (kept,) = slot_records.of_node(conn, NODE)
        # A free slot is withdrawn as well: the host holds nothing of it.
        slot_life.withdraw(conn, slot_life.disable(conn, kept.id, ACT).id, ACT)
    selling.client("admin").post(PATH, json={"to": "baremetal"})
    with transaction(selling.engine) as conn:
        (task,) = queue.every(conn, kind=TaskKind.NODE_CONVERT)
        work = open_work(conn, selling.settings, task)
        given = HANDLERS["node.convert"].variables(work)
    run = dict.fromkeys(("id", "task_id", "kind", "node_id", "correlation_id"), "1")
    whole = {"slice_run": run, "slice_profile": work.profile, **given}
    contract.check_vars("restore_baremetal", whole)
    assert given["slice_written_off"] == [
        {
            "slot_id": dead.id,
            "fence": dead.fence,
            "allocation_id": key,
            "reason": "no disk any more",
        }
    ]


def test_a_canceled_conversion_is_asked_for_again(selling: Stack) -> None:
    admin = selling.client("admin")
    for kind, to in (("node.convert", "baremetal"), ("node.bootstrap", "slice")):
        first = admin.post(PATH, json={"to": to}).json()
        assert admin.post(f"admin/tasks/{first['id']}/cancel").json()["state"] == "canceled"
        assert mode(selling) == f"converting_to_{to}"
        again = admin.post(PATH, json={"to": to}).json()
        assert (again["kind"], again["state"], again["id"] != first["id"]) == (kind, "queued", True)
        if to == "baremetal":
            finish(selling)


def on_the_way(stack: Stack, state: SlotState) -> None:
    """A slot of the node in a state in which it holds, or may hold, something of a tenant."""
    key = launch(stack).json()["id"]
    error = {"code": "readiness_failed", "found": "no lease"}
    with transaction(stack.engine) as conn:
        if state != SlotState.RESERVED:
            slices.provision_started(conn, key, ACT)
        if state in (SlotState.ACTIVE, SlotState.RELEASING):
            slices.provision_succeeded(conn, key, ACT, connection={"host": "gate"})
        if state == SlotState.RELEASING:
            launching.release(conn, key, ACT)
        if state in (SlotState.CLEANUP, SlotState.CLEANUP_BLOCKED):
            slices.provision_failed(conn, key, ACT, step="slice_ready", error=error)
        if state == SlotState.CLEANUP:
            recovery.repair(conn, claims.held_slots(conn, key)[0].id, ACT)


@pytest.mark.parametrize("state", nodes.BUSY)
def test_not_while_somebody_is_on_the_node(selling: Stack, state: SlotState) -> None:
    on_the_way(selling, state)
    admin, before = selling.client("admin"), mode(selling)
    tasks = len(admin.get("admin/tasks").json()["items"])
    statuses = [slot["status"] for slot in admin.get(SLOTS).json()["items"]]
    assert sorted(statuses) == sorted(["available", state])
    refused = admin.post(PATH, json={"to": "baremetal"})
    assert (refused.status_code, refused.json()["code"]) == (409, "node_in_use")
    assert f" {state}" in refused.json()["found"]
    assert mode(selling) == before
    # Nothing has changed: the slots on sale are still on sale.
    assert [slot["status"] for slot in admin.get(SLOTS).json()["items"]] == statuses
    assert len(admin.get("admin/tasks").json()["items"]) == tasks


def test_every_busy_state_is_one_that_the_requirement_names() -> None:
    assert {str(state) for state in nodes.BUSY} == {
        *("reserved", "provisioning", "active", "releasing", "cleanup", "cleanup_blocked")
    }


def ended(stack: Stack, evidence: dict[str, Any], **failed: Any) -> dict[str, Any]:
    """The next task's run has ended: settled as the worker does it, the task afterwards."""
    task = stack.lease()
    status = "failed" if failed else "successful"
    document = {"schema": 1, "ok": not failed, "step": "", "error": {}, "evidence": evidence}
    outcome = Outcome(status, document | failed)
    settle(stack.engine, stack.settings, HANDLERS[task.kind], task, outcome)
    row: dict[str, Any] = stack.client("admin").get(f"admin/tasks/{task.id}").json()
    return row


def bare_again(stack: Stack) -> None:
    stack.client("admin").post(PATH, json={"to": "baremetal"})
    assert ended(stack, IDENTITY)["state"] == "succeeded"
    assert mode(stack) == "baremetal"


def test_one_call_leads_to_a_proven_host_and_a_takeover_to_slots_on_sale(selling: Stack) -> None:
    bare_again(selling)
    admin = selling.client("admin")
    headers = {"X-Correlation-Id": "back-to-slices"}
    first = admin.post(PATH, json={"to": "slice", "allow_reboot": True}, headers=headers).json()
    story = [
        ended(selling, IDENTITY),
        ended(selling, {"bound": []}),
        ended(selling, {"discovery": discovery()}),
        ended(selling, {"parity": REPORT | {"failures": 0}}),
    ]
    assert [task["kind"] for task in story] == [
        *("node.bootstrap", "node.bind_topology", "slice.topology_discover", "node.parity")
    ]
    assert mode(selling) == "slice"
    # Nothing recorded how the ordinary machine used the disks, so the host has ended their proofs.
    assert {slot["status"] for slot in admin.get(SLOTS).json()["items"]} == {"disabled"}
    closed = story[-1]["result"]["closed"].values()
    assert {row["code"] for rows in closed for row in rows} == {"proof_missing"}
    with transaction(selling.engine) as conn:
        for slot in slot_records.of_node(conn, NODE):
            proof = {"disk": slot.nvme_identity, "verified": True, "method": "discard"}
            proofs.record_transition(conn, NODE, proof, ACT)
        assert not gate.open_gate(conn, NODE, ACT)["closed"]
    assert {slot["status"] for slot in admin.get(SLOTS).json()["items"]} == {"available"}
    # Each task names the next under the same correlation id; the node's timeline has them all.
    assert first["id"] == story[0]["id"]
    assert [task["result"].get("next_task_id") for task in story] == [
        *(task["id"] for task in story[1:]),
        None,
    ]
    assert {task["correlation_id"] for task in story} == {"back-to-slices"}
    timeline = admin.get(f"admin/nodes/{NODE}/timeline", params={"limit": 200}).json()["items"]
    assert {task["id"] for task in story} <= {row.get("entity_id") for row in timeline}
    assert f"follows node.bootstrap {first['id']}" in {row.get("reason") for row in timeline}


def test_a_step_that_fails_ends_the_way_and_a_person_goes_on_from_there(selling: Stack) -> None:
    bare_again(selling)
    admin = selling.client("admin")
    admin.post(PATH, json={"to": "slice"})
    ended(selling, IDENTITY)
    error = {"code": "device_in_use", "expected": "a", "found": "b", "remedy": "c"}
    failed = ended(selling, {"bound": []}, step="Bind GPUs and fabric functions", error=error)
    assert (failed["state"], failed["error"]["code"]) == ("failed", "device_in_use")
    assert failed["error"]["step"] == "Bind GPUs and fabric functions"
    assert not [
        task for task in admin.get("admin/tasks").json()["items"] if not task["finished_at"]
    ]
    assert {slot["status"] for slot in admin.get(SLOTS).json()["items"]} == {"disabled"}
    assert admin.post(f"admin/nodes/{NODE}/bind-topology").status_code == 202
    assert "next_task_id" not in ended(selling, {"bound": []})["result"]


def test_checks_that_fail_at_the_end_keep_the_slots_off_sale(selling: Stack) -> None:
    bare_again(selling)
    selling.client("admin").post(PATH, json={"to": "slice"})
    for evidence in (IDENTITY, {"bound": []}, {"discovery": discovery()}):
        ended(selling, evidence)
    last = ended(selling, {"parity": REPORT | {"failures": 2}})
    assert (last["kind"], last["result"]["failures"]) == ("node.parity", 2)
    slots = selling.client("admin").get(SLOTS).json()["items"]
    assert {slot["status"] for slot in slots} == {"disabled"}


def test_without_approved_slots_there_is_nothing_to_prove(prepared: Stack) -> None:
    bare_again(prepared)
    prepared.client("admin").post(PATH, json={"to": "slice"})
    only = ended(prepared, IDENTITY)
    assert "no approved slots" in only["result"]["story"]
    assert mode(prepared) == "slice"
    tasks = prepared.client("admin").get("admin/tasks").json()["items"]
    assert all(task["finished_at"] for task in tasks)
