"""After a time as an ordinary machine the host is a slice host again, by one call (HOST-15)."""

from __future__ import annotations

import pytest

from lab.demo.stage import Stage
from tests.lab.conftest import Chapter
from tests.lab.proof import prove_again

pytestmark = pytest.mark.covers("HOST-15")


def test_it_becomes_a_slice_host_again(stage: Stage, story: Chapter) -> None:
    story.needs("baremetal")
    body = {"to": "slice", "allow_reboot": True, "reason": "sold in slices"}
    assert stage.task(stage.path("/conversion"), body)["rebooted"]
    assert stage.api().get(stage.path())["mode"] == "slice"
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    # Approved as before, and not sold before the host is proven.
    assert {slot["status"] for slot in slots} == {"disabled"}
    stage.task(stage.path("/bind-topology"))
    prove_again(stage)
