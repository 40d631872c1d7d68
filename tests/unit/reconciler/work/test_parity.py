"""node.parity: the intent by the node's mode, and the gate, which only a slice host opens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.lifecycle import host
from reconciler.lifecycle import slots as slot_life
from reconciler.model.states import NodeMode, TaskKind
from reconciler.records import leasing, nodes, queue, reports, slots
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work.handler import Work, open_work
from reconciler.work.kinds import node as kinds_node
from tests.unit.reconciler.conftest import ADMIN, Site

PROFILES = Path(__file__).parents[4] / "profiles"


def work(conn: sa.Connection, node_id: str) -> Work:
    item = queue.Enqueue(
        kind=TaskKind.NODE_PARITY, node_id=node_id, subject_kind="node", subject_id=node_id
    )
    queue.enqueue(conn, item, ADMIN)
    (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.NODE_PARITY])
    nodes.change(conn, node_id, ADMIN, profile="lab")
    return open_work(conn, Settings(profiles_dir=PROFILES), task)


def variables(item: Work) -> dict[str, Any]:
    given = kinds_node.HANDLERS[TaskKind.NODE_PARITY].variables(item)
    run = {
        "id": "r", "task_id": item.task.id, "kind": item.task.kind,
        "node_id": item.node.id, "correlation_id": "c",
    }  # fmt: skip
    contract.check_vars("parity", {"slice_run": run, "slice_profile": item.profile, **given})
    return given


@pytest.mark.covers("HOST-10")
def test_a_slice_host_is_asked_for_its_slots(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        item = work(conn, "n1")
        given = variables(item)
        assert (given["slice_intent"], len(given["slice_slots"])) == ("slice", 2)
        report = sold.parity(failures=1)
        assert kinds_node.HANDLERS[TaskKind.NODE_PARITY].succeed(item, {"parity": report}) == {
            "failures": 1,
            "warnings": 0,
        }
        assert sold.statuses(conn) == ["disabled", "disabled"]


@pytest.mark.covers("HOST-10", "HOST-15")
def test_a_bare_metal_node_is_asked_for_absence_and_opens_nothing(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        slot_life.disable(conn, slots.of_node(conn, "n1")[0].id, ADMIN)
        before = reports.latest_parity(conn, "n1")
        host.convert(conn, "n1", NodeMode.BAREMETAL, ADMIN)
        item = work(conn, "n1")
        assert variables(item) == {"slice_intent": "baremetal", "slice_slots": []}
        report = {**sold.parity(), "intent": "baremetal"}
        assert kinds_node.HANDLERS[TaskKind.NODE_PARITY].succeed(item, {"parity": report}) == {
            "failures": 0,
            "warnings": 0,
        }
        # The gate's report is unchanged; the new report is stored all the same.
        assert reports.latest_parity(conn, "n1") == before
        kept = reports.latest_parity(conn, "n1", "baremetal")
        assert kept is not None and kept.task_id == item.task.id
        assert set(sold.statuses(conn)) == {"disabled"}


@pytest.mark.covers("HOST-10")
@pytest.mark.parametrize(
    "tags", [[], ["gpuaas-profile-baremetal"], ["a", "gpuaas-profile-slice-vm"]]
)
@pytest.mark.parametrize("mode", [NodeMode.SLICE, NodeMode.BAREMETAL])
def test_the_machines_tags_in_maas_go_along_once_somebody_has_said_them(
    sold: Site, mode: NodeMode, tags: list[str]
) -> None:
    """Given as an empty list while unknown, they would keep every site without MAAS closed."""
    with transaction(sold.engine) as conn:
        if mode is NodeMode.BAREMETAL:
            host.convert(conn, "n1", mode, ADMIN)
        item = work(conn, "n1")
        assert "slice_maas_tags" not in variables(item)
        node = nodes.change(conn, "n1", ADMIN, maas_tags=tags)
        assert variables(dataclasses.replace(item, node=node))["slice_maas_tags"] == tags


@pytest.mark.parametrize(
    ("mode", "purpose"),
    [
        (NodeMode.SLICE, "slice"),
        (NodeMode.CONVERTING_TO_SLICE, "slice"),
        (NodeMode.BAREMETAL, "baremetal"),
        (NodeMode.CONVERTING_TO_BAREMETAL, "baremetal"),
    ],
)
def test_a_conversion_proves_what_it_leads_to(mode: NodeMode, purpose: str) -> None:
    assert mode.purpose == purpose


@pytest.mark.covers("HOST-7")
def test_the_nodes_own_address_is_what_the_host_is_measured_by(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        fabric = {"fabric_interface": "ibp65s0", "fabric_address": "10.20.0.7/16"}
        nodes.change(conn, "n1", ADMIN, **fabric)
        item = work(conn, "n1")
        variables(item)
        assert item.profile["fabric"]["interface"] == "ibp65s0"
        assert item.profile["fabric"]["site_address"] == "10.20.0.7/16"
