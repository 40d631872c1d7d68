"""Power of a slice, with a fault at every step; then its project asks again, and gets it.

Whatever goes wrong, nothing is freed. A comparison with the host finds the machine as the records
say that it is to be, or off although it is owed a start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Allocation
from reconciler.lifecycle import power
from reconciler.model.states import PowerAction, TaskKind
from reconciler.records import allocations
from tests.unit.reconciler.conftest import ADMIN, Database
from tests.unit.reconciler.faults.kinds import Slice
from tests.unit.reconciler.faults.playing import How, steps_of
from tests.unit.reconciler.faults.scripted_site import scripted_site
from tests.unit.reconciler.faults.test_drift import Look
from tests.unit.reconciler.faults.test_steps import (
    Moment,
    at_step,
    beginnings,
    come_back,
    fail_after,
    kill_after,
    kill_before,
)

__all__ = ["beginnings"]
pytestmark = pytest.mark.covers("CTRL-9", "I11", "I12", "I13", "I15")

POWER = TaskKind.SLICE_VM_POWER
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
    """Codes of what the host differs in from the records, which hear of it."""
    look = Look(scripted)
    look.take()
    return {row["code"] for row in look.tell()["differences"]}


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
    assert action != PowerAction.RESTART or set(steps) == every
    runs = action != PowerAction.STOP
    faults: list[tuple[int, How]] = [(0, kill_before)]
    faults += [(index, how) for index in range(len(steps)) for how in (fail_after, kill_after)]
    for index, how in faults:
        where = f"{action}, {how.__name__} at {steps[index]}"
        scripted, key = slices(stopped)
        before = set(scripted.host.ledger())
        ask(scripted, key, action)
        scripted.runner.faults[POWER] = at_step(index, lambda how=how: how)
        if how is fail_after:
            scripted.work()
        else:
            scripted.die()
        row = record(scripted, key)
        assert (row.state, row.power_action, bool(row.error)) == ("active", "", True), where
        scripted.sound(where)
        assert set(scripted.host.ledger()) == before, where
        seen = differences(scripted)
        assert seen <= {"guest_stopped"}, where
        row, on = record(scripted, key), key in scripted.host.running
        # One that is off against its project's wish is owed a start, and is named.
        assert row.stopped is (not on and not runs), where
        assert bool(seen) is (not on and runs), where
        ask(scripted, key, action)
        scripted.work()
        row = record(scripted, key)
        assert (row.error, row.stopped, key in scripted.host.running) == ({}, not runs, runs), where
        assert differences(scripted) == set(), where
    come_back(scripted, str(action))


def played(scripted: Slice, key: str, action: PowerAction) -> list[str]:
    """The steps of the action when nothing goes wrong."""
    ask(scripted, key, action)
    scripted.work()
    assert record(scripted, key).error == {}
    run = list(scripted.runner.runs.values())[-1]
    return [step.module for step in run.steps]
