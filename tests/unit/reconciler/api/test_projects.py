"""Who sees which projects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.reconciler.api.world import World

pytestmark = pytest.mark.covers("CTRL-10")


def names(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [row["name"] for row in answer.json()["items"]]


def test_members_see_their_own_and_admins_all(new: World) -> None:
    assert names(new.client("member").get("projects")) == ["demo"]
    assert names(new.client("stranger").get("projects")) == ["other"]
    assert names(new.client("admin").get("projects")) == ["demo", "other"]
    refused = new.client("node").get("projects")
    assert (refused.status_code, refused.json()["code"]) == (403, "role_required")
    assert new.client().get("http://test/api/v1/projects").status_code == 401


def test_page_after_page(new: World) -> None:
    admin = new.client("admin")
    first = admin.get("projects", params={"limit": 1}).json()
    assert [row["id"] for row in first["items"]] == ["demo"]
    rest = admin.get("projects", params={"limit": 1, "cursor": first["next"]}).json()
    assert ([row["id"] for row in rest["items"]], rest["next"]) == (["other"], None)
    mine = new.client("member").get("projects", params={"limit": 1}).json()
    assert mine["next"] is None
