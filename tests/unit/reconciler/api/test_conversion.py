"""Slice host to bare metal and back: one call each, never while somebody is on the node."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.store import nodes
from reconciler.store.engine import transaction
from reconciler.tasks.registry import HANDLERS
from reconciler.tasks.work import open_work
from tests.unit.reconciler.api.test_launches import launch
from tests.unit.reconciler.api.world import NODE, World, discovery

pytestmark = pytest.mark.covers("HOST-15")

PATH = f"admin/nodes/{NODE}/conversion"


def mode(world: World) -> str:
    return str(world.client("admin").get(f"admin/nodes/{NODE}").json()["mode"])


def finish(world: World) -> dict[str, Any]:
    """The node's task ends well, as its handler records it."""
    task = world.lease()
    with transaction(world.engine) as conn:
        work = open_work(conn, world.settings, task)
        return HANDLERS[task["kind"]].succeed(work, {"identity": discovery()["identity"]})


def test_a_slice_host_becomes_bare_metal_and_a_slice_host_again(selling: World) -> None:
    admin = selling.client("admin")
    answer = admin.post(
        PATH, json={"to": "baremetal", "allow_reboot": True, "reason": "sold whole"}
    )
    assert (answer.status_code, answer.json()["kind"]) == (202, "node.convert")
    assert mode(selling) == "converting_to_baremetal"
    # Off sale before anything happens on the host.
    slots = admin.get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    assert {slot["status"] for slot in slots} == {"disabled"}
    finish(selling)
    assert mode(selling) == "baremetal"
    for noun, body in (("bootstrap", {}), ("bind-topology", {})):
        refused = admin.post(f"admin/nodes/{NODE}/{noun}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (409, "node_is_baremetal")
    answer = admin.post(PATH, json={"to": "slice", "allow_reboot": True})
    assert (answer.json()["kind"], mode(selling)) == ("node.bootstrap", "converting_to_slice")
    with transaction(selling.engine) as conn:
        node = nodes.get(conn, NODE)
        assert (node["mode"], node["slice_scheduling"]) == ("converting_to_slice", False)


def test_asking_again_goes_on_with_the_conversion(selling: World) -> None:
    """A conversion that failed half way is asked for again; the node never left it."""
    admin = selling.client("admin")
    first = admin.post(PATH, json={"to": "baremetal"}).json()
    assert admin.post(PATH, json={"to": "baremetal"}).json()["id"] == first["id"]
    assert mode(selling) == "converting_to_baremetal"
    other = admin.post(PATH, json={"to": "slice"})
    assert (other.status_code, other.json()["code"]) == (409, "transition_refused")


def test_not_while_a_tenant_is_on_the_node(selling: World) -> None:
    launch(selling)
    before = mode(selling)
    refused = selling.client("admin").post(PATH, json={"to": "baremetal"})
    assert (refused.status_code, refused.json()["code"]) == (409, "node_in_use")
    assert mode(selling) == before
    tasks = selling.client("admin").get("admin/tasks").json()["items"]
    assert {task["kind"] for task in tasks} == {"slice.vm_provision"}
