"""Power of a slice: who may request it and when, and the start after a restart of the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations as allocation_table
from reconciler.db.schema import slots as slot_table
from reconciler.lifecycle import host, power, quota, restore, task_failures
from reconciler.lifecycle import launch as launching
from reconciler.model.errors import Problem
from reconciler.model.states import PowerAction, SlotState, TaskKind, TaskState
from reconciler.records import allocations, leasing, nodes, queue
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work.handler import Work, open_work
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.db import test_postgres
from tests.unit.reconciler.service.service import until

POWER = TaskKind.SLICE_VM_POWER
postgresql = test_postgres.engine


@pytest.fixture
def key(sold: Site) -> str:
    """A running slice, started under the present boot."""
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        power.succeeded(conn, key, boot_id=nodes.get(conn, "n1").boot_id)
        return key


def reboot(conn: sa.Connection, site: Site) -> str:
    """The host is found under another boot, with its evidence still to come."""
    identity = site.document(0)["identity"] | {"boot_id": "5e0f5a7e-0000-4000-8000-000000000001"}
    host.observed(conn, "n1", ADMIN, identity=identity)
    return str(identity["boot_id"])


def prove(conn: sa.Connection, site: Site, boot_id: str) -> None:
    report = site.parity()
    report["identity"] = report["identity"] | {"boot_id": boot_id}
    host.record_parity(conn, "n1", report, ADMIN)


def code(call: Any, *args: Any) -> str:
    with pytest.raises(Problem) as caught:
        call(*args)
    assert caught.value.expected and caught.value.found and caught.value.remedy
    return caught.value.code


@pytest.mark.parametrize("action", list(PowerAction))
def test_an_action_is_one_audited_task(sold: Site, key: str, action: PowerAction) -> None:
    with transaction(sold.engine) as conn:
        changed = power.request(conn, key, action, ADMIN)
        assert (changed.state, changed.power_action) == ("active", action)
        assert changed.stopped is (action == PowerAction.STOP)
        assert power.request(conn, key, action, ADMIN) == changed
        (task,) = queue.every(conn, allocation_id=key, kind=POWER)
        assert task.parameters["boot_id"] == nodes.get(conn, "n1").boot_id
        (row,) = journal.audit_rows(conn, action="allocation.power")
        assert (row.subject_id, row.detail) == (key, {"action": action})
        other = PowerAction.START if action != PowerAction.START else PowerAction.STOP
        assert code(power.request, conn, key, other, ADMIN) == "allocation_busy"
        sold.finish(conn, POWER)
        power.succeeded(conn, key, boot_id="")
        ended = allocations.get(conn, key)
        assert (ended.power_action, ended.error) == ("", {})


@pytest.mark.covers("I9", "I10")
def test_each_action_has_a_higher_fence_than_the_one_before(
    sold: Site, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences, of_slots, now = [], [], clock.read
    free = sa.update(slot_table).where(slot_table.c.status != SlotState.ACTIVE)
    with transaction(sold.engine) as conn:
        for action in (PowerAction.STOP, PowerAction.START, PowerAction.START):
            power.request(conn, key, action, ADMIN)
            task = sold.finish(conn, POWER, TaskState.LOST)
            power.failed(conn, task, {"code": "run_lost"})
            fences.append(task.parameters["power_fence"])
        # The host may have seen any number since the backup, also after an earlier restore of it.
        backup = {"generation": allocations.get(conn, key).generation}
        for later in (0.0, 3600.0):
            monkeypatch.setattr(clock, "read", lambda conn, later=later: now(conn) + later)
            conn.execute(sa.update(allocation_table).values(**backup))
            conn.execute(free.values(fence=1))
            restore.doubt(conn, ADMIN)
            of_slots.append(conn.execute(sa.select(sa.func.max(slot_table.c.fence))).scalar_one())
            prove(conn, sold, reboot(conn, sold))
            for _ in range(2):
                power.request(conn, key, PowerAction.STOP, ADMIN)
                task = sold.finish(conn, POWER, TaskState.LOST)
                power.failed(conn, task, {"code": "run_lost"})
                fences.append(task.parameters["power_fence"])
    assert fences == sorted(set(fences)) and fences[3] > 1_000_000
    assert of_slots == sorted(set(of_slots)) and of_slots[0] > 1_000_000


def test_what_is_refused(sold: Site, key: str) -> None:
    with transaction(sold.engine) as conn:
        boot_id = reboot(conn, sold)
        assert code(power.request, conn, key, PowerAction.START, ADMIN) == "host_unproven"
        assert code(power.request, conn, key, PowerAction.RESET, ADMIN) == "host_unproven"
        prove(conn, sold, boot_id)
        host.lost(conn, "n1", ADMIN)
        for action in PowerAction:
            assert code(power.request, conn, key, action, ADMIN) == "host_unreachable"
        host.regained(conn, "n1", ADMIN)
        assert not allocations.get(conn, key).stopped, "a refusal changes nothing"
        launching.release(conn, key, ADMIN)
        assert code(power.request, conn, key, PowerAction.STOP, ADMIN) == "allocation_not_active"
        assert not queue.every(conn, kind=POWER)


@pytest.mark.covers("I16")
def test_a_host_whose_proof_fails_starts_nothing(sold: Site, key: str) -> None:
    """Its parity is of its present boot, and says that the host may not be used."""
    with transaction(sold.engine) as conn:
        identity = {**sold.parity()["identity"], "boot_id": reboot(conn, sold)}
        host.record_parity(conn, "n1", sold.parity(failures=1) | {"identity": identity}, ADMIN)
        assert code(power.request, conn, key, PowerAction.START, ADMIN) == "host_unproven"
        assert power.start_after_boot(conn, "n1", ADMIN) == []


@pytest.mark.covers("I16")
@pytest.mark.parametrize("stopped", [False, True])
def test_after_a_boot_only_a_slice_that_ran_starts(sold: Site, key: str, stopped: bool) -> None:
    """None of another host, and none that is released."""
    sold.node("n2", number=1)
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, sold.active(conn, 2)).node_id == "n2"
        released = sold.active(conn)
        assert allocations.get(conn, released).node_id == "n1"
        launching.release(conn, released, ADMIN)
        if stopped:
            power.request(conn, key, PowerAction.STOP, ADMIN)
            sold.finish(conn, POWER)
            power.succeeded(conn, key, boot_id="")
        assert power.start_after_boot(conn, "n1", ADMIN) == [], "it is the same boot"
        boot_id = reboot(conn, sold)
        prove(conn, sold, boot_id)
        assert power.start_after_boot(conn, "n1", ADMIN) == ([] if stopped else [key])
        assert power.start_after_boot(conn, "n1", ADMIN) == [], "its start is queued"
        if stopped:
            return
        task = sold.finish(conn, POWER, TaskState.FAILED)
        error = {"code": "device_not_answering", "expected": "a", "found": "b", "remedy": "c"}
        task_failures.record(conn, task, task_failures.Failure("start", error, {}, known=True))
        row = allocations.get(conn, key)
        assert (row.state, row.power_action) == ("active", "")
        assert row.error["code"] == "device_not_answering"
        assert sold.statuses(conn)[0] == "active", "a failed start frees nothing"
        assert power.start_after_boot(conn, "n1", ADMIN) == [key], "the next proof tries again"
        sold.finish(conn, POWER)
        power.succeeded(conn, key, boot_id=boot_id)
        assert allocations.get(conn, key).error == {}
        assert power.start_after_boot(conn, "n1", ADMIN) == []


@pytest.mark.covers("I16")
@pytest.mark.parametrize("restart", [True, False])
def test_a_report_of_an_earlier_boot_starts_nothing(sold: Site, key: str, restart: bool) -> None:
    """It began before another boot was learned, so the host's boot is unknown. The slices run, or
    will start once it is proven.
    """
    with transaction(sold.engine) as conn:
        before = nodes.get(conn, "n1").boot_id
        reboot(conn, sold)
        report = sold.parity() | {"identity": sold.parity()["identity"] | {"boot_id": before}}
        host.record_parity(conn, "n1", report, ADMIN, observed_at=1.0)
        assert nodes.get(conn, "n1").boot_id == ""
        assert power.start_after_boot(conn, "n1", ADMIN, restart=restart) == []
        row = allocations.get(conn, key)
        assert (row.power_action, row.stopped, row.error) == ("", False, {})
        assert not queue.open_of_allocation(conn, key)


@pytest.mark.parametrize("earlier", [POWER, TaskKind.SLICE_INGRESS_APPLY])
def test_work_that_waits_does_not_keep_a_slice_off(sold: Site, key: str, earlier: TaskKind) -> None:
    """It was queued before the host lost power. The host would refuse a start of that boot."""
    with transaction(sold.engine) as conn:
        if earlier == POWER:
            power.request(conn, key, PowerAction.RESTART, ADMIN)
        else:
            queue.add(conn, queue.Enqueue(earlier, "n1", allocation_id=key), ADMIN)
        (before,) = queue.every(conn, allocation_id=key, kind=earlier)
        boot_id = reboot(conn, sold)
        prove(conn, sold, boot_id)
        assert power.start_after_boot(conn, "n1", ADMIN) == [key]
        assert power.start_after_boot(conn, "n1", ADMIN) == [], "its start is queued"
        state = TaskState.CANCELED if earlier == POWER else TaskState.QUEUED
        assert queue.get(conn, before.id).state == state
        (start,) = [t for t in queue.open_of_allocation(conn, key) if t.kind == POWER]
        assert start.parameters["boot_id"] == boot_id
        assert allocations.get(conn, key).power_action == "start"


@pytest.mark.covers("I16")
@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_an_action_before_the_boot_is_not_that_of_the_start(
    sold: Site, key: str, *, fails: bool
) -> None:
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.RESTART, ADMIN)
        (running,) = leasing.lease(conn, "worker", kinds=[POWER])
        prove(conn, sold, reboot(conn, sold))
        assert power.start_after_boot(conn, "n1", ADMIN) == [key]
        before = allocations.get(conn, key)
        if fails:
            error = {"code": "boot_changed", "expected": "a", "found": "b", "remedy": "c"}
            failure = task_failures.Failure("start", error, {}, known=True)
            task_failures.record(conn, running, failure)
        else:
            work = Work(conn, running, nodes.get(conn, "n1"), {}, Settings())
            HANDLERS[POWER].succeed(work, {})
        assert allocations.get(conn, key) == before and before.power_action == "start"


@pytest.mark.postgres
def test_a_stop_while_the_slices_of_a_boot_start_counts(postgresql: sa.Engine) -> None:
    """The start waits for its transaction. SQLite has one writer at a time."""
    sold = Site(postgresql)
    sold.node()
    with transaction(postgresql) as conn:
        key = sold.active(conn)
        power.succeeded(conn, key, boot_id=nodes.get(conn, "n1").boot_id)
        prove(conn, sold, reboot(conn, sold))

    def start() -> list[str]:
        with transaction(postgresql) as conn:
            return power.start_after_boot(conn, "n1", ADMIN)

    with ThreadPoolExecutor(1) as pool:
        with transaction(postgresql) as conn:
            power.request(conn, key, PowerAction.STOP, ADMIN)
            waiting = pool.submit(start)
            held_up = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            until(lambda: conn.scalar(held_up))
        assert waiting.result(60) == []
    with transaction(postgresql) as conn:
        assert allocations.get(conn, key).stopped
        assert len(queue.open_of_allocation(conn, key)) == 1


def test_a_slice_whose_start_waits_is_not_taken_for_off_by_its_guest(sold: Site, key: str) -> None:
    """Its guest has obeyed the stop before, which libvirt does not tell from a power-off."""
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.STOP, ADMIN)
        sold.finish(conn, POWER)
        power.succeeded(conn, key, boot_id="")
        power.request(conn, key, PowerAction.START, ADMIN)
        boot_id = nodes.get(conn, "n1").boot_id
        assert power.powered_off(conn, [key], ADMIN, boot_id=boot_id) == []
        sold.finish(conn, POWER)
        power.succeeded(conn, key, boot_id=boot_id)
        assert not allocations.get(conn, key).stopped
        assert power.powered_off(conn, [key], ADMIN, boot_id=boot_id) == [key]


def test_a_start_whose_run_was_lost_counts_once_the_machine_is_seen(sold: Site, key: str) -> None:
    with transaction(sold.engine) as conn:
        boot_id = nodes.get(conn, "n1").boot_id
        power.request(conn, key, PowerAction.RESTART, ADMIN)
        power.seen_running(conn, [key], ADMIN, boot_id=boot_id)
        assert allocations.get(conn, key).power_action, "its run may stop it yet"
        task = sold.finish(conn, POWER, TaskState.FAILED)
        power.failed(conn, task, {"code": "host_unreachable"})
        power.seen_running(conn, [key], ADMIN, boot_id=boot_id)
        seen = allocations.get(conn, key)
        assert (seen.started_boot_id, seen.error, seen.stopped) == (boot_id, {}, False)
        # From now on its guest's own power-off counts.
        assert power.powered_off(conn, [key], ADMIN, boot_id=boot_id) == [key]


@pytest.mark.parametrize(
    ("action", "machine", "stopped", "owed"),
    [
        (PowerAction.STOP, "running", False, False),
        (PowerAction.STOP, "", True, False),
        (PowerAction.STOP, "shut off", True, False),
        (PowerAction.RESTART, "running", False, False),
        (PowerAction.RESTART, "shut off", False, True),
        (PowerAction.RESTART, "", False, True),
    ],
)
def test_a_failed_action_leaves_the_record_as_the_machine_is(
    sold: Site, key: str, action: PowerAction, machine: str, stopped: bool, owed: bool
) -> None:
    """A guest whose stop failed runs on, and starts again with its host; until it is seen running,
    its project wants it off. A guest that a failed restart has shut down is owed a start; a guest
    that runs without SSH may power itself off later.
    """
    with transaction(sold.engine) as conn:
        boot_id = nodes.get(conn, "n1").boot_id
        power.request(conn, key, action, ADMIN)
        task = sold.finish(conn, POWER, TaskState.FAILED)
        error = {"code": "readiness_failed", "expected": "a", "found": "b", "remedy": "c"}
        evidence = {"shutdown": "", "domain": {"state": machine} if machine else {}}
        task_failures.record(conn, task, task_failures.Failure("s", error, evidence, known=True))
        row = allocations.get(conn, key)
        assert (row.stopped, row.power_action, row.error) == (stopped, "", error)
        off = power.powered_off(conn, [key], ADMIN, boot_id=boot_id)
        assert off == ([] if stopped or owed else [key])
        assert power.start_after_boot(conn, "n1", ADMIN) == ([key] if owed else [])


@pytest.mark.parametrize("booted", [False, True])
@pytest.mark.parametrize("action", [*PowerAction])
def test_an_action_that_was_withdrawn_leaves_a_stopped_slice_stopped(
    sold: Site, key: str, action: PowerAction, *, booted: bool
) -> None:
    """Also the start that a boot of its host has put in its place."""
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.STOP, ADMIN)
        sold.finish(conn, POWER)
        power.succeeded(conn, key, boot_id="")
        power.request(conn, key, action, ADMIN)
        if booted:
            prove(conn, sold, reboot(conn, sold))
            power.start_after_boot(conn, "n1", ADMIN)
        (task,) = queue.open_of_allocation(conn, key)
        task_failures.cancel(conn, task.id, ADMIN)
        assert allocations.get(conn, key).stopped
        # The next boot of its host does not start it.
        prove(conn, sold, reboot(conn, sold))
        assert power.start_after_boot(conn, "n1", ADMIN) == []


def test_a_stop_that_was_withdrawn_leaves_a_slice_that_runs_on(sold: Site, key: str) -> None:
    """It starts again with its host, which it would not if it counted as stopped."""
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.STOP, ADMIN)
        (task,) = queue.open_of_allocation(conn, key)
        task_failures.cancel(conn, task.id, ADMIN)
        assert not allocations.get(conn, key).stopped
        prove(conn, sold, reboot(conn, sold))
        assert power.start_after_boot(conn, "n1", ADMIN) == [key]


def test_a_release_ends_what_is_queued_and_what_runs(sold: Site, key: str) -> None:
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.RESTART, ADMIN)
        (running,) = leasing.lease(conn, "worker", kinds=[POWER])
        launching.release(conn, key, ADMIN)
        assert allocations.get(conn, key).power_action == "", "a command waits until it is empty"
        assert queue.get(conn, running.id).cancel_requested
        release = TaskKind.SLICE_VM_RELEASE
        assert leasing.lease(conn, "worker", kinds=[release]) == [], "it waits for the other run"
        queue.finish(conn, running.id, running.lease_token, TaskState.CANCELED, ADMIN)
        power.succeeded(conn, key, boot_id="late")
        assert allocations.get(conn, key).started_boot_id != "late"
        power.failed(conn, running, {"code": "readiness_failed"})
        assert allocations.get(conn, key).error == {}, "it would count as a failed release"
        assert len(leasing.lease(conn, "worker", kinds=[release])) == 1


def test_a_release_forgets_a_failed_action(sold: Site, key: str) -> None:
    """An error of a release means that it waits for an operator, and is no use of its project."""
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.RESTART, ADMIN)
        task = sold.finish(conn, POWER, TaskState.FAILED)
        power.failed(conn, task, {"code": "readiness_failed"})
        assert launching.release(conn, key, ADMIN).error == {}
        assert quota.used(conn, sold.project)["gpus"] == 1


def test_a_run_that_is_not_wanted_any_more_does_not_begin(sold: Site, key: str) -> None:
    with transaction(sold.engine) as conn:
        power.request(conn, key, PowerAction.RESTART, ADMIN)
        launching.release(conn, key, ADMIN)
        (task,) = queue.every(conn, allocation_id=key, kind=POWER)
        assert task.state == TaskState.CANCELED
        assert power.began(conn, key) == "allocation releasing"


def test_a_later_start_keeps_the_machine_and_waits_as_the_profile_says(
    sold: Site, tmp_path: Path
) -> None:
    """A site may change its profile at any time. A guest's disk may not boot by other firmware, and
    a host that is full has no more CPUs.
    """
    text = (Path("profiles") / "lab.yml").read_text()
    profile = tmp_path / "lab.yml"
    settings = Settings(state_dir=tmp_path, profiles_dir=tmp_path)
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        key = sold.allocate(conn)
        profile.write_text(text)
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.SLICE_VM_PROVISION])
        launch = HANDLERS[task.kind]
        launch.start(open_work(conn, settings, task))
        for before, after in (
            ("firmware: bios", "firmware: uefi"),
            ("vcpus_per_gpu: 1", "vcpus_per_gpu: 2"),
            ("memory_mib_per_gpu: 768", "memory_mib_per_gpu: 1024"),
            ("ready: 1500", "ready: 1500, start: 300"),
        ):
            assert before in text
            text = text.replace(before, after)
        profile.write_text(text)
        # The profile has changed while the run went on; a second run of the launch is as the first.
        work = open_work(conn, settings, task)
        assert launch.variables(work)["slice_vm"]["firmware"] == "bios"
        result = launch.succeed(work, {"readiness": {}})
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN, result=result)
        power.request(conn, key, PowerAction.RESTART, ADMIN)
        (task,) = leasing.lease(conn, "worker", kinds=[POWER])
        variables = HANDLERS[POWER].variables(open_work(conn, settings, task))
    machine = variables["slice_vm"]
    assert (machine["firmware"], machine["qemu_arguments"]) == ("bios", [])
    assert (machine["vcpus"], machine["memory_mib"]) == (1, 768)
    assert variables["slice_ready_deadline"] == 300


def test_a_slice_is_stopped_on_a_host_whose_boot_is_unknown(
    sold: Site, key: str, tmp_path: Path
) -> None:
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        boot_id = nodes.get(conn, "n1").boot_id
        assert host.restarted(conn, "n1", ADMIN, since=boot_id)
        power.request(conn, key, PowerAction.STOP, ADMIN)
        (task,) = leasing.lease(conn, "worker", kinds=[POWER])
        work = open_work(conn, Settings(state_dir=tmp_path), task)
        run = {
            "id": "r", "task_id": task.id, "kind": task.kind, "node_id": "n1",
            "correlation_id": "c",
        }  # fmt: skip
        given = HANDLERS[POWER].variables(work)
        contract.check_vars(
            "power_slice", {"slice_run": run, "slice_profile": work.profile, **given}
        )


def test_the_variables_of_each_action(sold: Site, key: str, tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        for action in PowerAction:
            power.request(conn, key, action, ADMIN)
            (task,) = leasing.lease(conn, "worker", kinds=[POWER])
            work = open_work(conn, settings, task)
            variables = HANDLERS[POWER].variables(work)
            assert variables["slice_power"] == action
            shutdown = work.profile["deadlines"]["shutdown"]
            assert variables["slice_shutdown_deadline"] == (0 if action == "reset" else shutdown)
            assert variables["slice_slots"][0]["fence"] == 1
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
        power.request(conn, key, PowerAction.RESET, ADMIN)
        (task,) = leasing.lease(conn, "worker", kinds=[POWER])
        reboot(conn, sold)
        assert code(HANDLERS[POWER].variables, open_work(conn, settings, task)) == "boot_changed"
