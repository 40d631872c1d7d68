"""Tenant of a whole machine, from claim to proof, and everything that bars the next tenant."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Node, Task
from reconciler.lifecycle import (
    baremetal,
    host,
    installation,
    launch,
    maintenance,
    recovery,
    slots,
    task_failures,
)
from reconciler.model.act import Act
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.scheduler.explain import explain_machines
from reconciler.model.scheduler.place import choose_machine
from reconciler.model.scheduler.snapshot import NodeView, Want
from reconciler.model.states import HealthState, NodeMode, TaskKind, TaskState
from reconciler.records import allocations, claims, leasing, nodes, queue, reports
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import baremetal as kinds_baremetal
from tests.unit.reconciler import wipes
from tests.unit.reconciler.conftest import Site, code
from tests.unit.reconciler.whole_machines import BEFORE, Machines, exclusion_holds

DISKS = [f"disk-5e0000000001a00{number}" for number in (0, 1, 3)]
ERROR = {"code": "disk_in_use", "found": "held"}
_KEY = TaskKind.ALLOCATION_RECONCILE_MANAGED_AUTHORIZED_KEY


@pytest.fixture
def machines(site: Site) -> Machines:
    """A machine that can be given away."""
    made = Machines(site)
    made.machine()
    return made


def node(conn: sa.Connection, node_id: str = "m1") -> Node:
    return nodes.get(conn, node_id)


@pytest.mark.covers("CTRL-4", "CTRL-15")
def test_a_machine_is_claimed_as_a_whole_and_its_tenant_reaches_it(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation = machines.launch(conn)
        (claim,) = allocation.claims
        assert (claim.kind, claim.fence, claim.slot_id) == ("node_exclusive", 1, None)
        assert allocation.gpu_count == 4
        assert machines.reasons(conn) == {"m1": "claimed"}
        task = machines.begin(conn, allocation)
        assert (task.exclusive, task.parameters["fence"]) == (True, 1)
        baremetal.provision_succeeded(
            conn, allocation.id, machines.act, baseline=BEFORE, task_id=task.id
        )
        row = allocations.get(conn, allocation.id)
        assert (row.state, row.claims[0].state) == ("active", "active")
        assert row.connection == {"host": "203.0.113.1", "port": 22, "username": "alice"}
        # Kept here, where the tenant, who is root there, cannot change it; and only once.
        reports.record_baseline(conn, "m1", row.id, {"accounts": {}}, task_id="t")
        assert reports.baseline(conn, row.id) == BEFORE


def test_disks_with_any_use_stay_the_operators(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        (claim,) = machines.launch(conn).claims
    free = [d for d in machines.site.document(1)["nvme"] if not d["blockers"]]
    assert [disk["nvme_device"] for disk in claim.disks] == [disk["by_id"] for disk in free]
    assert not any("00ff" in disk["slot_id"] for disk in claim.disks)


@pytest.mark.covers("CTRL-15")
def test_a_disk_that_nobody_took_over_stays_the_operators(site: Site) -> None:
    """A missing signature does not show that a disk is empty; neither does an approval on another
    node, an approval before a new installation, or a wipe without an approval.
    """
    machines = Machines(site)
    with transaction(machines.engine) as conn:
        machines.add(conn, "m1", 1)
        machines.add(conn, "m2", 2)
        machines.discover(conn, "m1", 1)
        blank, elsewhere, taken = (f"eui.{name.removeprefix('disk-')}" for name in DISKS)
        machines.take_over(conn, "m1", taken)
        machines.take_over(conn, "m2", elsewhere)
        proven = wipes.proofs_of_disk(conn, taken)[0]
        wiped = {**vars(proven), "id": "w", "kind": "wipe", "disk_identity": blank}
        before = {**vars(proven), "id": "o", "install_id": "before", "disk_identity": blank}
        conn.execute(sa.insert(tables.proofs), [wiped, before])
        (claim,) = machines.launch(conn).claims
    assert [disk["slot_id"] for disk in claim.disks] == DISKS[2:]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mode": "converting_to_slice"}, "not_baremetal"),
    ({"state": "draining"}, "node_draining"),
    ({"state": "unreachable"}, "node_unreachable"),
    ({"unclean_allocation_id": "a"}, "not_clean"),
    ({"health_state": "failed"}, "node_unhealthy"),
    ({"health_state": "degraded"}, "node_degraded"),
    ({"reboot_required": True}, "reboot_required"),
    ({"tenant_address": ""}, "tenant_address_missing"),
    ({"boot_id": "another"}, "discovery_stale"),
    ({"install_id": "another"}, "discovery_stale"),
]


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize(("wrong", "reason"), WRONG)
def test_a_machine_that_is_not_fit_is_not_given_away(
    machines: Machines, wrong: dict[str, Any], reason: str
) -> None:
    with transaction(machines.engine) as conn:
        conn.execute(sa.update(tables.nodes).values(**wrong))
        assert machines.reasons(conn) == {"m1": reason}


@pytest.mark.covers("CTRL-15")
def test_a_machine_with_a_slot_that_is_not_clean_is_not_given_away(machines: Machines) -> None:
    """Its tenant would be root beside the disk of the last tenant."""
    with transaction(machines.engine) as conn:
        mode = sa.update(tables.nodes)
        conn.execute(mode.values(mode="slice"))
        bundle = Bundle.of(machines.site.document(1)["candidates"][1]["bundle"])
        slot = slots.approve(conn, "m1", bundle, machines.act)
        conn.execute(mode.values(mode="baremetal"))
        journal.advance(conn, tables.Slot, slot.id, "block", machines.act)
        assert machines.reasons(conn) == {"m1": "slots_in_use"}


def test_a_machine_that_an_operator_restarts_is_not_given_away(machines: Machines) -> None:
    """The launch would wait for the restart, and fail for the boot that it was placed under."""
    with transaction(machines.engine) as conn:
        maintenance.request_reboot(conn, "m1", machines.act, allocations=[])
        assert machines.reasons(conn) == {"m1": "node_restarting"}
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.NODE_REBOOT])
        assert machines.reasons(conn) == {"m1": "node_restarting"}
        maintenance.restarted(conn, task, machines.act)
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, machines.act)
        assert machines.reasons(conn) == {"m1": "discovery_stale"}
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": ""}


def test_a_machine_that_nobody_has_seen_is_not_given_away(site: Site) -> None:
    machines = Machines(site)
    with transaction(site.engine) as conn:
        machines.add(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": "not_discovered"}


@pytest.mark.covers("CTRL-5")
def test_the_choice_is_the_same_every_time() -> None:
    machines = [
        NodeView(id="c", region="north"),
        NodeView(id="a"),
        NodeView(id="b"),
        NodeView(id="0", refusal="claimed"),
    ]
    for views in (machines, machines[::-1]):
        assert choose_machine(views, Want(8), sliced={"a"}) == "b"
    assert choose_machine(machines, Want(8, region="north"), sliced={"a"}) == "c"
    assert choose_machine(machines, Want(8, region="south"), sliced={"a"}) is None
    explanation = explain_machines(machines, Want(8, region="south"))
    assert {row["node_id"]: row["reasons"] for row in explanation["nodes"]} == {
        name: {"other_region": 1} for name in ("0", "a", "b", "c")
    }


@pytest.mark.covers("CTRL-15")
def test_a_released_machine_is_free_once_it_was_seen_again(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        assert machines.released(conn, allocation_id)
        ended = allocations.get(conn, allocation_id)
        assert (ended.state, ended.claims[0].state) == ("released", "released")
        proof, _taken_over = wipes.proofs_of_disk(conn, "eui.5e0000000001a001")
        # Newer than the claim's end: a slot on this disk needs no other proof after a conversion.
        assert proof.created_at >= claims.exclusive_ended_at(conn, "m1") > 0
        assert node(conn).health_state == HealthState.HEALTHY
        # The report was that of a system on which a tenant was root; no other report helps.
        assert machines.reasons(conn) == {"m1": "reinstall_required"}
        assert not queue.every(conn, kind=TaskKind.SLICE_TOPOLOGY_DISCOVER)
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": "reinstall_required"}
        machines.reinstall(conn)
        assert machines.launch(conn).claims[0].fence == 3


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize(
    ("evidence", "refusal"),
    [
        ({"proofs": {}}, "proof_missing"),
        ({"absence": {"absent": False}}, "absence_unproven"),
        ({"proofs": {name: {"disk": "eui.0"} for name in DISKS}}, "proof_mismatch"),
    ],
)
def test_without_proof_a_machine_is_not_free(
    machines: Machines, evidence: dict[str, Any], refusal: str
) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
    with pytest.raises(Problem) as caught, transaction(machines.engine) as conn:
        machines.released(conn, allocation_id, **evidence)
    assert caught.value.code == refusal
    with transaction(machines.engine) as conn:
        assert allocations.get(conn, allocation_id).state == "releasing"
        assert machines.reasons(conn) == {"m1": "claimed"}


@pytest.mark.covers("CTRL-15")
def test_what_a_failed_release_left_keeps_everybody_out_until_it_is_clean(
    machines: Machines,
) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        task = machines.releasing(conn, allocation_id)
        first = task.parameters["fence"]
        failed = {"fence": first, "step": "Wipe the disks", "error": ERROR}
        assert baremetal.release_failed(conn, allocation_id, machines.act, **failed)
        machines.end(conn, task)
        assert node(conn).health_state == "failed"
        assert node(conn).health_detail == {
            "code": "machine_not_clean",
            "allocation_id": allocation_id,
            "reason": "held",
            "step": "Wipe the disks",
        }
        # No recovery case is opened for a machine, so none is a remedy.
        with pytest.raises(Problem, match="allocation_not_releasable") as caught:
            launch.release(conn, allocation_id, machines.act)
        assert "`gpuaas nodes clean-machine NODE`" in caught.value.remedy
        # Its use can be ended by force; the node stays out of everybody's reach.
        recovery.force_release(conn, allocation_id, machines.act)
        assert machines.reasons(conn) == {"m1": "not_clean"}
        assert code(host.convert, conn, "m1", NodeMode.SLICE, machines.act) == "machine_not_clean"

        task = baremetal.clean(conn, "m1", machines.act)
        assert baremetal.clean(conn, "m1", machines.act).id == task.id
        assert task.parameters["fence"] > first
        # The first release ends late: it was fenced off, so its report means nothing.
        late = {"fence": first, "evidence": machines.evidence(conn, allocation_id)}
        assert not baremetal.release_succeeded(conn, allocation_id, machines.act, **late)
        assert not baremetal.release_failed(conn, allocation_id, machines.act, **failed)
        assert node(conn).unclean_allocation_id == allocation_id

        assert machines.released(conn, allocation_id)
        assert (node(conn).unclean_allocation_id, node(conn).health_state) == ("", "healthy")
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": "reinstall_required"}


def work(conn: sa.Connection, task: Task) -> Work:
    return Work(conn, task, nodes.get(conn, "m1"), {}, Settings())


@pytest.mark.covers("CTRL-15", "I12")
def test_a_disk_that_died_does_not_keep_its_machine_for_ever(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        first, *others = baremetal.claim_of(conn, key).disks
        assert others, "other disks than the dying disk"
        launch.release(conn, key, machines.act)
        task = machines.releasing(conn, key)
        failed = {"fence": task.parameters["fence"], "step": "Wipe the disks", "error": ERROR}
        assert baremetal.release_failed(conn, key, machines.act, **failed)
        machines.end(conn, task, TaskState.FAILED)

        def without(act: Any = machines.act) -> Any:
            return baremetal.clean(conn, "m1", act, without_dead_disks=True)

        machines.discover(conn, "m1", 1)
        assert code(without) == "disk_present", "all of them are there"
        document = machines.site.document(1)
        gone = f"eui.{first['nvme_eui']}"
        document["nvme"] = [disk for disk in document["nvme"] if disk["identity"] != gone]
        host.record_discovery(conn, "m1", document, machines.act)
        assert code(without, machines.act.because("")) == "reason_required"
        task = without()
        assert task.parameters["written_off"] == [first["slot_id"]]
        given = kinds_baremetal.release_variables(work(conn, task))
        assert given["slice_written_off"] == [first]
        assert given["slice_disks"] == others
        held = machines.releasing(conn, key)
        evidence = machines.evidence(conn, key)
        del evidence["proofs"][first["slot_id"]]
        kinds_baremetal.release_succeeded(work(conn, held), evidence)
        machines.end(conn, held)
        assert node(conn).unclean_allocation_id == ""
        kinds = {proof.kind for proof in wipes.proofs_of_disk(conn, gone)}
        assert kinds <= {"transition"}, "no proof of a wipe after its tenant"
        assert allocations.get(conn, key).state == "released"

        # A power cycle brings the disk back, with its tenant's bytes.
        fresh = {"machine_id": "fresh", "host_key": "ssh-ed25519 fresh"}
        machines.installed["m1"] = fresh
        host.enrolled(conn, "m1", machines.act, **fresh)
        identity = machines.site.document(1)["identity"] | fresh
        host.bootstrapped(conn, "m1", machines.act, identity=identity)
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": "disk_not_proven"}
        assert [place.not_on_sale for place in baremetal.stock(conn).values()] == [1]
        assert returned(conn, "m1", machines.act) == "disk_not_proven"
        document["identity"] |= fresh
        host.record_discovery(conn, "m1", document, machines.act)
        assert [place.free for place in baremetal.stock(conn).values()] == [1]
        assert returned(conn, "m1", machines.act) == "disk_not_proven", "it may come back there"
        machines.discover(conn, "m1", 1)
        machines.take_over(conn, "m1", gone)
        assert returned(conn, "m1", machines.act) == ""
        assert machines.reasons(conn) == {"m1": ""}


def returned(conn: sa.Connection, node_id: str, act: Act) -> str:
    """Code of the refusal to return the machine to MAAS, "" if it may be returned."""
    nodes.update(conn, node_id, maas={"system_id": "abc"})
    host.drain(conn, node_id, act)
    host.maintain(conn, node_id, act)
    release = (conn, node(conn, node_id), TaskKind.NODE_RELEASE)
    try:
        installation.require_free(*release)
    except Problem as problem:
        return problem.code
    finally:
        host.resume(conn, node_id, act)
    return ""


@pytest.mark.covers("CTRL-15", "I12")
@pytest.mark.parametrize("moved", [False, True])
def test_a_disk_of_a_withdrawn_slot_is_not_sold_with_a_whole_machine(
    sold: Site, moved: bool
) -> None:
    """The disk is absent during the conversion and returns, here or in another machine."""
    machines, act = Machines(sold), sold.act
    with transaction(sold.engine) as conn:
        (claim,) = claims.of_allocation(conn, sold.failed(conn))
        document = sold.document(0)
        document["nvme"] = [d for d in document["nvme"] if d["identity"] != claim.nvme_identity]
        host.record_discovery(conn, "n1", document, act)
        slots.withdraw(conn, claim.slot_id, act)
        host.convert(conn, "n1", NodeMode.BAREMETAL, act)
        host.converted(conn, "n1", act)
        nodes.change(conn, "n1", act, tenant_address="203.0.113.77")
        host.record_discovery(conn, "n1", document, act)
        there, number = ("m1", 1) if moved else ("n1", 0)
        if moved:
            machines.add(conn, "m1", 1)
            host.drain(conn, "n1", act)
        document = sold.document(number)
        document["nvme"][0]["identity"] = claim.nvme_identity
        host.record_discovery(conn, there, document, act)
        assert machines.reasons(conn)[there] == "disk_not_proven"
        assert returned(conn, there, act) == "disk_not_proven"
        machines.take_over(conn, there, claim.nvme_identity)
        assert returned(conn, there, act) == ""
        assert machines.reasons(conn) == {there: ""}


@pytest.mark.covers("CTRL-15")
def test_a_clean_up_under_way_writes_nothing_else_off(machines: Machines) -> None:
    """Its audit row would tell of a disk that it wipes all the same."""
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        launch.release(conn, key, machines.act)
        task = machines.releasing(conn, key)
        failed = {"fence": task.parameters["fence"], "step": "Wipe the disks", "error": ERROR}
        assert baremetal.release_failed(conn, key, machines.act, **failed)
        machines.end(conn, task, TaskState.FAILED)
        assert baremetal.clean(conn, "m1", machines.act).state == "queued"
        document = machines.site.document(1)
        gone = f"eui.{baremetal.claim_of(conn, key).disks[0]['nvme_eui']}"
        document["nvme"] = [disk for disk in document["nvme"] if disk["identity"] != gone]
        host.record_discovery(conn, "m1", document, machines.act)
    with pytest.raises(Problem, match="allocation_releasing"), transaction(machines.engine) as conn:
        baremetal.clean(conn, "m1", machines.act, without_dead_disks=True)


@pytest.mark.covers("CTRL-15", "I12")
@pytest.mark.parametrize("ending", ["force_release", "cancel"])
def test_no_number_of_tasks_hides_that_a_tenant_was_there(machines: Machines, ending: str) -> None:
    """A member makes tasks for a host that does not answer, none of which begins."""
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        host.lost(conn, "m1", machines.act)
        for _ in range(120):
            item = queue.Enqueue(_KEY, "m1", allocation_id=key)
            queue.enqueue(conn, item, machines.act)
        if ending == "force_release":
            recovery.force_release(conn, key, machines.act)
        else:
            launch.release(conn, key, machines.act)
            (task,) = queue.every(conn, kind=TaskKind.BAREMETAL_RELEASE)
            task_failures.cancel(conn, task.id, machines.act)
        assert node(conn).unclean_allocation_id == key
        assert node(conn).health_detail["code"] == "machine_not_clean"


@pytest.mark.covers("CTRL-4", "CTRL-15")
@pytest.mark.parametrize("kept", ["draining", "maintenance"])
def test_a_machine_that_a_person_took_out_stays_out_over_its_new_installation(
    machines: Machines, kept: str
) -> None:
    why = machines.act.because("its power supply fails")
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        maintenance.drain(conn, "m1", why)
        launch.release(conn, key, machines.act)
        machines.released(conn, key)
        if kept == "maintenance":
            host.maintain(conn, "m1", why)
        machines.reinstall(conn)
        assert (node(conn).state, node(conn).mode) == (kept, "baremetal")
        assert "its power supply fails" in node(conn).state_reason
        assert machines.reasons(conn) == {"m1": f"node_{kept}"}
        # Also over the next installation.
        machines.reinstall(conn)
        assert node(conn).state == kept
        # A person's word ends it, also for the next installation.
        maintenance.resume(conn, "m1", machines.act)
        machines.reinstall(conn)
        assert node(conn).state == "ready"


@pytest.mark.covers("CTRL-15")
def test_force_release_of_a_host_that_does_not_answer(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        host.lost(conn, "m1", machines.act)
        assert code(recovery.verify_absence, conn, allocation_id, machines.act)
        assert recovery.force_release(conn, allocation_id, machines.act).state == "released"
        host.regained(conn, "m1", machines.act)
        assert machines.reasons(conn) == {"m1": "not_clean"}
        assert baremetal.clean(conn, "m1", machines.act).kind == "baremetal.release"
    # The allocation has ended, and its machine still needs every proof.
    with pytest.raises(Problem, match="absence_unproven"), transaction(machines.engine) as conn:
        machines.released(conn, allocation_id, absence={"absent": False})
    with transaction(machines.engine) as conn:
        assert machines.reasons(conn) == {"m1": "not_clean"}


@pytest.mark.covers("CTRL-15")
def test_differences_that_let_somebody_in_wait_for_a_person(machines: Machines) -> None:
    key = {"section": "keys", "name": "/root/.ssh/authorized_keys", "change": "changed"}
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        package = {"section": "packages", "name": "htop", "change": "added", "access": False}
        machines.released(conn, allocation_id, drift=[package, {**key, "access": True}])
        row = node(conn)
        assert (row.health_state, row.health_detail["code"]) == ("degraded", "machine_drifted")
        assert row.health_detail["drift"] == [{**key, "access": True}]
        machines.discover(conn, "m1", 1)
        assert machines.reasons(conn) == {"m1": "node_degraded"}
        assert code(baremetal.accept_drift, conn, "m1", Act("admin:bob")) == "reason_required"
        baremetal.accept_drift(conn, "m1", machines.act)
        assert code(baremetal.accept_drift, conn, "m1", machines.act) == "no_drift"
        assert code(baremetal.clean, conn, "m1", machines.act) == "machine_clean"
        machines.reinstall(conn)
        assert machines.reasons(conn) == {"m1": ""}


@pytest.mark.covers("CTRL-15")
def test_a_machine_that_was_not_compared_waits_for_a_person(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        machines.released(conn, allocation_id, compared=False)
        row = node(conn)
        assert (row.health_state, row.health_detail["code"]) == ("degraded", "machine_drifted")


def test_harmless_differences_stay_in_the_evidence(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        package = {"section": "packages", "name": "htop", "change": "added", "access": False}
        machines.released(conn, allocation_id, drift=[package])
        assert node(conn).health_state == "healthy"


@pytest.mark.parametrize(
    ("untouched", "error", "reason"),
    [
        (True, ERROR, "discovery_stale"),
        (False, ERROR, "not_clean"),
        (True, {"code": "node_in_slice_mode", "found": "mode slice"}, "node_unhealthy"),
    ],
)
def test_after_a_failed_provision(
    machines: Machines, untouched: bool, error: dict[str, Any], reason: str
) -> None:
    with transaction(machines.engine) as conn:
        allocation = machines.launch(conn)
        machines.begin(conn, allocation)
        step = "Take the machine under the fence of the claim"
        failed = {"step": step, "error": error, "untouched": untouched}
        assert baremetal.provision_failed(conn, allocation.id, machines.act, **failed)
        assert not baremetal.provision_failed(conn, allocation.id, machines.act, **failed)
        assert allocations.get(conn, allocation.id).state == "failed"
        assert machines.reasons(conn) == {"m1": reason}


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize(
    ("step", "attempt", "untouched", "entered"),
    [
        ("Wipe the disks that are not proven clean", 1, True, False),
        ("Wipe the disks that are not proven clean", 2, True, True),
        ("Let the tenant in", 1, True, True),
        ("deadline", 1, False, True),
    ],
)
def test_an_installation_that_a_tenant_may_have_entered_is_not_used_again(
    machines: Machines, step: str, attempt: int, untouched: bool, entered: bool
) -> None:
    with transaction(machines.engine) as conn:
        allocation = machines.launch(conn)
        machines.begin(conn, allocation)
        conn.execute(sa.update(tables.tasks).values(attempt=attempt))
        failed = {"step": step, "error": ERROR, "untouched": untouched}
        assert baremetal.provision_failed(conn, allocation.id, machines.act, **failed)
        assert bool(node(conn).tenant_machine_ids) is entered


def test_a_provision_that_passes_its_deadline_leaves_an_unknown_machine(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation = machines.launch(conn)
        machines.begin(conn, allocation)
        late = machines.site.late(conn, "allocation", allocation.id)
        assert recovery.expire(conn, late, machines.act)
        assert machines.reasons(conn) == {"m1": "not_clean"}


def test_a_claim_that_was_never_begun_leaves_no_trace(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation = machines.launch(conn)
        assert launch.release(conn, allocation.id, machines.act).state == "released"
        assert claims.exclusive_ended_at(conn, "m1") == 0
        assert machines.reasons(conn) == {"m1": ""}


def test_a_tenant_on_the_machine_is_not_cleaned_away(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        machines.active(conn)
        assert code(baremetal.clean, conn, "m1", machines.act) == "machine_clean"
        assert code(host.convert, conn, "m1", NodeMode.SLICE, machines.act) == "node_in_use"
        # Not even by the clean-up that is due to an earlier tenant.
        nodes.update(conn, "m1", unclean_allocation_id="earlier")
        assert code(baremetal.clean, conn, "m1", machines.act) == "node_in_use"


def test_what_others_found_wrong_with_a_node_is_not_made_good(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        fan = {"health_state": "failed", "health_detail": {"code": "fan"}}
        nodes.change(conn, "m1", machines.act, **fan)
        launch.release(conn, allocation_id, machines.act)
        machines.released(conn, allocation_id)
        assert node(conn).health_detail == {"code": "fan"}


@pytest.mark.covers("CTRL-4", "I2")
def test_the_schema_holds_a_machine_for_one(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.launch(conn).id
        for statement in (
            sa.update(tables.nodes).values(mode="slice"),
            sa.insert(tables.claims).values(
                id="x", allocation_id=allocation_id, kind="node_exclusive", node_id="m1",
                state="reserved",
            ),
        ):  # fmt: skip
            with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
                conn.execute(statement)
        assert len(rows.every(conn, sa.select(tables.claims))) == 1


@pytest.mark.covers("CTRL-4", "I1", "I2")
def test_whole_machines_slices_and_conversions_exclude_each_other(site: Site) -> None:
    exclusion_holds(Machines(site))
