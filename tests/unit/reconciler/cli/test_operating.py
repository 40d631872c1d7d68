"""`gpuaas explain`, `recovery-policy` and `usage`, and `recover` with a host that is played."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from reconciler.client import Client
from reconciler.db import journal
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import host as host_life
from reconciler.lifecycle import recovery, slices
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import queue, reports
from reconciler.records import slots as slot_records
from reconciler.records.claims import of_allocation
from tests.unit.reconciler.api.test_allocations import failed
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.world import ACT, NODE, World
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.wipes import proofs


@pytest.mark.covers("CTRL-5")
def test_explain(selling: World, gpuaas: Gpuaas) -> None:
    out = gpuaas.at(selling)("explain", "--gpus", "3")
    assert "2 GPUs free, no 3 on one node" in out
    assert NODE in out
    document = json.loads(gpuaas("explain", "--pool", "none", "--output", "json"))
    assert document["explanation"]["reasons"] == {"other_pool": 2}


@pytest.mark.covers("CTRL-7")
def test_recovery_policy(selling: World, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("recovery-policy", "on", "--per-hour", "9", "--output", "json")
    assert json.loads(gpuaas.out)["per_hour"] == 9
    gpuaas("recovery-policy", "off", "--output", "json")
    document = json.loads(gpuaas("recovery-policy", "--output", "json"))
    assert (document["enabled"], document["per_hour"]) == (False, 9), "limits stay"


def test_the_switch_of_the_site_is_shown(selling: World, gpuaas: Gpuaas) -> None:
    for switch, enabled in (("show", True), ("off", False), ("show", False)):
        gpuaas.at(selling)("scheduling", switch, "--reason", "why", "--output", "json")
        assert json.loads(gpuaas.out) == {"enabled": enabled}
    assert json.loads(gpuaas("scheduling", "--output", "json")) == {"enabled": False}


@pytest.mark.covers("CTRL-14")
def test_usage(selling: World, gpuaas: Gpuaas) -> None:
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    assert allocation_id in gpuaas.at(selling)("usage", "--from", "2020-01-01T00:00:00Z")
    assert allocation_id in gpuaas("usage", "--from", "2020-01-01")
    assert allocation_id not in gpuaas("usage", "--from", "2020-01-01", "--to", "2020-01-02")
    assert gpuaas.status == 0, gpuaas.err
    (row,) = csv.DictReader(io.StringIO(gpuaas("usage", "--project", "demo", "--csv")))
    assert (row["allocation_id"], row["node_id"]) == (allocation_id, NODE)
    mine = gpuaas.at(selling, "member")("usage", "--member", "--project", "demo", "--csv")
    assert (allocation_id in mine, NODE in mine) == (True, False)
    gpuaas("usage")
    assert (gpuaas.status, "role_required" in gpuaas.err) == (1, True)
    gpuaas("usage", "--member")
    assert gpuaas.status == 2


class Host:
    """Carries out the tasks that `recover` waits for. absent: its answers, in order."""

    def __init__(self, world: World, *absent: bool) -> None:
        self.world = world
        self.absent = list(absent)

    def look(self, conn: Any, task: dict[str, Any]) -> dict[str, Any]:
        report = {"absent": self.absent.pop(0), "checks": {}}
        times = {"task_id": task["id"], "observed_at": task["started_at"]}
        reports.record_absence(conn, task["allocation_id"], report, ACT, **times)
        return {"absence": report}

    def wipe(self, _seconds: float = 0) -> None:
        task = self.world.lease()
        assert task["kind"] == TaskKind.SLICE_WIPE
        with transaction(self.world.engine) as conn:
            allocation_id = task["allocation_id"]
            given = proofs(conn, allocation_id)
            slices.wiped(conn, allocation_id, ACT, proofs=given, absence={"absent": True})
            queue.finish(conn, task["id"], task["lease_token"], TaskState.SUCCEEDED, ACT)


@pytest.fixture
def host(selling: World, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(selling)
    # What the command waits for happens while it waits.
    monkeypatch.setattr("reconciler.recovery.time.sleep", host.wipe)
    gpuaas.at(selling).ending(selling, host.look)
    return host


def stuck(world: World) -> str:
    allocation_id = failed(world)
    with transaction(world.engine) as conn:
        conn.exec_driver_sql("UPDATE tasks SET state = 'canceled'")
    return allocation_id


def said(err: str) -> dict[str, list[str]]:
    """The lines of each step, until a refusal comes."""
    steps: dict[str, list[str]] = {}
    for line in err.splitlines():
        if line.startswith("    "):
            steps[list(steps)[-1]].append(line.strip())
        elif line.startswith("  "):
            steps[line.strip()] = []
        else:
            break
    return steps


@pytest.mark.covers("CTRL-7")
@pytest.mark.parametrize(
    ("looks", "steps"),
    [
        ((True,), ["runtime_absence", "disk_evidence", "force_cleanup"]),
        (
            (False, True),
            [
                "runtime_absence",
                "disk_evidence",
                "force_cleanup",
                "repair",
                "runtime_absence_after",
            ],
        ),
    ],
)
def test_recover_does_the_whole_runbook(
    selling: World, gpuaas: Gpuaas, host: Host, looks: tuple[bool, ...], steps: list[str]
) -> None:
    host.absent = list(looks)
    allocation_id = stuck(selling)
    gpuaas("recover", allocation_id, "--reason", "demo", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    order = ["allocation", "inventory", *steps, "inventory_after", "disk_evidence_after", "audit"]
    assert list(evidence) == order == list(said(gpuaas.err)), "one JSON, and progress beside it"
    (after,) = evidence["inventory_after"].values()
    assert (after["status"], after["health_state"], after["health_detail"]) == (
        "available",
        "healthy",
        {},
    )
    (event,) = evidence["audit"]["events"]
    assert event["detail"]["runtime_verified_absent"] is looks[0]
    with reading(selling.engine) as conn:
        asked = queue.every(conn, allocation_id=allocation_id, kind=TaskKind.SLICE_ABSENCE_VERIFY)
        begun = [journal.history_of(conn, "task", task["id"])[0] for task in asked]
        acts = [*begun, *journal.audit_rows(conn, action="admin.slot.repair")]
    assert {row["reason"] for row in acts} == {"demo"}
    # Each step said what it found as it found it, not at the end.
    told = said(gpuaas.err)
    assert [step for step, lines in told.items() if not lines] == []
    (slot_id,) = evidence["inventory_after"]
    assert "cleanup_blocked, failed" in told["inventory"][0]
    assert told["runtime_absence"][0].startswith("absent" if looks[0] else "not absent")
    before, after_it = (
        evidence[name][slot_id] for name in ("disk_evidence", "disk_evidence_after")
    )
    assert before["id"] in told["disk_evidence"][0]
    assert after_it["id"] in told["disk_evidence_after"][0]
    assert before["id"] != after_it["id"]
    assert "available, healthy" in told["inventory_after"][0]
    assert event["reason"] in told["audit"][0]


@pytest.mark.covers("CTRL-7", "CTRL-9")
def test_recover_first_ends_a_run_that_is_alive(
    selling: World, gpuaas: Gpuaas, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a run that lives nothing can be asked of the host."""
    allocation_id = launch(selling).json()["id"]
    task = selling.lease()
    with transaction(selling.engine) as conn:
        slices.provision_started(conn, allocation_id, ACT)
    waits = Client.wait

    def wait(own: Client, task_id: str, **options: Any) -> Any:
        with transaction(selling.engine) as conn:
            run = queue.get(conn, task["id"])
            assert run["cancel_requested"], "it was told to end before anything waits for it"
            queue.finish(conn, run["id"], task["lease_token"], TaskState.CANCELED, ACT)
        return waits(own, task_id, **options)

    monkeypatch.setattr(Client, "wait", wait)
    host.absent = [True]
    gpuaas("recover", allocation_id, "--reason", "hangs", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    (ended,) = evidence["run_canceled"]["slots"]
    assert ended["status"] == "cleanup_blocked"
    assert [slot["status"] for slot in evidence["inventory_after"].values()] == ["available"]
    with reading(selling.engine) as conn:
        (claim,) = of_allocation(conn, allocation_id)
        # Once when it was ended, once for the clean-up.
        assert slot_records.get(conn, claim["slot_id"])["fence"] == claim["fence"] + 2


@pytest.mark.covers("CTRL-7")
def test_recover_does_not_disturb_a_release(selling: World, gpuaas: Gpuaas) -> None:
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    member = selling.client("member")
    member.post(f"projects/demo/allocations/{allocation_id}/release")
    gpuaas.at(selling)("recover", allocation_id, "--reason", "x")
    assert (gpuaas.status, "allocation_releasing" in gpuaas.err) == (1, True)


@pytest.mark.covers("CTRL-7", "I16")
def test_recover_succeeds_where_the_gate_is_shut_and_says_what_comes_next(
    selling: World, gpuaas: Gpuaas, host: Host
) -> None:
    allocation_id = stuck(selling)
    with transaction(selling.engine) as conn:
        host_life.observed(conn, NODE, ACT, identity={"boot_id": "another"})
    host.absent = [True]
    gpuaas("recover", allocation_id, "--reason", "rebooted", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    ((slot_id, told),) = evidence["not_on_sale"].items()
    assert evidence["inventory_after"][slot_id]["status"] == "disabled"
    assert {row["code"] for row in told["gate"]} == {"discovery_stale", "parity_stale"}
    assert told["next"] == f"gpuaas nodes discover {NODE} && gpuaas nodes parity {NODE}"


@pytest.mark.covers("CTRL-7")
def test_recover_after_a_forced_release(selling: World, gpuaas: Gpuaas, host: Host) -> None:
    allocation_id = launch(selling).json()["id"]
    activate(selling, allocation_id)
    with transaction(selling.engine) as conn:
        host_life.lost(conn, NODE, ACT)
        recovery.force_release(conn, allocation_id, ACT)
        host_life.regained(conn, NODE, ACT)
    host.absent = [False, True]
    gpuaas("recover", allocation_id, "--reason", "host is back", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    evidence = json.loads(gpuaas.out)
    assert "force_cleanup" not in evidence, "there is nothing more to fail"
    assert [slot["status"] for slot in evidence["inventory_after"].values()] == ["available"]


@pytest.mark.covers("CTRL-7")
def test_recover_stops_where_a_person_must_decide(
    selling: World, gpuaas: Gpuaas, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = launch(selling).json()["id"]
    activate(selling, running)
    gpuaas("recover", running, "--reason", "x")
    assert (gpuaas.status, "allocation_active" in gpuaas.err) == (1, True)
    with transaction(selling.engine) as conn:
        conn.exec_driver_sql("UPDATE allocations SET capacity_shape = 'baremetal'")
    gpuaas("recover", running, "--reason", "x")
    assert (gpuaas.status, "allocation_baremetal" in gpuaas.err) == (1, True)
    admin = selling.client("admin")
    looks = admin.get("admin/tasks", params={"kind": "slice.absence_verify"}).json()["items"]
    assert looks == [], "its host is not even asked"

    allocation_id = stuck_beside(selling)
    host.absent = [True]
    error = {"code": "command_failed", "found": "I/O error"}

    def breaks(_seconds: float) -> None:
        with transaction(selling.engine) as conn:
            slices.wipe_failed(conn, allocation_id, ACT, step="nvme_wipe", error=error)

    monkeypatch.setattr("reconciler.recovery.time.sleep", breaks)
    gpuaas("recover", allocation_id, "--reason", "x", "--output", "json")
    assert (gpuaas.status, "slots_not_recovered" in gpuaas.err) == (1, True)
    assert gpuaas.out == ""
    told = said(gpuaas.err)
    (proven,) = told["disk_evidence"]
    assert told["runtime_absence"] == ["absent: nothing is left on the host by 0 checks"]
    assert "nvme_wipe, command_failed, I/O error" in told["inventory_after"][0]
    # What a person decides on stays with the refusal.
    refusal = json.loads(gpuaas.err[gpuaas.err.index("{") :])
    evidence = refusal["evidence"]
    assert list(evidence) == list(told)
    assert evidence["runtime_absence"]["absent"] is True
    (proof,) = evidence["disk_evidence"].values()
    assert proof["id"] in proven


@pytest.mark.covers("CTRL-7", "I13")
def test_recover_knows_nothing_from_a_host_that_is_silent(selling: World, gpuaas: Gpuaas) -> None:
    allocation_id = stuck(selling)
    lost = {"code": "host_unreachable", "found": "no route to host"}
    gpuaas.at(selling).ending(selling, lambda _conn, _task: {"error": lost})
    gpuaas("recover", allocation_id, "--reason", "x")
    assert (gpuaas.status, "absence_unknown" in gpuaas.err) == (1, True)
    slots = selling.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    assert sorted(slot["status"] for slot in slots) == ["available", "cleanup_blocked"]


def stuck_beside(world: World) -> str:
    """As `stuck`, with another allocation running."""
    allocation_id = str(launch(world, key="second").json()["id"])
    task = world.lease()
    error: dict[str, Any] = {"code": "readiness_failed"}
    with transaction(world.engine) as conn:
        slices.provision_started(conn, allocation_id, ACT)
        slices.provision_failed(conn, allocation_id, ACT, step="ready", error=error, untouched=None)
        assert task["allocation_id"] == allocation_id
        conn.exec_driver_sql("UPDATE tasks SET state = 'canceled'")
    return allocation_id
