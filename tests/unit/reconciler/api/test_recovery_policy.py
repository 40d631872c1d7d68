"""The recovery policy's switch and what it shows."""

from __future__ import annotations

import pytest

from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.api.world import NODE, World

PATH = "admin/settings/recovery-policy"


@pytest.mark.covers("CTRL-7")
def test_off_until_switched_on(selling: World) -> None:
    admin = selling.client("admin")
    assert admin.get(PATH).json() == {
        "enabled": False,
        "per_node": 1,
        "per_hour": 4,
        "remove_leftovers": False,
        "cases": [],
    }
    stuck = failed(selling)
    changed = admin.put(PATH, json={"enabled": True, "per_hour": 2, "reason": "nights"}).json()
    assert (changed["enabled"], changed["per_hour"]) == (True, 2)
    (case,) = changed["cases"]
    assert (case["allocation_id"], case["node_id"]) == (stuck, NODE)
    assert (case["move"], "has not ended" in case["why"]) == ("wait", True), case
    query = {"action": "admin.setting.changed", "subject_id": "recovery_policy"}
    (entry,) = admin.get("admin/audit", params=query).json()["items"]
    assert (entry["reason"], entry["detail"]["value"]["per_hour"]) == ("nights", 2)


def test_bad_wishes(new: World) -> None:
    admin = new.client("admin")
    for body in ({}, {"enabled": "yes"}, {"enabled": True, "per_hour": 0}, {"on": True}):
        assert admin.put(PATH, json=body).json()["code"] == "request_invalid"
    assert new.client("member").get(PATH).status_code == 403
