"""slice.drift_reconcile from the loop to its effects: real store, scripted runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.api import metrics
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import drift, host
from reconciler.model.bundle import Bundle
from reconciler.model.states import TaskState
from reconciler.records import leasing, nodes, queue, slots
from reconciler.runs import contract
from reconciler.runs.contract import ContractError
from reconciler.settings import Settings
from reconciler.work import loops
from reconciler.work.loops import LOOPS
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.holdings import PARTS, Holdings, nothing, put, tenant, unknown
from tests.unit.reconciler.work.conftest import Attend, Runs, statuses
from tests.unit.reconciler.work.test_unreachable import SILENT

pytestmark = pytest.mark.covers("CTRL-8", "I14")

STRANGER = "43bd713b-6073-4ef7-8a51-2897e902365d"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, drift_interval_s=100)


@pytest.fixture
def loop(sold: Site, settings: Settings) -> Callable[..., list[Task]]:
    """The loop after a whole interval; returns the queued tasks."""

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


def result(holdings: dict[str, Any]) -> dict[str, Any]:
    head = {"schema": 1, "playbook": "reconcile_drift", "ok": True, "step": "", "error": {}}
    return head | {"evidence": holdings}


def test_hosts_that_begin_to_hang_together_stop_no_others(
    sold: Site, loop: Callable[..., list[Task]]
) -> None:
    for number in (2, 3):
        sold.node(f"n{number}", (0,), number)
    hanging = []
    for _ in range(2):
        hanging += [task.id for task in loop()]
        with transaction(sold.engine) as conn:
            leasing.lease(conn, "worker")
            began = tables.tasks.c.started_at - drift.SLOW_S - 1
            conn.execute(sa.update(tables.tasks).values(started_at=began))
    assert loop() == [], "the third host has no place"
    with transaction(sold.engine) as conn:
        assert [queue.get(conn, id).cancel_requested for id in hanging] == [False, True]
        (task,) = (queue.get(conn, id) for id in hanging[1:])
        queue.finish(conn, task.id, task.lease_token, TaskState.CANCELED, ADMIN)
    assert [task.node_id for task in loop()] == ["n3"]


def test_the_leader_asks_and_the_records_learn(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]]
) -> None:
    (task,) = loop()
    assert (task.kind, task.requested_by) == ("slice.drift_reconcile", "reconciler")
    assert [row.id for row in loop()] == [task.id], "a comparison is queued already"
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


NAT = {"code": "nat", "expected": "it", "found": "no rule", "remedy": "bootstrap"}
AT = "2026-11-23T04:00:00.000001+00:00"
REPAIR = {"step": "add_nat nat rule", "times": 2, "first_at": AT, "last_at": AT}


def with_upkeep(sold: Site, **rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The evidence of a host with these rows in its baseline and repairs."""
    parts = {
        name: {"known": True, "detail": "", "found": rows.get(name, [])}
        for name in ("baseline", "repairs")
    }
    return evidence(sold, nothing()) | parts | {"collected_at": datetime.now(UTC).isoformat()}


def test_a_host_without_its_way_out_is_not_sold_until_it_is_mended(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]]
) -> None:
    loop()
    runs.ends(evidence=with_upkeep(sold, baseline=[NAT]))
    ended = attend()
    assert {row["code"] for row in ended.result["differences"]} == {"nat"}
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "disabled"]
        assert nodes.get(conn, "n1").health_detail["code"] == "nat"
    text = metrics.exposition(sold.engine).decode()
    assert 'gpuaas_drift_differences{severity="failed"} 2.0' in text
    runs.alive = False
    loop()
    sound = with_upkeep(sold, repairs=[REPAIR])
    contract.check_result(result(sound))
    runs.ends(evidence=sound)
    ended = attend()
    assert ended.result["repairs"] == [REPAIR]
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["available", "available"]
        assert nodes.get(conn, "n1").health_state == "healthy"
    assert "gpuaas_drift_repairs 2.0" in metrics.exposition(sold.engine).decode()


def test_what_was_not_read_of_a_host_is_counted(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]]
) -> None:
    holdings = nothing()
    for part in PARTS:
        unknown(holdings, part)
    report = with_upkeep(sold) | {"holdings": holdings}
    report["repairs"] = {"known": False, "detail": "no record", "found": []}
    contract.check_result(result(report))
    loop()
    runs.ends(evidence=report)
    ended = attend()
    assert ended.result["unknown"].keys() == {*PARTS, "repairs"}
    assert ended.result["unknown"]["repairs"] == "no record"
    text = metrics.exposition(sold.engine).decode()
    assert f"gpuaas_drift_unread {len(PARTS) + 1}.0" in text
    with transaction(sold.engine) as conn:
        assert "repairs" not in nodes.get(conn, "n1").health_detail["reason"]


def test_a_stranger_on_a_tenants_slot_is_counted_although_the_slot_is_only_degraded(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]]
) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        (slot,) = (slot for slot in slots.of_node(conn, "n1") if slot.status == "active")
    bundles = {slot.id: Bundle.of(vars(slot))}
    holdings = nothing()
    tenant(holdings, allocation_id, bundles)
    loop()
    runs.ends(evidence=evidence(sold, holdings))
    assert attend().result["differences"] == []
    runs.alive = False
    strange = nothing()
    tenant(strange, STRANGER, bundles)
    holdings["domains"]["found"] += strange["domains"]["found"]
    loop()
    runs.ends(evidence=evidence(sold, holdings))
    attend()
    text = metrics.exposition(sold.engine).decode()
    assert 'gpuaas_drift_differences{severity="failed"} 0.0' in text
    assert "gpuaas_drift_orphans 1.0" in text


@pytest.mark.parametrize(("hours", "word"), [(-2, "behind"), (2, "ahead")])
def test_a_wrong_clock_is_named_and_closes_nothing(
    sold: Site, runs: Runs, attend: Attend, loop: Callable[..., list[Task]], hours: int, word: str
) -> None:
    loop()
    at = datetime.now(UTC) + timedelta(hours=hours)
    runs.ends(evidence=with_upkeep(sold) | {"collected_at": at.isoformat()})
    (difference,) = attend().result["differences"]
    assert (difference["code"], difference["slot_id"]) == ("clock_wrong", "")
    # A busy machine takes some seconds in between.
    match = re.search(rf"([0-9]+) s {word}", difference["found"])
    assert match and abs(int(match[1]) - 7200) < 60
    assert statuses(sold) == ["available", "available"]


@pytest.mark.parametrize(
    "change",
    [
        {"collected_at": "now"},
        {"collected_at": "9999-12-31T23:59:59+00:00"},
        {"collected_at": "2026-13-01T00:00:00+00:00"},
        {"collected_at": "2026-02-30T00:00:00+00:00"},
        {"collected_at": "2026-01-01T29:00:00+00:00"},
        {"baseline": {"known": True, "detail": "", "found": [{**NAT, "code": "a b"}]}},
        {"baseline": {"known": True, "detail": "", "found": [NAT] * 65}},
        {"repairs": {"known": True, "detail": "", "found": [{**REPAIR, "times": 2**60}]}},
        {"repairs": {"known": True, "detail": "", "found": [{**REPAIR, "step": "x" * 501}]}},
    ],
)
def test_what_a_hosts_upkeep_may_not_say(sold: Site, change: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="result_invalid"):
        contract.check_result(result(with_upkeep(sold) | change))


def test_it_can_be_switched_off(loop: Callable[..., list[Task]]) -> None:
    assert loop(drift_interval_s=0) == []


def test_it_is_one_of_the_leaders_loops() -> None:
    assert [loop.act for loop in LOOPS if loop.name == "drift"] == [loops.compare_hosts]


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
    ("part", "item"),
    [
        ("guards", {"cookie": "0xzz", "owner": "0" * 16}),
        ("ports", {"port": "gs1; reboot", "owner": "0" * 12}),
        ("ports", {"port": "gs000000000000", "owner": "1; reboot"}),
        ("leases", {"slot_id": "a"}),
        ("domains", {"name": "x", "allocation_id": "", "state": "", "active": "yes"}),
    ],
)
def test_what_a_host_may_not_say(sold: Site, part: str, item: dict[str, Any]) -> None:
    holdings = nothing()
    put(holdings, part, **item)
    with pytest.raises(ContractError, match="result_invalid"):
        contract.check_result(result(evidence(sold, holdings)))
