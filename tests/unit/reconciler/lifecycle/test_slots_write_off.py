"""Write-off of dead devices with evidence; nothing of them ever counts as clean."""

from __future__ import annotations

import pytest

from reconciler.db import journal
from reconciler.db.engine import transaction
from reconciler.lifecycle import gate, host, invariants, launch, recovery, slices
from reconciler.lifecycle import slots as slot_life
from reconciler.model.bundle import Bundle
from reconciler.model.states import TaskKind
from reconciler.records import claims, slots
from tests.unit.reconciler.conftest import Site, code


@pytest.mark.covers("CTRL-7", "I12", "I4")
@pytest.mark.parametrize("dead", ["disk", "gpu"])
def test_a_blocked_slot_whose_device_died_is_written_off(sold: Site, dead: str) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        slot = slots.get(conn, claims.of_allocation(conn, key)[0].slot_id)
        assert code(slot_life.withdraw, conn, slot.id, sold.act.because("")) == "reason_required"
        assert code(slot_life.withdraw, conn, slot.id, sold.act) == "slot_in_use", "not looked at"
        host.record_discovery(conn, "n1", sold.document(0), sold.act)
        assert code(slot_life.withdraw, conn, slot.id, sold.act) == "slot_in_use", "all is there"
        document = sold.document(0)
        name, column, gone = {
            "disk": ("nvme", "identity", slot.nvme_identity),
            "gpu": ("gpu", "address", slot.gpu_pci_address),
        }[dead]
        document[name] = [row for row in document[name] if row[column] != gone]
        host.record_discovery(conn, "n1", document, sold.act, observed_at=slot.status_since - 1)
        assert code(slot_life.withdraw, conn, slot.id, sold.act) == "slot_in_use", "from before"
        host.record_discovery(conn, "n1", document, sold.act)
        after = slot_life.withdraw(conn, slot.id, sold.act)
        assert after.retired_at and after.status == "disabled"
        assert after.fence > slot.fence
        row = journal.history_of(conn, "slot", slot.id)[-1]
        assert (row.event, row.evidence["missing"]) == ("withdraw", [dead])
        assert recovery.blocked(conn) == []
        assert invariants.check(conn) == []
        # Put back or replaced, it is approved anew; the disk is not believed to be clean.
        host.record_discovery(conn, "n1", sold.document(0), sold.act)
        host.record_parity(conn, "n1", sold.parity(), sold.act)
        bundle = Bundle.of(sold.document(0)["candidates"][0]["bundle"])
        again = slot_life.approve(conn, "n1", bundle, sold.act)
        assert again.nvme_identity == slot.nvme_identity
        assert "proof_missing" in {row.code for row in gate.gate(conn, again.id)}


@pytest.mark.covers("CTRL-7")
def test_a_dead_slot_is_not_written_off_under_a_claim(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        launch.release(conn, key, sold.act)
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE)
        slices.release_failed(conn, key, sold.act, step="nvme_wipe", error={})
        host.record_discovery(conn, "n1", {**sold.document(0), "nvme": []}, sold.act)
        slot_id = claims.of_allocation(conn, key)[0].slot_id
        assert code(slot_life.withdraw, conn, slot_id, sold.act) == "claim_live"
