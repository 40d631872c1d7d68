"""Audit log: each action with its actor, and nothing secret."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import AuditEntry
from reconciler.model.states import Role, TaskKind, TaskState
from reconciler.records import leasing, queue, tokens
from tests.unit.reconciler.api.stack import ACT, NODE, Stack

pytestmark = pytest.mark.covers("I20")


def _log(stack: Stack, action: str) -> list[AuditEntry]:
    with reading(stack.engine) as conn:
        table = tables.audit_log
        query = sa.select(table).where(table.c.action == action).order_by(table.c.id)
        return [AuditEntry(**row) for row in conn.execute(query).mappings()]


def test_canceling_what_has_ended_or_was_canceled_leaves_no_row(selling: Stack) -> None:
    admin = selling.client("admin")
    task = admin.post(f"admin/nodes/{NODE}/parity").json()
    cancel = f"admin/tasks/{task['id']}/cancel"
    with transaction(selling.engine) as conn:
        (leased,) = leasing.lease(conn, "w", kinds=[TaskKind.NODE_PARITY])
    # It runs: the first request asks for its end, the second changes nothing.
    assert [admin.post(cancel).status_code for _ in range(2)] == [200, 200]
    assert len(_log(selling, "admin.task.canceled")) == 1
    with transaction(selling.engine) as conn:
        queue.finish(conn, leased.id, leased.lease_token, TaskState.SUCCEEDED, ACT)
    answer = admin.post(cancel)
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")
    assert len(_log(selling, "admin.task.canceled")) == 1


def test_a_token_is_revoked_once(selling: Stack) -> None:
    admin = selling.client("admin")
    made = admin.post("admin/tokens", json={"role": "platform-admin", "name": "leaked"}).json()
    listed = []
    for _ in range(2):
        assert admin.delete(f"admin/tokens/{made['id']}").status_code == 200
        rows = admin.get("admin/tokens").json()["items"]
        listed.append([row["revoked_at"] for row in rows if row["id"] == made["id"]])
    assert listed[0] == listed[1] != [None]
    assert len(_log(selling, "admin.token.revoked")) == 1
    assert admin.delete("admin/tokens/unknown").json()["code"] == "token_not_found"


def test_two_tokens_of_one_name_are_two_actors(selling: Stack) -> None:
    made = []
    with transaction(selling.engine) as conn:
        for _ in range(2):
            made.append(tokens.issue(conn, ACT, name="ci", role=Role.PLATFORM_ADMIN))
    for number, (_, secret) in enumerate(made):
        client = selling.client()
        client.headers["Authorization"] = f"Bearer {secret}"
        body = {"name": f"project-{number}", "reason": "test"}
        assert client.post("admin/projects", json=body).status_code == 201
        assert client.post(f"admin/nodes/{NODE}/drain", json={"reason": "x"}).is_success
        assert client.post(f"admin/nodes/{NODE}/resume", json={"reason": "x"}).is_success
    names = [f"admin:ci#{record.id}" for record, _ in made]
    assert [row.actor for row in _log(selling, "admin.project.created")][-2:] == names
    with reading(selling.engine) as conn:
        table = tables.history
        query = sa.select(table.c.actor).where(table.c.entity_id == NODE)
        changed = list(conn.execute(query.order_by(table.c.id)).scalars())
    assert changed[-4:] == [names[0]] * 2 + [names[1]] * 2


def test_the_row_of_a_new_token_says_what_it_opens_and_until_when(selling: Stack) -> None:
    admin = selling.client("admin")
    body = {"role": "project-member", "name": "bob", "project_id": "demo", "ttl_s": 3600}
    made = admin.post("admin/tokens", json=body).json()
    row = _log(selling, "admin.token.issued")[-1]
    assert row.subject_id == made["id"]
    given = {"role": "project-member", "name": "bob", "project_id": "demo", "node_id": None}
    assert {name: row.detail[name] for name in given} == given
    with reading(selling.engine) as conn:
        (record,) = [token for token in tokens.every(conn) if token.id == made["id"]]
    assert row.detail["expires_at"] == record.expires_at is not None
