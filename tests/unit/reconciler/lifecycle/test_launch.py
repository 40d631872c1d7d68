"""Launch, release and failure: claim, slot, allocation and task change together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal, settings
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.lifecycle import gate, host, invariants, quota, slices
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import slots as slot_life
from reconciler.lifecycle.placement import NoRoom, refusal
from reconciler.model.errors import Problem
from reconciler.model.hardware import Offer
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import (
    allocations,
    claims,
    leasing,
    nodes,
    projects,
    proofs,
    queue,
    reports,
    slots,
)
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import ADMIN, Site, code

ABSENT = {"absent": True, "checks": {}}


@pytest.mark.covers("CTRL-4", "I3")
def test_allocate_does_all_of_it(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        before = len(relay.pending_events(conn))
        allocation = launching.allocate(conn, sold.launch(2), sold.act)
        assert allocation.state == "requested"
        assert [claim.state for claim in allocation.claims] == ["reserved", "reserved"]
        assert sold.statuses(conn) == ["reserved", "reserved"]
        (task,) = queue.every(conn, allocation_id=allocation.id)
        assert (task.kind, task.state) == ("slice.vm_provision", "queued")
        assert task.parameters["slots"] == claims.bundles(conn, allocation.id)
        assert task.parameters["allocation"]["id"] == allocation.id
        assert task.parameters["image"]["digest"].startswith("sha256:")
        assert set(task.fences.values()) == {1}
        topics = [row.topic for row in relay.pending_events(conn)[before:]]
        assert topics.count("slot.reserved") == topics.count("claim.reserved") == 2
        assert {"allocation.requested", "task.queued"} <= set(topics)
        assert journal.audit_rows(conn, action="allocation.created")[0].correlation_id == "corr-1"
        rows = journal.history_of(conn, "slot", allocation.claims[0].slot_id)
        assert rows[-1].evidence["allocation_id"] == allocation.id


@pytest.mark.covers("CTRL-4", "I3")
def test_nothing_remains_of_a_transaction_that_fails(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        before = relay.pending_events(conn)
    with pytest.raises(RuntimeError), transaction(sold.engine) as conn:
        sold.allocate(conn, 2)
        raise RuntimeError
    with transaction(sold.engine) as conn:
        assert relay.pending_events(conn) == before
        assert sold.statuses(conn) == ["available", "available"]
        assert allocations.every(conn) == []


@pytest.mark.covers("CTRL-2", "CTRL-5")
def test_refusals(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        with pytest.raises(NoRoom) as caught:
            sold.allocate(conn, 3)
        problem = refusal(conn, caught.value.want)
        assert problem.code == caught.value.code == "no_capacity"
        assert problem.found == "2 GPUs free, no 3 on one node"
        launch = launching.allocate
        assert code(launch, conn, sold.launch(0), sold.act) == "gpu_count_invalid"
        part = sold.launch(1, capacity_shape="gpu_partition")
        assert code(launch, conn, part, sold.act) == "shape_not_schedulable"
        bare = sold.launch(0, capacity_shape="baremetal")
        assert code(launch, conn, bare, sold.act) == "no_capacity"
        settings.set_site_scheduling(conn, False, sold.act)
        with pytest.raises(NoRoom) as caught:
            launch(conn, sold.launch(), sold.act)
        problem = refusal(conn, caught.value.want)
        assert problem.code == "scheduling_off"
        assert code(allocations.get, conn, "nothing") == "allocation_not_found"


@pytest.mark.covers("CTRL-5", "SLICE-3")
def test_a_node_whose_profile_takes_the_image_is_chosen(sold: Site) -> None:
    """Two profiles sell the same SKU, and the host of the first in order needs a driver."""
    sold.node("n2", number=1)
    offers = {
        "baked": Offer(sku="x", runtime=("driver-570",)),
        "plain": Offer(sku="x"),
        "zz": Offer(sku="y", runtime=("driver-580",)),
    }
    catalogue = {name: offer.sku for name, offer in offers.items()}
    wish = sold.launch(2, sku="x", offers=offers, catalogue=catalogue)
    with transaction(sold.engine) as conn:
        for node_id, profile in (("n1", "baked"), ("n2", "plain")):
            of_node = sa.update(tables.nodes).where(tables.nodes.c.id == node_id)
            conn.execute(of_node.values(profile=profile))
        assert launching.allocate(conn, wish, sold.act).node_id == "n2"
        with pytest.raises(NoRoom) as caught:
            launching.allocate(conn, wish, sold.act)
        problem = refusal(conn, caught.value.want)
        assert problem.code == "no_capacity"
        reasons = {"image_runtime_missing": 2, "reserved": 2}
        assert problem.detail["explanation"]["reasons"] == reasons
        only = replace(wish, catalogue=catalogue | {"plain": "y"})
        with pytest.raises(NoRoom) as caught:
            launching.allocate(conn, only, sold.act)
        problem = refusal(conn, caught.value.want)
        assert problem.code == "image_runtime_missing"
        assert problem.expected == "an image that contains driver-570"
        assert problem.found == "base 1, whose record lacks driver-570"


@pytest.mark.covers("CTRL-4", "CTRL-6")
def test_the_whole_life(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn, 2)
        assert sold.statuses(conn) == ["active", "active"]
        assert allocations.get(conn, allocation_id).connection == {"host": "gw"}
        assert launching.release(conn, allocation_id, sold.act).state == "releasing"
        (task,) = queue.every(conn, kind=TaskKind.SLICE_VM_RELEASE)
        assert task.fences == {
            claim.slot_id: 1 for claim in claims.of_allocation(conn, allocation_id)
        }
        given = sold.proofs(conn, allocation_id)
        assert slices.release_succeeded(conn, allocation_id, sold.act, proofs=given, absence=ABSENT)
        assert sold.statuses(conn) == ["available", "available"]
        ended = allocations.get(conn, allocation_id)
        assert ended.state == "released"
        assert {claim.state for claim in ended.claims} == {"released"}
        slot = slots.of_node(conn, "n1")[0]
        assert slot.last_proof.kind == "wipe"
        assert (slot.health_state, slot.health_detail) == ("healthy", {})
        assert reports.latest_absence(conn, allocation_id).absent
        # The next tenant's claim gets the next fence.
        assert claims.bundles(conn, sold.allocate(conn))[0]["fence"] == 2


@pytest.mark.covers("I4")
@pytest.mark.parametrize(
    ("change", "absence", "expected"),
    [
        ({}, {"absent": False}, "absence_unproven"),
        ({"verified": False}, ABSENT, "proof_unverified"),
        ({"disk": "eui.other"}, ABSENT, "proof_mismatch"),
        (None, ABSENT, "proof_missing"),
    ],
)
def test_release_needs_proof(sold: Site, change: Any, absence: Any, expected: str) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launching.release(conn, allocation_id, sold.act)
        given = sold.proofs(conn, allocation_id)
        given = {} if change is None else {key: {**doc, **change} for key, doc in given.items()}
        release = slices.release_succeeded
        named = {"proofs": given, "absence": absence}
        assert code(release, conn, allocation_id, sold.act, **named) == expected
        assert sold.statuses(conn)[0] == "releasing"


@pytest.mark.covers("I6")
def test_release_that_fails_blocks_its_slot(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launching.release(conn, allocation_id, sold.act)
        error = {"code": "wipe_failed", "found": "I/O error"}
        slices.release_failed(conn, allocation_id, sold.act, step="nvme_wipe", error=error)
        slot = slots.of_node(conn, "n1")[0]
        assert slot.status == "cleanup_blocked"
        assert slot.health_detail == {
            "allocation_id": allocation_id,
            "reason": "I/O error",
            "step": "nvme_wipe",
            "code": "wipe_failed",
        }
        assert allocations.get(conn, allocation_id).state == "releasing"
        late = slices.provision_failed(conn, allocation_id, sold.act, step="x", error={})
        assert late is False


@pytest.mark.covers("I6")
def test_failure_before_the_clone_gives_the_slot_back(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn, 2)
        slices.provision_started(conn, allocation_id, sold.act)
        first, second = (claim.slot_id for claim in claims.of_allocation(conn, allocation_id))
        untouched = {
            first: {"disk_written": False, "leftovers": False},
            second: {"disk_written": False, "leftovers": True},
        }
        error = {"code": "image_digest_mismatch"}
        slices.provision_failed(
            conn, allocation_id, sold.act, step="image_cache", error=error, untouched=untouched
        )
        assert sold.statuses(conn) == ["available", "cleanup_blocked"]
        assert proofs.of_slot(conn, first)[0].kind == "untouched"
        assert allocations.get(conn, allocation_id).state == "failed"


@pytest.mark.covers("CTRL-6", "I6")
def test_a_slot_that_its_host_fails_is_not_sold_again_and_again(sold: Site) -> None:
    """Off sale until the host was looked at; for the second time, until a person lets it in."""
    with transaction(sold.engine) as conn:
        slot_id = fails_on_the_host(sold, conn)
        slot = slots.get(conn, slot_id)
        assert slot.status == "disabled"
        assert "launch_failed" in slot.status_reason
        health = (slot.health_state, slot.health_detail["code"])
        assert health == ("degraded", "launch_failed")
        kinds = [task.kind for task in reversed(queue.every(conn, state=TaskState.QUEUED))]
        assert kinds == ["slice.topology_discover", "node.parity"]
        assert fails_on_the_host(sold, conn) != slot_id, "the next launch goes elsewhere"
        assert sold.prove(conn, "n1")["opened"], "looked at, it is tried once more"
        sold.finish(conn, TaskKind.SLICE_TOPOLOGY_DISCOVER)
        sold.finish(conn, TaskKind.NODE_PARITY)
        assert fails_on_the_host(sold, conn) == slot_id
        (blocker,) = sold.prove(conn, "n1")["closed"][slot_id]
        assert blocker["code"] == "launches_failed" and "not_clean" in blocker["detail"]
        assert invariants.check(conn) == []
        slot_life.enable(conn, slot_id, sold.act)
        assert slots.get(conn, slot_id).status == "available", "on a person's word"


@pytest.mark.covers("CTRL-6")
@pytest.mark.parametrize("limits", [{}, dict.fromkeys(quota.SHIPPED)])
def test_a_launch_avoids_hosts_on_which_the_project_has_just_failed(
    sold: Site, limits: Any
) -> None:
    """Whatever the host says of the cause: of some codes it stays on sale."""
    sold.node("n2", (0, 1), 2)

    def chosen(**fields: Any) -> str:
        with conn.begin_nested() as tried:
            key = launching.allocate(conn, replace(sold.launch(), **fields), ADMIN).id
            node_id = allocations.get(conn, key).node_id
            tried.rollback()
        return str(node_id)

    def fails(code: str) -> None:
        key = launching.allocate(conn, replace(sold.launch(), node_id="n1"), ADMIN).id
        slices.provision_started(conn, key, sold.act)
        sold.finish(conn, TaskKind.SLICE_VM_PROVISION, TaskState.FAILED)
        (claim,) = claims.of_allocation(conn, key)
        untouched = {claim.slot_id: {"disk_written": False, "leftovers": False}}
        error = {"code": code}
        slices.provision_failed(conn, key, sold.act, step="s", error=error, untouched=untouched)

    with transaction(sold.engine) as conn:
        quota.change_defaults(conn, limits, ADMIN)
        projects.create(conn, "other", ADMIN, id="other")
        # With a slice it is the first choice.
        launching.allocate(conn, replace(sold.launch(), node_id="n1"), ADMIN)
        sold.finish(conn, TaskKind.SLICE_VM_PROVISION, TaskState.FAILED)
        fails("run_not_started")
        assert chosen() == "n1", "no host was to blame"
        fails("image_digest_mismatch")
        assert chosen() == "n2"
        assert chosen(project_id="other") == "n1"
        assert chosen(node_id="n1") == "n1", "asked for by name"
        with conn.begin_nested() as hour:
            passed = tables.allocations.c.created_at - 3_600
            conn.execute(sa.update(tables.allocations).values(created_at=passed))
            assert chosen() == "n1"
            hour.rollback()
        sold.allocate(conn, 2)
        assert chosen() == "n1", "the others are full"


@pytest.mark.covers("CTRL-6")
def test_a_tenant_in_between_shows_that_the_host_is_well(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        slot_id = fails_on_the_host(sold, conn)
        sold.prove(conn, "n1")
        for kind in (TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskKind.NODE_PARITY):
            sold.finish(conn, kind)
        key = sold.active(conn)
        assert claims.of_allocation(conn, key)[0].slot_id == slot_id
        launching.release(conn, key, sold.act)
        given = sold.proofs(conn, key)
        slices.release_succeeded(conn, key, sold.act, proofs=given, absence={"absent": True})
        sold.finish(conn, TaskKind.SLICE_VM_RELEASE)
        assert fails_on_the_host(sold, conn) == slot_id
        assert "launch_failed" in slots.get(conn, slot_id).status_reason


@pytest.mark.covers("I4")
def test_a_disk_untouched_is_as_clean_as_it_was_sold_and_to_the_same_installation(
    sold: Site,
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        slot_id = claims.of_allocation(conn, key)[0].slot_id
        before = proofs.get(conn, slots.get(conn, slot_id).last_proof_id).install_id
        host.observed(conn, "n1", sold.act, identity={"machine_id": "another", "boot_id": "b2"})
        evidence = {slot_id: {"disk_written": False, "leftovers": False}}
        error = {"code": "canceled"}
        slices.provision_failed(
            conn, key, sold.act, step="start the run", error=error, untouched=evidence
        )
        assert proofs.of_slot(conn, slot_id)[0].install_id == before
        assert "proof_stale" in {row.code for row in gate.gate(conn, slot_id)}


def fails_on_the_host(site: Site, conn: sa.Connection) -> str:
    """A launch that the host refuses before it touches anything; the slot."""
    key = site.allocate(conn)
    slices.provision_started(conn, key, site.act)
    site.finish(conn, TaskKind.SLICE_VM_PROVISION, TaskState.FAILED)
    slot_id = str(claims.of_allocation(conn, key)[0].slot_id)
    evidence = {slot_id: {"disk_written": False, "leftovers": False}}
    error = {"code": "not_clean", "found": "no standing proof"}
    slices.provision_failed(
        conn, key, site.act, step="image_clone", error=error, untouched=evidence
    )
    return slot_id


def test_withdrawn_before_any_run(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        assert launching.release(conn, allocation_id, sold.act).state == "released"
        assert sold.statuses(conn) == ["available", "available"]
        assert queue.every(conn, allocation_id=allocation_id)[0].state == "canceled"
        with pytest.raises(Problem, match="allocation_not_releasable") as caught:
            launching.release(conn, allocation_id, sold.act)
        assert caught.value.remedy == "nothing: it is given back already"


def test_what_helps_while_it_is_given_back(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        launching.release(conn, allocation_id, sold.act)
        with pytest.raises(Problem) as caught:
            launching.release(conn, allocation_id, sold.act)
        assert caught.value.remedy.startswith("wait: it is being given back")
        row = tables.allocations
        conn.execute(sa.update(row).values(error={"code": "x"}).where(row.c.id == allocation_id))
        with pytest.raises(Problem) as caught:
            launching.release(conn, allocation_id, sold.act)
        assert f"`gpuaas recover {allocation_id}" in caught.value.remedy


def test_not_withdrawn_once_a_run_may_have_begun(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        leasing.lease(conn, "worker")
        assert code(launching.release, conn, allocation_id, sold.act) == (
            "allocation_not_releasable"
        )


@pytest.mark.covers("CTRL-3")
def test_slot_comes_back_disabled_while_the_gate_is_closed(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        host.record_parity(conn, "n1", sold.parity(failures=1), sold.act)
        assert sold.statuses(conn) == ["active", "disabled"]
        launching.release(conn, allocation_id, sold.act)
        given = sold.proofs(conn, allocation_id)
        slices.release_succeeded(conn, allocation_id, sold.act, proofs=given, absence=ABSENT)
        assert sold.statuses(conn) == ["disabled", "disabled"]
        host.record_parity(conn, "n1", sold.parity(), sold.act)
        assert len(gate.open_gate(conn, "n1", sold.act)["opened"]) == 2


def test_a_discovery_during_use_does_not_keep_the_slot_closed(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        document = sold.document(0)
        for disk in document["nvme"]:
            if disk["serial"] == "LABNVME0":
                disk["blockers"] = [{"code": "qemu_in_use", "detail": "pid 7"}]
        host.record_discovery(conn, "n1", document, sold.act)
        launching.release(conn, allocation_id, sold.act)
        given = sold.proofs(conn, allocation_id)
        slices.release_succeeded(conn, allocation_id, sold.act, proofs=given, absence=ABSENT)
        assert sold.statuses(conn) == ["available", "available"]


@pytest.mark.covers("I4")
def test_schema_refuses_available_without_a_current_proof(sold: Site) -> None:
    def force(**values: Any) -> None:
        with transaction(sold.engine) as conn:
            update = sa.update(tables.slots).where(tables.slots.c.slot_index == 0)
            conn.execute(update.values(**values))

    with transaction(sold.engine) as conn:
        old = slots.of_node(conn, "n1")[0].available_proof_id
        sold.allocate(conn)
    for values in (
        {"status": "available"},
        {"status": "available", "available_proof_id": old},
        {"status": "available", "available_proof_id": "made-up"},
    ):
        with pytest.raises(sa.exc.IntegrityError):
            force(**values)


@pytest.mark.covers("CTRL-14")
def test_where_and_what_it_is_comes_from_the_machine_not_from_the_request(sold: Site) -> None:
    """Bills use these fields: a tenant cannot choose cheaper values."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, region="eu", pool="h200", profile="xe9680l-h200")
        catalogue = {"xe9680l-h200": "h200-sxm-slice", "lab": "lab-edu-slice"}
        request = sold.launch(1, catalogue=catalogue)
        made = launching.allocate(conn, request, ADMIN)
        placed = (made.region, made.pool, made.sku)
        assert placed == ("eu", "h200", "h200-sxm-slice")
        for sku, refusal in (("free-of-charge", "sku_unknown"), ("lab-edu-slice", "no_capacity")):
            assert code(launching.allocate, conn, replace(request, sku=sku), ADMIN) == refusal
        assert launching.allocate(conn, replace(request, sku=made.sku), ADMIN).sku


@pytest.mark.covers("CTRL-5")
def test_a_wrong_image_is_named_also_where_nothing_is_free(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        wrong = replace(sold.launch(64), image_id="", image="no-such-image")
        with pytest.raises(Problem, match="image_not_found"):
            launching.allocate(conn, wrong, ADMIN)
