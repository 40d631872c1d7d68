"""Projects and API tokens: visible projects of a caller, and access by token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.reconciler.api.stack import NODE, Stack

pytestmark = pytest.mark.covers("CTRL-10")


def names(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [row["name"] for row in answer.json()["items"]]


def test_members_see_their_own_and_admins_all(new: Stack) -> None:
    assert names(new.client("member").get("projects")) == ["demo"]
    assert names(new.client("stranger").get("projects")) == ["other"]
    assert names(new.client("admin").get("projects")) == ["demo", "other"]
    refused = new.client("node").get("projects")
    assert (refused.status_code, refused.json()["code"]) == (403, "role_required")
    assert new.client().get("http://test/api/v1/projects").status_code == 401


def test_page_after_page(new: Stack) -> None:
    admin = new.client("admin")
    first = admin.get("projects", params={"limit": 1}).json()
    assert [row["id"] for row in first["items"]] == ["demo"]
    rest = admin.get("projects", params={"limit": 1, "cursor": first["next"]}).json()
    assert ([row["id"] for row in rest["items"]], rest["next"]) == (["other"], None)
    mine = new.client("member").get("projects", params={"limit": 1}).json()
    assert mine["next"] is None


def test_a_token_opens_its_project(new: Stack) -> None:
    admin = new.client("admin")
    project = admin.post("admin/projects", json={"name": "fresh"}).json()
    body = {"role": "project-member", "name": "ann", "project_id": project["id"], "ttl_s": 600}
    issued = admin.post("admin/tokens", json=body)
    assert issued.status_code == 201
    new.secrets["ann"] = issued.json()["token"]
    path = f"projects/{project['id']}/allocations"
    assert new.client("ann").get(path).json()["items"] == []
    assert new.client("ann").get("projects/demo/allocations").status_code == 404
    assert new.secrets["ann"] not in admin.get("admin/tokens").text
    assert project["id"] in [row["id"] for row in admin.get("admin/projects").json()["items"]]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"role": "project-member"}, "request_invalid"),
        ({"role": "platform-admin", "project_id": "demo"}, "request_invalid"),
        ({"role": "platform-admin", "node_id": NODE}, "request_invalid"),
        ({"role": "node"}, "request_invalid"),
        ({"role": "node", "project_id": "demo"}, "request_invalid"),
        ({"role": "node", "node_id": "none"}, "node_not_found"),
        ({"role": "project-member", "project_id": "none"}, "project_not_found"),
        ({"role": "platform-admin", "ttl_s": 1}, "request_invalid"),
    ],
)
def test_bad_tokens(new: Stack, body: dict[str, Any], code: str) -> None:
    answer = new.client("admin").post("admin/tokens", json={"name": "x"} | body)
    assert answer.json()["code"] == code


def test_ids_and_names_are_their_own(new: Stack) -> None:
    admin = new.client("admin")
    again = admin.post("admin/projects", json={"name": "new", "id": "demo"})
    assert (again.status_code, again.json()["code"]) == (409, "project_exists")
    node = {"role": "node", "name": "agent", "node_id": NODE}
    assert admin.post("admin/tokens", json=node).status_code == 201
