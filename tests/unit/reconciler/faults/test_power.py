"""Power of a slice, and a restart of its host, with a fault at every step.

Then its project asks again, and gets it. After a restart of the host the slice starts by itself.
Whatever goes wrong, nothing is freed. A comparison with the host finds the machine as the records
say that it is to be, or off although it is owed a start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Allocation
from reconciler.lifecycle import maintenance, power
from reconciler.model.states import PowerAction, TaskKind
from reconciler.records import allocations, nodes
from reconciler.runs.collect import Phase
from tests.unit.reconciler.conftest import ADMIN, Database
from tests.unit.reconciler.faults.conftest import Moment
from tests.unit.reconciler.faults.kinds import Slice
from tests.unit.reconciler.faults.playing import Step, steps_of
from tests.unit.reconciler.faults.scripted_site import Run, scripted_site
from tests.unit.reconciler.faults.test_drift import Look
from tests.unit.reconciler.faults.test_steps import (
    Decide,
    at_step,
    come_back,
    fail_after,
    kill_after,
    kill_before,
    stop,
)

pytestmark = pytest.mark.covers("CTRL-9", "I11", "I12", "I13", "I15")

POWER, REBOOT = TaskKind.SLICE_VM_POWER, "reboot_node"
Open = Callable[[bool], tuple[Slice, str]]


@pytest.fixture
def slices(
    beginnings: dict[str, Moment],
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Open:
    """A slice that runs, or that its project has stopped; as many as wanted."""
    moments: dict[bool, Moment] = {}
    count = iter(range(10_000))

    def opened(stopped: bool) -> tuple[Slice, str]:
        moment = moments.get(stopped, beginnings["Slice"])
        folder = tmp_path / str(next(count))
        scripted = scripted_site(Slice, database, moment, folder, monkeypatch)
        assert isinstance(scripted, Slice)
        if stopped not in moments:
            key = scripted.launch()
            scripted.work()
            if stopped:
                ask(scripted, key, PowerAction.STOP)
                scripted.work()
            moments[stopped] = (database.keep(f"power-{stopped}.db"), scripted.host.copied())
        with reading(scripted.engine) as conn:
            (row,) = allocations.every(conn)
        return scripted, row.id

    return opened


def ask(scripted: Slice, key: str, action: PowerAction) -> None:
    with transaction(scripted.engine) as conn:
        power.request(conn, key, action, ADMIN)


def record(scripted: Slice, key: str) -> Allocation:
    with reading(scripted.engine) as conn:
        return allocations.get(conn, key)


def differences(scripted: Slice) -> set[str]:
    """Codes of the differences between host and records, from a look that is reported."""
    look = Look(scripted)
    look.take()
    return {row["code"] for row in look.report()["differences"]}


@pytest.mark.parametrize(
    ("action", "stopped"),
    [
        (PowerAction.START, True),
        (PowerAction.STOP, False),
        # A reset has the same steps; its guest gets no time.
        (PowerAction.RESTART, False),
    ],
)
def test_an_action_that_goes_wrong_is_asked_for_again(
    slices: Open, action: PowerAction, stopped: bool
) -> None:
    scripted, key = slices(stopped)
    steps = played(scripted, key, action)
    # A later start has no seed.
    every = {module for _name, module in steps_of("power_slice")} - {"write_seed"}
    # Only a restart prepares a domain that runs.
    every |= {"prepare_domain"}
    assert action != PowerAction.RESTART or set(steps) == every
    runs = action != PowerAction.STOP
    faults = [(0, kill_before), *((index, kill_after) for index in range(len(steps)))]
    if action != PowerAction.START:  # A restart fails at its steps, too.
        faults += [(index, fail_after) for index in range(len(steps))]
    for index, how in faults:
        where = f"{action}, {how.__name__} at {steps[index]}"
        scripted, key = slices(stopped)
        before = held(scripted)
        ask(scripted, key, action)
        scripted.runner.faults[POWER] = at_step(index, lambda how=how: how)
        if how is fail_after:
            scripted.work()
        else:
            scripted.die()
        row = record(scripted, key)
        assert (row.state, row.power_action, bool(row.error)) == ("active", "", True), where
        scripted.sound(where)
        assert held(scripted) == before, where
        seen = differences(scripted)
        assert seen <= {"guest_stopped"}, where
        row, on = record(scripted, key), key in scripted.host.running
        # A slice that is off against its project's wish is owed a start, and is reported.
        assert row.stopped is (not on and not runs), where
        assert bool(seen) is (not on and runs), where
        ask(scripted, key, action)
        scripted.work()
        row = record(scripted, key)
        assert (row.error, row.stopped, key in scripted.host.running) == ({}, not runs, runs), where
        assert differences(scripted) == set(), where
    come_back(scripted, str(action))


def other_tenant(scripted: Slice, key: str) -> None:
    scripted.host.reservations["other"] = scripted.host.reservations[key]


def other_guest(scripted: Slice, key: str) -> None:
    scripted.host.running["other"] = scripted.host.running[key]


@pytest.mark.parametrize(
    ("plant", "code"), [(other_tenant, "ip_in_use"), (other_guest, "device_in_use")]
)
@pytest.mark.parametrize("action", [PowerAction.RESTART, PowerAction.RESET])
def test_a_restart_whose_start_would_be_refused_leaves_the_guest_running(
    slices: Open, plant: Callable[[Slice, str], None], code: str, action: PowerAction
) -> None:
    scripted, key = slices(False)
    boot_id, disks = record(scripted, key).started_boot_id, scripted.host.running[key]
    plant(scripted, key)
    ask(scripted, key, action)
    scripted.work()
    row = record(scripted, key)
    assert (row.state, row.error["code"], row.stopped) == ("active", code, False)
    assert scripted.host.running[key] == disks
    assert row.started_boot_id == boot_id, "it is owed no start"


@pytest.mark.covers("I9", "I10")
@pytest.mark.parametrize("successor", [PowerAction.START, PowerAction.STOP, None])
@pytest.mark.parametrize("action", [PowerAction.START, PowerAction.RESTART, PowerAction.STOP])
def test_a_run_that_was_given_up_does_nothing_beside_its_successor(
    slices: Open, action: PowerAction, successor: PowerAction | None
) -> None:
    """It hangs somewhere, in AWX or on its host, and goes on when its successor has ended: another
    action, or the release.
    """
    stopped = action == PowerAction.START
    scripted, key = slices(stopped)
    for index, step in enumerate(played(scripted, key, action)):
        where = f"{action} at {step}, then {successor}"
        scripted, key = slices(stopped)
        ask(scripted, key, action)
        scripted.runner.faults[POWER] = at_step(index, stop)
        scripted.work()
        late = list(scripted.runner.runs.values())[-1]
        scripted.deadlines_pass()
        row = record(scripted, key)
        assert (row.state, row.power_action, bool(row.error)) == ("active", "", True), where
        if successor is None:
            scripted.release(key)
        else:
            ask(scripted, key, successor)
        scripted.work()
        before = scripted.host.seen()
        scripted.runner.go_on(late)
        assert late.phase is Phase.FINISHED, where
        assert scripted.host.seen() == before, where
        scripted.sound(where)


@pytest.mark.covers("I9", "I10")
def test_a_run_that_was_given_up_starts_no_guest_that_a_restart_of_the_host_has_stopped(
    slices: Open,
) -> None:
    """It goes on between the stop of the guest and the restart."""
    scripted, key = slices(True)
    for index, step in enumerate(played(scripted, key, PowerAction.START)):
        scripted, key = slices(True)
        ask(scripted, key, PowerAction.START)
        scripted.runner.faults[POWER] = at_step(index, stop)
        scripted.work()
        late = list(scripted.runner.runs.values())[-1]
        scripted.deadlines_pass()
        started: list[bool] = []

        restart(scripted, key, going_on(scripted, key, late, started))
        assert started == [False], step
        row = record(scripted, key)
        assert (row.error, key in scripted.host.running) == ({}, True), step


@pytest.mark.covers("I16")
def test_a_restart_of_the_host_that_goes_wrong_leaves_its_slice_running(slices: Open) -> None:
    """Once the host is proven, also under the boot that it had."""
    scripted, key = slices(False)
    boot_id = restart(scripted, key)
    (first, *_) = [run for run in scripted.runner.runs.values() if run.spec.playbook == REBOOT]
    steps = [step.module for step in first.steps]
    assert {*steps} == {module for _name, module in steps_of(REBOOT)}
    assert scripted.host.boot_id != boot_id
    faults = [(index, kill_after) for index in range(len(steps))]
    faults += [(steps.index(module), fail_after) for module in ("stop_domain", "reboot")]
    for index, how in faults:
        where = f"{how.__name__} at {steps[index]}"
        scripted, key = slices(False)
        decide = at_step(index, lambda how=how: how)
        restart(scripted, key, decide, killed=how is kill_after)
        row = record(scripted, key)
        assert (row.state, row.stopped, row.error) == ("active", False, {}), where
        assert key in scripted.host.running, where
        assert row.started_boot_id == scripted.host.boot_id, where
        scripted.sound(where)
        with reading(scripted.engine) as conn:
            assert nodes.get(conn, "n1").state == "ready", where
            assert scripted.site.statuses(conn) == ["active", "available"], where
        assert differences(scripted) == set(), where
    come_back(scripted, "restart of the host")


def going_on(scripted: Slice, key: str, late: Run, started: list[bool]) -> Decide:
    """Have the late run go on before the host restarts, and note whether the guest runs then."""

    def decide(_run: Run, _now: int, step: Step) -> None:
        if step.module == "reboot":
            scripted.runner.go_on(late)
            started.append(key in scripted.host.running)

    return decide


def restart(
    scripted: Slice, key: str, decide: Decide | None = None, *, killed: bool = False
) -> str:
    """An operator restarts the host; returns the boot before."""
    before = scripted.host.boot_id
    if decide:
        scripted.runner.faults[TaskKind.NODE_REBOOT] = decide
    with transaction(scripted.engine) as conn:
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=[key])
    if killed:
        scripted.die()
    else:
        scripted.work()
    return before


def held(scripted: Slice) -> set[_ledger.Entry]:
    """The ledger of the host, but for the numbers of its runs of power."""
    return {replace(entry, power_fence=0) for entry in scripted.host.ledger()}


def played(scripted: Slice, key: str, action: PowerAction) -> list[str]:
    """The steps of the action when nothing goes wrong."""
    ask(scripted, key, action)
    scripted.work()
    assert record(scripted, key).error == {}
    run = list(scripted.runner.runs.values())[-1]
    return [step.module for step in run.steps]
