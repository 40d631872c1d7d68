"""Model-based test of a site: random events in any order, compared with an independent model.

The records, the workers and the ends of runs are real; hosts and their runs are fake. After each
step the records agree with the model, `gpuaas check` finds nothing, no dirty disk is sold and no
disk belongs to two tenants. In the end an operator brings everything back, without SQL.

GPUAAS_MODEL=20000x80 sets the number of stories and their steps in the long test.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
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
from reconciler.model.states import NodeMode, NodeState, SlotState, TaskKind, TaskState
from reconciler.records import leasing, nodes, proofs, queue, slots
from reconciler.runs import collect
from reconciler.work import worker
from reconciler.work.loops import end_overdue
from tests.unit.reconciler.conftest import ADMIN, Database
from tests.unit.reconciler.faults import expected_effects
from tests.unit.reconciler.faults.fake_runs import ENDS, FakeRuns
from tests.unit.reconciler.faults.prepared_site import (
    FENCES,
    FREE,
    LIVE,
    SLOTS,
    STATES,
    UNCLEAN,
    PreparedSite,
    pairs,
    written,
)
from tests.unit.reconciler.faults.site_model import BLOCKED, BUILDING, IDLE, MACHINE, Run, Slot
from tests.unit.reconciler.whole_machines import Machines

# A story takes a second of processor time: 500 stories take 9 minutes.
STORIES, STEPS = 24, 50
COVERED = ("CTRL-4", "I1", "I2", "I3", "I4", "I6", "I10", "I12", "I13", "I16")
OPEN = (TaskState.QUEUED, TaskState.WAITING, TaskState.RUNNING)
LOOKS = (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY)
# The index of a candidate, modulo their number.
PICK = st.integers(0, 7)
NODE = st.sampled_from(("n1", "m1"))
EFFECT = st.sampled_from(("nothing", "done", "later"))


@pytest.fixture
def prepared(
    database: Database, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PreparedSite:
    made = PreparedSite(database, template, tmp_path)
    monkeypatch.setattr(worker, "_site", lambda *_: None)
    monkeypatch.setattr(worker, "launch", made.launch)
    monkeypatch.setattr(collect, "observe", made.observe)
    return made


class Story(RuleBasedStateMachine):
    """A site and a sequence of events."""

    prepared: PreparedSite

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.prepared.database.restore(self.prepared.kept)
        self.site, self.settings = self.prepared.site, self.prepared.settings
        self.model = self.prepared.model()
        self.runs = FakeRuns(self.model, self.prepared.documents)
        self.prepared.runs = self.runs
        # The tasks that this worker holds, by id.
        self.held: dict[str, Task] = {}
        self.stopping = threading.Event()
        self.stopping.set()
        self.act = ADMIN.because("the model says so")
        self.wrote = (0, -1)

    # Requests of people and tenants.

    @rule(gpus=st.sampled_from((1, 1, 2, 3)))
    def launch(self, gpus: int) -> None:
        with transaction(self.engine) as conn:
            try:
                made = launching.allocate(conn, self.site.launch(gpus), ADMIN)
            except Problem as problem:
                assert problem.code == "no_capacity", problem
                assert max(self._sellable(conn).values(), default=0) < gpus
                return
            disks = {row.slot_id: row.nvme_identity for row in made.claims}
        assert len(disks) == gpus
        self.model.promise(made.id, made.node_id, tuple(disks.values()), tuple(disks))

    @rule()
    def launch_whole(self) -> None:
        def ask(conn: sa.Connection) -> None:
            made = Machines(self.site).launch(conn)
            disks = baremetal.claim_of(conn, made.id).disks
            given = tuple(f"eui.{disk['nvme_eui']}" for disk in disks)
            assert not self.model.hosts[made.node_id].sliced
            self.model.promise(made.id, made.node_id, given, ())

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
            tenant = self.model.tenants[key]
            for name in tenant.slots:
                self.model.slots[name].where = BLOCKED
            if not tenant.slots:
                self.model.hosts[tenant.node].unclean = key
            self.model.end(key, "released")

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
            if states[key] == "failed" and self.model.tenants[key].state != "failed":
                self.model.end(key, "failed")
            recovered = {name: statuses[name] for name in case.slot_ids if name in statuses}
            self._recovered(recovered, "cleanup", BLOCKED)

    @rule()
    def pauses_end(self) -> None:
        self._end_pauses()

    @precondition(lambda self: any(host.unclean for host in self.model.hosts.values()))
    @rule(node=NODE)
    def clean_machine(self, node: str) -> None:
        self._ask(lambda conn: baremetal.clean(conn, node, ADMIN), "machine_clean", "node_in_use")

    @rule(pick=PICK, on_sale=st.booleans())
    def switch(self, pick: int, on_sale: bool) -> None:
        """Enable or disable a slot."""
        if not self.model.slots:
            return
        name = _one(list(self.model.slots), pick)
        self.model.slots[name].wanted = on_sale
        with transaction(self.engine) as conn:
            (slot_life.enable if on_sale else slot_life.disable)(conn, name, ADMIN)

    @precondition(lambda self: self._slots(IDLE))
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        name = _one(self._slots(IDLE), pick)
        if self._ask(lambda conn: slot_life.withdraw(conn, name, self.act), "slot_in_use"):
            del self.model.slots[name]

    @rule(node=NODE, pick=PICK)
    def approve(self, node: str, pick: int) -> None:
        """A disk is taken over, which wipes it, and a slot is made with it."""
        bundle = Bundle.of(
            self.prepared.documents[node]["candidates"][FREE[pick % len(FREE)]]["bundle"]
        )
        if any(slot.disk == bundle.identity for slot in self.model.slots.values()):
            return
        if self.model.owner.get(bundle.identity) or self.model.hosts[node].unclean:
            return

        def ask(conn: sa.Connection) -> str:
            proof = {"disk": bundle.identity, "method": "discard", "verified": True}
            proofs.record_transition(conn, node, proof, ADMIN)
            return str(slot_life.approve(conn, node, bundle, ADMIN).id)

        refusals = ("node_not_slice", "discovery_stale", "discovery_missing", "disk_not_found")
        if made := self._ask(ask, *refusals):
            self.model.bytes_of[bundle.identity] = ""
            self.model.slots[made] = Slot(node, bundle.identity)

    @rule(node=NODE, event=st.sampled_from((host_life.drain, host_life.maintain, host_life.resume)))
    def operate(self, node: str, event: Callable[..., Any]) -> None:
        self._ask(lambda conn: event(conn, node, ADMIN), "transition_refused", "node_in_use")

    @rule(node=NODE)
    def sell(self, node: str) -> None:
        refused = "scheduling_not_ready"
        self._ask(lambda conn: host_life.set_scheduling(conn, node, True, ADMIN), refused)

    @rule(node=NODE)
    def convert(self, node: str) -> None:
        host = self.model.hosts[node]
        to = NodeMode.BAREMETAL if host.sliced else NodeMode.SLICE
        refusals = ("node_in_use", "transition_refused", "machine_not_clean", "reinstall_required")
        if self._ask(lambda conn: host_life.convert(conn, node, to, ADMIN), *refusals):
            host.sliced = False

    @rule(node=NODE)
    def conversion_ends(self, node: str) -> None:
        with reading(self.engine) as conn:
            mode = nodes.get(conn, node).mode
        host = self.model.hosts[node]
        if not mode.startswith("converting"):
            return
        with transaction(self.engine) as conn:
            if mode == NodeMode.CONVERTING_TO_SLICE:
                identity = self.prepared.documents[node]["identity"] | {"boot_id": host.boot}
                host_life.bootstrapped(conn, node, ADMIN, identity=identity)
                host.recorded = host.boot
            else:
                host_life.converted(conn, node, ADMIN)
        host.sliced = mode == NodeMode.CONVERTING_TO_SLICE

    @rule(node=NODE, kind=st.sampled_from(LOOKS))
    def look(self, node: str, kind: TaskKind) -> None:
        with transaction(self.engine) as conn:
            queue.enqueue(conn, queue.Enqueue(kind, node, "node", node), ADMIN)

    @rule(pick=PICK)
    def cancel_task(self, pick: int) -> None:
        with reading(self.engine) as conn:
            open_tasks = [task for task in queue.every(conn) if task.state in OPEN]
        if not open_tasks:
            return
        task = _one(sorted(open_tasks, key=lambda task: task.id), pick)
        ours = self._ours(task)
        with transaction(self.engine) as conn:
            task_failures.cancel(conn, task.id, ADMIN)
        if task.state != TaskState.RUNNING:
            self._dropped(task, ours, "before" if task.attempt <= 1 else "lost")

    # Events of workers and hosts.

    @rule()
    def work(self) -> None:
        """Take the next task: begin its run, or attend to an abandoned run."""
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
    def run_is_given_up(self, pick: int) -> None:
        """The deadline of the task passes, and its run goes on unobserved."""
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
        run.reported = "given up"
        expected_effects.ended(self.model, run, "lost", ours)

    @precondition(lambda self: self._late())
    @rule(pick=PICK)
    def late_run_acts(self, pick: int) -> None:
        """A run that was given up has its late effect; the model asserts that it does no harm."""
        run = _one(self._late(), pick)
        self.model.act(run)
        run.acting = False

    @rule()
    def reconciler_is_killed(self) -> None:
        with transaction(self.engine) as conn:
            queue.abandon(conn, "worker")
        self.held.clear()

    @rule(node=NODE)
    def host_restarts(self, node: str) -> None:
        self.model.restart(node)
        for run in self.runs.by_id.values():
            if run.node == node:
                run.acting = False

    @rule(node=NODE)
    def host_answers(self, node: str) -> None:
        with transaction(self.engine) as conn:
            host_life.record_answer(conn, node, ADMIN)

    @rule(node=NODE, broken=st.booleans())
    def host_drifts(self, node: str, broken: bool) -> None:
        """Parity will fail, or pass again."""
        self.model.hosts[node].broken = broken

    @rule(node=NODE, pick=PICK, there=st.booleans())
    def disk_is_pulled(self, node: str, pick: int, there: bool) -> None:
        """A disk is pulled or put back; the next discovery shows it."""
        disks = [self.prepared.documents[node]["candidates"][slot]["bundle"] for slot in FREE]
        disk = f"eui.{_one(disks, pick)['nvme_eui']}"
        hidden = self.model.hosts[node].hidden
        (hidden.discard if there else hidden.add)(disk)

    # Invariants after each event.

    @invariant()
    def records_agree_with_model(self) -> None:
        model = self.model
        with reading(self.engine) as conn:
            wrote = written(conn)
            # Skip this expensive check when nothing was written since the last check.
            violations = invariants.check(conn) if wrote != self.wrote else []
            self.wrote = wrote
            states = pairs(conn, STATES)
            sold = conn.execute(SLOTS).mappings().all()
            live = conn.execute(LIVE).all()
            unclean = pairs(conn, UNCLEAN)
        assert violations == [], violations
        assert states == {key: tenant.state for key, tenant in model.tenants.items()}
        assert unclean == {name: host.unclean for name, host in model.hosts.items()}
        assert {slot["id"] for slot in sold} == set(model.slots)
        for row in sold:
            slot = model.slots[row["id"]]
            idle = row["status"] in ("available", "disabled")
            assert (IDLE if idle else row["status"]) == slot.where, (row["id"], row["status"])
            if row["status"] == "available":
                assert model.may_be_sold(slot) == "", row["id"]
            elif idle:
                whose = model.bytes_of.get(slot.disk, "")
                there = model.hosts[slot.node].unclean, model.owner.get(slot.disk, "")
                assert whose in ("", *there), f"{row['id']} is at rest with {whose} on it"
        claimed = {(key, disk) for key, disk in live if disk}
        owned = {(key, disk) for disk, key in model.owner.items() if key}
        assert {pair for pair in owned if model.tenants[pair[0]].slots} == claimed
        for key, tenant in model.tenants.items():
            if tenant.state == "active":
                theirs = {model.bytes_of.get(disk) for disk in tenant.disks}
                assert theirs <= {key}, f"{key} has {theirs}"

    def teardown(self) -> None:
        """An operator brings everything back with ordinary requests."""
        if sys.exc_info()[0] is not None:
            return  # The story has already failed.
        for host in self.model.hosts.values():
            host.broken = False
            host.hidden.clear()
        for _ in range(4):
            self._bring_back()
        # Runs that were given up act now. They must do no harm.
        for run in self._late():
            self.model.act(run)
        self.records_agree_with_model()
        model = self.model
        assert {tenant.state for tenant in model.tenants.values()} <= {"released", "failed"}
        assert not any(model.bytes_of.values()), model.bytes_of
        with reading(self.engine) as conn:
            for row in conn.execute(SLOTS).mappings():
                sliced = model.hosts[model.slots[row["id"]].node].sliced
                blockers = gate.gate(conn, row["id"])
                assert row["status"] == ("available" if sliced else "disabled"), blockers

    def _bring_back(self) -> None:
        for node in self.model.hosts:
            self.host_answers(node)
            self.operate(node, host_life.resume)
            self.conversion_ends(node)
            self._take_over(node)
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
        for pick in range(len(self.model.slots)):
            self.switch(pick, True)

    # Helpers.

    def _take_over(self, node: str) -> None:
        """Wipe the disks whose proofs a conversion has ended."""
        with transaction(self.engine) as conn:
            for slot in slots.of_node(conn, node):
                codes = {blocker.code for blocker in gate.gate(conn, slot.id)}
                if slot.status != SlotState.DISABLED or "proof_missing" not in codes:
                    continue
                if not self.model.bytes_of.get(slot.nvme_identity):
                    proof = {"disk": slot.nvme_identity, "method": "discard", "verified": True}
                    proofs.record_transition(conn, node, proof, ADMIN)

    def _end_pauses(self) -> None:
        """Make every retry due. A request that meets a waiting retry gets that retry, so a look
        that was lost comes after its pause (30 s, then 120 s) and not sooner.
        """
        with transaction(self.engine) as conn:
            conn.execute(sa.update(tables.tasks).values(not_before=None))

    def _ask(self, ask: Callable[[sa.Connection], Any], *refusals: str) -> Any:
        """The result; None when the request was refused with one of these codes."""
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
        run = self.runs.by_id.get(run_id)
        with reading(self.engine) as conn:
            state = queue.get(conn, task.id).state
        if state == TaskState.RUNNING:
            assert run is not None
            expected_effects.begun(self.model, run)
            return
        self.held.pop(task.id, None)
        if run is None:
            self._dropped(task, ours, "before")
        elif state != TaskState.WAITING:
            expected_effects.ended(self.model, run, run.reported, ours)

    def _dropped(self, task: Task, ours: list[str], reported: str) -> None:
        """A task has ended without a run."""
        kind, key = task.kind, task.allocation_id or ""
        if kind in BUILDING:
            expected_effects.built(self.model, key, reported)
        elif kind not in LOOKS:
            none = Run("", task.id, kind, task.node_id, key, (), (), {}, "", {})
            expected_effects.ended(self.model, none, "lost", ours)

    def _ours(self, task: Task) -> list[str]:
        """The fences of the task that were not raised since."""
        given = {slot["slot_id"]: slot["fence"] for slot in task.parameters.get("slots", ())}
        with reading(self.engine) as conn:
            fences = pairs(conn, FENCES)
            machine = nodes.get(conn, task.node_id).fence
        ours = [key for key, fence in given.items() if fences[key] == fence]
        return [*ours, *([MACHINE] if task.parameters.get("fence") == machine else [])]

    def _release(self, key: str) -> None:
        refused = "allocation_not_releasable"
        if not self._ask(lambda conn: launching.release(conn, key, ADMIN), refused):
            return
        tenant, at_once = self.model.tenants[key], self.model.tenants[key].state == "requested"
        if at_once:
            self.model.end(key, "released")
        else:
            tenant.state = "releasing"
        for name in tenant.slots:
            self.model.slots[name].where = IDLE if at_once else "releasing"

    def _repair(self, name: str) -> None:
        if self._ask(lambda conn: recovery.repair(conn, name, self.act), "claim_live"):
            self.model.slots[name].where = "cleanup"

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
        if self.model.tenants[key].state != "failed":
            self.model.end(key, "failed")
        statuses = {row["slot_id"]: row["status"] for row in answer["slots"]}
        self._recovered(statuses, "cleanup" if absent else BLOCKED)

    def _recovered(self, statuses: dict[str, str], *allowed: str) -> None:
        """Recovery has moved slots. The invariant checks the disks of those that are idle now."""
        for slot_id, status in statuses.items():
            if slot_id not in self.model.slots:
                continue  # withdrawn since
            slot, idle = self.model.slots[slot_id], status in ("available", "disabled")
            assert idle or status in (*allowed, slot.where)
            slot.where = IDLE if idle else status

    def _sellable(self, conn: sa.Connection) -> dict[str, int]:
        """The most available slots in one NUMA node of each node that sells slices."""
        count: dict[str, int] = {}
        for node in nodes.every(conn, state=NodeState.READY, mode=NodeMode.SLICE):
            if node.slice_scheduling:
                there = slots.of_node(conn, node.id)
                free = Counter(slot.numa_node for slot in there if slot.status == "available")
                count[node.id] = max(free.values(), default=0)
        return count

    def _tenants(self, *states: str) -> list[str]:
        return [key for key, tenant in self.model.tenants.items() if tenant.state in states]

    def _slots(self, where: str) -> list[str]:
        return [name for name, slot in self.model.slots.items() if slot.where == where]

    def _going(self) -> list[Run]:
        return [run for run in self.runs.by_id.values() if not run.reported]

    def _late(self) -> list[Run]:
        return [run for run in self.runs.by_id.values() if run.reported and run.acting]


def _one(items: list[Any], pick: int) -> Any:
    return items[pick % len(items)]


def _play_stories(prepared: PreparedSite, stories: int, steps: int, *, derandomize: bool) -> None:
    hypothesis_settings = settings(
        max_examples=stories,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(
        type("PlayedStory", (Story,), {"prepared": prepared}), settings=hypothesis_settings
    )


@pytest.mark.covers(*COVERED)
def test_any_story_of_a_site_is_one_that_the_model_tells(prepared: PreparedSite) -> None:
    """The same stories every time."""
    _play_stories(prepared, STORIES, STEPS, derandomize=True)


@pytest.mark.covers(*COVERED)
@pytest.mark.long
def test_other_stories_every_time(prepared: PreparedSite) -> None:
    """A failure prints how to repeat its story."""
    stories, _, steps = os.environ.get("GPUAAS_MODEL", "500x50").partition("x")
    _play_stories(prepared, int(stories), int(steps), derandomize=False)
