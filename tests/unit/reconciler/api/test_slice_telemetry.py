"""Telemetry for members: their own slices, nothing of the host, and no dashboard of it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.api import metrics
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations
from reconciler.lifecycle import slice_telemetry
from reconciler.model.slice_telemetry import Snapshot
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.api.test_launches import PATH, activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas, gpuaas

__all__ = ["gpuaas"]
pytestmark = pytest.mark.covers("SLICE-11")


@pytest.fixture
def measured(selling: Stack) -> tuple[Stack, str]:
    """An active slice with a sample."""
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    text = (
        '{"version": 1, "slices": [{"allocation_id": "%s", "host": {"state": "running",'
        ' "cpu_s": 2.5, "sent_bytes": 7}, "guest": {"age_s": 4, "load_1": 0.25, "cuda": "ready",'
        ' "gpus": [{"index": 0, "power_w": 7}, {"index": 0, "power_w": 118.5}]}}]}'
    )
    snapshot = Snapshot.read((text % mine).encode())
    assert isinstance(snapshot, Snapshot), snapshot
    with transaction(selling.engine) as conn:
        slice_telemetry.record(conn, NODE, snapshot)
    return selling, mine


def test_a_member_sees_both_sources_apart(measured: tuple[Stack, str]) -> None:
    stack, mine = measured
    answer = stack.client("member").get(f"{PATH}/{mine}/telemetry")
    assert answer.status_code == 200, answer.text
    document = answer.json()
    latest = document["latest"]
    assert document["samples"] == [latest] and document["allocation_id"] == mine
    assert (latest["host"]["source"], latest["guest"]["source"]) == ("host", "guest")
    assert (latest["host"]["cpu_s"], latest["guest"]["load_1"]) == (2.5, 0.25)
    assert latest["guest"]["gpus"][0]["power_w"] == 118.5
    assert latest["at"].startswith("20")
    for minutes in (0, 1441, "x"):
        refused = stack.client("member").get(
            f"{PATH}/{mine}/telemetry", params={"minutes": minutes}
        )
        assert refused.status_code == 422


def test_nobody_else_sees_it(measured: tuple[Stack, str]) -> None:
    stack, mine = measured
    stranger = stack.client("stranger")
    # Neither under its own project nor under that of the slice.
    assert stranger.get(f"projects/other/allocations/{mine}/telemetry").status_code == 404
    assert stranger.get(f"{PATH}/{mine}/telemetry").status_code in (403, 404)
    assert stack.client().get(f"{PATH}/{mine}/telemetry").status_code == 401


@pytest.mark.covers("CTRL-10")
def test_a_slice_never_has_a_dashboard_link(measured: tuple[Stack, str]) -> None:
    """Whatever its record says: the dashboard is the host's, and shows every tenant."""
    stack, mine = measured
    canary = {"host": "gate", "telemetry_url": "https://canary-dashboard.invalid"}
    row = sa.update(allocations).where(allocations.c.id == mine)
    with transaction(stack.engine) as conn:
        conn.execute(row.values(connection=canary))
    for path in (f"{PATH}/{mine}", PATH, f"{PATH}/{mine}/telemetry"):
        answer = stack.client("member").get(path)
        assert answer.status_code == 200 and "canary" not in answer.text, path
    # The same record of a whole machine has the link, and no telemetry here.
    with transaction(stack.engine) as conn:
        conn.execute(row.values(capacity_shape="baremetal"))
    shown = stack.client("member").get(f"{PATH}/{mine}").json()
    assert shown["telemetry_url"] == canary["telemetry_url"]
    refused = stack.client("member").get(f"{PATH}/{mine}/telemetry")
    assert (refused.status_code, refused.json()["code"]) == (409, "telemetry_of_whole_machine")


def test_the_command_shows_the_newest_sample(measured: tuple[Stack, str], gpuaas: Gpuaas) -> None:
    stack, mine = measured
    shown = gpuaas.at(stack, "member")("allocation", "telemetry", mine, "--project", "demo")
    for text in ("running", "118.5", "ready", "guest", "host"):
        assert text in shown


def test_a_gpu_that_its_guest_names_twice_is_one_series(measured: tuple[Stack, str]) -> None:
    """The root of a guest chooses the numbers."""
    stack, mine = measured
    lines = metrics.exposition(stack.engine).decode().splitlines()
    ours = [line for line in lines if line.startswith("gpuaas_slice_gpu_power_w{") and mine in line]
    assert len(ours) == 1 and ours[0].endswith(" 118.5")
