"""Timelines of a node and of an allocation, page by page."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import launch
from reconciler.records import images, queue
from tests.unit.reconciler import relay
from tests.unit.reconciler.api.stack import ACT, KEY, NODE, Stack
from tests.unit.reconciler.api.test_launches import BODY, PATH
from tests.unit.reconciler.api.test_paging import pages

pytestmark = pytest.mark.covers("CTRL-8")


def launched(stack: Stack) -> str:
    """An allocation whose run has said two things."""
    with transaction(stack.engine) as conn:
        request = launch.Launch(
            project_id="demo", gpu_count=1, username="u", ssh_keys=[KEY], hostname="h",
            image_id=images.every(conn)[0].id,
        )  # fmt: skip
        allocation = launch.allocate(conn, request, ACT)
    task = stack.lease()
    with transaction(stack.engine) as conn:
        held = (task.id, task.lease_token)
        queue.started(conn, *held, run_id="r", run_directory="r")
        lines = ({"event": "started", "task": "one"}, {"event": "ok", "task": "one"})
        queue.progress(conn, *held, *lines, offset=7)
    return str(allocation.id)


def read(stack: Stack, path: str, limit: int) -> list[dict[str, Any]]:
    """The whole list, by pages of this size."""
    read_pages = pages(stack.client("admin"), path, limit=limit)
    assert all(len(page) <= limit for page in read_pages)
    return [row for page in read_pages for row in page]


def test_of_an_allocation(selling: Stack) -> None:
    key = launched(selling)
    path = f"admin/allocations/{key}/timeline"
    whole = read(selling, path, 1000)
    assert whole == read(selling, path, 3), "pages neither repeat nor leave out"
    assert [row["at"] for row in whole] == sorted((row["at"] for row in whole), reverse=True)
    kinds = {(row["type"], row.get("entity", "")) for row in whole}
    for entity in ("allocation", "claim", "slot", "task"):
        assert ("state", entity) in kinds
    lines = [row["document"]["event"] for row in whole if row["type"] == "progress"]
    assert lines == ["ok", "started"]


def test_of_a_node_with_who_did_what(selling: Stack) -> None:
    launched(selling)
    admin = selling.client("admin")
    admin.post(f"admin/nodes/{NODE}/drain", json={"reason": "new firmware"})
    newest = read(selling, f"admin/nodes/{NODE}/timeline", 50)[:2]
    assert {row["type"] for row in newest} == {"state", "audit"}
    assert {row["reason"] for row in newest} == {"new firmware"}
    assert any(
        row["type"] == "progress" for row in read(selling, f"admin/nodes/{NODE}/timeline", 7)
    )


def test_of_a_request(selling: Stack) -> None:
    """The same correlation id through allocation, task, run, events and audit."""
    admin, once = selling.client("admin"), {"X-Correlation-Id": "asked-once"}
    member = selling.client("member")
    answer = member.post(PATH, json=BODY, headers={"Idempotency-Key": "k", **once})
    assert answer.status_code == 201, answer.text
    launched_id = answer.json()["id"]
    task = selling.lease()
    with transaction(selling.engine) as conn:
        held = (task.id, task.lease_token)
        queue.started(conn, *held, run_id="r", run_directory="r")
        queue.progress(conn, *held, {"event": "started", "task": "one"}, offset=7)
        pending = relay.pending_events(conn)
    admin.post(f"admin/nodes/{NODE}/parity", headers={"X-Correlation-Id": "other"})
    path = "admin/correlations/asked-once/timeline"
    whole = read(selling, path, 1000)
    assert whole == read(selling, path, 2)
    kinds = {(row["type"], row.get("entity", "")) for row in whole}
    entities = ("allocation", "claim", "slot", "task")
    assert kinds == {*(("state", entity) for entity in entities), ("progress", ""), ("audit", "")}
    assert {row["allocation_id"] for row in whole if row["type"] == "progress"} == {launched_id}
    mine = [row for row in pending if row.correlation_id == "asked-once"]
    assert {row.subject_kind for row in mine} >= {"allocation", "slot", "task"}
    audited = admin.get("admin/audit", params={"correlation_id": "asked-once"}).json()["items"]
    assert [row["subject_id"] for row in audited] == [launched_id]
    assert read(selling, "admin/correlations/nothing/timeline", 5) == []
    assert member.get(path).status_code == 403


def test_of_nobody(selling: Stack) -> None:
    admin = selling.client("admin")
    assert admin.get("admin/nodes/none/timeline").json()["code"] == "node_not_found"
    assert admin.get("admin/allocations/none/timeline").json()["code"] == "allocation_not_found"
    cursor = admin.get("admin/audit", params={"limit": 1}).json()["next"]
    foreign = admin.get(f"admin/nodes/{NODE}/timeline", params={"cursor": cursor})
    assert foreign.json()["code"] == "cursor_invalid"
