"""The shape of a slice's machine, worked out from the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reconciler.profiles import hardware_profile
from reconciler.work.kinds import slices as slice_kinds

PROFILES = Path(__file__).parents[4] / "profiles"


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("limit", [None, {"rate_kbps": 2_000_000, "burst_kb": 100_000}])
def test_a_limit_of_the_profile_goes_to_the_machine(limit: dict[str, int] | None) -> None:
    profile: dict[str, Any] = hardware_profile(PROFILES, "lab")
    shape = {name: value for name, value in profile["vm"].items() if name != "mgmt_qos"}
    wanted = {"mgmt_qos": limit} if limit else {}
    machine = slice_kinds.machine_shape({**profile, "vm": {**shape, **wanted}}, 2)
    assert machine["mgmt_attachment"] == "tap"
    assert machine["nested"] is False
    assert machine["vcpus"] == 2 * profile["vm"]["vcpus_per_gpu"]
    # Not a limit for each GPU: a slice has one management interface, however many it has.
    assert machine.get("mgmt_qos") == limit
