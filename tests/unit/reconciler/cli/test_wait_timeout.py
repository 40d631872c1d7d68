"""Time limits of commands that wait: those of the service, measured in real seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import slices
from reconciler.model.states import TaskState
from reconciler.records import queue
from tests.unit.reconciler.api.stack import ACT, NODE, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.cli.test_recovery import Host, stuck
from tests.unit.reconciler.wipes import proofs

pytestmark = pytest.mark.covers("CTRL-7", "CTRL-8")

HOUR = 3600.0


class Passing:
    """A clock for a wait. then: events, by the second in which they happen."""

    def __init__(self, patch: pytest.MonkeyPatch, step: float) -> None:
        self.seconds = 0.0
        self.then: dict[float, Callable[[], Any]] = {}
        self._step = step
        patch.setattr("reconciler.wait_timeout.monotonic", lambda: self.seconds)
        patch.setattr("time.sleep", self._pass)

    def _pass(self, _seconds: float) -> None:
        self.seconds += self._step
        for at in [at for at in self.then if at <= self.seconds]:
            self.then.pop(at)()


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Passing:
    return Passing(monkeypatch, HOUR)


@pytest.fixture
def host(selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch) -> Host:
    """It is looked at within no time."""
    gpuaas.at(selling)
    return Host(selling, True).attend(monkeypatch)


def test_recover_waits_for_a_wipe_of_hours(
    selling: Stack, gpuaas: Gpuaas, host: Host, hours: Passing
) -> None:
    hours.then[4 * HOUR] = host.wipe
    gpuaas("recover", stuck(selling), "--reason", "x", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    (after,) = json.loads(gpuaas.out)["inventory_after"].values()
    assert after["status"] == "available"


def test_recover_says_of_what_goes_on_that_it_goes_on(
    selling: Stack, gpuaas: Gpuaas, host: Host, hours: Passing
) -> None:
    gpuaas("recover", stuck(selling), "--reason", "x", "--output", "json")
    refusal = json.loads(gpuaas.err[gpuaas.err.index("{") :])
    # A slot may be in cleanup for 14,400 s, and its service has a while to say that it was not.
    assert (gpuaas.status, refusal["code"], hours.seconds) == (1, "cleanup_unfinished", 5 * HOUR)
    assert f"gpuaas tasks list --node {NODE}" in refusal["remedy"]
    assert list(refusal["evidence"])[-1] == "force_cleanup"


def test_release_waits_as_long_as_its_run_may_take(
    selling: Stack, gpuaas: Gpuaas, hours: Passing
) -> None:
    key = launch(selling).json()["id"]
    activate(selling, key)

    def run_begins() -> None:
        tasks.append(begun(selling, deadline_s=8 * 14_400))

    def run_ends() -> None:
        with transaction(selling.engine) as conn:
            gone = {"absent": True}
            slices.release_succeeded(conn, key, ACT, proofs=proofs(conn, key), absence=gone)
            queue.finish(conn, tasks[0].id, tasks[0].lease_token, TaskState.SUCCEEDED, ACT)

    tasks: list[Task] = []
    hours.then = {HOUR: run_begins, 30 * HOUR: run_ends}
    gpuaas.at(selling, "member")("release", key, "--project", "demo", "--output", "json")
    assert gpuaas.status == 0, gpuaas.err
    assert json.loads(gpuaas.out)["state"] == "released"


def test_release_gives_up_when_its_time_is_over(
    selling: Stack, gpuaas: Gpuaas, hours: Passing
) -> None:
    key = launch(selling).json()["id"]
    activate(selling, key)
    gpuaas.at(selling, "member")("release", key, "--project", "demo")
    assert (gpuaas.status, hours.seconds) == (1, 5 * HOUR)
    assert "allocation_timeout" in gpuaas.err


def test_a_task_that_runs_has_its_own_deadline(
    selling: Stack, gpuaas: Gpuaas, hours: Passing
) -> None:
    tasks: list[Task] = []

    def begins() -> None:
        tasks.append(begun(selling, deadline_s=14_400))

    def fails() -> None:
        with transaction(selling.engine) as conn:
            held = (tasks[0].id, tasks[0].lease_token)
            queue.finish(conn, *held, TaskState.FAILED, ACT, error={"code": "no_kvm"})

    hours.then = {HOUR: begins, 5 * HOUR: fails}
    follow(selling, gpuaas)
    assert (gpuaas.status, "no_kvm" in gpuaas.err) == (1, True), gpuaas.err


def test_a_task_that_cannot_begin_is_not_waited_for_all_day(
    selling: Stack, gpuaas: Gpuaas, hours: Passing
) -> None:
    follow(selling, gpuaas)
    assert (gpuaas.status, hours.seconds) == (1, 3 * HOUR)
    assert "task_timeout" in gpuaas.err and "waits for worker" in gpuaas.err


def test_a_task_waits_its_turn_behind_one_of_hours(
    selling: Stack, gpuaas: Gpuaas, hours: Passing
) -> None:
    bootstrap = selling.client("admin").post(f"admin/nodes/{NODE}/bootstrap").json()
    before = begun(selling, deadline_s=14_400)
    assert before.id == bootstrap["id"]

    def turns() -> None:
        with transaction(selling.engine) as conn:
            held = (before.id, before.lease_token)
            queue.finish(conn, *held, TaskState.FAILED, ACT, error={"code": "no_kvm"})
        mine = selling.lease()
        with transaction(selling.engine) as conn:
            held = (mine.id, mine.lease_token)
            queue.finish(conn, *held, TaskState.FAILED, ACT, error={"code": "its_turn"})

    hours.then[4 * HOUR] = turns
    follow(selling, gpuaas)
    assert (gpuaas.status, "its_turn" in gpuaas.err) == (1, True), gpuaas.err


def begun(stack: Stack, *, deadline_s: int) -> Task:
    """The next task, with a run that may take so long."""
    task = stack.lease()
    with transaction(stack.engine) as conn:
        held = (task.id, task.lease_token)
        begun = queue.started(conn, *held, run_id="r", run_directory="", deadline_s=deadline_s)
        queue.extend_deadlines(conn, begun)
    return begun


def follow(stack: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(stack)("nodes", "parity", NODE)


def test_a_power_action_that_never_ends_is_not_waited_for(
    selling: Stack, gpuaas: Gpuaas, hours: Passing
) -> None:
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    gpuaas.at(selling)("restart", mine, "--project", "demo", "--output", "json")
    problem = json.loads(gpuaas.err)
    assert (gpuaas.status, problem["code"]) == (1, "power_timeout")
    assert problem["found"] == "restart under way for 120 minutes"
    assert HOUR < hours.seconds <= 4 * HOUR
