"""What no record knows is removed on a person's word, slot by slot, and proven gone."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.domain.errors import Problem
from reconciler.domain.states import ProofKind, TaskKind, TaskState
from reconciler.settings import Settings
from reconciler.store import (
    allocations,
    audit,
    discoveries,
    gates,
    invariants,
    orphans,
    outcomes,
    proofs,
    recovery,
    restored,
    slots,
    tables,
    tasks,
)
from reconciler.store.engine import transaction
from reconciler.tasks import wipe
from reconciler.tasks.handler import Work

UNKNOWN = str(uuid.uuid4())


def code(call: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(Problem) as caught:
        call(*args, **named)
    return caught.value.code


def cleaned(site: Any, conn: Any, task: dict[str, Any]) -> None:
    """The host has done what the task says."""
    work = Work(conn, task, {"id": "n1"}, {}, Settings())
    (given,) = wipe.variables(work)["slice_slots"]
    slot = slots.get(conn, given["slot_id"])
    proof = {
        "disk": slot["nvme_identity"],
        "serial": slot["nvme_serial"],
        "size_bytes": slot["nvme_size_bytes"],
        "method": "user_data_erase",
        "verified": True,
    }
    evidence = {"proofs": {slot["id"]: proof}, "absence": {"absent": True}}
    wipe.succeed(work, evidence)
    site.finish(conn, TaskKind.SLICE_WIPE)


@pytest.mark.covers("CTRL-7", "I13", "I4")
def test_after_a_restore_no_proof_of_before_stands(sold: Any) -> None:
    """A slot was sold since the backup: its disk is a tenant's, and the records know nothing."""
    with transaction(sold.engine) as conn:
        running = sold.active(conn)
        held = allocations.claims(conn, running)[0]["slot_id"]
        takeover = {"disk": "eui.5e000000000000aa", "method": "discard", "verified": True}
        proofs.record_transition(conn, "n1", takeover, sold.act)
        before = {slot["id"]: slot for slot in slots.of_node(conn, "n1")}
        restored.doubt(conn, sold.act)
        (idle,) = set(before) - {held}
        assert slots.get(conn, held)["disk_generation"] == before[held]["disk_generation"]
        assert slots.get(conn, idle)["disk_generation"] == before[idle]["disk_generation"] + 1
        # All that can be seen of the host is well, and still nothing of it is sold.
        discoveries.record(conn, "n1", sold.document(0), sold.act)
        discoveries.record_parity(conn, "n1", sold.parity(), sold.act)
        (found,) = slots.open_gate(conn, "n1", sold.act)["closed"][idle]
        assert found["code"] == "proof_missing"
        slot = {**before[idle], "nvme_identity": "eui.5e000000000000aa"}
        old = {**slot, "disk_generation": 0, "nvme_eui": "5e000000000000aa"}
        codes = {row.code for row in gates.judge(conn, old, proofs.current(conn, old))}
        assert "proof_outdated" in codes, "a disk in no slot may have been sold as well"
        assert invariants.check(conn) == []
        # The tenant of the records is still theirs.
        allocations.release(conn, running, sold.act)
        given = sold.proofs(conn, running)
        assert outcomes.release_succeeded(
            conn, running, sold.act, proofs=given, absence={"absent": True}
        )
        # The unknown one goes on a person's word, and with it the doubt.
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE)
        task = orphans.remove(conn, idle, UNKNOWN, sold.act)
        assert task["parameters"]["allocation"] == {"id": UNKNOWN}
        assert (task["allocation_id"], task["subject_id"]) == (None, idle)
        cleaned(sold, conn, task)
        assert slots.get(conn, idle)["status"] == "available"
        (told,) = audit.every(conn, action="admin.slot.orphan.removed")
        assert (told["subject_id"], told["detail"]) == (idle, {"allocation_id": UNKNOWN})
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-7", "I13")
def test_evidence_from_before_a_restore_frees_no_blocked_slot(sold: Any) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        document = sold.proofs(conn, key)[slot["id"]]
        proofs.record(conn, slot, ProofKind.WIPE, document, allocation_id=key)
        discoveries.record_absence(conn, key, {"absent": True}, sold.act)
        restored.doubt(conn, sold.act)
        forced = recovery.force_cleanup(conn, key, sold.act, runtime_verified_absent=True)
        assert forced["slots"][0]["status"] == "cleanup"


@pytest.mark.covers("CTRL-7")
def test_only_from_an_idle_slot_and_nobody_who_is_known(sold: Any) -> None:
    with transaction(sold.engine) as conn:
        running = sold.active(conn)
        held = allocations.claims(conn, running)[0]["slot_id"]
        (idle,) = {slot["id"] for slot in slots.of_node(conn, "n1")} - {held}
        assert code(orphans.remove, conn, idle, UNKNOWN, sold.act.because("")) == "reason_required"
        assert code(orphans.remove, conn, idle, UNKNOWN, sold.act) == "slot_in_use", "on sale"
        assert code(orphans.remove, conn, held, UNKNOWN, sold.act) == "slot_in_use"
        slots.disable(conn, idle, sold.act)
        assert code(orphans.remove, conn, idle, running, sold.act) == "allocation_active"
        assert tasks.every(conn, kind=TaskKind.SLICE_WIPE) == []


@pytest.mark.covers("CTRL-7", "I13")
def test_what_a_tenant_left_is_not_freed_by_the_removal_of_another_machine(sold: Any) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
        assert code(orphans.remove, conn, slot["id"], UNKNOWN, sold.act) == "slot_in_use"
        assert slots.get(conn, slot["id"])["status"] == "cleanup_blocked"
        orphans.remove(conn, slot["id"], key, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        outcomes.wipe_slots_failed(conn, [slot["id"]], sold.act, step="nvme_wipe", error={})
        assert code(orphans.remove, conn, slot["id"], UNKNOWN, sold.act) == "slot_in_use"
        task = orphans.remove(conn, slot["id"], key, sold.act)
        cleaned(sold, conn, task)
        assert slots.get(conn, slot["id"])["status"] == "available"
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-7", "I12")
@pytest.mark.parametrize("named", [UNKNOWN, str(uuid.uuid4())], ids=["the same", "another"])
def test_a_removal_that_failed_is_repeated_under_whatever_name(sold: Any, named: str) -> None:
    with transaction(sold.engine) as conn:
        slot_id = slots.of_node(conn, "n1")[0]["id"]
        slots.disable(conn, slot_id, sold.act)
        orphans.remove(conn, slot_id, UNKNOWN, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        outcomes.wipe_slots_failed(conn, [slot_id], sold.act, step="nvme_wipe", error={})
        # As the recovery policy tries by itself.
        recovery.repair(conn, slot_id, sold.act)
        sold.finish(conn, TaskKind.SLICE_WIPE, TaskState.FAILED)
        outcomes.wipe_slots_failed(conn, [slot_id], sold.act, step="nvme_wipe", error={})
        cleaned(sold, conn, orphans.remove(conn, slot_id, named, sold.act))
        assert slots.get(conn, slot_id)["status"] == "disabled"
        assert slots.gate(conn, slot_id) == ()


@pytest.mark.covers("CTRL-7", "I12")
def test_a_blocked_slot_that_nobody_ever_had_can_be_repaired(sold: Any) -> None:
    """As one is whose disk the host calls dirty although no claim was ever made."""
    with transaction(sold.engine) as conn:
        slot = slots.of_node(conn, "n1")[0]
        error = {"code": "disk_dirty", "found": "not wiped since it was used"}
        outcomes.block(conn, slot, "", sold.act, step="drift", error=error)
        task = recovery.repair(conn, slot["id"], sold.act)
        assert task["parameters"]["allocation"] == {"id": slot["id"]}
        cleaned(sold, conn, task)
        assert sold.statuses(conn) == ["available", "available"]
        absences = conn.execute(sa.select(tables.absences.c.id)).all()
        assert absences == [], "it was nobody's"
