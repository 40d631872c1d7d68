"""Recovery cases and the recovery policy through the API."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.api.app import PREFIX
from reconciler.db.engine import transaction
from reconciler.lifecycle import host, recovery_cases
from reconciler.work.loops import play_recovery_cases
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.api.test_launches import activate, launch

pytestmark = pytest.mark.covers("CTRL-7")


def recover(stack: Stack, key: str, *, once: str = "r", **headers: str) -> Any:
    return stack.client("admin").post(
        f"admin/allocations/{key}/recover",
        json={"reason": "test"},
        headers={"X-Idempotency-Key": once, **headers},
    )


def newest(stack: Stack, key: str) -> Any:
    return stack.client("admin").get(f"admin/allocations/{key}/recovery")


def test_a_case_is_opened_once_and_followed(selling: Stack) -> None:
    stuck = failed(selling)
    none = newest(selling, stuck)
    assert (none.status_code, none.json()["code"]) == (404, "recovery_case_not_found")
    opened = recover(selling, stuck)
    assert opened.status_code == 202, opened.text
    case = opened.json()
    assert (case["state"], case["step"], case["waits_for"]["code"]) == (
        "opened",
        "inventory",
        "leader",
    )
    assert [step["step"] for step in case["steps"]] == ["allocation", "inventory"]
    (slot_id,) = case["slot_ids"]
    assert case["steps"][1]["evidence"][slot_id]["status"] == "cleanup_blocked"
    assert recover(selling, stuck, once="another").json() == case
    play_recovery_cases(selling.engine, selling.settings)
    now = newest(selling, stuck).json()
    assert (now["state"], now["task_ids"]) == ("verifying", [now["task_id"]])
    assert now["failed_in"] is None
    with transaction(selling.engine) as conn:
        host.lost(conn, NODE, ACT.because("no route"))
    waits = {"code": "host_unreachable", "detail": "no route", "remedy": ""}
    assert newest(selling, stuck).json()["waits_for"] == waits
    audit = selling.client("admin").get("admin/audit", params={"action": recovery_cases.OPENED})
    (event,) = audit.json()["items"]
    assert (event["subject_id"], event["reason"]) == (stuck, "test")
    assert event["detail"] == {"recovery_case_id": case["id"]}


def test_it_is_part_of_the_timeline(selling: Stack) -> None:
    stuck = failed(selling)
    recover(selling, stuck)
    play_recovery_cases(selling.engine, selling.settings)
    path = f"admin/allocations/{stuck}/timeline"
    rows = selling.client("admin").get(path, params={"limit": 50}).json()["items"]
    moves = [row["target"] for row in rows if row.get("entity") == "recovery_case"]
    assert moves == ["verifying", "opened"]


def test_a_failed_case_says_what_to_do(selling: Stack) -> None:
    stuck = failed(selling)
    recover(selling, stuck)
    play_recovery_cases(selling.engine, selling.settings)
    task = newest(selling, stuck).json()["task_id"]
    selling.client("admin").post(f"admin/tasks/{task}/cancel")
    play_recovery_cases(selling.engine, selling.settings)
    case = newest(selling, stuck).json()
    assert (case["state"], case["failure"]["code"]) == ("failed", "absence_unknown")
    assert case["failed_in"] == "verifying"
    assert case["failure"]["remedy"] and case["finished_at"] and case["waits_for"] is None
    assert recover(selling, stuck, once="again").json()["id"] != case["id"]


def test_what_is_refused(selling: Stack) -> None:
    stuck = failed(selling)
    stale = {"If-Match": '"999"'}
    guarded = refused(selling, lambda: recover(selling, stuck, once="g", **stale))
    assert (guarded["status"], guarded["code"]) == (412, "precondition_failed")
    admin = selling.client("admin")
    without = refused(
        selling,
        lambda: admin.post(
            f"admin/allocations/{stuck}/recover", json={}, headers={"Idempotency-Key": "w"}
        ),
    )
    assert (without["status"], without["code"]) == (422, "reason_required")
    running = launch(selling, key="second").json()["id"]
    activate(selling, running)
    active = refused(selling, lambda: recover(selling, running, once="a"))
    assert (active["status"], active["code"]) == (409, "allocation_active")
    unknown = refused(selling, lambda: recover(selling, "none", once="n"))
    assert (unknown["status"], unknown["code"]) == (404, "allocation_not_found")
    assert PREFIX in unknown["instance"]


POLICY = "admin/settings/recovery-policy"


def test_off_until_switched_on(selling: Stack) -> None:
    admin = selling.client("admin")
    assert admin.get(POLICY).json() == {
        "enabled": False,
        "per_node": 1,
        "per_hour": 4,
        "remove_leftovers": False,
        "tenant_failures": True,
        "cases": [],
    }
    stuck = failed(selling)
    changed = admin.put(POLICY, json={"enabled": True, "per_hour": 2, "reason": "nights"}).json()
    assert (changed["enabled"], changed["per_hour"]) == (True, 2)
    (case,) = changed["cases"]
    assert (case["allocation_id"], case["node_id"]) == (stuck, NODE)
    assert (case["move"], "has not ended" in case["why"]) == ("wait", True), case
    query = {"action": "admin.setting.changed", "subject_id": "recovery_policy"}
    (entry,) = admin.get("admin/audit", params=query).json()["items"]
    assert (entry["reason"], entry["detail"]["value"]["per_hour"]) == ("nights", 2)


def test_bad_wishes(new: Stack) -> None:
    admin = new.client("admin")
    for body in ({}, {"enabled": "yes"}, {"enabled": True, "per_hour": 0}, {"on": True}):
        assert admin.put(POLICY, json=body).json()["code"] == "request_invalid"
    assert new.client("member").get(POLICY).status_code == 403
