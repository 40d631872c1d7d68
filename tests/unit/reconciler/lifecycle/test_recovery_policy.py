"""The recovery policy over real records: alone, within limits, stopping where it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import host, quota, recovery, recovery_cases, recovery_policy, slices
from reconciler.model.recovery import Move, Policy
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import allocations, queue, reports
from reconciler.records import recovery_cases as case_records
from reconciler.records.claims import held_slots
from reconciler.settings import Settings
from reconciler.work.loops import play_recovery_cases, recover_blocked
from tests.unit.reconciler.conftest import Site

ERROR = {"code": "command_failed", "found": "I/O error"}


class Governed:
    """A site with the policy on, and the host's part played by hand."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.set(enabled=True)

    def set(self, **values: Any) -> None:
        with transaction(self.site.engine) as conn:
            recovery_policy.write(conn, Policy(**values), self.site.act)

    def fail(self, gpus: int = 1) -> str:
        with transaction(self.site.engine) as conn:
            return str(self.site.failed(conn, gpus, "domain_failed"))

    def look(self) -> None:
        recover_blocked(self.site.engine, Settings())
        play_recovery_cases(self.site.engine, Settings())

    def do(self, work: Callable[[sa.Connection], Any]) -> Any:
        with transaction(self.site.engine) as conn:
            return work(conn)

    def host_says(self, absent: bool) -> None:
        """The look at the host ends."""

        def work(conn: sa.Connection) -> None:
            task = self.site.finish(conn, TaskKind.SLICE_ABSENCE_VERIFY)
            reports.record_absence(
                conn,
                task.allocation_id,
                {"absent": absent},
                self.site.act,
                task_id=task.id,
                observed_at=task.started_at,
            )

        self.do(work)

    def wiped(self, allocation_id: str) -> None:
        def work(conn: sa.Connection) -> None:
            self.site.finish(conn, TaskKind.SLICE_WIPE)
            given = self.site.proofs(conn, allocation_id)
            absence = {"absent": True}
            assert slices.cleanup_succeeded(
                conn, allocation_id, self.site.act, proofs=given, absence=absence
            )

        self.do(work)

    def tasks(self) -> list[str]:
        return [row.kind for row in self.do(queue.every) if row.state == "queued"]

    def statuses(self) -> list[str]:
        by_slot: list[str] = self.do(self.site.statuses)
        return by_slot

    def marks(self) -> list[str]:
        blocked = self.do(recovery.blocked)
        return [slot.health_detail.get(recovery_policy.STOPPED_KEY, "") for slot in blocked]


@pytest.fixture
def governed(sold: Site) -> Governed:
    return Governed(sold)


@pytest.mark.covers("CTRL-7")
def test_alone_from_blocked_to_available(governed: Governed) -> None:
    allocation_id = governed.fail()
    governed.look()
    governed.look()
    assert governed.tasks() == ["slice.absence_verify"], "asked once"
    governed.host_says(absent=True)
    governed.look()
    assert governed.tasks() == ["slice.wipe"]
    governed.look()
    governed.wiped(allocation_id)
    governed.look()
    assert governed.statuses() == ["available", "available"]
    (forced,) = governed.do(lambda conn: journal.audit_rows(conn, action=recovery.FORCE_CLEANUP))
    assert (forced.actor, forced.detail["runtime_verified_absent"]) == ("policy", True)
    assert forced.correlation_id == "corr-1", "found from the tenant's request"


@pytest.mark.covers("CTRL-7")
def test_off_by_default(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        sold.failed(conn, error_code="domain_failed")
        assert not recovery_policy.read(conn).enabled
    recover_blocked(sold.engine, Settings())
    with reading(sold.engine) as conn:
        (case,) = recovery_policy.blocked_allocations(conn)
        assert case.move == Move.LOOK, "the planned move is shown"
        assert queue.every(conn, kind=TaskKind.SLICE_ABSENCE_VERIFY) == []
    with transaction(sold.engine) as conn:
        assert recovery_cases.open_by_policy(conn, case.allocation_id) is None


@pytest.mark.covers("CTRL-7", "CTRL-11")
def test_failures_of_tenants_are_recovered_also_while_it_is_off(sold: Site) -> None:
    """Without the limits, which are for faults of hosts; `test_hostile_member.py` plays the end."""
    governed = Governed(sold)
    governed.set()
    for _ in range(2):
        governed.do(sold.failed)
    governed.look()
    assert governed.tasks() == ["slice.absence_verify"] * 2
    governed.set(tenant_failures=False)
    with reading(sold.engine) as conn:
        cases = case_records.every_open(conn)
        assert {case.remove_leftovers for case in cases} == {True}
        assert not recovery_policy.covers(conn, cases[0].allocation_id)


@pytest.mark.covers("CTRL-7", "CTRL-11")
def test_a_gpu_that_fails_its_probe_is_not_its_tenants_doing(sold: Site) -> None:
    governed = Governed(sold)
    governed.set()
    allocation_id = governed.do(lambda conn: sold.failed(conn, error_code="probe_failed"))
    governed.look()
    assert governed.tasks() == []
    with reading(sold.engine) as conn:
        row = allocations.get(conn, allocation_id)
        assert row.error["code"] == "probe_failed"
        assert quota.used(conn, row.project_id)["failures_per_hour"] == 0


@pytest.mark.covers("CTRL-7", "CTRL-11")
def test_failures_of_tenants_are_left_where_the_site_wants_to_look(sold: Site) -> None:
    governed = Governed(sold)
    governed.set(tenant_failures=False)
    governed.do(sold.failed)
    governed.look()
    assert governed.tasks() == []
    governed.set(enabled=True, tenant_failures=False)
    governed.do(sold.failed)
    governed.look()
    assert governed.tasks() == ["slice.absence_verify"], "by the limits of the policy"


@pytest.mark.covers("CTRL-7")
def test_it_stops_when_the_slot_does_not_come_back(governed: Governed) -> None:
    allocation_id = governed.fail()
    governed.look()
    governed.host_says(absent=True)
    governed.look()

    def broken(conn: sa.Connection) -> None:
        governed.site.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        act = governed.site.act
        slot_ids = [slot.id for slot in held_slots(conn, allocation_id)]
        assert slices.cleanup_failed(conn, slot_ids, act, step="nvme_wipe", error=ERROR)

    governed.do(broken)
    governed.look()
    assert governed.marks() == ["it did not come back: I/O error"]
    governed.look()
    assert (governed.tasks(), governed.do(recovery_policy.blocked_allocations)) == ([], [])
    (stopped,) = governed.do(lambda conn: journal.audit_rows(conn, action=recovery_policy.STOPPED))
    assert (stopped.actor, stopped.subject_id) == ("policy", allocation_id)
    slot = governed.do(recovery.blocked)[0]
    assert slot.health_detail["reason"] == "I/O error", "the cause stays readable"
    # A person goes on from here; their repair clears the mark.
    governed.do(lambda conn: recovery.repair(conn, slot.id, governed.site.act))
    governed.wiped(allocation_id)
    assert governed.statuses()[0] == "available"


@pytest.mark.covers("CTRL-7")
def test_a_host_that_still_holds_something_is_for_a_person(governed: Governed) -> None:
    governed.fail()
    governed.look()
    governed.host_says(absent=False)
    governed.look()
    assert governed.marks() == ["the host still holds something of it"]
    assert governed.tasks() == []


@pytest.mark.covers("CTRL-7")
def test_unless_the_site_lets_it_remove_leftovers(governed: Governed) -> None:
    governed.set(enabled=True, remove_leftovers=True)
    allocation_id = governed.fail()
    governed.look()
    governed.host_says(absent=False)
    governed.look()
    assert governed.tasks() == ["slice.wipe"]
    (forced,) = governed.do(lambda conn: journal.audit_rows(conn, action=recovery.FORCE_CLEANUP))
    assert forced.detail["runtime_verified_absent"] is False, "nothing is claimed"
    governed.wiped(allocation_id)
    assert governed.statuses()[0] == "available"


@pytest.mark.covers("CTRL-7", "I13")
def test_a_look_that_failed_frees_nothing(governed: Governed) -> None:
    governed.fail()
    governed.look()
    kind = TaskKind.SLICE_ABSENCE_VERIFY
    governed.do(lambda conn: governed.site.finish(conn, kind, TaskState.FAILED))
    governed.look()
    assert governed.marks() == ["the host did not say what is left of it"]


@pytest.mark.covers("CTRL-7")
def test_what_a_person_keeps_for_inspection_is_left_alone(governed: Governed) -> None:
    """Seed 000: with `runtime_verified_absent` false the slots remain blocked."""
    allocation_id = governed.fail()

    def forced(absent: bool) -> None:
        act = governed.site.act.because("to be looked at")
        with transaction(governed.site.engine) as conn:
            recovery.force_cleanup(conn, allocation_id, act, runtime_verified_absent=absent)

    forced(False)
    governed.look()
    governed.look()
    assert (governed.tasks(), governed.marks()) == ([], [""])
    (case,) = governed.do(recovery_policy.blocked_allocations)
    assert (case.move, case.why) == (Move.WAIT, "kept for inspection: admin:alice: to be looked at")
    forced(True)
    assert governed.tasks() == ["slice.wipe"], "that person's own word ends it"


@pytest.mark.covers("CTRL-7")
def test_limits_per_node_and_per_hour(governed: Governed) -> None:
    first, second = governed.fail(), governed.fail()
    governed.look()
    assert governed.tasks() == ["slice.absence_verify"], "one per node"
    cases = {case.allocation_id: case for case in governed.do(recovery_policy.blocked_allocations)}
    assert "on the node" in cases[second].why
    assert cases[first].move == Move.WAIT
    governed.set(enabled=True, per_node=2, per_hour=1)
    governed.look()
    assert "on the site" in governed.do(recovery_policy.blocked_allocations)[1].why
    governed.set(enabled=True, per_node=2, per_hour=2)
    governed.look()
    assert governed.tasks() == ["slice.absence_verify"] * 2


@pytest.mark.covers("CTRL-7")
def test_an_unhealthy_node_is_waited_for(governed: Governed) -> None:
    governed.fail()
    governed.look()
    governed.host_says(absent=True)
    act = governed.site.act
    governed.do(lambda conn: host.lost(conn, "n1", act))
    governed.look()
    assert (governed.marks(), governed.tasks()) == ([""], [])
    governed.do(lambda conn: host.regained(conn, "n1", act))
    governed.look()
    assert governed.tasks() == ["slice.wipe"]


@pytest.mark.covers("CTRL-7")
def test_a_force_released_allocation_is_repaired(governed: Governed) -> None:
    site = governed.site

    def released(conn: sa.Connection) -> str:
        allocation_id = str(site.active(conn, 2))
        host.lost(conn, "n1", site.act)
        recovery.force_release(conn, allocation_id, site.act)
        host.regained(conn, "n1", site.act)
        return allocation_id

    allocation_id = governed.do(released)
    governed.look()
    governed.host_says(absent=True)
    governed.look()
    assert governed.statuses() == ["cleanup", "cleanup"]
    assert governed.do(lambda conn: allocations.get(conn, allocation_id)).state == "released"


@pytest.mark.covers("CTRL-7")
def test_one_that_breaks_leaves_the_others(
    governed: Governed, monkeypatch: pytest.MonkeyPatch
) -> None:
    governed.set(enabled=True, per_node=2)
    broken, sound = governed.fail(), governed.fail()
    real = recovery_cases.open_by_policy

    def step(conn: sa.Connection, allocation_id: str) -> Any:
        if allocation_id == broken:
            raise RuntimeError("broken")
        return real(conn, allocation_id)

    monkeypatch.setattr(recovery_cases, "open_by_policy", step)
    governed.look()
    (row,) = governed.do(lambda conn: journal.audit_rows(conn, action=recovery_policy.BEGUN))
    assert row.subject_id == sound
