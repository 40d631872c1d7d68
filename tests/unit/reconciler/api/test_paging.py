"""Lists page by page: complete, each row once, whatever is added meanwhile."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from reconciler.api import contract
from reconciler.db.engine import transaction
from reconciler.records import nodes, projects
from tests.unit.reconciler.api.conformity import Client
from tests.unit.reconciler.api.stack import ACT, NODE, Stack

pytestmark = pytest.mark.covers("CTRL-1")


def cursor(*place: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def pages(client: Client, path: str, **query: Any) -> list[list[dict[str, Any]]]:
    read: list[list[dict[str, Any]]] = []
    while True:
        page = client.get(path, params=query).json()
        read.append(page["items"])
        if page["next"] is None:
            return read
        query["cursor"] = page["next"]


def test_every_list_is_paged() -> None:
    document = contract.contract()
    lists = []
    for path, verbs in document["paths"].items():
        answer = verbs.get("get", {}).get("responses", {}).get("200", {})
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        if "items" in document["components"]["schemas"].get(name, {}).get("properties", {}):
            lists.append(path)
            shared = {str(part.get("$ref")) for part in verbs["get"]["parameters"]}
            named = {reference.rpartition("/")[2] for reference in shared}
            assert {"QueryLimit", "QueryCursor"} <= named, path
            assert "next" in document["components"]["schemas"][name]["required"], path
    assert len(lists) >= 10


def test_pages_hold_every_row_once(new: Stack) -> None:
    with transaction(new.engine) as conn:
        for index in range(7):
            projects.create(conn, f"project-{index}", ACT, id=f"p{index}")
    admin = new.client("admin")
    read = pages(admin, "admin/projects", limit=4)
    assert [len(page) for page in read] == [4, 4, 1]
    names = [row["name"] for page in read for row in page]
    assert names == sorted(names)
    assert len(set(names)) == 9
    log = [row["id"] for page in pages(admin, "admin/audit", limit=3) for row in page]
    assert log == sorted(log, reverse=True)
    assert len(log) == len(admin.get("admin/audit", params={"limit": 1000}).json()["items"])


def test_what_is_added_meanwhile_repeats_and_hides_nothing(new: Stack) -> None:
    admin = new.client("admin")
    before = [row["id"] for row in admin.get("admin/tokens").json()["items"]]
    first = admin.get("admin/tokens", params={"limit": 2}).json()
    body = {"role": "platform-admin", "name": "later"}
    assert admin.post("admin/tokens", json=body).status_code == 201
    rest = pages(admin, "admin/tokens", limit=2, cursor=first["next"])
    assert [row["id"] for row in first["items"]] + [
        row["id"] for page in rest for row in page
    ] == before


def test_a_page_of_filtered_rows_goes_on_among_them(new: Stack) -> None:
    with transaction(new.engine) as conn:
        for index in range(3):
            nodes.create(conn, ACT, id=f"n{index}", address="192.0.2.9", profile="lab")
    read = pages(new.client("admin"), "admin/nodes", limit=1, state="enrolling")
    assert [page[0]["id"] for page in read] == [NODE, "n0", "n1", "n2"]


@pytest.mark.parametrize(
    "text",
    [
        "!",
        "x" * 9,
        cursor("nodes"),
        cursor("nodes", 1),
        cursor("nodes", "a", "b"),
        cursor("nodes", "a\0"),
        cursor("nodes", "\ud800"),
        cursor("projects", "a"),
        cursor({"nodes": "a"}),
        base64.urlsafe_b64encode(b"[" * 3000).decode()[:1000],
        base64.urlsafe_b64encode(b'["nodes", NaN]').decode(),
    ],
)
def test_what_is_no_cursor_of_the_list_is_refused(new: Stack, text: str) -> None:
    answer = new.client("admin").get("admin/nodes", params={"cursor": text})
    assert (answer.status_code, answer.json()["code"]) == (400, "cursor_invalid")


def test_numbers_that_no_database_takes_are_no_place(new: Stack) -> None:
    admin = new.client("admin")
    for place in (cursor("audit_log", 1 << 63), cursor("audit_log", True), cursor("tasks", 1, "a")):
        path = "admin/tasks" if "tasks" in str(base64.b64decode(place + "==")) else "admin/audit"
        answer = admin.get(path, params={"cursor": place})
        assert (answer.status_code, answer.json()["code"]) == (400, "cursor_invalid")
    far = admin.get("admin/tasks", params={"cursor": cursor("tasks", 1e999, "a")})
    assert far.status_code in (200, 400)
