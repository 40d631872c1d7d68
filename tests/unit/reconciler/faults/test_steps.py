"""Every step of provision and release, each with every fault; afterwards nothing is untrue.

After each fault the reconciler goes on or is started again; its records must be consistent
(`invariants`) and true of the host, and recovery must need only requests that an operator may make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reconciler.db.engine import reading
from reconciler.model.drift import STEP
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import allocations
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.conftest import Database
from tests.unit.reconciler.faults.conftest import Healthy, Moment, Open
from tests.unit.reconciler.faults.host import MODULES, Host, refuse
from tests.unit.reconciler.faults.kinds import MOMENTS, REGISTERED, Slice, fail_before
from tests.unit.reconciler.faults.playing import How, Killed, Step, rescue_of, round_trips, steps_of
from tests.unit.reconciler.faults.scripted_site import (
    Run,
    Runner,
    ScriptedSite,
    Stopped,
    ended,
    scripted_site,
)

pytestmark = pytest.mark.covers("CTRL-9", "I6", "I10", "I11", "I12", "I13")

Decide = Callable[[Run, int, Step], How | None]


def at_step(index: int, how: Callable[[], How]) -> Decide:
    """No fault until the step with this number, and `how` there."""
    return lambda _run, now, _step: how() if now == index else None


def fail_after(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return {**do(), **fail_before(do)}


def kill_after(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    do()
    raise Killed


def kill_before(_do: object) -> dict[str, Any]:
    raise Killed


def stop() -> How:
    raise Stopped


def come_back(scripted: ScriptedSite, where: str) -> None:
    """An operator asks until nothing is left to be asked for, at most three times."""
    for key in active(scripted):
        scripted.release(key)
    scripted.work()
    for _ in range(3):
        if not scripted.recover():
            break
    scripted.pristine(where)


def active(scripted: ScriptedSite) -> list[str]:
    with reading(scripted.engine) as conn:
        return [row.id for row in allocations.every(conn) if row.state == "active"]


# Steps of a module that does several in one call, as an operator reads them.
PARTS = {
    "write_seed": "Write the cloud-init seed",
    "reserve_address": "Reserve the address",
    "give_functions": "Put the fabric functions into the tenant's network",
    "start_domain": "Define and start the domain",
    "remove_domain": "Shut the domain down and undefine it",
    "take_functions": "Take the fabric functions out of the tenant's network",
    "release_address": "Remove the address reservation and its lease",
    "remove_seed": "Remove the cloud-init seed",
    "open_way": "Let the gateway reach the guest",
    "destroy_seed": "Detach and destroy the seed",
}
UNDOING = ("slice.wipe", "baremetal.release")
KINDS = pytest.mark.parametrize("kind", sorted(MOMENTS))
# Those of which a rescue touches the host; the others only say how they failed.
RESCUED = pytest.mark.parametrize(
    "kind", sorted(kind for kind in MOMENTS if rescue_of(HANDLERS[kind].playbook))
)


def test_everything_that_provisions_or_releases_is_here() -> None:
    assert set(MOMENTS) == REGISTERED
    rescued = {kind for kind in MOMENTS if rescue_of(HANDLERS[kind].playbook)}
    assert rescued >= {TaskKind.SLICE_VM_PROVISION, TaskKind.BAREMETAL_PROVISION}


def test_a_provisioning_takes_six_round_trips() -> None:
    assert round_trips("provision_slice") == 6


@KINDS
def test_every_step_of_the_playbook_is_played(
    at: Open, healthy: dict[str, Healthy], kind: str
) -> None:
    """No step hides behind a condition: it runs when all is well, or in the rescue."""
    steps = healthy[kind].steps
    seen = {(step.name, step.module) for step in steps}
    # Once when hardly anything was done, once when nearly all was.
    for number in (1, len(steps) - 1):
        scripted = at(kind)
        scripted.runner.faults[kind] = at_step(number, lambda: fail_before)
        scripted.work()
        (run, *_) = scripted.runner.runs.values()
        seen |= {(step.name, step.module) for step in run.steps}
    # A first start has no fence of power.
    of_power = {"fence_power"}
    every = {step for step in steps_of(HANDLERS[kind].playbook) if step[1] not in of_power}
    assert seen == every


@KINDS
@pytest.mark.parametrize("how", [fail_before, fail_after])
def test_a_step_fails(at: Open, healthy: dict[str, Healthy], kind: str, how: How) -> None:
    for number, step in enumerate(healthy[kind].steps):
        where = f"{kind}: {how.__name__} at {step.name!r}"
        scripted = at(kind)
        scripted.runner.faults[kind] = at_step(number, lambda: how)
        scripted.work()
        task = ended(scripted, kind)
        assert task.state == TaskState.FAILED, where
        assert task.error["step"] == PARTS.get(step.module, task.error["step"]), where
        scripted.sound(where)
        come_back(scripted, where)


def test_a_host_names_no_step_that_it_does_not_have(at: Open) -> None:
    """Drift is told from a failed launch by the step, so a host must not choose it."""
    kind = TaskKind.SLICE_VM_PROVISION
    scripted = at(kind)
    scripted.runner.faults[kind] = at_step(1, lambda: lambda do: fail_before(do) | {"part": STEP})
    scripted.work()
    assert ended(scripted, kind).error["step"] == "Keep the image in the digest-checked cache"


@KINDS
@pytest.mark.parametrize("how", [kill_before, kill_after])
def test_run_and_reconciler_are_killed(
    at: Open, healthy: dict[str, Healthy], kind: str, how: How
) -> None:
    for number, step in enumerate(healthy[kind].steps):
        where = f"{kind}: {how.__name__} at {step.name!r}"
        scripted = at(kind)
        scripted.runner.faults[kind] = at_step(number, lambda: how)
        scripted.die()
        assert ended(scripted, kind).state == TaskState.LOST, where
        assert active(scripted) == [], where
        scripted.sound(where)
        come_back(scripted, where)


@pytest.mark.parametrize(
    ("ending", "module", "status"),
    [
        (False, "slice_lease", "available"),
        (False, "start_domain", "cleanup_blocked"),
        (True, "slice_lease", "cleanup_blocked"),
        (True, "nvme_wipe", "cleanup_blocked"),
        (True, "gpu_reset", "cleanup_blocked"),
    ],
)
def test_a_module_fails_between_the_slots_of_a_slice_with_two_gpus(
    beginnings: dict[str, Moment],
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ending: bool,
    module: str,
    status: str,
) -> None:
    """Both slots end alike, and one clean-up brings back both."""
    scripted = scripted_site(Slice, database, beginnings["Slice"], tmp_path, monkeypatch)
    key = scripted.launch(everything=True)
    if ending:
        scripted.work()
        assert scripted.state(key) == "active"
        assert len(scripted.host.running[key]) == 2
        scripted.release(key)
    answers = MODULES[module]
    calls = []

    def halfway(host: Host, params: dict[str, Any]) -> dict[str, Any]:
        calls.append(module)
        if len(calls) > 1:
            return answers(host, params)
        answers(host, {**params, "slots": params["slots"][:1]})
        raise refuse("planted")

    monkeypatch.setitem(MODULES, module, halfway)
    scripted.work()
    with reading(scripted.engine) as conn:
        assert scripted.site.statuses(conn) == [status] * 2
    where = f"{module} halfway, then {status}"
    scripted.sound(where)
    come_back(scripted, where)


@RESCUED
@pytest.mark.parametrize("how", [fail_before, kill_after])
def test_the_rescue_itself_goes_wrong(
    at: Open, healthy: dict[str, Healthy], kind: str, how: How
) -> None:
    """After a failure of every step, each step of the rescue fails or is killed."""
    tried: set[tuple[str, str]] = set()
    for number, step in enumerate(healthy[kind].steps):
        for second in range(4):
            where = f"{kind}: {step.name!r} fails, then {how.__name__} at rescue {second}"
            scripted = at(kind)
            rescue = Rescue(number, second, how)
            scripted.runner.faults[kind] = rescue
            try:
                scripted.work()
            except Killed:
                scripted.restart()
            if len(rescue.steps) <= second:
                break
            tried |= {(step.name, step.module) for step in rescue.steps[second:]}
            scripted.sound(where)
            come_back(scripted, where)
    assert tried == rescue_of(HANDLERS[kind].playbook)


@dataclass
class Rescue:
    """Step number `first` fails; of the rescue that follows, step number `second` goes wrong."""

    first: int
    second: int
    how: How
    steps: list[Step] = field(default_factory=list)

    def __call__(self, _run: Run, now: int, step: Step) -> How | None:
        if not step.rescuing:
            return fail_after if now == self.first else None
        self.steps.append(step)
        return self.how if len(self.steps) - 1 == self.second else None


@KINDS
def test_the_reconciler_is_killed_before_it_records_the_end(
    at: Open, healthy: dict[str, Healthy], kind: str
) -> None:
    expected = healthy[kind].host
    scripted = at(kind)
    scripted.runner.dies_before_recording = True
    scripted.die()
    assert ended(scripted, kind).state == TaskState.SUCCEEDED
    assert scripted.host.seen() == expected
    come_back(scripted, kind)


@KINDS
def test_a_run_is_sent_twice(at: Open, healthy: dict[str, Healthy], kind: str) -> None:
    """Beside the first, stopped after each of its steps, a second copy runs to its end."""
    expected = healthy[kind].host
    for number, step in enumerate(healthy[kind].steps):
        where = f"{kind}: a second run after {step.name!r}"
        scripted = at(kind)
        scripted.runner.faults[kind] = lambda run, now, _step, last=number, on=scripted: (
            again(on.runner, run) if now == last else None
        )
        scripted.work()
        scripted.sound(where)
        task = ended(scripted, kind)
        ending = (task.state, task.error.get("code", ""))
        # The tenant whom the second run let in uses the disks that the first run would wipe.
        entered = kind == TaskKind.BAREMETAL_PROVISION and any(
            later.module == "nvme_wipe" for later in healthy[kind].steps[number + 1 :]
        )
        refused = (TaskState.FAILED, "disk_in_use") if entered else (TaskState.SUCCEEDED, "")
        assert ending == refused, where
        assert scripted.host.seen() == expected, where
        come_back(scripted, where)


def again(runner: Runner, run: Run) -> How:
    """Do the step, and then all of the run from its beginning."""

    def how(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        result = do()
        for _ in runner.playing(run.spec):
            pass
        return result

    return how


@KINDS
def test_undone_twice_is_undone_once(at: Open, healthy: dict[str, Healthy], kind: str) -> None:
    for number, step in enumerate(healthy[kind].steps):
        where = f"{kind}: undone twice after {step.name!r}"
        scripted = at(kind)
        scripted.runner.faults[kind] = at_step(number, lambda: fail_after)
        scripted.work()
        twice = Twice(scripted.runner)
        for undo in UNDOING:
            scripted.runner.faults[undo] = twice
        come_back(scripted, where)
        assert twice.once == twice.again, where


@dataclass
class Twice:
    """When the run has done its last step, all of it is done again under the same fence."""

    runner: Runner
    once: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)

    def __call__(self, run: Run, _now: int, step: Step) -> How | None:
        # Giving the lease back is the end of every undoing.
        last = step.module in ("slice_lease", "baremetal_lease") and len(run.steps) > 1
        return self.repeated(run) if last else None

    def repeated(self, run: Run) -> How:
        def how(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            result = do()
            self.once = self.runner.host.seen()
            for _ in self.runner.playing(run.spec):
                pass
            self.again = self.runner.host.seen()
            return result

        return how


@KINDS
def test_the_undoing_fails_too(at: Open, healthy: dict[str, Healthy], kind: str) -> None:
    """At each of its steps in turn; the second time it is done."""
    steps = healthy[kind].steps
    undoing = 0
    for number, step in enumerate(steps):
        where = f"{kind}: not undone after {step.name!r}, at step {undoing}"
        scripted = at(kind)
        scripted.runner.faults[kind] = at_step(number, lambda: fail_after)
        scripted.work()
        for undo in UNDOING:
            scripted.runner.faults[undo] = at_step(undoing, lambda: fail_before)
        scripted.recover()
        scripted.sound(where)
        scripted.runner.faults.clear()
        come_back(scripted, where)
        undoing = (undoing + 1) % len(steps)


@KINDS
@pytest.mark.parametrize("how", [fail_before, fail_after, kill_before, kill_after])
@pytest.mark.long
def test_every_pair_of_steps(at: Open, healthy: dict[str, Healthy], kind: str, how: How) -> None:
    """A fault at one step, and then at each step of the task that undoes it."""
    undo = UNDOING[kind.startswith("baremetal.")]
    for number, step in enumerate(healthy[kind].steps):
        for second, undone in enumerate(healthy[undo].steps):
            where = f"{kind}: not undone after {step.name!r}, {how.__name__} at {undone.name!r}"
            scripted = at(kind)
            scripted.runner.faults[kind] = at_step(number, lambda: fail_after)
            scripted.work()
            scripted.runner.faults[undo] = at_step(second, lambda: how)
            try:
                scripted.recover()
            except Killed:
                scripted.restart()
            scripted.sound(where)
            scripted.runner.faults.clear()
            come_back(scripted, where)


@KINDS
@pytest.mark.parametrize("next_tenant", ["before", "after"])
def test_a_late_run_does_no_harm(
    at: Open, healthy: dict[str, Healthy], kind: str, next_tenant: str
) -> None:
    """It stands still before each step, counts as lost, and goes on when the slot is sold again."""
    for number, step in enumerate(healthy[kind].steps):
        where = f"{kind}: late at {step.name!r}, the next tenant comes {next_tenant}"
        scripted = at(kind)
        scripted.runner.faults[kind] = at_step(number, stop)
        scripted.work()
        (late,) = [run for run in scripted.runner.runs.values() if run.pending]
        scripted.deadlines_pass()
        scripted.sound(where)
        assert ended(scripted, kind).state == TaskState.LOST, where
        for _ in range(3):
            if not scripted.recover():
                break
        scripted.pristine(where)
        if next_tenant == "after":
            scripted.runner.go_on(late)
        scripted.reinstall()
        key = scripted.launch(everything=True)
        scripted.work()
        assert scripted.state(key) == "active", where
        if next_tenant == "before":
            scripted.runner.go_on(late)
        # The wait for a slice's guest knows no fence; giving back after it is refused.
        if kind.startswith("baremetal."):
            assert late.outcome and late.outcome.result, f"{where}: it does not say how it ended"
        scripted.sound(where)
        come_back(scripted, where)
