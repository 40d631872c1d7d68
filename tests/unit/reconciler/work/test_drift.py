"""slice.drift_reconcile from the loop to what came of it: real store, scripted runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import host
from reconciler.model.bundle import Bundle
from reconciler.model.states import TaskState
from reconciler.records import leasing, nodes, queue, slots
from reconciler.runs import contract
from reconciler.runs.contract import ContractError
from reconciler.settings import Settings
from reconciler.work import loops
from reconciler.work.loops import LOOPS
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.holdings import Holdings, nothing, put, tenant
from tests.unit.reconciler.work.test_attend import Runs, attend, runs
from tests.unit.reconciler.work.test_unreachable import SILENT

__all__ = ["attend", "runs"]
pytestmark = pytest.mark.covers("CTRL-8", "I14")

STRANGER = "43bd713b-6073-4ef7-8a51-2897e902365d"
Attend = Callable[[], Task]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, drift_interval_s=100)


@pytest.fixture
def loop(sold: Site, settings: Settings) -> Callable[..., list[Task]]:
    """The loop after a whole interval; what it has queued."""

    def turn(**change: Any) -> list[Task]:
        with transaction(sold.engine) as conn:
            table = tables.nodes
            conn.execute(sa.update(table).values(mode_since=table.c.mode_since - 101))
            made = tables.tasks.c.created_at - 101
            conn.execute(sa.update(tables.tasks).values(created_at=made))
        loops.compare_hosts(sold.engine, settings.model_copy(update=change))
        with transaction(sold.engine) as conn:
            return queue.every(conn, state=TaskState.QUEUED)

    return turn


def evidence(sold: Site, holdings: Holdings) -> dict[str, Any]:
    return {"holdings": holdings, "identity": sold.document(0)["identity"]}


def result(found: dict[str, Any]) -> dict[str, Any]:
    head = {"schema": 1, "playbook": "reconcile_drift", "ok": True, "step": "", "error": {}}
    return head | {"evidence": found}


def test_the_leader_asks_and_the_records_learn(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]]
) -> None:
    (task,) = loop()
    assert (task.kind, task.requested_by) == ("slice.drift_reconcile", "reconciler")
    assert [one.id for one in loop()] == [task.id], "one is asked for already"
    with transaction(sold.engine) as conn:
        first = slots.of_node(conn, "n1")[0]
    holdings = nothing()
    tenant(holdings, STRANGER, {first.id: Bundle.of(vars(first))})
    runs.ends(evidence=evidence(sold, holdings))
    ended = attend()
    assert ended.state == "succeeded", ended.error
    assert ended.result["shut"] == [first.id]
    (spec,) = runs.launched
    assert spec.playbook == "reconcile_drift"
    assert spec.variables["slice_slots"][0]["slot_id"] == first.id
    contract.check_vars("reconcile_drift", spec.variables)
    contract.check_result(result(evidence(sold, holdings)))
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "available"]


def test_it_can_be_switched_off(loop: Callable[..., list[Task]]) -> None:
    assert loop(drift_interval_s=0) == []


def test_it_is_one_of_the_leaders_loops() -> None:
    assert [one.act for one in LOOPS if one.name == "drift"] == [loops.compare_hosts]


@pytest.mark.covers("I13")
def test_a_host_that_falls_silent_with_nothing_to_do_is_lost_and_comes_back(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]]
) -> None:
    loop()
    runs.outcome = SILENT
    assert attend().state == "waiting"
    with transaction(sold.engine) as conn:
        assert nodes.get(conn, "n1").state == "unreachable"
        assert sold.statuses(conn) == ["available", "available"]
    assert loop() == [], "it waits already; the watch asks whether the host is back"
    with transaction(sold.engine) as conn:
        assert host.record_answer(conn, "n1", ADMIN)
        assert nodes.get(conn, "n1").state == "ready"
    runs.alive = False
    runs.ends(evidence=evidence(sold, nothing()))
    assert attend().state == "succeeded"


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    ("status", "state"), [("failed", "failed"), ("lost", "queued"), ("canceled", "canceled")]
)
def test_a_look_that_fails_changes_nothing(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]], status: str, state: str
) -> None:
    loop()
    runs.ends(status)
    assert attend().state == state
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["available", "available"]
        assert nodes.get(conn, "n1").state == "ready"


def test_tenants_go_first(sold: Site, loop: Callable[..., list[Task]]) -> None:
    loop()
    with transaction(sold.engine) as conn:
        sold.allocate(conn)
        (first,) = leasing.lease(conn, "worker")
        assert first.kind == "slice.vm_provision"


@pytest.mark.parametrize(
    ("part", "one"),
    [
        ("guards", {"cookie": "0xzz", "owner": "0" * 16}),
        ("ports", {"port": "gs1; reboot", "owner": "0" * 12}),
        ("ports", {"port": "gs000000000000", "owner": "1; reboot"}),
        ("leases", {"slot_id": "a"}),
        ("domains", {"name": "x", "allocation_id": "", "state": "", "active": "yes"}),
    ],
)
def test_what_a_host_may_not_say(sold: Site, part: str, one: dict[str, Any]) -> None:
    holdings = nothing()
    put(holdings, part, **one)
    with pytest.raises(ContractError, match="result_invalid"):
        contract.check_result(result(evidence(sold, holdings)))
