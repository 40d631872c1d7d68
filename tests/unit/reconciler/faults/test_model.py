"""Anything that can happen to a site, in any order, against a model of what is true.

The records, the workers and the ends of runs are the real ones; hosts are hearsay. After each step
the records say what the model says, `gpuaas check` finds nothing, no disk that is dirty is sold and
none is anybody's beside its owner. In the end an operator brings everything back, without SQL.

GPUAAS_MODEL=20000x80 sets how many stories of how many steps the long test tells.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reconciler.db import clock
from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.journal import advance
from reconciler.db.schema import Task
from reconciler.lifecycle import (
    baremetal,
    gate,
    invariants,
    recovery,
    recovery_cases,
    task_failures,
)
from reconciler.lifecycle import host as host_life
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import slots as slot_life
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, NodeState, TaskKind, TaskState
from reconciler.records import leasing, nodes, proofs, queue, slots
from reconciler.runs import collect
from reconciler.work import worker
from reconciler.work.loops import end_overdue
from tests.unit.reconciler.conftest import ADMIN, Database
from tests.unit.reconciler.faults import account
from tests.unit.reconciler.faults.ground import (
    FENCES,
    FREE,
    LIVE,
    SLOTS,
    STATES,
    UNCLEAN,
    Ground,
    pairs,
    written,
)
from tests.unit.reconciler.faults.hearsay import ENDS, Runs
from tests.unit.reconciler.faults.truth import (
    BLOCKED,
    BUILDING,
    IDLE,
    MACHINE,
    Run,
    Slot,
)
from tests.unit.reconciler.whole_machines import Machines

# A story costs a second of processor time: these take a minute and a half, 500 of them nine.
STORIES, STEPS = 80, 50
COVERED = ("CTRL-4", "I1", "I2", "I3", "I4", "I6", "I10", "I12", "I13", "I16")
OPEN = (TaskState.QUEUED, TaskState.WAITING, TaskState.RUNNING)
LOOKS = (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)
# One of as many as there are.
PICK = st.integers(0, 7)
NODE = st.sampled_from(("n1", "m1"))
EFFECT = st.sampled_from(("nothing", "done", "later"))


@pytest.fixture
def ground(
    database: Database, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Ground:
    made = Ground(database, template, tmp_path)
    monkeypatch.setattr(worker, "_site", lambda *_: None)
    monkeypatch.setattr(worker, "launch", made.launch)
    monkeypatch.setattr(collect, "observe", made.observe)
    return made


class Story(RuleBasedStateMachine):
    """One site and what happens to it."""

    ground: Ground

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.ground.database.restore(self.ground.kept)
        self.site, self.settings = self.ground.site, self.ground.settings
        self.truth = self.ground.truth()
        self.runs = Runs(self.truth, self.ground.documents)
        self.ground.runs = self.runs
        # By task, what this worker holds.
        self.held: dict[str, Task] = {}
        self.stopping = threading.Event()
        self.stopping.set()
        self.act = ADMIN.because("the model says so")
        self.wrote = (0, -1)

    # What people and tenants ask for.

    @rule(gpus=st.sampled_from((1, 1, 2, 3)))
    def launch(self, gpus: int) -> None:
        with transaction(self.engine) as conn:
            try:
                made = launching.allocate(conn, self.site.launch(gpus), ADMIN)
            except Problem as problem:
                assert problem.code == "no_capacity", problem
                assert max(self._sellable(conn).values(), default=0) < gpus
                return
            own = {row.slot_id: row.nvme_identity for row in made.claims}
        assert len(own) == gpus
        self.truth.promise(made.id, made.node_id, tuple(own.values()), tuple(own))

    @rule()
    def launch_whole(self) -> None:
        def ask(conn: sa.Connection) -> None:
            made = Machines(self.site).launch(conn)
            disks = baremetal.claim_of(conn, made.id).disks
            given = tuple(f"eui.{disk['nvme_eui']}" for disk in disks)
            assert not self.truth.hosts[made.node_id].sliced
            self.truth.promise(made.id, made.node_id, given, ())

        self._ask(ask, "no_capacity")

    @precondition(lambda self: self._tenants("active", "requested"))
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self._release(_one(self._tenants("active", "requested"), pick))

    @precondition(lambda self: self._tenants("requested", "provisioning", "failed", "releasing"))
    @rule(pick=PICK, absent=st.booleans())
    def force_cleanup(self, pick: int, absent: bool) -> None:
        open_ = self._tenants("requested", "provisioning", "failed", "releasing")
        self._force_cleanup(_one(open_, pick), absent)

    @precondition(lambda self: self._tenants("active", "releasing"))
    @rule(pick=PICK)
    def force_release(self, pick: int) -> None:
        key = _one(self._tenants("active", "releasing"), pick)
        if self._ask(lambda conn: recovery.force_release(conn, key, self.act), "node_reachable"):
            tenant = self.truth.tenants[key]
            for name in tenant.slots:
                self.truth.slots[name].where = BLOCKED
            if not tenant.slots:
                self.truth.hosts[tenant.node].unclean = key
            self.truth.end(key, "released")

    @precondition(lambda self: self._slots(BLOCKED))
    @rule(pick=PICK)
    def repair(self, pick: int) -> None:
        self._repair(_one(self._slots(BLOCKED), pick))

    @precondition(lambda self: self._tenants("requested", "provisioning", "failed", "releasing"))
    @rule(pick=PICK, leftovers=st.booleans())
    def recover(self, pick: int, leftovers: bool) -> None:
        """Open a recovery case, or get the open case."""
        open_ = self._tenants("requested", "provisioning", "failed", "releasing")
        key, act = _one(open_, pick), self.act
        self._ask(
            lambda conn: recovery_cases.open_case(conn, key, act, remove_leftovers=leftovers),
            "allocation_baremetal",
            "allocation_releasing",
        )

    @rule()
    def leader_plays_the_cases(self) -> None:
        """Each case that is due makes its next move, once."""
        with reading(self.engine) as conn:
            due = recovery_cases.due(conn)
        for case_id in due:
            with transaction(self.engine) as conn:
                case = recovery_cases.play(conn, case_id)
                statuses, states = pairs(conn, SLOTS), pairs(conn, STATES)
            if case is None:
                continue
            key = case.allocation_id
            if states[key] == "failed" and self.truth.tenants[key].state != "failed":
                self.truth.end(key, "failed")
            recovered = {name: statuses[name] for name in case.slot_ids if name in statuses}
            self._recovered(recovered, "cleanup", BLOCKED)

    @rule()
    def pauses_end(self) -> None:
        self._end_pauses()

    @precondition(lambda self: any(host.unclean for host in self.truth.hosts.values()))
    @rule(node=NODE)
    def clean_machine(self, node: str) -> None:
        self._ask(lambda conn: baremetal.clean(conn, node, ADMIN), "machine_clean", "node_in_use")

    @rule(pick=PICK, wanted=st.booleans())
    def switch(self, pick: int, wanted: bool) -> None:
        """Enable or disable a slot."""
        if not self.truth.slots:
            return
        name = _one(list(self.truth.slots), pick)
        self.truth.slots[name].wanted = wanted
        with transaction(self.engine) as conn:
            (slot_life.enable if wanted else slot_life.disable)(conn, name, ADMIN)

    @precondition(lambda self: self._slots(IDLE))
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        name = _one(self._slots(IDLE), pick)
        if self._ask(lambda conn: slot_life.withdraw(conn, name, self.act), "slot_in_use"):
            del self.truth.slots[name]

    @rule(node=NODE, pick=PICK)
    def approve(self, node: str, pick: int) -> None:
        """A disk is taken over, which wipes it, and a slot is made with it."""
        bundle = Bundle.of(
            self.ground.documents[node]["candidates"][FREE[pick % len(FREE)]]["bundle"]
        )
        if any(slot.disk == bundle.identity for slot in self.truth.slots.values()):
            return
        if self.truth.owner.get(bundle.identity) or self.truth.hosts[node].unclean:
            return

        def ask(conn: sa.Connection) -> str:
            proof = {"disk": bundle.identity, "method": "discard", "verified": True}
            proofs.record_transition(conn, node, proof, ADMIN)
            return str(slot_life.approve(conn, node, bundle, ADMIN).id)

        refusals = ("node_not_slice", "discovery_stale", "discovery_missing", "disk_not_found")
        if made := self._ask(ask, *refusals):
            self.truth.bytes_of[bundle.identity] = ""
            self.truth.slots[made] = Slot(node, bundle.identity)

    @rule(node=NODE, event=st.sampled_from((host_life.drain, host_life.maintain, host_life.resume)))
    def operate(self, node: str, event: Callable[..., Any]) -> None:
        self._ask(lambda conn: event(conn, node, ADMIN), "transition_refused", "node_in_use")

    @rule(node=NODE)
    def sell(self, node: str) -> None:
        refused = "scheduling_not_ready"
        self._ask(lambda conn: host_life.set_scheduling(conn, node, True, ADMIN), refused)

    @rule(node=NODE)
    def convert(self, node: str) -> None:
        host = self.truth.hosts[node]
        to = NodeMode.BAREMETAL if host.sliced else NodeMode.SLICE
        refusals = ("node_in_use", "transition_refused", "machine_not_clean")
        if self._ask(lambda conn: host_life.convert(conn, node, to, ADMIN), *refusals):
            host.sliced = False

    @rule(node=NODE, back=st.booleans())
    def conversion_ends(self, node: str, back: bool) -> None:
        """Well, or with everything as it was."""
        with reading(self.engine) as conn:
            mode = nodes.get(conn, node).mode
        host = self.truth.hosts[node]
        if not mode.startswith("converting"):
            return
        with transaction(self.engine) as conn:
            if back:
                advance(conn, "node_mode", node, "revert", ADMIN)
            elif mode == NodeMode.CONVERTING_TO_SLICE:
                found = self.ground.documents[node]["identity"] | {"boot_id": host.boot}
                host_life.bootstrapped(conn, node, ADMIN, identity=found)
                host.known = host.boot
            else:
                host_life.converted(conn, node, ADMIN)
        host.sliced = back != (mode == NodeMode.CONVERTING_TO_SLICE)

    @rule(node=NODE, kind=st.sampled_from(LOOKS))
    def look(self, node: str, kind: TaskKind) -> None:
        with transaction(self.engine) as conn:
            queue.enqueue(conn, queue.Enqueue(kind, node, "node", node), ADMIN)

    @rule(pick=PICK)
    def cancel_task(self, pick: int) -> None:
        with reading(self.engine) as conn:
            found = [task for task in queue.every(conn) if task.state in OPEN]
        if not found:
            return
        task = _one(sorted(found, key=lambda one: one.id), pick)
        ours = self._ours(task)
        with transaction(self.engine) as conn:
            task_failures.cancel(conn, task.id, ADMIN)
        if task.state != TaskState.RUNNING:
            self._dropped(task, ours, "before" if task.attempt <= 1 else "lost")

    # What workers and hosts do.

    @rule()
    def work(self) -> None:
        """Take the next task: begin its run, or attend to the one that somebody left."""
        with transaction(self.engine) as conn:
            leased = leasing.lease(conn, "worker")
        for task in leased:
            self.held[task.id] = task
            self._attend(task)

    @precondition(lambda self: self._going())
    @rule(pick=PICK, how=st.sampled_from(ENDS), effect=EFFECT)
    def run_ends(self, pick: int, how: str, effect: str) -> None:
        run = _one(self._going(), pick)
        self.runs.end(run, how, effect)
        if run.task in self.held:
            self._attend(self.held[run.task])

    @rule(steps=st.integers(1, 4))
    def all_goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.work()
            for run in self._going():
                self.runs.end(run, "ok", "done")
                if run.task in self.held:
                    self._attend(self.held[run.task])

    @precondition(lambda self: self._going())
    @rule(pick=PICK)
    def is_given_up(self, pick: int) -> None:
        """The task's deadline passes; its run goes on, and nobody can tell."""
        run = _one(self._going(), pick)
        with reading(self.engine) as conn:
            ours = self._ours(queue.get(conn, run.task))
        for _ in range(2):
            with transaction(self.engine) as conn:
                past = {"deadline_at": clock.now() - 1, "lease_expires_at": clock.now() - 1}
                late = sa.update(tables.tasks).where(tables.tasks.c.id == run.task)
                conn.execute(late.values(**past))
            end_overdue(self.engine, self.settings)
        with reading(self.engine) as conn:
            assert queue.get(conn, run.task).state == TaskState.LOST
        self.held.pop(run.task, None)
        run.told = "given up"
        account.ended(self.truth, run, "lost", ours)

    @precondition(lambda self: self._late())
    @rule(pick=PICK)
    def late_run_acts(self, pick: int) -> None:
        """What is given up wakes up; the truth itself says when that does harm."""
        run = _one(self._late(), pick)
        self.truth.act(run)
        run.acting = False

    @rule()
    def reconciler_is_killed(self) -> None:
        with transaction(self.engine) as conn:
            queue.abandon(conn, "worker")
        self.held.clear()

    @rule(node=NODE)
    def host_restarts(self, node: str) -> None:
        self.truth.restart(node)
        for run in self.runs.known.values():
            if run.node == node:
                run.acting = False

    @rule(node=NODE)
    def host_answers(self, node: str) -> None:
        with transaction(self.engine) as conn:
            host_life.record_answer(conn, node, ADMIN)

    @rule(node=NODE, broken=st.booleans())
    def host_drifts(self, node: str, broken: bool) -> None:
        """Parity will fail, or pass again."""
        self.truth.hosts[node].broken = broken

    @rule(node=NODE, pick=PICK, there=st.booleans())
    def disk_is_pulled(self, node: str, pick: int, there: bool) -> None:
        """Or put back; a discovery will tell."""
        disks = [self.ground.documents[node]["candidates"][one]["bundle"] for one in FREE]
        disk = f"eui.{_one(disks, pick)['nvme_eui']}"
        hidden = self.truth.hosts[node].hidden
        (hidden.discard if there else hidden.add)(disk)

    # What must hold after each of them.

    @invariant()
    def the_records_are_true(self) -> None:
        truth = self.truth
        with reading(self.engine) as conn:
            wrote = written(conn)
            # Where nothing was written since, the answer is the same, and it is the dear part.
            found = invariants.check(conn) if wrote != self.wrote else []
            self.wrote = wrote
            states = pairs(conn, STATES)
            sold = conn.execute(SLOTS).mappings().all()
            live = conn.execute(LIVE).all()
            unclean = pairs(conn, UNCLEAN)
        assert found == [], found
        assert states == {key: tenant.state for key, tenant in truth.tenants.items()}
        assert unclean == {name: host.unclean for name, host in truth.hosts.items()}
        assert {slot["id"] for slot in sold} == set(truth.slots)
        for row in sold:
            slot = truth.slots[row["id"]]
            idle = row["status"] in ("available", "disabled")
            assert (IDLE if idle else row["status"]) == slot.where, (row["id"], row["status"])
            if row["status"] == "available":
                assert truth.may_be_sold(slot) == "", row["id"]
            elif idle:
                whose = truth.bytes_of.get(slot.disk, "")
                there = truth.hosts[slot.node].unclean, truth.owner.get(slot.disk, "")
                assert whose in ("", *there), f"{row['id']} is at rest with {whose} on it"
        claimed = {(key, disk) for key, disk in live if disk}
        owned = {(key, disk) for disk, key in truth.owner.items() if key}
        assert {pair for pair in owned if truth.tenants[pair[0]].slots} == claimed
        for key, tenant in truth.tenants.items():
            if tenant.state == "active":
                theirs = {truth.bytes_of.get(disk) for disk in tenant.disks}
                assert theirs <= {key}, f"{key} has {theirs}"

    def teardown(self) -> None:
        """An operator asks for what an operator may ask for, and all of it comes back."""
        if sys.exc_info()[0] is not None:
            return  # the story has failed already
        for host in self.truth.hosts.values():
            host.broken = False
            host.hidden.clear()
        for _ in range(4):
            self._bring_back()
        # What was given up long ago wakes up now, and is let do no harm.
        for run in self._late():
            self.truth.act(run)
        self.the_records_are_true()
        truth = self.truth
        assert {tenant.state for tenant in truth.tenants.values()} <= {"released", "failed"}
        assert not any(truth.bytes_of.values()), truth.bytes_of
        with reading(self.engine) as conn:
            for row in conn.execute(SLOTS).mappings():
                sliced = truth.hosts[truth.slots[row["id"]].node].sliced
                told = gate.gate(conn, row["id"])
                assert row["status"] == ("available" if sliced else "disabled"), told

    def _bring_back(self) -> None:
        for node in self.truth.hosts:
            self.host_answers(node)
            self.operate(node, host_life.resume)
            self.conversion_ends(node, back=True)
            for kind in LOOKS:
                self.look(node, kind)
            self.clean_machine(node)
        for key in self._tenants("active"):
            self._release(key)
        for key in self._tenants("failed", "releasing"):
            self._force_cleanup(key, True)
        for name in self._slots(BLOCKED):
            self._repair(name)
        self.reconciler_is_killed()
        for _ in range(30):
            with reading(self.engine) as conn:
                if not any(task.state in OPEN for task in queue.every(conn)):
                    break
            self._end_pauses()
            self.all_goes_well(1)
        for pick in range(len(self.truth.slots)):
            self.switch(pick, True)

    # How it is done.

    def _end_pauses(self) -> None:
        """Make every retry due. A request that meets a waiting retry gets that retry, so a look
        that was lost comes after its pause (30 s, then 120 s) and not sooner.
        """
        with transaction(self.engine) as conn:
            conn.execute(sa.update(tables.tasks).values(not_before=None))

    def _ask(self, ask: Callable[[sa.Connection], Any], *refusals: str) -> Any:
        """The answer; None when it was refused, for one of these reasons."""
        try:
            with transaction(self.engine) as conn:
                return ask(conn)
        except Problem as problem:
            assert problem.code in refusals, problem
            return None

    def _attend(self, task: Task) -> None:
        run_id = queue.run_id(task)
        ours = self._ours(task)
        try:
            worker.attend(self.engine, self.settings, task, self.stopping)
        except Problem as problem:
            assert problem.code == "stale_lease", problem
            self.held.pop(task.id, None)
            return
        run = self.runs.known.get(run_id)
        with reading(self.engine) as conn:
            state = queue.get(conn, task.id).state
        if state == TaskState.RUNNING:
            assert run is not None
            account.begun(self.truth, run)
            return
        self.held.pop(task.id, None)
        if run is None:
            self._dropped(task, ours, "before")
        elif state != TaskState.WAITING:
            account.ended(self.truth, run, run.told, ours)

    def _dropped(self, task: Task, ours: list[str], told: str) -> None:
        """A task has ended without a run."""
        kind, key = task.kind, task.allocation_id or ""
        if kind in BUILDING:
            account.built(self.truth, key, told)
        elif kind not in LOOKS:
            none = Run("", task.id, kind, task.node_id, key, (), (), {}, "", {})
            account.ended(self.truth, none, "lost", ours)

    def _ours(self, task: Task) -> list[str]:
        """The fences of a task that nobody has raised since it was given them."""
        given = {slot["slot_id"]: slot["fence"] for slot in task.parameters.get("slots", ())}
        with reading(self.engine) as conn:
            known = pairs(conn, FENCES)
            machine = nodes.get(conn, task.node_id).fence
        ours = [key for key, fence in given.items() if known[key] == fence]
        return [*ours, *([MACHINE] if task.parameters.get("fence") == machine else [])]

    def _release(self, key: str) -> None:
        refused = "allocation_not_releasable"
        if not self._ask(lambda conn: launching.release(conn, key, ADMIN), refused):
            return
        tenant, at_once = self.truth.tenants[key], self.truth.tenants[key].state == "requested"
        if at_once:
            self.truth.end(key, "released")
        else:
            tenant.state = "releasing"
        for name in tenant.slots:
            self.truth.slots[name].where = IDLE if at_once else "releasing"

    def _repair(self, name: str) -> None:
        if self._ask(lambda conn: recovery.repair(conn, name, self.act), "claim_live"):
            self.truth.slots[name].where = "cleanup"

    def _force_cleanup(self, key: str, absent: bool) -> None:
        answer = self._ask(
            lambda conn: recovery.force_cleanup(
                conn, key, self.act, runtime_verified_absent=absent
            ),
            "allocation_baremetal",
            "allocation_releasing",
            "node_unreachable",
            "node_unhealthy",
        )
        if answer is None:
            return
        if self.truth.tenants[key].state != "failed":
            self.truth.end(key, "failed")
        statuses = {row["slot_id"]: row["status"] for row in answer["slots"]}
        self._recovered(statuses, "cleanup" if absent else BLOCKED)

    def _recovered(self, statuses: dict[str, str], *allowed: str) -> None:
        """Recovery has moved slots. The invariant checks the disks of those that are idle now."""
        for slot_id, status in statuses.items():
            if slot_id not in self.truth.slots:
                continue  # withdrawn since
            slot, idle = self.truth.slots[slot_id], status in ("available", "disabled")
            assert idle or status in (*allowed, slot.where)
            slot.where = IDLE if idle else status

    def _sellable(self, conn: sa.Connection) -> dict[str, int]:
        """By node that may be sold from now, how many slots are available."""
        count: dict[str, int] = {}
        for node in nodes.every(conn, state=NodeState.READY, mode=NodeMode.SLICE):
            if node.slice_scheduling:
                there = [slot.status for slot in slots.of_node(conn, node.id)]
                count[node.id] = there.count("available")
        return count

    def _tenants(self, *states: str) -> list[str]:
        return [key for key, one in self.truth.tenants.items() if one.state in states]

    def _slots(self, where: str) -> list[str]:
        return [name for name, slot in self.truth.slots.items() if slot.where == where]

    def _going(self) -> list[Run]:
        return [run for run in self.runs.known.values() if not run.told]

    def _late(self) -> list[Run]:
        return [run for run in self.runs.known.values() if run.told and run.acting]


def _one(found: list[Any], pick: int) -> Any:
    return found[pick % len(found)]


def _tell(ground: Ground, stories: int, steps: int, *, derandomize: bool) -> None:
    told = settings(
        max_examples=stories,
        stateful_step_count=steps,
        derandomize=derandomize,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(type("Told", (Story,), {"ground": ground}), settings=told)


@pytest.mark.covers(*COVERED)
def test_any_story_of_a_site_is_one_that_the_model_tells(ground: Ground) -> None:
    """The same stories every time."""
    _tell(ground, STORIES, STEPS, derandomize=True)


@pytest.mark.covers(*COVERED)
@pytest.mark.long
def test_other_stories_every_time(ground: Ground) -> None:
    """One that fails is shown with what repeats it."""
    stories, _, steps = os.environ.get("GPUAAS_MODEL", "500x50").partition("x")
    _tell(ground, int(stories), int(steps), derandomize=False)
