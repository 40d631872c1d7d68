"""Stored documents are answered as they were stored, whatever their keys are called."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.model.act import Act
from reconciler.model.states import TaskState
from reconciler.records import queue, slots
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, discovery
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.api.test_stream import sent

pytestmark = pytest.mark.covers("CTRL-1")

_INNER: dict[str, Any] = {
    "hash": "sha256:00",
    "lease_token": "shown",
    "sampled_at": 12.5,
    "at": 0.25,
    "since": [{"hash": None, "valid_until": 1e9, "z": 1, "a": 2}],
}
# Keys that the answers' own fields use as well: secrets that are hidden, and moments.
DOCUMENT: dict[str, Any] = {**_INNER, "nested": {"deeper": [_INNER, _INNER]}}


def same(shown: dict[str, Any], stored: dict[str, Any] = DOCUMENT) -> bool:
    """Equal as JSON text, so the order of keys and the form of numbers count."""
    return json.dumps(shown) == json.dumps(stored)


def slots_path() -> str:
    return f"admin/nodes/{NODE}/resource-slots"


def drop_triggers(conn: sa.Connection, *names: str) -> None:
    """Let the test change rows that the schema keeps as they are."""
    query = "SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'"
    for trigger, table in conn.exec_driver_sql(query).all():
        if table in names:
            conn.exec_driver_sql(f'DROP TRIGGER "{trigger}"')


def test_reports_of_hosts(prepared: Stack) -> None:
    admin = prepared.client("admin")
    document = {**discovery(), **DOCUMENT}
    report = {"failures": 0, "warnings": 0, "identity": discovery()["identity"], **DOCUMENT}
    with transaction(prepared.engine) as conn:
        host.record_discovery(conn, NODE, document, ACT)
        host.record_parity(conn, NODE, report, ACT)
    shown = admin.get(f"admin/nodes/{NODE}/slice-topology/discovery").json()
    assert same(shown["document"], document)
    assert same(admin.get(f"admin/nodes/{NODE}/parity").json()["document"], report)


def test_tasks(prepared: Stack) -> None:
    admin = prepared.client("admin")
    admin.post(f"admin/nodes/{NODE}/parity")
    task = prepared.lease()
    with transaction(prepared.engine) as conn:
        held = (task.id, task.lease_token)
        queue.progress(conn, *held, DOCUMENT)
        queue.finish(conn, *held, TaskState.FAILED, ACT, result=DOCUMENT, error=DOCUMENT)
        conn.execute(sa.update(tables.tasks).values(parameters=DOCUMENT, fences=DOCUMENT))
    (listed,) = admin.get("admin/tasks").json()["items"]
    shown = admin.get(f"admin/tasks/{task.id}").json()
    for row in (listed, shown):
        for name in ("parameters", "fences", "progress", "result", "error"):
            assert same(row[name]), name
    assert "lease_token" not in shown
    assert [same(event["document"]) for event in shown["events"]] == [True]
    events = {name: document for name, _, document in sent(prepared, task.id)}
    assert same(events["progress"])
    assert same(events["end"]["error"])


def test_history_audit_and_timeline(selling: Stack) -> None:
    admin = selling.client("admin")
    slot = admin.get(slots_path()).json()["items"][0]
    act = Act("test", "documents", "one-request", DOCUMENT)
    with transaction(selling.engine) as conn:
        row = slots.get(conn, slot["id"])
        journal.write_history(conn, "slot", row, act, source="", event="create", target="disabled")
        journal.audit(conn, act, "test.act", "node", NODE, detail=DOCUMENT)
    history = admin.get(f"{slots_path()}/{slot['id']}/history").json()["items"]
    assert same(history[0]["evidence"])
    assert same(admin.get(f"{slots_path()}/{slot['id']}").json()["history"][-1]["evidence"])
    log = admin.get("admin/audit", params={"action": "test.act"}).json()["items"]
    assert [same(entry["detail"]) for entry in log] == [True]
    for path in (f"nodes/{NODE}", "correlations/one-request"):
        entries = admin.get(f"admin/{path}/timeline").json()["items"]
        assert any(same(entry.get("evidence", {})) for entry in entries), path
        assert any(same(entry.get("detail", {})) for entry in entries), path


def test_nodes_slots_and_allocations(selling: Stack) -> None:
    admin = selling.client("admin")
    allocation = launch(selling).json()["id"]
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(tables.nodes).values(health_detail=DOCUMENT))
        conn.execute(
            sa.update(tables.slots).values(health_detail=DOCUMENT, capacity_metadata=DOCUMENT)
        )
        documents = {"parameters": DOCUMENT, "connection": DOCUMENT, "error": DOCUMENT}
        conn.execute(sa.update(tables.allocations).values(documents))
        drop_triggers(conn, "allocation_resource_claims", "wipe_proofs")
        conn.execute(sa.update(tables.claims).values(disks=[DOCUMENT]))
        conn.execute(sa.update(tables.proofs).values(document=DOCUMENT))
    for node in (
        admin.get(f"admin/nodes/{NODE}").json(),
        admin.get("admin/nodes").json()["items"][0],
    ):
        assert same(node["health_detail"])
    listed = admin.get(slots_path()).json()["items"]
    assert all(same(slot["last_proof"]["document"]) for slot in listed)
    for slot in (*listed, admin.get(f"{slots_path()}/{listed[0]['id']}").json()):
        assert same(slot["health_detail"])
        assert same(slot["capacity_metadata"])
    detail = admin.get(f"admin/allocations/{allocation}").json()
    for row in (detail, *admin.get("admin/allocations").json()["items"]):
        assert all(same(row[name]) for name in documents)
    assert [same(disk) for claim in detail["claims"] for disk in claim["disks"]] == [True]
