"""Recovery of blocked slots: by evidence, refused where it would hide something."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import host, launch, power, recovery, slices
from reconciler.model import transitions
from reconciler.model.errors import Problem
from reconciler.model.states import HealthState, PowerAction, ProofKind, TaskKind
from reconciler.records import allocations, claims, leasing, nodes, proofs, queue, reports, slots
from tests.unit.reconciler.conftest import Site, code

ABSENT = {"absent": True, "checks": {}}


def force(
    conn: sa.Connection, site: Site, allocation_id: str, absent: bool = True
) -> dict[str, Any]:
    return recovery.force_cleanup(conn, allocation_id, site.act, runtime_verified_absent=absent)


@pytest.mark.covers("CTRL-7")
def test_the_runbook(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.failed(conn)
        (slot,) = recovery.blocked(conn, "n1")
        assert (slot.health_detail["allocation_id"], slot.health_detail["step"]) == (
            allocation_id,
            "slice_ready",
        )
        assert slot.health_detail["reason"] == "no lease"
        look = recovery.verify_absence(conn, allocation_id, sold.act)
        assert look.kind == "slice.absence_verify"
        reports.record_absence(conn, allocation_id, ABSENT, sold.act)
        sold.finish(conn, TaskKind.SLICE_ABSENCE_VERIFY)
        applied = force(conn, sold, allocation_id)
        assert applied["slots"][0]["status"] == "cleanup"
        (task,) = queue.every(conn, kind=TaskKind.SLICE_WIPE)
        assert applied["slots"][0]["task_id"] == task.id
        assert task.fences == {slot.id: 2}
        assert task.parameters["slots"][0]["fence"] == 2
        given = sold.proofs(conn, allocation_id)
        assert slices.cleanup_succeeded(conn, allocation_id, sold.act, proofs=given, absence=ABSENT)
        back = slots.of_node(conn, "n1")[0]
        assert (back.status, back.health_state, back.health_detail) == ("available", "healthy", {})
        (entry,) = journal.audit_rows(conn, action="admin.allocation.force_cleanup.applied")
        assert entry.detail["runtime_verified_absent"] is True
        assert entry.reason == "test"
        assert not slices.cleanup_succeeded(
            conn, allocation_id, sold.act, proofs=given, absence=ABSENT
        )


@pytest.mark.covers("CTRL-7")
def test_without_the_word_for_absence_slots_stay_blocked(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        applied = force(conn, sold, allocation_id, absent=False)
        assert [slot["status"] for slot in applied["slots"]] == ["cleanup_blocked"]
        row = allocations.get(conn, allocation_id)
        assert row.state == "failed"
        assert {claim.state for claim in row.claims} == {"failed"}
        assert len(applied["canceled_tasks"]) == 1
        held = slots.get(conn, applied["slots"][0]["slot_id"])
        claim = claims.of_allocation(conn, allocation_id)[0]
        assert held.fence == claim.fence + 1, "the run that may live is shut out"
        assert queue.every(conn, kind=TaskKind.SLICE_WIPE) == []
        again = force(conn, sold, allocation_id, absent=True)
        assert again["slots"][0]["status"] == "cleanup"


@pytest.mark.covers("CTRL-7")
def test_with_absence_and_wipe_proof_at_hand_it_is_available_at_once(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        document = sold.proofs(conn, allocation_id)[slot.id]
        proofs.record(
            conn, slots.get(conn, slot.id), ProofKind.WIPE, document, allocation_id=allocation_id
        )
        reports.record_absence(conn, allocation_id, {"absent": False}, sold.act)
        reports.record_absence(conn, allocation_id, ABSENT, sold.act)
        applied = force(conn, sold, allocation_id)
        assert applied["slots"][0] == {
            "slot_id": slot.id,
            "slot_index": 0,
            "status": "available",
            "task_id": None,
        }


@pytest.mark.covers("CTRL-7")
def test_absence_from_before_the_failure_does_not_count(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        reports.record_absence(conn, allocation_id, ABSENT, sold.act, observed_at=1.0)
        slices.provision_failed(conn, allocation_id, sold.act, step="x", error={})
        assert force(conn, sold, allocation_id)["slots"][0]["status"] == "cleanup"


@pytest.mark.covers("CTRL-7", "I4", "I13")
@pytest.mark.parametrize("wrong", ["old absence", "old proof", "no wipe", "not absent"])
def test_half_of_the_evidence_gives_no_slot_back(sold: Site, wrong: str) -> None:
    """Without the word of the host since the block, the disk is wiped once more."""
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        document = sold.proofs(conn, key)[slot.id]
        kind = ProofKind.UNTOUCHED if wrong == "no wipe" else ProofKind.WIPE
        proofs.record(conn, slot, kind, document, allocation_id=key)
        later = slot.status_since + 60
        seen_at = 1.0 if wrong == "old absence" else later
        absence = {**ABSENT, "absent": wrong != "not absent"}
        reports.record_absence(conn, key, absence, sold.act, observed_at=seen_at)
        if wrong == "old proof":
            conn.execute(sa.update(tables.slots).values(status_since=later))
        assert force(conn, sold, key)["slots"][0]["status"] == "cleanup"


@pytest.mark.covers("CTRL-7", "CTRL-9")
def test_a_run_still_alive_is_canceled_and_its_result_decides_nothing(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        (task,) = leasing.lease(conn, "worker")
        slices.provision_started(conn, allocation_id, sold.act)
        applied = force(conn, sold, allocation_id)
        assert applied["canceled_tasks"] == [task.id]
        assert queue.get(conn, task.id).cancel_requested
        # The clean-up waits until the old run has ended.
        assert leasing.lease(conn, "worker") == []
        assert not slices.provision_succeeded(conn, allocation_id, sold.act, connection={})
        assert not slices.provision_started(conn, allocation_id, sold.act)
        sold_error: dict[str, Any] = {"code": "late"}
        assert not slices.provision_failed(
            conn, allocation_id, sold.act, step="late", error=sold_error
        )
        assert sold.statuses(conn)[0] == "cleanup"


@pytest.mark.covers("CTRL-7")
def test_wipe_that_fails_blocks_again(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.failed(conn)
        slot_id = recovery.blocked(conn)[0].id
        task = recovery.repair(conn, slot_id, sold.act)
        assert task.subject_id == allocation_id
        assert code(recovery.repair, conn, slot_id, sold.act) == "slot_not_blocked"
        error = {"code": "command_failed", "found": "I/O error"}
        assert slices.cleanup_failed(conn, [slot_id], sold.act, step="nvme_wipe", error=error)
        assert recovery.blocked(conn)[0].health_detail["reason"] == "I/O error"
        assert not slices.cleanup_failed(conn, [slot_id], sold.act, step="x", error=error)
        recovery.repair(conn, slot_id, sold.act)
        given = sold.proofs(conn, allocation_id)
        assert slices.cleanup_succeeded(conn, allocation_id, sold.act, proofs=given, absence=ABSENT)
        assert sold.statuses(conn)[0] == "available"


@pytest.mark.covers("CTRL-7")
def test_refusals(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        active = sold.active(conn)
        assert code(force, conn, sold, active) == "allocation_active"
        launch.release(conn, active, sold.act)
        assert code(force, conn, sold, active) == "allocation_releasing"
        stuck = sold.allocate(conn)
        nameless = sold.act.because("  ")
        with pytest.raises(Problem, match="reason_required"):
            recovery.force_cleanup(conn, stuck, nameless, runtime_verified_absent=True)
        nodes.change(conn, "n1", sold.act, health_state=HealthState.FAILED.value)
        assert code(force, conn, sold, stuck) == "node_unhealthy"
        host.lost(conn, "n1", sold.act)
        assert code(force, conn, sold, stuck) == "node_unreachable"
        host.regained(conn, "n1", sold.act)
        host.drain(conn, "n1", sold.act)
        assert force(conn, sold, stuck)["state"] == "failed"
        update = tables.allocations.update().where(tables.allocations.c.id == stuck)
        conn.execute(update.values(capacity_shape="baremetal"))
        assert code(force, conn, sold, stuck) == "allocation_baremetal"


@pytest.mark.covers("CTRL-7")
@pytest.mark.parametrize(
    ("state", "remedy"),
    [("ready", "drain"), ("bootstrapping", "end its bootstrap"), ("enrolling", "enrol")],
)
def test_what_comes_before_it_is_possible_in_the_nodes_state(
    sold: Site, state: str, remedy: str
) -> None:
    with transaction(sold.engine) as conn:
        stuck = sold.allocate(conn)
        values = {"state": state, "health_state": HealthState.FAILED.value}
        conn.execute(sa.update(tables.nodes).values(**values))
        with pytest.raises(Problem) as caught:
            force(conn, sold, stuck)
        assert (caught.value.code, remedy in caught.value.remedy) == ("node_unhealthy", True)
        drains = transitions.target("node", state, "drain") is not None
        assert ("drain" in caught.value.remedy) == drains


@pytest.mark.covers("CTRL-7")
def test_release_whose_wipe_failed_can_be_forced(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launch.release(conn, allocation_id, sold.act)
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE)
        slices.release_failed(conn, allocation_id, sold.act, step="nvme_wipe", error={})
        assert force(conn, sold, allocation_id)["slots"][0]["status"] == "cleanup"
        assert allocations.get(conn, allocation_id).state == "failed"
        (wipe,) = leasing.lease(conn, "worker")
        assert force(conn, sold, allocation_id)["slots"][0]["task_id"] is None
        assert queue.every(conn, kind=TaskKind.SLICE_WIPE) == [wipe], "it is wiped once"


@pytest.mark.covers("CTRL-7")
def test_force_release_ends_use_and_keeps_the_slot(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        assert code(recovery.force_release, conn, allocation_id, sold.act) == "node_reachable"
        host.drain(conn, "n1", sold.act)
        assert code(recovery.force_release, conn, allocation_id, sold.act) == "node_reachable"
        power.request(conn, allocation_id, PowerAction.STOP, sold.act)
        host.lost(conn, "n1", sold.act)
        assert recovery.force_release(conn, allocation_id, sold.act).state == "released"
        assert queue.open_of_allocation(conn, allocation_id) == [], "its host may come back"
        assert sold.statuses(conn)[0] == "cleanup_blocked"
        assert code(force, conn, sold, allocation_id) == "allocation_released"
        host.regained(conn, "n1", sold.act)
        assert recovery.repair(conn, recovery.blocked(conn)[0].id, sold.act)


@pytest.mark.covers("I12")
def test_deadlines_of_slots_block(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.failed(conn)
        slot_id = recovery.blocked(conn)[0].id
        recovery.repair(conn, slot_id, sold.act)
        late = sold.late(conn, "slot", slot_id)
        assert (late.state, late.event) == ("cleanup", "block")
        assert recovery.expire(conn, late, sold.act)
        row = journal.history_of(conn, "slot", slot_id)[-1]
        assert row.target == "cleanup_blocked"
        assert row.allocation_id == allocation_id
        over = journal.Overdue("node", "n1", "bootstrapping", 1.0, "maintain")
        assert not recovery.expire(conn, over, sold.act)


@pytest.mark.covers("I12")
def test_deadline_of_a_release_blocks_its_slots(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launch.release(conn, allocation_id, sold.act)
        slot_id = claims.of_allocation(conn, allocation_id)[0].slot_id
        late = sold.late(conn, "slot", slot_id)
        assert recovery.expire(conn, late, sold.act)
        assert not recovery.expire(conn, late, sold.act)
        assert recovery.blocked(conn)[0].health_detail["step"] == "deadline"
        assert queue.open_of_allocation(conn, allocation_id) == []
