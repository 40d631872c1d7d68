"""How a task goes from leased to settled: real store, scripted runs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import migrations
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import gate, host, recovery, slices
from reconciler.lifecycle import launch as launching
from reconciler.model.errors import Problem
from reconciler.model.states import Role, TaskKind
from reconciler.records import allocations, claims, leasing, nodes, queue, reports, tokens
from reconciler.runs import contract
from reconciler.runs.events import Recorder
from reconciler.runs.paths import RunPaths, run_directory
from reconciler.runs.spec import RunError, RunSpec
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.api.test_stream import sent
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.work.conftest import READINESS, Runs, launched, statuses


@pytest.mark.covers("CTRL-9")
def test_a_reachable_vm_makes_its_allocation_active(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    allocation_id = launched(sold)
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    task = attend()
    assert task.state == "succeeded"
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, allocation_id).state == "active"
        assert sorted(sold.statuses(conn)) == ["active", "available"]
    (spec,) = runs.launched
    assert spec.playbook == "provision_slice"
    assert spec.variables["slice_slots"][0]["fence"] == 1
    assert spec.variables["slice_vm"]["memory_mib"] == 768
    assert spec.variables["boot_id"] == sold.document(0)["identity"]["boot_id"]
    contract.check_vars("provision_slice", spec.variables)
    # The same id from the request to the host's log: the playbooks log the id in `slice_run`.
    assert task.correlation_id == ADMIN.correlation_id
    ids = (spec.correlation_id, spec.variables["slice_run"]["correlation_id"])
    assert ids == (task.correlation_id, task.correlation_id)


@pytest.mark.covers("CTRL-8")
def test_what_a_run_says_is_read_while_it_lives_and_to_its_last_word(
    sold: Site, runs: Runs, attend: Callable[[], Task], tmp_path: Path
) -> None:
    """From the runner's events to the stream that operators read."""
    launched(sold)
    heard: list[list[str]] = []

    def lines() -> list[str]:
        with transaction(sold.engine) as conn:
            (task,) = queue.every(conn)
            return [row.document["task"] for row in queue.events(conn, task.id)]

    def say(name: str) -> None:
        (spec,) = runs.launched
        directory = run_directory(tmp_path, spec.run_id)
        directory.mkdir(parents=True, exist_ok=True)
        record = Recorder(RunPaths(directory).progress)
        record({"event": "runner_on_ok", "event_data": {"task": name, "res": {"changed": True}}})

    # Reported at the look after it; the last words at the look that finds the run ended.
    runs.during = [lambda: say("Clone the image"), lambda: heard.append(lines())]
    runs.during.append(lambda: say("Wait until it is reachable"))
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    settings = Settings(state_dir=tmp_path, poll_s=0.01)
    stack = Stack(settings, sold.engine)
    with transaction(sold.engine) as conn:
        _, stack.secrets["admin"] = tokens.issue(conn, ADMIN, role=Role.PLATFORM_ADMIN, name="a")
    task = attend()
    steps = [row["task"] for name, _, row in sent(stack, task.id) if name == "progress"]
    assert heard == [["Clone the image"]]
    assert steps == ["Clone the image", "Wait until it is reachable"]


@pytest.mark.covers("CTRL-8")
def test_a_run_begins_with_a_lease_only(
    sold: Site, runs: Runs, attend: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparations elsewhere before the run may take as long as a lease."""

    def arrange(*_: object) -> None:
        with transaction(sold.engine) as conn:
            conn.execute(sa.update(tables.tasks).values(lease_expires_at=1.0))
            leasing.lease(conn, "another worker")

    launched(sold)
    kind = TaskKind.SLICE_VM_PROVISION
    slow = replace(HANDLERS[kind], arrange=arrange)
    monkeypatch.setitem(HANDLERS, kind, slow)
    with pytest.raises(Problem, match="stale_lease"):
        attend()
    assert runs.launched == []
    with transaction(sold.engine) as conn:
        (task,) = queue.every(conn)
        assert (task.state, task.lease_owner) == ("running", "another worker")


@pytest.mark.covers("CTRL-8")
def test_no_run_begins_for_a_task_that_is_canceled_meanwhile(
    sold: Site, runs: Runs, attend: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    def arrange(*_: object) -> None:
        with transaction(sold.engine) as conn:
            (task,) = queue.every(conn)
            queue.cancel(conn, task.id, ADMIN)

    launched(sold)
    kind = TaskKind.SLICE_VM_PROVISION
    monkeypatch.setitem(HANDLERS, kind, replace(HANDLERS[kind], arrange=arrange))
    runs.ends("canceled")
    assert attend().state == "canceled"
    assert runs.launched == []
    assert statuses(sold) == ["available", "available"]


@pytest.mark.covers("CTRL-8")
def test_no_run_begins_on_a_newer_schema(
    sold: Site, runs: Runs, attend: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules may not hold any more. A worker of the newer version attends the task."""
    launched(sold)
    monkeypatch.setattr(migrations, "revisions", lambda: ("0001",))
    with pytest.raises(Problem, match="schema_outdated"):
        attend()
    assert runs.launched == []
    with transaction(sold.engine) as conn:
        (task,) = queue.every(conn)
    assert (task.state, task.run_id) == ("running", "")


NEW_BOOT = "11111111-2222-4333-8444-555555555555"
BOOT_CHANGED = {
    "code": "boot_changed",
    "expected": "the boot under which parity passed",
    "found": f"boot {NEW_BOOT}",
    "remedy": "discover the node and run its parity again",
}


def restarted(sold: Site) -> dict[str, Any]:
    """Identity that the host reports after its restart."""
    return {**sold.document(0)["identity"], "boot_id": NEW_BOOT}


@pytest.mark.covers("I16")
def test_a_restarted_host_gets_its_slots_back_and_sells_nothing_until_it_is_proven(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    """I16: also the slot without an allocation goes off sale."""
    launched(sold)
    evidence = {"disk_written": False, "leftovers": False}
    runs.ends("failed", step="Lease the slots", error=BOOT_CHANGED, evidence=evidence)
    assert attend().error["code"] == "boot_changed"
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "disabled"]
        assert gate.open_gate(conn, "n1", ADMIN)["opened"] == []
        host.record_discovery(conn, "n1", {**sold.document(0), "identity": restarted(sold)}, ADMIN)
        assert gate.open_gate(conn, "n1", ADMIN)["opened"] == []
        report = {**sold.parity(), "identity": restarted(sold)}
        host.record_parity(conn, "n1", report, ADMIN)
        assert len(gate.open_gate(conn, "n1", ADMIN)["opened"]) == 2


@pytest.mark.covers("I13", "I16")
def test_a_restarted_host_that_does_not_say_what_it_wrote_keeps_the_slot_blocked(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    launched(sold)
    runs.ends("failed", step="Clone the image", error=BOOT_CHANGED, evidence={})
    attend()
    assert statuses(sold) == ["cleanup_blocked", "disabled"]


@pytest.mark.covers("I16")
def test_no_run_is_started_on_a_host_known_to_have_restarted(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    launched(sold)
    with transaction(sold.engine) as conn:
        host.observed(conn, "n1", ADMIN, identity=restarted(sold))
    assert attend().error["code"] == "boot_changed"
    assert runs.launched == []
    assert statuses(sold) == ["disabled", "disabled"]


def test_an_old_run_does_not_unsettle_a_host_that_was_proven_since(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    launched(sold)
    evidence = {"disk_written": False, "leftovers": False}
    runs.ends("failed", step="Lease the slots", error=BOOT_CHANGED, evidence=evidence)
    runs.alive = True
    with transaction(sold.engine) as conn:
        host.record_discovery(conn, "n1", {**sold.document(0), "identity": restarted(sold)}, ADMIN)
        report = {**sold.parity(), "identity": restarted(sold)}
        host.record_parity(conn, "n1", report, ADMIN)
        gate.open_gate(conn, "n1", ADMIN)
    attend()
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["available", "available"]
        assert nodes.get(conn, "n1").boot_id == NEW_BOOT


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    "end",
    [*({"status": status} for status in ("lost", "timeout", "canceled")), {"unreachable": True}],
    ids=str,
)
def test_an_unknown_end_never_frees_a_slot(
    sold: Site, runs: Runs, attend: Callable[[], Task], end: dict[str, Any]
) -> None:
    """Also when the last word of the run was that nothing had been written (I13)."""
    launched(sold)
    runs.ends("failed", evidence={"disk_written": False, "leftovers": False})
    assert runs.outcome is not None
    runs.outcome = replace(runs.outcome, **end)
    task = attend()
    assert statuses(sold) == ["available", "cleanup_blocked"]
    with transaction(sold.engine) as conn:
        (slot,) = recovery.blocked(conn)
    # Parts of a run that its launcher lost may still act.
    assert (slot.fence > task.fences[slot.id]) is (task.state == "lost")


def test_a_run_that_could_not_start_gives_the_slot_back(
    sold: Site, runs: Runs, attend: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(sold)

    def refuse(_site: object, _spec: RunSpec) -> Path:
        raise RunError("variables_invalid", expected="a", found="b", remedy="c")

    monkeypatch.setattr(worker, "launch", refuse)
    assert attend().error["code"] == "variables_invalid"
    assert statuses(sold) == ["available", "available"]


@pytest.mark.covers("I13")
def test_a_run_that_began_although_its_launch_failed_is_attended(
    sold: Site, runs: Runs, attend: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is not free: the run builds a machine there."""
    allocation_id = launched(sold)

    def begin_and_fail(site: object, spec: RunSpec) -> Path:
        runs.launch(site, spec)
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(worker, "launch", begin_and_fail)
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    assert attend().state == "succeeded"
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, allocation_id).state == "active"


@pytest.mark.covers("CTRL-9")
def test_a_restarted_worker_attaches_and_does_not_launch_again(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    launched(sold)
    runs.alive = True
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    assert attend().state == "succeeded"
    assert runs.launched == []


@pytest.mark.covers("I4")
def test_a_host_success_that_the_records_refuse_is_a_failure(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    """A release whose proofs name another disk: the slot is blocked, not sold."""
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launching.release(conn, allocation_id, ADMIN)
        proofs = sold.proofs(conn, allocation_id)
    for proof in proofs.values():
        proof["disk"] = "eui.0000000000000000"
    runs.ends(
        evidence={"proofs": proofs, "absence": {"absent": True, "checks": {}}, "shutdown": "hard"}
    )
    ended = attend()
    assert (ended.state, ended.error["code"]) == ("failed", "proof_mismatch")
    assert statuses(sold) == ["available", "cleanup_blocked"]


@pytest.mark.covers("CTRL-9")
def test_a_worker_that_lost_its_lease_settles_nothing(
    sold: Site, runs: Runs, tmp_path: Path, attend: Callable[[], Task]
) -> None:
    """Another worker took the task over while this worker slept: its result is not recorded."""
    allocation_id = launched(sold)
    with transaction(sold.engine) as conn:
        (task,) = leasing.lease(conn, "worker-a")
        queue.abandon(conn, "worker-a")
        (_again,) = leasing.lease(conn, "worker-b")
    runs.alive = True
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    with pytest.raises(Problem) as refused:
        worker.attend(sold.engine, Settings(state_dir=tmp_path), task, threading.Event())
    assert refused.value.code == "stale_lease"
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, allocation_id).state != "active"


@pytest.mark.covers("I4")
def test_a_wipe_frees_only_the_slots_it_was_given(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    """A host proves a slot of another allocation clean, and not the requested slot."""
    with transaction(sold.engine) as conn:
        mine, other = sold.failed(conn), sold.failed(conn)
        (slot,) = [claim.slot_id for claim in claims.of_allocation(conn, mine)]
        recovery.repair(conn, slot, ADMIN)
        proofs = sold.proofs(conn, other)
    runs.ends(evidence={"proofs": proofs, "absence": {"absent": True, "checks": {}}})
    assert attend().error["code"] == "proof_missing"
    assert statuses(sold) == ["cleanup_blocked", "cleanup_blocked"]


@pytest.mark.covers("I4")
def test_a_wipe_that_was_fenced_off_frees_nothing(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    """The slot may have been used since the wipe."""
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        recovery.repair(conn, slot.id, ADMIN)
        proofs = sold.proofs(conn, key)

    def fence_off() -> None:
        with transaction(sold.engine) as conn:
            conn.execute(sa.update(tables.slots).values(fence=tables.slots.c.fence + 1))

    runs.during = [fence_off]
    runs.ends(evidence={"proofs": proofs, "absence": {"absent": True, "checks": {}}})
    attend()
    assert statuses(sold) == ["available", "cleanup"]


@pytest.mark.covers("CTRL-7", "I13")
def test_an_absence_report_is_as_old_as_its_run(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    """A slot that is blocked during the run is not freed by what was seen before."""
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        recovery.verify_absence(conn, key, ADMIN)
    runs.ends(evidence={"absence": {"absent": True, "checks": {}}})
    task = attend()
    with transaction(sold.engine) as conn:
        report = reports.latest_absence(conn, key)
    assert report is not None
    assert (report.task_id, report.observed_at) == (task.id, task.started_at)


@pytest.mark.covers("CTRL-7")
def test_a_slot_with_a_live_claim_is_not_repaired(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launching.release(conn, allocation_id, ADMIN)
        error = {"code": "step_failed", "found": "x"}
        slices.release_failed(conn, allocation_id, ADMIN, step="wipe", error=error)
        (slot,) = [claim.slot_id for claim in claims.of_allocation(conn, allocation_id)]
        with pytest.raises(Problem, match="claim_live"):
            recovery.repair(conn, slot, ADMIN)


@pytest.mark.covers("CTRL-8")
def test_a_task_canceled_before_its_run_began_starts_none(
    sold: Site, runs: Runs, tmp_path: Path, attend: Callable[[], Task]
) -> None:
    launched(sold)
    with transaction(sold.engine) as conn:
        (task,) = leasing.lease(conn, "worker")
        queue.cancel(conn, task.id, ADMIN)
    worker.attend(sold.engine, Settings(state_dir=tmp_path), task, threading.Event())
    assert runs.launched == []
    with transaction(sold.engine) as conn:
        assert queue.get(conn, task.id).state == "canceled"
        assert sold.statuses(conn) == ["available", "available"]


@pytest.mark.covers("I13")
def test_a_result_that_cannot_be_read_is_unknown_and_ends_the_task(
    sold: Site, runs: Runs, attend: Callable[[], Task]
) -> None:
    launched(sold)
    runs.ends(evidence={"nothing": "that provisioning knows"})
    assert attend().error["code"] == "outcome_unreadable"
    assert statuses(sold) == ["available", "cleanup_blocked"]


@pytest.mark.covers("I12")
def test_a_profile_that_goes_during_the_run_does_not_keep_the_task_for_ever(
    sold: Site, runs: Runs, attend: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation_id = launched(sold)

    def launch(site: object, spec: RunSpec) -> Path:
        with transaction(sold.engine) as conn:
            conn.execute(sa.update(tables.nodes).values(profile="gone"))
        return runs.launch(site, spec)

    monkeypatch.setattr(worker, "launch", launch)
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    task = attend()
    assert (task.state, task.error["code"]) == ("failed", "profile_unknown")
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, allocation_id).state == "failed"
        assert sorted(sold.statuses(conn)) == ["available", "cleanup_blocked"]
