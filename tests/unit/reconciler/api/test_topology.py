"""The latest report of a host, beside the task that may bring the next."""

from __future__ import annotations

import pytest

from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from tests.unit.reconciler.api.world import ACT, NODE, World, discovery

pytestmark = pytest.mark.covers("HOST-11")


def test_before_the_first_report(new: World) -> None:
    admin = new.client("admin")
    with transaction(new.engine) as conn:
        host.enrolled(conn, NODE, ACT, **discovery()["identity"])
    for noun in ("slice-topology/discovery", "parity"):
        path = f"admin/nodes/{NODE}/{noun}"
        assert admin.get(path).json() == {"document": None, "task": None}
        task = admin.post(path).json()
        assert admin.get(path).json()["task"]["id"] == task["id"]
    assert admin.get("admin/nodes/none/parity").status_code == 404


@pytest.mark.covers("HOST-10")
def test_a_bare_metal_nodes_report_is_the_one_that_it_was_asked_for(new: World) -> None:
    admin = new.client("admin")
    body = {"id": "m1", "address": "192.0.2.8", "profile": "lab", "mode": "baremetal"}
    assert admin.post("admin/nodes", json=body).status_code == 201
    identity = discovery()["identity"]
    with transaction(new.engine) as conn:
        for intent, failures in (("baremetal", 3), ("slice", 0)):
            report = {"intent": intent, "failures": failures, "identity": identity}
            host.record_parity(conn, "m1", report, ACT)
    assert admin.get("admin/nodes/m1/parity").json()["document"]["failures"] == 3


def test_the_latest_report(selling: World) -> None:
    admin = selling.client("admin")
    found = admin.get(f"admin/nodes/{NODE}/slice-topology/discovery").json()
    assert found["document"] == discovery()
    assert found["observed_at"].endswith("+00:00")
    assert admin.get(f"admin/nodes/{NODE}/parity").json()["document"]["failures"] == 0
