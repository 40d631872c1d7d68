"""The latest report of a host, beside the task that may bring the next."""

from __future__ import annotations

import pytest

from tests.unit.reconciler.api.world import NODE, World, discovery

pytestmark = pytest.mark.covers("HOST-11")


def test_before_the_first_report(new: World) -> None:
    admin = new.client("admin")
    for noun in ("slice-topology/discovery", "parity"):
        path = f"admin/nodes/{NODE}/{noun}"
        assert admin.get(path).json() == {"document": None, "task": None}
        task = admin.post(path).json()
        assert admin.get(path).json()["task"]["id"] == task["id"]
    assert admin.get("admin/nodes/none/parity").status_code == 404


def test_the_latest_report(selling: World) -> None:
    admin = selling.client("admin")
    found = admin.get(f"admin/nodes/{NODE}/slice-topology/discovery").json()
    assert found["document"] == discovery()
    assert found["observed_at"].endswith("+00:00")
    assert admin.get(f"admin/nodes/{NODE}/parity").json()["document"]["failures"] == 0
