"""Reboot of a host and change of its firmware: agreement, start, and the way back into use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import host, maintenance, power, recovery, slices, task_failures
from reconciler.lifecycle import launch as launching
from reconciler.model.errors import Problem
from reconciler.model.states import NodeState, PowerAction, TaskKind, TaskState
from reconciler.records import allocations, leasing, nodes, queue, slots
from reconciler.runs.collect import Outcome
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.handler import Work, open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import queue_next_step, settle
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import Machines

DISCOVER, PARITY = TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY
REBOOT, FIRMWARE = TaskKind.NODE_REBOOT, TaskKind.NODE_FIRMWARE
POWER = TaskKind.SLICE_VM_POWER
NEW_BOOT = "5e0f5a7e-0000-4000-8000-000000000001"
STEP = {"name": "stage_attribute", "subject": "ProcSettings.LogicalProc", "destroys": False}
PLAN = {"differences": [{**STEP, "before": {"current": "Disabled"}, "after": {"current": "x"}}]}


@pytest.fixture
def settings(sold: Site, tmp_path: Path) -> Settings:
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
    return Settings(state_dir=tmp_path)


def running(conn: sa.Connection, site: Site) -> str:
    """A slice, started under the present boot."""
    key = site.active(conn)
    power.succeeded(conn, key, boot_id=nodes.get(conn, "n1").boot_id)
    return key


def problem(call: Any, *args: Any, **given: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        call(*args, **given)
    assert caught.value.expected and caught.value.found and caught.value.remedy
    return caught.value


def begin(conn: sa.Connection, settings: Settings, kind: TaskKind) -> Work:
    """The task's run begins as a worker begins it."""
    (task,) = leasing.lease(conn, "worker", kinds=[kind])
    work = open_work(conn, settings, task)
    HANDLERS[kind].variables(work)
    HANDLERS[kind].start(work)
    return work


def succeed(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
    """The run has ended well; returns the task's result."""
    result = queue_next_step(work, HANDLERS[TaskKind(work.task.kind)].succeed(work, evidence))
    task = work.task
    queue.finish(work.conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN, result=result)
    return result


def fail(work: Work, code: str, evidence: dict[str, Any], *, known: bool = True) -> None:
    error = {"code": code, "expected": "a", "found": "b", "remedy": "c"}
    task_failures.record(
        work.conn, work.task, task_failures.Failure("step", error, evidence, known=known)
    )
    queue.finish(work.conn, work.task.id, work.task.lease_token, TaskState.FAILED, ADMIN)


def prove(conn: sa.Connection, site: Site, settings: Settings, boot_id: str) -> dict[str, Any]:
    """Discovery and parity of the queue end well under this boot; returns the last result."""
    document = site.document(0)
    document["identity"] |= {"boot_id": boot_id}
    succeed(begin(conn, settings, DISCOVER), {"discovery": document})
    report = site.parity()
    report["identity"] = report["identity"] | {"boot_id": boot_id}
    return succeed(begin(conn, settings, PARITY), {"parity": report})


def booted(conn: sa.Connection, site: Site) -> None:
    """The host is proven under another boot."""
    report = site.parity()
    host.record_parity(
        conn, "n1", report | {"identity": report["identity"] | {"boot_id": NEW_BOOT}}, ADMIN
    )


def rebooted(powered_off: list[str]) -> dict[str, Any]:
    return {"rebooted": True, "identity": {"boot_id": NEW_BOOT}, "powered_off": powered_off}


def test_the_operator_names_all_that_are_on_the_node(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        keys = sorted([running(conn, sold), running(conn, sold)])
        for named in ([], keys[:1], [*keys, "23bd713b-6073-4ef7-8a51-2897e902365d"]):
            refused = problem(maintenance.request_reboot, conn, "n1", ADMIN, allocations=named)
            assert refused.code == "reboot_unconfirmed"
            assert all(key in refused.found for key in keys)
        assert nodes.get(conn, "n1").state == NodeState.READY, "a refusal changes nothing"
        task = maintenance.request_reboot(conn, "n1", ADMIN, allocations=keys)
        assert maintenance.request_reboot(conn, "n1", ADMIN, allocations=keys) == task
        assert nodes.get(conn, "n1").state == NodeState.DRAINING
        (row,) = journal.audit_rows(conn, action="admin.node.reboot")
        assert (row.subject_id, row.detail) == ("n1", {"allocations": keys})
        power.request(conn, keys[0], PowerAction.STOP, ADMIN)
        work = begin(conn, settings, REBOOT)
        guests = work.parameters["guests"]
        assert sorted(guest["allocation_id"] for guest in guests) == keys
        assert [guest["slots"][0]["slot_id"] for guest in guests] == [
            slot.id for slot in slots.of_node(conn, "n1")
        ], "in the order of the slots"
        assert guests[0]["slots"][0]["fence"] == 1
        # Late runs of power are refused from here on, but not the action that waits.
        (waiting,) = queue.open_of_allocation(conn, keys[0])
        last = allocations.get(conn, keys[1]).generation
        given = HANDLERS[REBOOT].variables(work)["slice_guests"]
        fences = {guest["allocation_id"]: guest["power_fence"] for guest in given}
        assert fences == {keys[0]: waiting.parameters["power_fence"], keys[1]: last}


def test_a_node_at_work_or_of_an_unknown_boot_is_not_restarted(
    sold: Site, settings: Settings
) -> None:
    machines = Machines(sold)
    machines.machine()
    with transaction(sold.engine) as conn:
        request = (maintenance.request_reboot, conn, "n1", ADMIN)
        host.restarted(conn, "n1", ADMIN, since=nodes.get(conn, "n1").boot_id)
        assert problem(*request, allocations=[]).code == "boot_unknown"
        sold.prove(conn, "n1")
        host.lost(conn, "n1", ADMIN)
        assert problem(*request, allocations=[]).code == "host_unreachable"
        host.regained(conn, "n1", ADMIN)
        key = sold.allocate(conn)
        assert problem(*request, allocations=[key]).code == "node_in_use"
        tenant = machines.launch(conn).id
        refused = problem(maintenance.request_reboot, conn, "m1", ADMIN, allocations=[tenant])
        assert refused.code == "node_in_use"
        assert not queue.every(conn, kind=REBOOT)


def test_a_host_whose_release_failed_can_be_restarted(sold: Site) -> None:
    """Some GPUs answer again only after that. Its claim lives until the clean-up is proven."""
    error = {"code": "gpu_not_reset", "expected": "a", "found": "b", "remedy": "c"}
    with transaction(sold.engine) as conn:
        key = running(conn, sold)
        launching.release(conn, key, ADMIN)
        request = (maintenance.request_reboot, conn, "n1", ADMIN)
        assert problem(*request, allocations=[key]).code == "node_in_use"
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE, TaskState.FAILED)
        slices.release_failed(conn, key, ADMIN, step="reset", error=error)
        task = maintenance.request_reboot(conn, "n1", ADMIN, allocations=[key])
        (guest,) = task.parameters["guests"]
        (slot_id,) = [slot["slot_id"] for slot in guest["slots"]]
        assert slots.get(conn, slot_id).status == "cleanup_blocked"
        assert power.fence_of_ended_runs(conn, key) is None
        maintenance.began(conn, task)


def test_a_host_whose_disk_is_wiped_is_not_restarted(sold: Site) -> None:
    """The restart would wait for hours, and the tasks of all its tenants for the restart."""
    with transaction(sold.engine) as conn:
        key = running(conn, sold)
        sold.failed(conn)
        recovery.repair(conn, recovery.blocked(conn)[0].id, ADMIN)
        request = (maintenance.request_reboot, conn, "n1", ADMIN)
        assert problem(*request, allocations=[key]).code == "node_in_use"


def test_a_worker_that_was_killed_prepares_the_same_restart_again(
    sold: Site, settings: Settings
) -> None:
    with transaction(sold.engine) as conn:
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[running(conn, sold)])
        (task,) = leasing.lease(conn, "w", kinds=[REBOOT])
    arguments = (sold.engine, settings, HANDLERS[REBOOT], task, queue.run_id(task))
    # A run id whose folder has another fingerprint is refused.
    assert worker.prepare(*arguments).fingerprint() == worker.prepare(*arguments).fingerprint()


def test_a_node_that_was_retired_in_its_restart_is_left_alone(
    sold: Site, settings: Settings
) -> None:
    with transaction(sold.engine) as conn:
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[])
        work = begin(conn, settings, REBOOT)
        host.lost(conn, "n1", ADMIN)
        host.retire(conn, "n1", ADMIN)
        fail(work, "run_canceled", {}, known=False)
        assert queue.open_of_node(conn, "n1") == []


def test_a_launch_meanwhile_keeps_the_host_running(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[])
        host.resume(conn, "n1", ADMIN)
        sold.allocate(conn)
        (task,) = leasing.lease(conn, "worker", kinds=[REBOOT])
        work = open_work(conn, settings, task)
        assert problem(HANDLERS[REBOOT].start, work).code == "node_in_use"


@pytest.mark.covers("I16")
def test_after_the_restart_a_proof_brings_back_what_ran(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        ran, off = running(conn, sold), running(conn, sold)
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[ran, off])
        work = begin(conn, settings, REBOOT)
        result = succeed(work, rebooted([off, "23bd713b-6073-4ef7-8a51-2897e902365d"]))
        assert queue.get(conn, result["next_task_id"]).kind == DISCOVER
        node = nodes.get(conn, "n1")
        assert (node.boot_id, node.state) == ("", NodeState.DRAINING), "its gate is closed"
        assert allocations.get(conn, off).stopped and not allocations.get(conn, ran).stopped
        result = prove(conn, sold, settings, NEW_BOOT)
        assert (result["started"], result["resumed"]) == ([ran], True)
        assert nodes.get(conn, "n1").state == NodeState.READY


@pytest.mark.parametrize("known", [True, False])
def test_a_restart_that_failed_starts_the_slices_again(
    sold: Site, settings: Settings, known: bool
) -> None:
    with transaction(sold.engine) as conn:
        key, boot_id = running(conn, sold), nodes.get(conn, "n1").boot_id
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[key])
        fail(begin(conn, settings, REBOOT), "host_in_use", {}, known=known)
        result = prove(conn, sold, settings, boot_id)
        assert (result["started"], result["resumed"]) == ([key], True), "also under the same boot"


@pytest.mark.covers("CTRL-9", "I13")
@pytest.mark.parametrize("how", ["awx", "deadline"])
def test_a_host_that_a_lost_run_may_still_restart_is_not_sold(
    sold: Site, settings: Settings, how: str
) -> None:
    """After any restart the run restarts nothing, so the node comes back."""
    with transaction(sold.engine) as conn:
        key, boot_id = running(conn, sold), nodes.get(conn, "n1").boot_id
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[key])
        task = begin(conn, settings, REBOOT).task
    if how == "awx":
        lost = Outcome("lost", None, "awx_failed: Task was marked as running but was not present")
        settle(sold.engine, settings, HANDLERS[REBOOT], task, lost)
    else:
        with transaction(sold.engine) as conn:
            error = {"code": queue.DEADLINE_PASSED, "expected": "", "found": "", "remedy": ""}
            task_failures.lose(conn, replace(task, error=error), ADMIN)
    with transaction(sold.engine) as conn:
        result = prove(conn, sold, settings, boot_id)
        assert (result["started"], result["resumed"]) == ([key], False)
        assert nodes.get(conn, "n1").state == NodeState.DRAINING
        host.restarted(conn, "n1", ADMIN, since=boot_id)
        host.reverify(conn, nodes.get(conn, "n1"), ADMIN)
        assert prove(conn, sold, settings, NEW_BOOT)["resumed"]
        assert nodes.get(conn, "n1").state == NodeState.READY


def test_a_restart_that_was_canceled_gives_the_node_back(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        key, boot_id = running(conn, sold), nodes.get(conn, "n1").boot_id
        task = maintenance.request_reboot(conn, "n1", ADMIN, allocations=[key])
        task_failures.cancel(conn, task.id, ADMIN)
        result = prove(conn, sold, settings, boot_id)
        assert (result["started"], result["resumed"]) == ([], True), "its slice ran all the time"


def test_an_operators_own_drain_outlasts_the_restart(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        host.drain(conn, "n1", ADMIN)
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[])
        succeed(begin(conn, settings, REBOOT), rebooted([]))
        assert not prove(conn, sold, settings, NEW_BOOT)["resumed"]
        assert nodes.get(conn, "n1").state == NodeState.DRAINING


def test_an_operators_drain_during_the_restart_outlasts_it(sold: Site, settings: Settings) -> None:
    """It was refused, because the node was draining already, and the proof put it back on sale."""
    with transaction(sold.engine) as conn:
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[])
        assert maintenance.drain(conn, "n1", ADMIN).state == NodeState.DRAINING
        succeed(begin(conn, settings, REBOOT), rebooted([]))
        assert not prove(conn, sold, settings, NEW_BOOT)["resumed"]
        assert nodes.get(conn, "n1").state == NodeState.DRAINING
        assert problem(maintenance.drain, conn, "n1", ADMIN).code == "transition_refused"


def test_a_node_is_not_resumed_while_its_host_restarts(sold: Site, settings: Settings) -> None:
    """Its slots would be sold, and each launch would fail."""
    with transaction(sold.engine) as conn:
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[])
        refusal = problem(maintenance.resume, conn, "n1", ADMIN)
        assert refusal.code == "maintenance_under_way"
        begin(conn, settings, REBOOT)
        assert problem(maintenance.resume, conn, "n1", ADMIN).code == "maintenance_under_way"
        assert nodes.get(conn, "n1").state == "draining"


def test_a_profile_may_leave_slices_stopped(sold: Site, settings: Settings, tmp_path: Path) -> None:
    with transaction(sold.engine) as conn:
        key = running(conn, sold)
        booted(conn, sold)
        assert power.start_after_boot(conn, "n1", ADMIN, restart=False) == []
        row = allocations.get(conn, key)
        assert (row.state, row.stopped) == ("active", True)
        assert not queue.every(conn, kind=POWER)


def test_a_guest_that_powered_itself_off_stays_off(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        key, boot_id = running(conn, sold), nodes.get(conn, "n1").boot_id
        assert power.powered_off(conn, [key], ADMIN, boot_id=NEW_BOOT) == [], "of another boot"
        assert power.powered_off(conn, [key], ADMIN, boot_id=boot_id) == [key]
        booted(conn, sold)
        assert power.start_after_boot(conn, "n1", ADMIN) == []


def planned(conn: sa.Connection, settings: Settings, bios: dict[str, Any]) -> str:
    queue.enqueue(conn, queue.Enqueue(FIRMWARE, "n1"), ADMIN)
    work = begin(conn, settings, FIRMWARE)
    assert HANDLERS[FIRMWARE].variables(work) == {"slice_apply": False, "slice_allow_reboot": False}
    return str(succeed(work, {"bios": bios, "preflight": {}})["digest"])


def apply(conn: sa.Connection, digest: str) -> Task:
    return maintenance.request_firmware(conn, "n1", ADMIN, digest=digest, acknowledged_jobs=[])


def test_a_firmware_change_needs_the_digest_of_the_latest_plan(
    sold: Site, settings: Settings
) -> None:
    with transaction(sold.engine) as conn:
        assert problem(apply, conn, "").code == "firmware_plan_changed", "there is no plan"
        assert planned(conn, settings, {"differences": []}) == ""
        assert problem(apply, conn, "").code == "firmware_plan_changed", "nothing to change"
        digest = planned(conn, settings, PLAN)
        other = planned(conn, settings, {"differences": [*PLAN["differences"], STEP]})
        assert problem(apply, conn, digest).code == "firmware_plan_changed"
        assert nodes.get(conn, "n1").state == NodeState.READY
        task = apply(conn, other)
        assert apply(conn, other) == task
        restart = (maintenance.request_reboot, conn, "n1", ADMIN)
        assert problem(*restart, allocations=[]).code == "maintenance_under_way"
        work = begin(conn, settings, FIRMWARE)
        variables = HANDLERS[FIRMWARE].variables(work)
        assert (variables["slice_approved_plan"], variables["slice_allow_reboot"]) == (other, True)
        succeed(work, {"bios": {"settled": True}, "preflight": {}})
        assert prove(conn, sold, settings, NEW_BOOT)["resumed"] is True
        assert nodes.get(conn, "n1").state == NodeState.READY
        assert problem(apply, conn, other).code == "firmware_plan_changed", "it is done"


def test_firmware_is_not_changed_under_a_tenant(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        digest = planned(conn, settings, PLAN)
        sold.active(conn)
        assert problem(apply, conn, digest).code == "node_in_use"


def test_a_launch_meanwhile_keeps_the_firmware_as_it_is(sold: Site, settings: Settings) -> None:
    with transaction(sold.engine) as conn:
        apply(conn, planned(conn, settings, PLAN))
        host.resume(conn, "n1", ADMIN)
        sold.allocate(conn)
        (task,) = leasing.lease(conn, "worker", kinds=[FIRMWARE])
        work = open_work(conn, settings, task)
        assert problem(HANDLERS[FIRMWARE].start, work).code == "node_in_use"


FINISH = {"name": "finish_job", "subject": "BIOS.Setup.1-1", "destroys": False}
OPEN = {"differences": [{**FINISH, "before": {"open": "JID_1"}, "after": {"open": ""}}]}


@pytest.mark.parametrize("code", ["plan_changed", "host_in_use", "foreign_pending_values"])
def test_a_firmware_change_that_its_host_refused_gives_the_node_back(
    sold: Site, settings: Settings, code: str
) -> None:
    with transaction(sold.engine) as conn:
        boot_id = nodes.get(conn, "n1").boot_id
        apply(conn, planned(conn, settings, PLAN))
        fail(begin(conn, settings, FIRMWARE), code, {"bios": {}})
        assert prove(conn, sold, settings, boot_id)["resumed"]
        task = apply(conn, planned(conn, settings, PLAN))
        task_failures.cancel(conn, task.id, ADMIN)
        assert prove(conn, sold, settings, boot_id)["resumed"], "its run never began"


@pytest.mark.parametrize(
    ("code", "known"), [("bios_job_timeout", True), ("run_canceled", False), ("run_lost", False)]
)
def test_a_host_that_its_bmc_may_still_restart_is_not_sold(
    sold: Site, settings: Settings, code: str, known: bool
) -> None:
    """The host answers and is proven, while the BMC has a job with a power cycle."""
    with transaction(sold.engine) as conn:
        boot_id = nodes.get(conn, "n1").boot_id
        apply(conn, planned(conn, settings, PLAN))
        fail(begin(conn, settings, FIRMWARE), code, {"bios": {}}, known=known)
        assert not prove(conn, sold, settings, boot_id)["resumed"]
        node = nodes.get(conn, "n1")
        assert node.state == NodeState.DRAINING and not maintenance.awaits_proof(conn, node)
        why = list(journal.history_of(conn, "node", "n1"))[-1]
        assert (why.event, "job queue" in why.reason) == ("drain", True)
        # Asked again, the change follows the same job, and the node comes back.
        apply(conn, planned(conn, settings, OPEN))
        succeed(begin(conn, settings, FIRMWARE), {"bios": {"settled": True}, "preflight": {}})
        assert prove(conn, sold, settings, NEW_BOOT)["resumed"]
        # A drain of an operator, before the change or after it, outlasts it.
        for before in (False, True):
            if before:
                host.drain(conn, "n1", ADMIN)
            apply(conn, planned(conn, settings, PLAN))
            fail(begin(conn, settings, FIRMWARE), code, {"bios": {}}, known=known)
            prove(conn, sold, settings, boot_id)
            if not before:
                assert maintenance.drain(conn, "n1", ADMIN).state == NodeState.DRAINING
            apply(conn, planned(conn, settings, OPEN))
            succeed(begin(conn, settings, FIRMWARE), {"bios": {"settled": True}, "preflight": {}})
            assert not prove(conn, sold, settings, boot_id)["resumed"]
            host.resume(conn, "n1", ADMIN)


def test_a_restart_ends_no_job_of_its_bmc(sold: Site, settings: Settings) -> None:
    """The BMC may restart the host once more, so its proof does not put the node back on sale."""
    with transaction(sold.engine) as conn:
        apply(conn, planned(conn, settings, PLAN))
        fail(begin(conn, settings, FIRMWARE), "run_lost", {"bios": {}}, known=False)
        prove(conn, sold, settings, nodes.get(conn, "n1").boot_id)
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[])
        succeed(begin(conn, settings, REBOOT), rebooted([]))
        assert not prove(conn, sold, settings, NEW_BOOT)["resumed"]


def lose_reboot(conn: sa.Connection, settings: Settings, node_id: str) -> None:
    """A restart is lost, and its run may go on."""
    maintenance.request_reboot(conn, node_id, ADMIN, allocations=[])
    task = begin(conn, settings, REBOOT).task
    error = {"code": queue.DEADLINE_PASSED, "expected": "", "found": "", "remedy": ""}
    task_failures.lose(conn, replace(task, error=error), ADMIN)


@pytest.mark.covers("I13")
@pytest.mark.parametrize("first", [REBOOT, FIRMWARE])
def test_a_host_that_a_lost_run_and_its_bmc_may_restart_is_held_for_both(
    sold: Site, settings: Settings, first: TaskKind
) -> None:
    with transaction(sold.engine) as conn:
        boot_id = nodes.get(conn, "n1").boot_id
        for kind in (first, FIRMWARE if first == REBOOT else REBOOT):
            if kind == REBOOT:
                lose_reboot(conn, settings, "n1")
            else:
                apply(conn, planned(conn, settings, PLAN))
                lost = begin(conn, settings, FIRMWARE)
                fail(lost, "run_lost", {"bios": {}}, known=False)
            assert not prove(conn, sold, settings, boot_id)["resumed"]
        why = list(journal.history_of(conn, "node", "n1"))[-1].reason
        assert "BIOS job" in why and "lost run" in why
        host.restarted(conn, "n1", ADMIN, since=boot_id)
        host.reverify(conn, nodes.get(conn, "n1"), ADMIN)
        assert not prove(conn, sold, settings, NEW_BOOT)["resumed"], "the BIOS job is open"
        # A change that its host refuses ends no job.
        apply(conn, planned(conn, settings, OPEN))
        fail(begin(conn, settings, FIRMWARE), "job_in_queue", {"bios": {}})
        assert not prove(conn, sold, settings, NEW_BOOT)["resumed"]
        apply(conn, planned(conn, settings, OPEN))
        succeed(begin(conn, settings, FIRMWARE), {"bios": {"settled": True}, "preflight": {}})
        assert prove(conn, sold, settings, boot_id)["resumed"]


@pytest.mark.covers("I13")
def test_a_second_lost_restart_before_the_proof_holds_under_its_own_boot(
    sold: Site, settings: Settings
) -> None:
    with transaction(sold.engine) as conn:
        boot_id = nodes.get(conn, "n1").boot_id
        lose_reboot(conn, settings, "n1")
        assert not prove(conn, sold, settings, boot_id)["resumed"]
        host.restarted(conn, "n1", ADMIN, since=boot_id)
        node = nodes.get(conn, "n1")
        assert not maintenance.awaits_proof(conn, node), "an unknown boot is no other boot"
        document = sold.document(0)
        document["identity"] |= {"boot_id": NEW_BOOT}
        host.record_discovery(conn, "n1", document, ADMIN)
        lose_reboot(conn, settings, "n1")
        assert not prove(conn, sold, settings, NEW_BOOT)["resumed"]


@pytest.mark.covers("I13")
def test_a_whole_machine_that_a_lost_run_may_restart_comes_back_with_its_next_boot(
    site: Site, settings: Settings
) -> None:
    """Discovery is the whole of its proof."""
    machines = Machines(site)
    machines.machine(profile="lab")
    with transaction(site.engine) as conn:
        lose_reboot(conn, settings, "m1")
        document = site.document(1)
        document["identity"] |= machines.installed.get("m1", {})
        succeed(begin(conn, settings, DISCOVER), {"discovery": document})
        assert nodes.get(conn, "m1").state == NodeState.DRAINING
        host.restarted(conn, "m1", ADMIN, since=nodes.get(conn, "m1").boot_id)
        host.reverify(conn, nodes.get(conn, "m1"), ADMIN)
        document["identity"] |= {"boot_id": NEW_BOOT}
        succeed(begin(conn, settings, DISCOVER), {"discovery": document})
        assert nodes.get(conn, "m1").state == NodeState.READY


def test_a_whole_machine_that_its_bmc_may_still_restart_is_not_given_away(
    site: Site, settings: Settings
) -> None:
    machines = Machines(site)
    machines.machine(profile="lab")
    with transaction(site.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(FIRMWARE, "m1"), ADMIN)
        digest = succeed(begin(conn, settings, FIRMWARE), {"bios": PLAN})["digest"]
        maintenance.request_firmware(conn, "m1", ADMIN, digest=digest, acknowledged_jobs=[])
        fail(begin(conn, settings, FIRMWARE), "run_lost", {}, known=False)
        document = site.document(1)
        document["identity"] |= machines.installed.get("m1", {})
        succeed(begin(conn, settings, DISCOVER), {"discovery": document})
        assert nodes.get(conn, "m1").state == NodeState.DRAINING
        queue.enqueue(conn, queue.Enqueue(FIRMWARE, "m1"), ADMIN)
        digest = succeed(begin(conn, settings, FIRMWARE), {"bios": OPEN})["digest"]
        maintenance.request_firmware(conn, "m1", ADMIN, digest=digest, acknowledged_jobs=[])
        succeed(begin(conn, settings, FIRMWARE), {"bios": {"settled": True}, "preflight": {}})
        succeed(begin(conn, settings, DISCOVER), {"discovery": document})
        assert nodes.get(conn, "m1").state == NodeState.READY
