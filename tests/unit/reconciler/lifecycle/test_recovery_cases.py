"""Recovery cases over real records: killed leaders, two at once, silent hosts, failed wipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal, leader
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import RecoveryCase
from reconciler.lifecycle import (
    host,
    invariants,
    launch,
    recovery,
    recovery_cases,
    recovery_policy,
    restore,
    slices,
)
from reconciler.lifecycle import slots as slot_life
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.recovery import Move, Policy
from reconciler.model.states import ProofKind, TaskKind, TaskState
from reconciler.records import allocations, leasing, nodes, proofs, queue, reports, slots
from reconciler.records import recovery_cases as case_records
from reconciler.records.claims import held_slots, of_allocation
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds.slices import absence_variables
from reconciler.work.loops import end_overdue, play_recovery_cases, recover_blocked
from tests.unit.reconciler.conftest import ADMIN, Site

pytestmark = pytest.mark.covers("CTRL-7", "I12", "I13")

BOB = Act("admin:bob", "second look", "corr-2", role="platform-admin")
ERROR = {"code": "command_failed", "found": "I/O error"}
LOOK, WIPE = TaskKind.SLICE_ABSENCE_VERIFY, TaskKind.SLICE_WIPE


class Killed(Exception):
    """The leader ends here, before its transaction is committed."""


class Story:
    """One recovery at a time, with the host's part played by hand. key: the failed allocation,
    made when there is none.
    """

    def __init__(self, site: Site, key: str = "") -> None:
        self.site = site
        self.key = key or self.do(partial(site.failed, error_code="domain_failed"))

    def do(self, work: Callable[[sa.Connection], Any]) -> Any:
        return retrying(self.site.engine, work)

    def open(self, act: Act = ADMIN) -> str:
        case = self.do(lambda conn: recovery_cases.open_case(conn, self.key, act))
        return str(case.id)

    def policy(self, **values: Any) -> None:
        self.do(lambda conn: recovery_policy.write(conn, Policy(**values), ADMIN))

    def play(self) -> RecoveryCase:
        """Run a look of the leader; returns the case."""
        play_recovery_cases(self.site.engine, Settings())
        return self.case()

    def case(self) -> RecoveryCase:
        with reading(self.site.engine) as conn:
            return case_records.latest(conn, self.key)

    def waits_for(self) -> dict[str, Any]:
        with reading(self.site.engine) as conn:
            case = case_records.latest(conn, self.key)
            return recovery_cases.waits_for(conn, case) or {}

    def answer(self, *, absent: bool = True) -> None:
        """The host reports whether anything is left."""

        def work(conn: sa.Connection) -> None:
            task = self.site.finish(conn, LOOK)
            times = {"task_id": task.id, "observed_at": task.started_at}
            report = {"absent": absent, "checks": {}}
            reports.record_absence(conn, task.allocation_id, report, ADMIN, **times)

        self.do(work)

    def wipe(self, *, fails: bool = False) -> None:
        def work(conn: sa.Connection) -> None:
            if fails:
                self.site.finish(conn, WIPE, TaskState.FAILED)
                slot_ids = [slot.id for slot in held_slots(conn, self.key)]
                assert slices.cleanup_failed(conn, slot_ids, ADMIN, step="nvme_wipe", error=ERROR)
                return
            self.site.finish(conn, WIPE)
            given, absence = self.site.proofs(conn, self.key), {"absent": True}
            assert slices.cleanup_succeeded(conn, self.key, ADMIN, proofs=given, absence=absence)

        self.do(work)

    def steps(self) -> list[str]:
        with reading(self.site.engine) as conn:
            case = case_records.latest(conn, self.key)
            return [step["step"] for step in case_records.steps(conn, case.id)]

    def tasks(self, kind: TaskKind) -> int:
        return len(self.do(lambda conn: queue.every(conn, kind=kind)))

    def audited(self, action: str) -> list[Any]:
        entries: list[Any] = self.do(lambda conn: journal.audit_rows(conn, action=action))
        return entries

    def keep(self, act: Act = BOB, *, absent: bool = False) -> None:
        """A person's word about the slots."""
        self.do(
            lambda conn: recovery.force_cleanup(conn, self.key, act, runtime_verified_absent=absent)
        )

    def statuses(self) -> list[str]:
        by_slot: list[str] = self.do(self.site.statuses)
        return by_slot


@pytest.fixture
def story(sold: Site) -> Iterator[Story]:
    """At the end nothing that must always hold is broken."""
    yield Story(sold)
    with reading(sold.engine) as conn:
        assert invariants.check(conn) == []


def whole_way(story: Story, before_move: Callable[[], None], *, absent: bool) -> None:
    """From the opened case to its end."""
    before_move()
    assert story.play().state == "verifying"
    story.answer(absent=absent)
    before_move()
    assert story.play().state == "cleaning"
    story.wipe()
    before_move()
    if not absent:
        assert story.play().state == "confirming"
        story.answer()
        before_move()
    assert story.play().state == "recovered"


@pytest.mark.parametrize("absent", [True, False])
def test_a_leader_that_is_killed_in_any_move_does_nothing_twice(story: Story, absent: bool) -> None:
    case_id = story.open()
    killed = []

    def dies() -> None:
        before = story.case()
        with pytest.raises(Killed), transaction(story.site.engine) as conn:
            assert recovery_cases.play(conn, case_id) is not None
            raise Killed
        assert story.case() == before
        killed.append(before.state)

    whole_way(story, dies, absent=absent)
    looks = 1 if absent else 2
    assert killed == ["opened", "verifying", "cleaning", "confirming"][: len(killed)]
    assert (len(killed), story.tasks(LOOK), story.tasks(WIPE)) == (looks + 2, looks, 1)
    (forced,) = story.audited(recovery.FORCE_CLEANUP)
    assert forced.detail["runtime_verified_absent"] is absent
    assert (forced.actor, forced.reason, forced.correlation_id) == ("admin:alice", "test", "corr-1")
    assert story.statuses() == ["available", "available"]
    case = story.case()
    assert (len(case.proof_ids), len(case.slot_ids)) == (1, 1)
    after = [] if absent else ["runtime_absence_after"]
    middle = ["force_cleanup"] if absent else ["force_cleanup", "repair"]
    assert story.steps() == [
        "allocation",
        "inventory",
        "runtime_absence",
        "disk_evidence",
        *middle,
        *after,
        "inventory_after",
        "disk_evidence_after",
        "audit",
    ]
    assert story.do(recovery_cases.due) == []
    assert story.do(lambda conn: recovery_cases.play(conn, case_id)) is None


@pytest.mark.covers("I9")
def test_an_old_leader_moves_nothing(story: Story) -> None:
    story.open()
    with transaction(story.site.engine) as conn:
        term = leader.campaign(conn, leader.LOOPS, "old", 30)
        assert term is not None
        conn.execute(sa.update(tables.leaders).values(expires_at=clock.now() - 1))
        assert leader.campaign(conn, leader.LOOPS, "new", 30) is not None
    with pytest.raises(leader.Deposed):
        play_recovery_cases(leader.led_by(story.site.engine, term), Settings())
    assert (story.case().state, story.tasks(LOOK)) == ("opened", 0)


def two_at_once(story: Story) -> None:
    """Concurrent commands open a single case, and concurrent leaders queue a task once."""
    with ThreadPoolExecutor(4) as pool:
        cases = set(pool.map(story.open, (ADMIN, BOB, ADMIN, BOB)))
    assert cases == {story.case().id}
    assert len(story.audited(recovery_cases.OPENED)) == 1
    play = partial(recovery_cases.play, case_id=story.case().id)
    for state, kind in (("verifying", LOOK), ("cleaning", WIPE)):
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda _: story.do(play), range(4)))
        assert [row.state for row in done if row is not None] == [state]
        assert story.tasks(kind) == 1
        if kind == LOOK:
            story.answer()
    story.wipe()
    assert story.play().state == "recovered"


def policy_and_person_at_once(story: Story) -> None:
    """In either order there is a single case, and the person's request counts."""
    story.policy(enabled=True)

    def by_policy() -> None:
        recover_blocked(story.site.engine, Settings())

    with ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(by_policy), pool.submit(story.open, BOB)):
            done.result()
    with reading(story.site.engine) as conn:
        (case,) = case_records.every_open(conn)
    assert (case.requested_by, case.remove_leftovers) == ("admin:bob", True)
    whole_way(story, lambda: None, absent=False)


def refused_by_the_schema(story: Story) -> None:
    """A second open case of an allocation, by any writer."""
    story.open()
    with transaction(story.site.engine) as conn:
        row = conn.execute(sa.select(tables.recovery_cases)).mappings().one()
        with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
            conn.execute(sa.insert(tables.recovery_cases).values({**row, "id": "another"}))
        ended = {**row, "id": "another", "state": "failed"}
        with conn.begin_nested() as ending:
            conn.execute(sa.insert(tables.recovery_cases).values(ended))
            ending.rollback()


def test_two_at_once(story: Story) -> None:
    two_at_once(story)


def test_policy_and_person_at_once(story: Story) -> None:
    policy_and_person_at_once(story)


def test_the_schema_has_one_open_case_of_an_allocation(story: Story) -> None:
    refused_by_the_schema(story)


def test_a_silent_host_is_waited_for_until_a_deadline(story: Story) -> None:
    story.do(lambda conn: host.lost(conn, "n1", ADMIN.because("no route")))
    story.open()
    assert story.waits_for()["code"] == "leader"
    for _ in range(3):
        assert story.play().state == "verifying"
    assert story.waits_for() == {"code": "host_unreachable", "detail": "no route", "remedy": ""}
    assert story.statuses()[0] == "cleanup_blocked"

    def late(conn: sa.Connection) -> None:
        conn.execute(sa.update(tables.recovery_cases).values(deadline_at=clock.now() - 1))

    story.do(late)
    end_overdue(story.site.engine, Settings())
    case = story.case()
    assert (case.state, case.failure["code"]) == ("failed", queue.DEADLINE_PASSED)
    assert "recover again" in case.failure["remedy"]
    assert story.statuses()[0] == "cleanup_blocked", "unknown frees nothing"
    # The host is back: another case goes the whole way, with the look that still waits.
    story.do(lambda conn: host.regained(conn, "n1", ADMIN))
    assert story.open() != case.id
    whole_way(story, lambda: None, absent=True)


def test_a_case_that_has_moved_on_is_not_ended_by_an_old_deadline(story: Story) -> None:
    case_id = story.open()
    late = story.do(lambda conn: story.site.late(conn, "recovery_case", case_id))
    story.play()
    assert story.do(lambda conn: recovery_cases.expire(conn, late, ADMIN)) is False


def test_a_look_that_fails_frees_nothing(story: Story) -> None:
    story.open()
    story.play()
    story.do(lambda conn: story.site.finish(conn, LOOK, TaskState.FAILED))
    case = story.play()
    assert (case.state, case.failure["code"]) == ("failed", "absence_unknown")
    assert (story.statuses()[0], story.tasks(WIPE)) == ("cleanup_blocked", 0)


def test_only_what_the_host_says_to_the_case_counts(story: Story) -> None:
    def report(conn: sa.Connection) -> None:
        reports.record_absence(conn, story.key, {"absent": True, "checks": {}}, ADMIN)

    story.do(report)
    story.open()
    story.do(report)
    story.play()
    story.do(report)
    assert story.play().state == "verifying"
    story.do(lambda conn: story.site.finish(conn, LOOK))
    assert story.play().failure["code"] == "absence_unknown"


def test_a_wipe_that_fails_is_for_a_person_and_can_be_tried_again(story: Story) -> None:
    first = story.open()
    story.play()
    story.answer()
    story.play()
    story.wipe(fails=True)
    case = story.play()
    assert (case.state, case.state_reason) == ("failed", "it did not come back: I/O error")
    failure = case.failure
    assert failure["code"] == "slots_not_recovered"
    assert failure["found"] == f"{case.slot_ids[0]} cleanup_blocked {ERROR['code']}"
    assert "recover again" in failure["remedy"]
    assert story.steps()[-3:] == ["inventory_after", "disk_evidence_after", "audit"]
    assert case.proof_ids == []
    assert story.open() != first
    whole_way(story, lambda: None, absent=True)


@pytest.mark.parametrize("proof", ["none", "a wipe of before", "no wipe"])
def test_a_slot_that_is_written_off_meanwhile_has_not_come_back(story: Story, proof: str) -> None:
    """The host reports the machine as present; its GPU is dead, and its disk is not wiped."""

    def prove(kind: ProofKind) -> None:
        def work(conn: sa.Connection) -> None:
            (slot,) = held_slots(conn, story.key)
            proofs.record(conn, slot, kind, story.site.proofs(conn, story.key)[slot.id])

        story.do(work)

    if proof == "a wipe of before":
        prove(ProofKind.WIPE)
    story.open()
    if proof == "no wipe":
        prove(ProofKind.UNTOUCHED)
    story.play()

    def write_off(conn: sa.Connection) -> None:
        (slot,) = held_slots(conn, story.key)
        document = story.site.document(0)
        document["gpu"] = [g for g in document["gpu"] if g["address"] != slot.gpu_pci_address]
        host.record_discovery(conn, "n1", document, ADMIN)
        slot_life.withdraw(conn, slot.id, ADMIN)

    story.do(write_off)
    story.answer(absent=False)
    while (case := story.play()).state not in ("failed", "recovered"):
        if case.state == "confirming":
            story.answer(absent=False)
    assert (case.state, case.proof_ids) == ("failed", [])
    assert "withdrawn without a proof" in case.state_reason
    assert case.failure["code"] == "slots_not_recovered"


def test_a_slot_that_came_back_and_was_withdrawn_later_is_recovered(story: Story) -> None:
    story.open()
    story.play()
    story.answer()
    story.play()
    story.wipe()

    def withdraw(conn: sa.Connection) -> None:
        (slot,) = held_slots(conn, story.key)
        slot_life.disable(conn, slot.id, ADMIN)
        slot_life.withdraw(conn, slot.id, ADMIN)

    story.do(withdraw)
    case = story.play()
    assert (case.state, len(case.proof_ids)) == ("recovered", 1)


def test_the_host_is_not_asked_about_slots_that_others_have_by_now(sold: Site) -> None:
    """Another tenant's machine would count as a leftover, and this allocation stay blocked."""
    story = Story(sold, retrying(sold.engine, lambda conn: str(sold.failed(conn, 2))))

    def resell(conn: sa.Connection) -> str:
        first, _ = held_slots(conn, story.key)
        recovery.repair(conn, first.id, ADMIN)
        sold.finish(conn, WIPE)
        given = {first.id: sold.proofs(conn, story.key)[first.id]}
        slices.cleanup_succeeded(conn, story.key, ADMIN, proofs=given, absence={"absent": True})
        launch.allocate(conn, sold.launch(1), ADMIN)
        return first.id

    sold_again = story.do(resell)
    with transaction(sold.engine) as conn:
        claimed = [claim.slot_id for claim in of_allocation(conn, story.key)]
        task = recovery.verify_absence(conn, story.key, ADMIN)
        work = Work(conn, task, nodes.get(conn, "n1"), {}, Settings())
        slot_ids = [slot["slot_id"] for slot in absence_variables(work)["slice_slots"]]
    assert slot_ids == [slot for slot in claimed if slot != sold_again] and len(slot_ids) == 1


def test_nothing_is_recovered_on_a_retired_node(story: Story) -> None:
    """Its host never answers again, and the task would wait for it."""
    story.keep(absent=True)
    story.wipe()

    def retire(conn: sa.Connection) -> None:
        host.drain(conn, "n1", ADMIN)
        host.maintain(conn, "n1", ADMIN)
        host.retire(conn, "n1", ADMIN)

    story.do(retire)
    with pytest.raises(Problem, match="node_not_enrolled"):
        story.open()


@pytest.mark.parametrize("resold", [False, True])
def test_what_is_left_after_the_clean_up_is_for_a_person(story: Story, *, resold: bool) -> None:
    """Not when a slot is sold again: the reported leftovers may be that tenant's."""
    story.open()
    story.play()
    story.answer(absent=False)
    story.play()
    story.wipe()
    if resold:
        story.do(lambda conn: story.site.allocate(conn, 2))
    assert story.play().state == "confirming"
    story.answer(absent=False)
    case = story.play()
    assert (case.state, len(case.proof_ids)) == ("recovered" if resold else "failed", 1)
    assert case.failure.get("code") == (None if resold else "leftovers_remain")
    assert "runtime_absence_after" in story.steps()
    compared = story.do(lambda conn: queue.every(conn, kind=TaskKind.SLICE_DRIFT_RECONCILE))
    assert bool(compared) != resold, "it takes slots off sale that are not clean"


def test_a_slot_that_was_sold_since_had_come_back(story: Story) -> None:
    story.open()
    story.play()
    story.answer()
    story.play()
    story.wipe()
    sold = story.do(lambda conn: story.site.allocate(conn, 2))
    assert story.statuses() == ["reserved", "reserved"]
    assert story.play().state == "recovered"
    assert story.do(lambda conn: allocations.get(conn, sold)).state == "requested"


def test_a_run_that_may_live_is_ended_first(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        (run,) = leasing.lease(conn, "worker")
        slices.provision_started(conn, key, ADMIN)
        case = recovery_cases.open_case(conn, key, ADMIN)
        assert not queue.get(conn, run.id).cancel_requested, "opening does nothing yet"
        recovery_cases.play(conn, case.id)
        assert queue.get(conn, run.id).cancel_requested
        assert leasing.lease(conn, "worker") == [], "nothing is asked of the host before its end"
        (ended,) = (row for row in case_records.steps(conn, case.id) if "slots" in row["evidence"])
        assert (ended["step"], ended["evidence"]["slots"][0]["status"]) == (
            "run_canceled",
            "cleanup_blocked",
        )
        (claim,) = of_allocation(conn, key)
        assert slots.get(conn, claim.slot_id).fence == claim.fence + 1, (
            "its reports no longer count"
        )


def test_what_only_a_person_can_decide(sold: Site) -> None:
    def code(key: str, act: Act = ADMIN) -> str:
        with pytest.raises(Problem) as caught, transaction(sold.engine) as conn:
            recovery_cases.open_case(conn, key, act)
        return caught.value.code

    with transaction(sold.engine) as conn:
        key = sold.active(conn)
    assert code(key) == "allocation_active"
    with transaction(sold.engine) as conn:
        launch.release(conn, key, ADMIN)
    assert code(key) == "allocation_releasing"
    with transaction(sold.engine) as conn:
        stuck = sold.failed(conn)
    assert code(stuck, ADMIN.because(" ")) == "reason_required"
    assert code("none") == "allocation_not_found"
    with transaction(sold.engine) as conn:
        conn.execute(sa.update(tables.allocations).values(capacity_shape="baremetal"))
    assert code(stuck) == "allocation_baremetal"


def test_an_allocation_that_became_active_is_left_alone(sold: Site) -> None:
    """It was opened while a run was building; the tenant got the machine before the first move."""
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        case = recovery_cases.open_case(conn, key, ADMIN)
        slices.provision_started(conn, key, ADMIN)
        sold.finish(conn, TaskKind.SLICE_VM_PROVISION)
        slices.provision_succeeded(conn, key, ADMIN, connection={"host": "gw"})
        recovery_cases.play(conn, case.id)
        ended = case_records.get(conn, case.id)
        assert (ended.state, ended.failure["code"]) == ("failed", "allocation_active")
        assert allocations.get(conn, key).state == "active"


def test_a_node_that_is_not_well_is_waited_for(story: Story) -> None:
    story.open()
    story.play()
    story.answer()
    story.do(lambda conn: host.lost(conn, "n1", ADMIN))
    before = story.case().deadline_at
    assert story.play().state == "verifying"
    assert story.waits_for()["code"] == "node_unreachable"
    assert story.case().deadline_at == before, "waiting gives it no more time"
    written = partial(journal.history_of, entity="recovery_case", key=story.case().id)
    before = story.do(written)
    story.play()
    assert story.do(written) == before, "said once"
    story.do(lambda conn: host.regained(conn, "n1", ADMIN))
    assert story.play().state == "cleaning"
    assert story.case().waits_for == {}


def test_a_word_that_keeps_the_slots_is_kept(story: Story) -> None:
    """Said while the case is open; until a person asks again."""
    case_id = story.open()
    story.play()
    story.answer()
    story.keep()
    for _ in range(2):
        assert story.play().state == "verifying"
    assert story.waits_for()["code"] == "kept_for_inspection"
    assert "admin:bob: second look" in story.waits_for()["detail"]
    assert story.open(BOB) == case_id
    case = story.case()
    request = (case.requested_by, case.reason, case.waits_for)
    assert request == ("admin:bob", "second look", {})
    assert [row.actor for row in story.audited(recovery_cases.ADOPTED)] == ["admin:bob"]
    assert story.play().state == "cleaning"


def test_a_word_that_came_while_the_policy_opened_its_case_is_kept(story: Story) -> None:
    """The policy read the records before it, and got the lock of the allocation after it."""
    story.policy(enabled=True)
    story.keep()
    story.open(Act(recovery_policy.ACTOR, "recovery policy: slots are blocked"))
    for _ in range(2):
        assert story.play().state == "opened"
    assert story.waits_for()["code"] == "kept_for_inspection"
    assert (story.tasks(LOOK), story.statuses()[0]) == (0, "cleanup_blocked")


def test_the_keepers_own_word_lets_it_go_on(story: Story) -> None:
    story.open()
    story.play()
    story.answer()
    story.keep()
    story.play()
    story.keep(absent=True)
    assert story.play().state == "cleaning"
    story.wipe()
    story.keep()
    assert story.play().state == "recovered", "it comes too late for a slot that is wiped"


def test_a_person_takes_over_from_the_policy(story: Story) -> None:
    story.policy(enabled=True)
    recover_blocked(story.site.engine, Settings())
    story.play()
    case = story.case()
    assert (case.requested_by, case.remove_leftovers) == ("policy", False)
    assert story.open(ADMIN.because("")) == case.id, "without a reason it is only read"
    assert story.case() == case
    assert story.open(BOB) == case.id
    assert story.case().deadline_at == case.deadline_at, "it gets no more time"
    story.answer(absent=False)
    assert story.play().state == "cleaning", "leftovers may be removed now"
    (forced,) = story.audited(recovery.FORCE_CLEANUP)
    assert forced.actor == "admin:bob"
    story.wipe(fails=True)
    story.play()
    story.answer()
    assert story.play().state == "failed"
    assert story.audited(recovery_policy.STOPPED) == [], "the person knows"
    # It was begun once: the policy does not try it again.
    recover_blocked(story.site.engine, Settings())
    assert len(story.audited(recovery_policy.BEGUN)) == 1
    assert len(story.audited(recovery_policy.STOPPED)) == 1
    with reading(story.site.engine) as conn:
        assert case_records.open_of(conn, story.key) is None


def test_a_policy_that_is_switched_off_stops_between_two_moves(story: Story) -> None:
    story.policy(enabled=True)
    recover_blocked(story.site.engine, Settings())
    story.play()
    story.answer()
    story.policy(enabled=False)
    assert story.play().state == "verifying"
    assert story.waits_for()["code"] == "recovery_policy_off"
    story.policy(enabled=True)
    assert story.play().state == "cleaning"


def test_a_policy_opens_nothing_where_a_person_has(story: Story) -> None:
    story.policy(enabled=True)
    case_id = story.open()
    recover_blocked(story.site.engine, Settings())
    assert (story.case().id, story.case().requested_by) == (case_id, "admin:alice")
    assert story.audited(recovery_policy.BEGUN) == []
    (blocked,) = story.do(recovery_policy.blocked_allocations)
    assert (blocked.move, blocked.why) == (Move.WAIT, "its recovery case is opened")


def test_a_restore_ends_every_open_case(sold: Site) -> None:
    """Changes after the backup are unknown, so its evidence may be outdated."""
    story = Story(sold)
    story.open()
    story.play()
    story.answer()
    story.do(lambda conn: restore.doubt(conn, ADMIN))
    case = story.play()
    assert (case.state, case.failure["code"]) == ("failed", "restored")
    assert story.statuses()[0] == "cleanup_blocked"


def test_a_recovery_without_its_proofs_is_a_violation(sold: Site) -> None:
    story = Story(sold)
    story.open()
    whole_way(story, lambda: None, absent=True)
    story.do(lambda conn: conn.execute(sa.update(tables.recovery_cases).values(proof_ids=["x"])))
    with reading(sold.engine) as conn:
        assert [violation.invariant for violation in invariants.check(conn)] == ["I4"]
