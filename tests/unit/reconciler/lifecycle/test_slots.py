"""Approval, the gate, and slots on and off sale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import gate, host, invariants, launch, slices
from reconciler.lifecycle import slots as slot_life
from reconciler.model.bundle import Bundle
from reconciler.model.states import HealthState, NodeMode, TaskKind
from reconciler.records import claims, nodes, proofs, queue, slots
from reconciler.settings import Settings
from reconciler.work.handler import open_work
from reconciler.work.kinds import node
from tests.unit.reconciler import wipes
from tests.unit.reconciler.conftest import Site, code


def candidate(site: Site, index: int, number: int = 0) -> Bundle:
    return Bundle.of(site.document(number)["candidates"][index]["bundle"])


@pytest.mark.covers("CTRL-3")
def test_order_of_preparation(site: Site) -> None:
    with transaction(site.engine) as conn:
        nodes.create(conn, site.act, id="n1")
        bundle = candidate(site, 0)
        assert code(slot_life.approve, conn, "n1", bundle, site.act) == "discovery_missing"
        host.retire(conn, "n1", site.act)
        site.enrol(conn, "n2")
        slot = site.approve(conn, "n2", 0)
        assert (slot.status, slot.wanted) == ("disabled", "available")
        assert slot.capacity_metadata["fabric_claim_mode"] == "per_slot_vf"
        assert set(slot.capacity_metadata) >= METADATA
        codes = {blocker.code for blocker in gate.gate(conn, slot.id)}
        assert codes == {"discovery_stale", "parity_missing"}
        assert code(gate.make_available, conn, slot.id, site.act) == "gate_closed"
        assert code(host.set_scheduling, conn, "n2", True, site.act) == "scheduling_not_ready"
        assert site.prove(conn, "n2") == {"opened": [slot.id], "closed": {}}
        assert slots.get(conn, slot.id).health_state == "healthy"
        assert journal.audit_rows(conn, action="admin.slot.approved")[0].subject_id == slot.id


# Keys of the metadata of a slot.
METADATA = {
    "storage_ownership",
    "storage_mode",
    "destructive_wipe_policy",
    "storage_transition_manifest",
    "storage_identity_kind",
    "fabric_claim_mode",
    "fabric_vf_pci_address",
}


@pytest.mark.covers("CTRL-3", "HOST-9")
@pytest.mark.parametrize("approved_first", [False, True])
def test_a_slot_says_whose_its_disk_is_and_where_its_former_use_is_written_down(
    site: Site, approved_first: bool
) -> None:
    bundle = candidate(site, 0)
    manifest = "/var/log/gpuaas/slice-storage-transition-20261121093831.txt"
    device = {
        "proof": {"disk": bundle.identity, "method": "discard", "verified": True},
        "manifest": manifest,
    }
    with transaction(site.engine) as conn:
        site.enrol(conn, "n1")
        nodes.change(conn, "n1", site.act, profile="lab")
        parameters = {"devices": [bundle.nvme_device], "apply": True}
        kind = TaskKind.NODE_STORAGE_TRANSITION
        task = queue.enqueue(conn, queue.Enqueue(kind, "n1", "node", "n1", parameters), site.act)
        work = open_work(conn, Settings(), task)
        if approved_first:
            slot = slot_life.approve(conn, "n1", bundle, site.act)
            assert slot.capacity_metadata["storage_transition_manifest"] == ""
            node.takeover_succeeded(work, {"devices": [device], "manifest": manifest})
        else:
            node.takeover_succeeded(work, {"devices": [device], "manifest": manifest})
            slot = slot_life.approve(conn, "n1", bundle, site.act)
        metadata = slots.get(conn, slot.id).capacity_metadata
        assert {name: metadata[name] for name in METADATA} == {
            "storage_ownership": "slice",
            "storage_mode": "slice",
            "destructive_wipe_policy": "clear",
            "storage_transition_manifest": manifest,
            "storage_identity_kind": "nvme_wwn_by_id",
            "fabric_claim_mode": "per_slot_vf",
            "fabric_vf_pci_address": bundle.fabric_vf_pci_address,
        }
        assert site.prove(conn, "n1") == {"opened": [slot.id], "closed": {}}


@pytest.mark.covers("CTRL-3", "I4")
def test_no_slot_without_a_transition_proof(site: Site) -> None:
    with transaction(site.engine) as conn:
        site.enrol(conn, "n1")
        slot = slot_life.approve(conn, "n1", candidate(site, 0), site.act)
        opened = site.prove(conn, "n1")
        assert opened["closed"][slot.id][0]["code"] == "proof_missing"


@pytest.mark.covers("I4")
def test_a_wipe_counts_only_when_the_slots_policy_accepts_it(site: Site) -> None:
    """I4, for the transition by which a disk comes in and for the wipe after a tenant."""
    purge = {"destructive_wipe_policy": "purge"}
    bundle = candidate(site, 0)
    taken_over = {"disk": bundle.identity, "method": "zero_fill", "verified": True}
    with transaction(site.engine) as conn:
        site.enrol(conn, "n1")
        proofs.record_transition(conn, "n1", taken_over, site.act)
        slot = slot_life.approve(conn, "n1", bundle, site.act, capacity_metadata=purge)
        closed = site.prove(conn, "n1")["closed"]
        assert [row["code"] for row in closed[slot.id]] == ["proof_class_refused"]
        better = {**taken_over, "method": "crypto_erase"}
        proofs.record_transition(conn, "n1", better, site.act)
        assert site.prove(conn, "n1")["opened"] == [slot.id]

        allocation_id = site.active(conn)
        launch.release(conn, allocation_id, site.act)
        given = site.proofs(conn, allocation_id)
        given[slot.id]["method"] = "discard"
        release = slices.release_succeeded
        named = {"proofs": given, "absence": {"absent": True}}
        assert code(release, conn, allocation_id, site.act, **named) == "proof_class_refused"
        given[slot.id]["method"] = "user_data_erase"
        assert release(conn, allocation_id, site.act, **named)
        assert site.statuses(conn) == ["available"]


@pytest.mark.covers("CTRL-3")
def test_refusals_of_the_bundle(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        approve = slot_life.approve
        fourth = candidate(sold, 3)
        wrong = replace(fourth, nvme_eui="5e0000000000dead")
        assert code(approve, conn, "n1", wrong, sold.act) == "identity_mismatch"
        shared = candidate(sold, 2)
        assert code(approve, conn, "n1", shared, sold.act) == "mounted_child"
        assert sold.statuses(conn) == ["available", "available"]


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        ("duplicate_slot_index", ["slot_index"]),
        ("duplicate_gpu", ["gpu_pci_address", "numa_node"]),
        ("duplicate_disk", ["nvme_device", "nvme_serial", "nvme_eui", "nvme_size_bytes"]),
        ("duplicate_fabric_vf", ["fabric_vf_pci_address"]),
        ("duplicate_mac", ["management_mac"]),
        ("duplicate_ip", ["private_ip"]),
    ],
)
def test_duplicates(sold: Site, expected: str, fields: list[str]) -> None:
    taken = candidate(sold, 0).document()
    bundle = replace(candidate(sold, 3), **{name: taken[name] for name in fields})
    with transaction(sold.engine) as conn:
        assert code(slot_life.approve, conn, "n1", bundle, sold.act) == expected


@pytest.mark.covers("CTRL-3")
def test_another_node_may_use_the_same_addresses_but_not_the_same_disk(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        sold.enrol(conn, "n2", 2)
        sold.approve(conn, "n2", 0, 2)
        sold.enrol(conn, "n3", 0)
        same = replace(candidate(sold, 0), management_mac="52:54:00:99:00:01")
        assert code(slot_life.approve, conn, "n3", same, sold.act) == "duplicate_disk"


@pytest.mark.covers("CTRL-3")
def test_no_mac_address_is_on_two_nodes(sold: Site) -> None:
    """Suggestions of two machines can meet in their few bytes; the second is refused, aloud."""
    with transaction(sold.engine) as conn:
        sold.enrol(conn, "n2", 2)
        mac = candidate(sold, 0).management_mac
        same = replace(candidate(sold, 0, 2), management_mac=mac)
        assert code(slot_life.approve, conn, "n2", same, sold.act) == "duplicate_mac"
        sold.approve(conn, "n2", 0, 2)
    # Not only asked by approve: two at once are stopped by the schema.
    table = tables.slots
    with pytest.raises(sa.exc.IntegrityError), transaction(sold.engine) as conn:
        conn.execute(sa.update(table).where(table.c.node_id == "n2").values(management_mac=mac))


@pytest.mark.covers("CTRL-3")
def test_no_iommu_group_is_in_two_slots(sold: Site) -> None:
    """At approval, and at the gate when the groups changed afterwards (another kernel, no ACS)."""
    document = sold.document(0)
    functions = {row["address"]: row for row in document["fabric"][0]["vfs"]}
    first, second, last = (candidate(sold, index) for index in (0, 1, 3))
    together = [first.fabric_vf_pci_address, last.fabric_vf_pci_address]
    for address in together:
        functions[address]["group_members"] = together
    with transaction(sold.engine) as conn:
        host.record_discovery(conn, "n1", document, sold.act)
        assert code(slot_life.approve, conn, "n1", last, sold.act) == "group_shared"
        assert sold.statuses(conn) == ["available", "available"]

        together[:] = [first.fabric_vf_pci_address, second.fabric_vf_pci_address]
        for address in together:
            functions[address]["group_members"] = together
        host.record_discovery(conn, "n1", document, sold.act)
        for slot in slots.of_node(conn, "n1"):
            slot_life.disable(conn, slot.id, sold.act)
            assert "discovery:group_shared" in {row.code for row in gate.gate(conn, slot.id)}
            assert slot_life.enable(conn, slot.id, sold.act).status == "disabled"


@pytest.mark.covers("CTRL-3")
def test_disable_enable_withdraw(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        slot = slots.of_node(conn, "n1")[0]
        assert code(slot_life.withdraw, conn, slot.id, sold.act) == "slot_in_use"
        assert slot_life.disable(conn, slot.id, sold.act).status == "disabled"
        assert gate.open_gate(conn, "n1", sold.act)["opened"] == []
        assert slot_life.enable(conn, slot.id, sold.act).status == "available"
        slot_life.disable(conn, slot.id, sold.act)
        slot_life.withdraw(conn, slot.id, sold.act)
        assert code(slot_life.enable, conn, slot.id, sold.act) == "slot_withdrawn"
        assert len(slots.of_node(conn, "n1")) == 1
        assert slot_life.approve(conn, "n1", candidate(sold, 0), sold.act).slot_index == 0


@pytest.mark.covers("CTRL-3")
def test_a_slot_in_use_is_disabled_when_it_comes_back(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        slot_id = claims.of_allocation(conn, allocation_id)[0].slot_id
        assert slot_life.disable(conn, slot_id, sold.act).status == "reserved"
        launch.release(conn, allocation_id, sold.act)
        assert slots.get(conn, slot_id).status == "disabled"


@pytest.mark.covers("I16")
def test_reboot_and_reimage_close_the_gate(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        document = sold.document(0)
        document["identity"]["boot_id"] = "another-boot"
        host.record_discovery(conn, "n1", document, sold.act)
        assert sold.statuses(conn) == ["disabled", "disabled"]
        row = journal.history_of(conn, "slot", slots.of_node(conn, "n1")[0].id)[-1]
        assert row.reason == "gate closed: new boot"
        closed = gate.open_gate(conn, "n1", sold.act)["closed"]
        assert {row["code"] for rows in closed.values() for row in rows} == {"parity_stale"}
        report = sold.parity()
        report["identity"]["boot_id"] = "another-boot"
        host.record_parity(conn, "n1", report, sold.act)
        assert len(gate.open_gate(conn, "n1", sold.act)["opened"]) == 2
        host.observed(conn, "n1", sold.act, identity={"host_key": "ssh-ed25519 BBBB"})
        assert sold.statuses(conn) == ["disabled", "disabled"]
        # The new installation's ledger knows nothing of the proofs of the old installation.
        for kind in (document, report):
            kind["identity"]["host_key"] = "ssh-ed25519 BBBB"
        host.record_discovery(conn, "n1", document, sold.act)
        host.record_parity(conn, "n1", report, sold.act)
        closed = gate.open_gate(conn, "n1", sold.act)["closed"]
        assert {row["code"] for rows in closed.values() for row in rows} == {"proof_stale"}
        for slot in slots.of_node(conn, "n1"):
            proof = {"disk": slot.nvme_identity, "method": "discard", "verified": True}
            proofs.record_transition(conn, "n1", proof, sold.act)
        assert len(gate.open_gate(conn, "n1", sold.act)["opened"]) == 2


@pytest.mark.covers("CTRL-3", "I16")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("gpu", "discovery:gpu_not_found"),
        ("mounted", "discovery:mounted"),
        ("identity", "discovery:disk_not_found"),
        ("node", "discovery:missing_dnsmasq"),
    ],
)
def test_a_later_discovery_takes_off_sale_what_it_speaks_against(
    sold: Site, change: str, code: str
) -> None:
    with transaction(sold.engine) as conn:
        first, second = slots.of_node(conn, "n1")
        document = sold.document(0)
        disk = next(d for d in document["nvme"] if d["identity"] == first.nvme_identity)
        if change == "gpu":
            document["gpu"] = [
                gpu for gpu in document["gpu"] if gpu["address"] != first.gpu_pci_address
            ]
        elif change == "mounted":
            disk["blockers"] = [{"code": "mounted", "detail": "/mnt"}]
        elif change == "identity":
            disk["identity"] = "eui.5e00000000000999"
        else:
            document["slice_network"]["blockers"] = [{"code": "missing_dnsmasq", "detail": "x"}]
        host.record_discovery(conn, "n1", document, sold.act)
        record = slots.get(conn, first.id)
        assert record.status == "disabled"
        assert code in record.status_reason
        other = slots.get(conn, second.id).status
        assert other == ("disabled" if change == "node" else "available")
        row = journal.history_of(conn, "slot", first.id)[-1]
        assert code in {row["code"] for row in row.evidence["blockers"]}
        assert [v for v in invariants.check(conn) if v.invariant != "I12"] == []
        # Seen without it, the slot passes again.
        host.record_discovery(conn, "n1", sold.document(0), sold.act)
        assert gate.open_gate(conn, "n1", sold.act)["closed"] == {}


@pytest.fixture
def free(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site on whose host every candidate's disk is free."""
    recorded = site.document

    def document(number: int) -> dict[str, Any]:
        prepared = recorded(number)
        for disk in prepared["nvme"]:
            disk["blockers"] = [row for row in disk["blockers"] if row["code"] == "os_disk"]
        return prepared

    monkeypatch.setattr(site, "document", document)
    return site


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize("report", ["missing", "silent", "parity"])
def test_one_dead_gpu_blocks_its_own_slot_and_degrades_the_node(free: Site, report: str) -> None:
    site = free
    site.node(indexes=(0, 1, 2, 3))
    with transaction(site.engine) as conn:
        first, *others = slots.of_node(conn, "n1")
        document = site.document(0)
        gpu = next(g for g in document["gpu"] if g["address"] == first.gpu_pci_address)
        if report == "missing":
            document["gpu"].remove(gpu)
            fault = {"code": "gpu_count_mismatch", "detail": "3 of 4 GPUs are present"}
            code = "discovery:gpu_not_found"
        else:
            fault = {"code": "device_not_answering", "detail": f"{gpu['address']} is silent"}
            gpu["blockers"] = [fault]
            code = "discovery:device_not_answering"
        document["candidate_summary"]["degraded"] = [fault]
        if report == "parity":
            dead = site.parity() | {"dead_gpus": [first.gpu_pci_address]}
            host.record_parity(conn, "n1", dead, site.act)
            code = "gpu_dead"
        else:
            host.record_discovery(conn, "n1", document, site.act)
            node_row = nodes.get(conn, "n1")
            assert (node_row.health_state, node_row.health_detail["code"]) == (
                "degraded",
                fault["code"],
            )
            assert fault["detail"] in node_row.health_detail["reason"]
        assert [slots.get(conn, slot.id).status for slot in others] == ["available"] * 3
        blocked = slots.get(conn, first.id)
        assert blocked.status == "disabled" and code in blocked.status_reason
        # The GPU is back: the node is healthy, and the slot is sold again.
        host.record_discovery(conn, "n1", site.document(0), site.act)
        host.record_parity(conn, "n1", site.parity(), site.act)
        assert gate.open_gate(conn, "n1", site.act) == {"opened": [first.id], "closed": {}}
        assert nodes.get(conn, "n1").health_state in ("healthy", "unknown")


@pytest.mark.covers("CTRL-3")
def test_the_gpus_that_are_left_can_be_approved(free: Site) -> None:
    site = free
    document = site.document(0)
    gone = document["gpu"].pop(0)["address"]
    fault = {"code": "gpu_count_mismatch", "detail": "3 of 4 GPUs are present"}
    document["candidate_summary"]["degraded"] = [fault]
    with transaction(site.engine) as conn:
        site.enrol(conn, "n1")
        host.record_discovery(conn, "n1", document, site.act)
        for index, row in enumerate(document["candidates"]):
            if row["bundle"]["gpu_pci_address"] == gone:
                assert code(site.approve, conn, "n1", index) == "gpu_not_found"
            else:
                site.approve(conn, "n1", index)
        host.record_discovery(conn, "n1", document, site.act)
        host.record_parity(conn, "n1", site.parity(), site.act)
        assert len(gate.open_gate(conn, "n1", site.act)["opened"]) == 3


@pytest.mark.covers("I4")
def test_use_from_before_the_wipe_keeps_a_late_discovery_from_closing(sold: Site) -> None:
    """The host was asked while the last tenant was there, and answers after the wipe."""
    with transaction(sold.engine) as conn:
        observed_at = clock.read(conn)
        key = sold.active(conn)
        held = claims.of_allocation(conn, key)[0]
        launch.release(conn, key, sold.act)
        given = sold.proofs(conn, key)
        slices.release_succeeded(conn, key, sold.act, proofs=given, absence={"absent": True})
        document = sold.document(0)
        disk = next(d for d in document["nvme"] if d["identity"] == held.nvme_identity)
        disk["blockers"] = [{"code": "qemu_in_use", "detail": "a guest"}]
        host.record_discovery(conn, "n1", document, sold.act, observed_at=observed_at)
        assert sold.statuses(conn) == ["available", "available"]


@pytest.mark.covers("CTRL-3")
def test_stale_discovery_approves_nothing(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        host.observed(conn, "n1", sold.act, identity={"boot_id": "another-boot"})
        assert (
            code(slot_life.approve, conn, "n1", candidate(sold, 3), sold.act) == "discovery_stale"
        )


@pytest.mark.covers("CTRL-3")
def test_bare_metal_nodes_get_no_slots(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        nodes.create(conn, sold.act, id="n2", mode=NodeMode.BAREMETAL)
        assert code(slot_life.approve, conn, "n2", candidate(sold, 3), sold.act) == "node_not_slice"


@pytest.mark.covers("I4")
def test_transition_of_a_disk_in_use_is_no_proof(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        proof = {"disk": candidate(sold, 0).identity, "method": "discard", "verified": True}
        assert code(proofs.record_transition, conn, "n1", proof, sold.act) == "disk_in_use"


@pytest.mark.covers("I4", "P1")
def test_a_host_proves_no_disk_of_another(site: Site) -> None:
    bundle = candidate(site, 0)
    proof = {"disk": bundle.identity, "method": "discard", "verified": True}
    with transaction(site.engine) as conn:
        site.enrol(conn, "n1")
        site.enrol(conn, "n2")
        proofs.record_transition(conn, "n2", proof, site.act)
        slot = slot_life.approve(conn, "n1", bundle, site.act)
        assert proofs.current(conn, slot) is None
        assert code(proofs.record_transition, conn, "n2", proof, site.act) == "disk_in_use"


@pytest.mark.covers("I4", "CTRL-15")
def test_no_slot_of_a_machine_on_which_a_tenant_was_root_is_sold(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def codes(conn: sa.Connection) -> set[str]:
        return {row.code for slot in slots.of_node(conn, "n1") for row in gate.gate(conn, slot.id)}

    with transaction(sold.engine) as conn:
        assert codes(conn) == set()
        with monkeypatch.context() as after:
            after.setattr(gate, "exclusive_ended_at", lambda *_node: clock.read(conn) + 1)
            assert codes(conn) == {"proof_outdated"}
        nodes.update(conn, "n1", tenant_machine_ids=["its own"])
        assert codes(conn) == {"reinstall_required"}
        assert len(gate.review(conn, "n1", sold.act)) == 2


@pytest.mark.covers("I4")
def test_old_proofs_of_a_used_disk_do_not_count_in_a_new_slot(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.failed(conn)
        slot_id = claims.of_allocation(conn, allocation_id)[0].slot_id
        slot = slots.get(conn, slot_id)
        assert proofs.generation(conn, slot.nvme_identity) == 1
        assert proofs.current(conn, slot) is None


@pytest.mark.covers("CTRL-6", "I20")
def test_health_is_recorded(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        slot = slots.of_node(conn, "n1")[0]
        detail = {"drift": "no OVS port"}
        slots.set_health(conn, slot.id, HealthState.DEGRADED, detail, sold.act)
        slots.set_health(conn, slot.id, HealthState.DEGRADED, detail, sold.act)
        rows = journal.history_of(conn, "slot_health", slot.id)
        assert [(row.source, row.target) for row in rows] == [("healthy", "degraded")]


def test_views(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        assert [row["slot_index"] for row in slots.bundles(conn, "n1")] == [0, 1]
        assert len(wipes.proofs_of_disk(conn, candidate(sold, 0).identity)) == 1
        assert proofs.of_slot(conn, "nothing") == []
