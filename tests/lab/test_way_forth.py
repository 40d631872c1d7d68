"""After a time as an ordinary machine the host is a slice host again, by one call (HOST-15)."""

from __future__ import annotations

import pytest

from lab.demo.stage import Stage
from tests.lab.conftest import Chapter

pytestmark = pytest.mark.covers("HOST-15")


def test_it_becomes_a_slice_host_again(stage: Stage, story: Chapter) -> None:
    story.needs("baremetal")
    body = {"to": "slice", "allow_reboot": True, "reason": "sold in slices"}
    first = stage.api().post(stage.path("/conversion"), body)
    bootstrap = stage.follow(first)
    assert bootstrap["rebooted"]
    assert stage.api().get(stage.path())["mode"] == "slice"
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    # Approved as before, and not sold before the host is proven.
    assert {slot["status"] for slot in slots} == {"disabled"}
    kinds, result = [first["kind"]], bootstrap
    while following := result.get("next_task_id"):
        result = stage.follow({"id": following})
        kinds.append(stage.api().get(f"/admin/tasks/{following}")["kind"])
    assert kinds == [
        "node.bootstrap",
        "node.bind_topology",
        "slice.topology_discover",
        "node.parity",
    ]
    checks = stage.api().get(stage.path("/parity"))["document"]["checks"]
    assert result["failures"] == 0, [check for check in checks if check["status"] == "FAIL"]
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"available"}
