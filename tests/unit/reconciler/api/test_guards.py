"""If-Match: an update that was decided on an old picture is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from reconciler.api.app import MUTATING
from reconciler.db.engine import transaction
from reconciler.lifecycle import slices
from tests.unit.reconciler.api.conformity import operations
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import PATH as MINE
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.test_security import app_instance

pytestmark = pytest.mark.covers("CTRL-1")
PATH = f"admin/nodes/{NODE}"
SLOTS = f"{PATH}/resource-slots"


def test_a_node_changes_only_as_it_was_read(new: Stack) -> None:
    admin = new.client("admin")
    tag = admin.get(PATH).headers["ETag"]
    changed = admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["ETag"] != tag
    stale = refused(
        new, lambda: admin.patch(PATH, json={"region": "us"}, headers={"If-Match": tag})
    )
    assert (stale["status"], stale["code"]) == (412, "precondition_failed")
    assert f'"{stale["generation"]}"' == changed.headers["ETag"]
    now = {"If-Match": f'"0", {changed.headers["ETag"]}'}
    assert admin.patch(PATH, json={"region": "us"}, headers=now).status_code == 200
    assert admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": "*"}).status_code == 200
    assert admin.patch(PATH, json={"region": "us"}).status_code == 200


# The node is at generation 0.
@pytest.mark.parametrize("given", ["", "3", '"x"', '""', '"-1"', '"99999999999999999999"', 'W/"0"'])
def test_what_is_no_tag_matches_nothing(new: Stack, given: str) -> None:
    admin = new.client("admin")
    answer = admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": given})
    assert (answer.status_code, answer.json()["code"]) == (412, "precondition_failed")


def test_an_act_on_a_slot_is_guarded(selling: Stack) -> None:
    admin = selling.client("admin")
    slot = admin.get(SLOTS).json()["items"][0]["id"]
    tag = admin.get(f"{SLOTS}/{slot}").headers["ETag"]
    disabled = admin.post(f"{SLOTS}/{slot}/disable", headers={"If-Match": tag})
    assert disabled.status_code == 200
    assert disabled.headers["ETag"] == admin.get(f"{SLOTS}/{slot}").headers["ETag"]
    headers = {"If-Match": tag}
    stale = refused(selling, lambda: admin.post(f"{SLOTS}/{slot}/enable", headers=headers))
    assert stale["code"] == "precondition_failed"


def test_an_allocation_changes_only_as_it_was_read(selling: Stack) -> None:
    member, made = selling.client("member"), launch(selling)
    at = f"{MINE}/{made.json()['id']}"
    requested = made.headers["ETag"]
    assert member.get(at).headers["ETag"] == requested == f'"{made.json()["generation"]}"'
    activate(selling, made.json()["id"])
    active = member.get(at)
    assert active.headers["ETag"] == f'"{active.json()["generation"]}"' != requested
    theirs = selling.client("admin").get(f"admin/allocations/{made.json()['id']}")
    assert theirs.headers["ETag"] == active.headers["ETag"]
    given_back = f"{at}/release"
    stale = refused(selling, lambda: member.post(given_back, headers={"If-Match": requested}))
    assert (stale["status"], stale["code"]) == (412, "precondition_failed")
    # Those of another project are not told even that.
    denied = selling.client("stranger").post(given_back, headers={"If-Match": requested})
    assert denied.status_code == 404
    now = {"If-Match": active.headers["ETag"], "Idempotency-Key": "back"}
    released = member.post(given_back, headers=now)
    assert (released.status_code, released.json()["state"]) == (200, "releasing")
    assert released.headers["ETag"] == member.get(at).headers["ETag"] != active.headers["ETag"]
    assert member.post(given_back, headers=now).headers["ETag"] == released.headers["ETag"]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("force-cleanup", (200, None)),
        # Its host answers, which is a judgement of its own: the guard has let it pass.
        ("force-release", (409, "node_reachable")),
    ],
)
def test_what_is_forced_on_an_allocation_is_guarded(
    selling: Stack, act: str, expected: tuple[int, str | None]
) -> None:
    """That its release has failed is news as well, although its state is the same."""
    admin, made = selling.client("admin"), launch(selling).json()["id"]
    activate(selling, made)
    at, body = f"admin/allocations/{made}", {"reason": "test"}
    if act == "force-cleanup":
        body = body | {"runtime_verified_absent": False}
    selling.client("member").post(f"{MINE}/{made}/release")
    seen = admin.get(at).headers["ETag"]
    with transaction(selling.engine) as conn:
        slices.release_failed(conn, made, ACT, step="test", error={"code": "failed"})

    def forced(tag: str) -> Any:
        headers = {"If-Match": tag, "Idempotency-Key": tag.strip('"')}
        return admin.post(f"{at}/{act}", json=body, headers=headers)

    stale = refused(selling, lambda: forced(seen))
    assert (stale["status"], stale["code"]) == (412, "precondition_failed")
    answer = forced(admin.get(at).headers["ETag"])
    assert (answer.status_code, answer.json().get("code")) == expected


def test_of_two_at_once_one_wins(new: Stack) -> None:
    tag = new.client("admin").get(PATH).headers["ETag"]

    def change(region: str) -> int:
        headers = {"If-Match": tag}
        return new.client("admin").patch(PATH, json={"region": region}, headers=headers).status_code

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(change, "abcd")) == [200, 412, 412, 412]


# A body that each operation accepts apart from the tag; {} where it needs none. An operation
# missing here is refused for its body, not for its tag, and fails the test.
BODIES: dict[str, dict[str, Any]] = {
    "allocations_change_power": {"action": "stop"},
    "nodes_change": {"region": "eu"},
    "nodes_schedule": {"enabled": False},
    "node_work_change_firmware": {"apply": True, "reason": "test"},
    "node_work_convert": {"to": "baremetal"},
    "node_work_reboot": {"reason": "test"},
    "bare_metal_accept_drift": {"reason": "test"},
    "bare_metal_accept_firmware": {"reason": "test"},
    "bare_metal_record_bmc": {"sections": {"redfish_boot": {}}},
    "slots_remove_orphan": {
        "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d",
        "reason": "test",
    },
    "recovery_force_cleanup": {"reason": "test", "runtime_verified_absent": True},
    "node_state_drain": {"reason": "test"},
    "node_state_maintain": {"reason": "test"},
    "node_state_resume": {"reason": "test"},
    "node_state_retire": {"reason": "test"},
}


def changing() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Verb, path and description of every operation of the written contract that acts."""
    return (row for row in operations() if row[0] in MUTATING)


def is_guarded(operation: dict[str, Any]) -> bool:
    return {"$ref": "#/components/parameters/HeaderIfMatch"} in operation["parameters"]


def test_whatever_changes_a_record_with_a_tag_is_guarded() -> None:
    """An operation that answers with a record and its new ETag has changed that record."""
    answers = {
        operation["operationId"]: operation["responses"].get("200", {}).get("headers", {})
        for _, _, operation in changing()
        if not is_guarded(operation)
    }
    assert [name for name, headers in answers.items() if "ETag" in headers] == []


def test_a_wrong_tag_is_refused_wherever_one_is_taken(selling: Stack) -> None:
    """From the contract, so that no operation is forgotten. New records are at generation 0."""
    app = app_instance(selling)
    admin = selling.client("admin", base="/")
    allocation = launch(selling).json()["id"]
    (task,) = selling.client("admin").get(f"admin/allocations/{allocation}").json()["tasks"]
    names = {
        "node_id": NODE,
        "slot_id": selling.client("admin").get(SLOTS).json()["items"][0]["id"],
        "action": "disable",
        "project_id": "demo",
        "allocation_id": allocation,
        "app_instance_id": app,
        "rule_id": selling.ingress_rule(allocation),
        "task_id": task["id"],
    }
    unused = set(BODIES)
    for verb, path, operation in changing():
        if not is_guarded(operation):
            continue
        name, at = operation["operationId"], path.format_map(names)
        who = selling.client("member", base="/") if "/projects/" in path else admin
        headers = {"If-Match": '"999"', "Idempotency-Key": name}
        ask = partial(who.request, verb, at, json=BODIES.get(name, {}), headers=headers)
        answer = refused(selling, ask)
        assert (name, answer["status"], answer["code"]) == (name, 412, "precondition_failed")
        unused.discard(name)
    assert unused == set(), "these are guarded no more, or gone"


def test_a_task_is_canceled_only_as_it_was_read(selling: Stack) -> None:
    """The task began to run after the read, so the cancellation is another decision."""
    admin = selling.client("admin")
    allocation = launch(selling).json()["id"]
    (task,) = admin.get(f"admin/allocations/{allocation}").json()["tasks"]
    at = f"admin/tasks/{task['id']}"
    queued = admin.get(at)
    assert queued.headers["ETag"] == f'"{queued.json()["generation"]}"'
    selling.lease()
    seen = {"If-Match": queued.headers["ETag"]}
    stale = refused(selling, lambda: admin.post(f"{at}/cancel", headers=seen))
    assert (stale["status"], stale["code"]) == (412, "precondition_failed")
    now = {"If-Match": admin.get(at).headers["ETag"]}
    canceled = admin.post(f"{at}/cancel", headers=now)
    assert (canceled.status_code, canceled.json()["cancel_requested"]) == (200, True)
    # It is still running: that its end was asked for is news all the same, and that only once.
    stale = refused(selling, lambda: admin.post(f"{at}/cancel", headers=now))
    assert (stale["status"], stale["code"]) == (412, "precondition_failed")
    again = admin.post(f"{at}/cancel", headers={"If-Match": canceled.headers["ETag"]})
    assert (again.status_code, again.headers["ETag"]) == (200, canceled.headers["ETag"])
