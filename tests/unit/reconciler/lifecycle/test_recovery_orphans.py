"""Removal of orphans on a person's request, slot by slot, with proof."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
import sqlalchemy as sa

from reconciler.db import journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import gate, host, invariants, launch, recovery, slices
from reconciler.lifecycle import restore as restored
from reconciler.lifecycle import slots as slot_life
from reconciler.model.states import NodeMode, ProofKind, TaskKind, TaskState
from reconciler.records import claims, nodes, proofs, queue, reports, slots
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import slices as slice_kinds
from tests.unit.reconciler import wipes
from tests.unit.reconciler.conftest import Site, code

UNKNOWN = str(uuid.uuid4())


def cleaned(site: Site, conn: sa.Connection, task: Task) -> None:
    """The host has done the task."""
    work = Work(conn, task, nodes.get(conn, "n1"), {}, Settings())
    (given,) = slice_kinds.wipe_variables(work)["slice_slots"]
    slot = slots.get(conn, given["slot_id"])
    proof = {
        "disk": slot.nvme_identity,
        "serial": slot.nvme_serial,
        "size_bytes": slot.nvme_size_bytes,
        "method": "user_data_erase",
        "verified": True,
        "gpu": wipes.gpu(slot.gpu_pci_address),
    }
    evidence = {"proofs": {slot.id: proof}, "absence": {"absent": True}}
    slice_kinds.wipe_succeeded(work, evidence)
    site.finish(conn, TaskKind.SLICE_WIPE)


@pytest.mark.covers("CTRL-7", "I13", "I4")
def test_after_a_restore_no_proof_of_before_stands(sold: Site) -> None:
    """A slot was sold since the backup: its disk is a tenant's, and the records know nothing."""
    with transaction(sold.engine) as conn:
        running = sold.active(conn)
        held = claims.of_allocation(conn, running)[0].slot_id
        takeover = {"disk": "eui.5e000000000000aa", "method": "discard", "verified": True}
        proofs.record_transition(conn, "n1", takeover, sold.act)
        before = {slot.id: slot for slot in slots.of_node(conn, "n1")}
        restored.doubt(conn, sold.act)
        (idle,) = set(before) - {held}
        assert slots.get(conn, held).disk_generation == before[held].disk_generation
        assert slots.get(conn, idle).disk_generation == before[idle].disk_generation + 1
        # All that can be seen of the host is well, and still nothing of it is sold.
        host.record_discovery(conn, "n1", sold.document(0), sold.act)
        host.record_parity(conn, "n1", sold.parity(), sold.act)
        (blocker,) = gate.open_gate(conn, "n1", sold.act)["closed"][idle]
        assert blocker["code"] == "proof_missing"
        old = replace(
            before[idle],
            nvme_identity="eui.5e000000000000aa",
            nvme_eui="5e000000000000aa",
            disk_generation=0,
        )
        codes = {row.code for row in gate.judge(conn, old, proofs.current(conn, old))}
        assert "proof_outdated" in codes, "a disk in no slot may have been sold as well"
        assert invariants.check(conn) == []
        # The tenant of the records is still theirs.
        launch.release(conn, running, sold.act)
        given = sold.proofs(conn, running)
        assert slices.release_succeeded(
            conn, running, sold.act, proofs=given, absence={"absent": True}
        )
        # The unknown machine is removed on a person's request, and with it the doubt.
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE)
        task = recovery.remove_orphan(conn, idle, UNKNOWN, sold.act)
        assert task.parameters["allocation"] == {"id": UNKNOWN}
        assert (task.allocation_id, task.subject_id) == (None, idle)
        cleaned(sold, conn, task)
        assert slots.get(conn, idle).status == "available"
        (entry,) = journal.audit_rows(conn, action="admin.slot.orphan.removed")
        assert (entry.subject_id, entry.detail) == (idle, {"allocation_id": UNKNOWN})
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-7", "I13")
def test_evidence_from_before_a_restore_frees_no_blocked_slot(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        document = sold.proofs(conn, key)[slot.id]
        proofs.record(conn, slots.get(conn, slot.id), ProofKind.WIPE, document, allocation_id=key)
        reports.record_absence(conn, key, {"absent": True}, sold.act)
        restored.doubt(conn, sold.act)
        forced = recovery.force_cleanup(conn, key, sold.act, runtime_verified_absent=True)
        assert forced["slots"][0]["status"] == "cleanup"


@pytest.mark.covers("CTRL-7")
def test_only_from_an_idle_slot_and_nobody_who_is_known(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        running = sold.active(conn)
        held = claims.of_allocation(conn, running)[0].slot_id
        (idle,) = {slot.id for slot in slots.of_node(conn, "n1")} - {held}
        assert (
            code(recovery.remove_orphan, conn, idle, UNKNOWN, sold.act.because(""))
            == "reason_required"
        )
        assert code(recovery.remove_orphan, conn, idle, UNKNOWN, sold.act) == "slot_in_use", (
            "on sale"
        )
        assert code(recovery.remove_orphan, conn, held, UNKNOWN, sold.act) == "slot_in_use"
        slot_life.disable(conn, idle, sold.act)
        assert code(recovery.remove_orphan, conn, idle, running, sold.act) == "allocation_active"
        # Its devices may be those of another slot by now.
        slot_life.withdraw(conn, idle, sold.act)
        assert code(recovery.remove_orphan, conn, idle, UNKNOWN, sold.act) == "slot_in_use"
        assert queue.every(conn, kind=TaskKind.SLICE_WIPE) == []


@pytest.mark.covers("CTRL-7", "CTRL-15", "I12")
def test_no_slot_is_wiped_on_a_machine_that_is_sold_whole(sold: Site) -> None:
    """Its tenant has the disks of all slots."""
    with transaction(sold.engine) as conn:
        host.convert(conn, "n1", NodeMode.BAREMETAL, sold.act)
        host.converted(conn, "n1", sold.act)
        slot = slots.of_node(conn, "n1")[0]
        assert slot.status == "disabled"
        assert code(recovery.remove_orphan, conn, slot.id, UNKNOWN, sold.act) == "node_is_baremetal"
        assert slots.get(conn, slot.id).status == "disabled"
        slices.block(conn, slot, "", sold.act, step="drift", error={"code": "disk_dirty"})
        assert code(recovery.repair, conn, slot.id, sold.act) == "node_is_baremetal"
        assert queue.every(conn, kind=TaskKind.SLICE_WIPE) == []


@pytest.mark.covers("CTRL-7", "I13")
def test_what_a_tenant_left_is_not_freed_by_the_removal_of_another_machine(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        assert code(recovery.remove_orphan, conn, slot.id, UNKNOWN, sold.act) == "slot_in_use"
        assert slots.get(conn, slot.id).status == "cleanup_blocked"
        recovery.remove_orphan(conn, slot.id, key, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        slices.cleanup_failed(conn, [slot.id], sold.act, step="nvme_wipe", error={})
        assert code(recovery.remove_orphan, conn, slot.id, UNKNOWN, sold.act) == "slot_in_use"
        task = recovery.remove_orphan(conn, slot.id, key, sold.act)
        cleaned(sold, conn, task)
        assert slots.get(conn, slot.id).status == "available"
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-7", "I12", "I13")
def test_nothing_is_wiped_under_a_live_claim(sold: Site) -> None:
    """The slot would be wiped and on sale, with a claim that refuses every launch there."""
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        launch.release(conn, key, sold.act)
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE, TaskState.FAILED)
        leased = {"code": "slot_leased", "found": f"leased by {UNKNOWN}"}
        slices.release_failed(conn, key, sold.act, step="fence", error=leased)
        (slot,) = recovery.blocked(conn)
        assert code(recovery.remove_orphan, conn, slot.id, UNKNOWN, sold.act) == "claim_live"
        assert code(recovery.repair, conn, slot.id, sold.act) == "claim_live"
        assert slots.get(conn, slot.id) == slot
        assert queue.every(conn, kind=TaskKind.SLICE_WIPE) == []
        recovery.force_cleanup(conn, key, sold.act, runtime_verified_absent=False)
        cleaned(sold, conn, recovery.remove_orphan(conn, slot.id, UNKNOWN, sold.act))
        assert slots.get(conn, slot.id).status == "available"
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-7", "I13")
def test_a_removal_of_long_ago_frees_nothing_of_a_later_tenant(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        slot_id = slots.of_node(conn, "n1")[0].id
        slot_life.disable(conn, slot_id, sold.act)
        cleaned(sold, conn, recovery.remove_orphan(conn, slot_id, UNKNOWN, sold.act))
        slot_life.enable(conn, slot_id, sold.act)
        sold.failed(conn)
        assert [slot.id for slot in recovery.blocked(conn)] == [slot_id]
        assert code(recovery.remove_orphan, conn, slot_id, UNKNOWN, sold.act) == "slot_in_use"


@pytest.mark.covers("CTRL-7", "I7", "I12", "I13")
def test_a_slot_that_was_sold_anew_since_the_backup_comes_back(sold: Site) -> None:
    """The records know its tenant of before, and its host has seen any number of later claims."""
    with transaction(sold.engine) as conn:
        former = sold.active(conn)
        slot_id = str(claims.of_allocation(conn, former)[0].slot_id)
        restored.doubt(conn, sold.act)
        launch.release(conn, former, sold.act)
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE, TaskState.FAILED)
        stale = {"code": "stale_fence", "found": "fence 1"}
        slices.release_failed(conn, former, sold.act, step="fence", error=stale)
        recovery.force_cleanup(conn, former, sold.act, runtime_verified_absent=True)
        task = sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        assert task.fences[slot_id] > 1_000_000, "above every fence of its host"
        # Its host answers that another allocation has it.
        leased = {"code": "slot_leased", "found": f"leased by {UNKNOWN}"}
        slices.cleanup_failed(conn, [slot_id], sold.act, step="fence", error=leased)
        task = recovery.remove_orphan(conn, slot_id, UNKNOWN, sold.act)
        assert task.parameters["allocation"] == {"id": UNKNOWN}
        cleaned(sold, conn, task)
        assert slots.get(conn, slot_id).status == "disabled", "its host is not proven again"
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-7", "I12")
@pytest.mark.parametrize("named", [UNKNOWN, str(uuid.uuid4())], ids=["the same", "another"])
def test_a_removal_that_failed_is_repeated_under_whatever_name(sold: Site, named: str) -> None:
    with transaction(sold.engine) as conn:
        slot_id = slots.of_node(conn, "n1")[0].id
        slot_life.disable(conn, slot_id, sold.act)
        recovery.remove_orphan(conn, slot_id, UNKNOWN, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        slices.cleanup_failed(conn, [slot_id], sold.act, step="nvme_wipe", error={})
        # As the recovery policy tries by itself.
        recovery.repair(conn, slot_id, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        slices.cleanup_failed(conn, [slot_id], sold.act, step="nvme_wipe", error={})
        cleaned(sold, conn, recovery.remove_orphan(conn, slot_id, named, sold.act))
        assert slots.get(conn, slot_id).status == "disabled"
        assert gate.gate(conn, slot_id) == ()


@pytest.mark.covers("CTRL-7", "I12")
def test_a_blocked_slot_that_nobody_ever_had_can_be_repaired(sold: Site) -> None:
    """For example a slot whose disk the host calls dirty although no claim was ever made."""
    with transaction(sold.engine) as conn:
        slot = slots.of_node(conn, "n1")[0]
        error = {"code": "disk_dirty", "found": "not wiped since it was used"}
        slices.block(conn, slot, "", sold.act, step="drift", error=error)
        task = recovery.repair(conn, slot.id, sold.act)
        assert task.parameters["allocation"] == {"id": slot.id}
        cleaned(sold, conn, task)
        assert sold.statuses(conn) == ["available", "available"]
        absences = conn.execute(sa.select(tables.absences.c.id)).all()
        assert absences == [], "the slot had no owner"
