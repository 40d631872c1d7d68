"""Life of a node, and actions that its tenants forbid."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Allocation
from reconciler.lifecycle import gate, host, invariants, launch, recovery, slices
from reconciler.lifecycle import slots as slot_life
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.states import HealthState, NodeMode, NodeState, TaskKind, TaskState
from reconciler.records import claims, leasing, nodes, queue, slots
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import node as kinds
from tests.unit.reconciler.conftest import Site, code


def test_from_enrolment_to_slice_host(site: Site) -> None:
    with transaction(site.engine) as conn:
        nodes.create(conn, site.act, id="n1", region="r1")
        assert code(nodes.create, conn, site.act, id="n1") == "node_exists"
        key = {"machine_id": "m", "host_key": "ssh-ed25519 AAAA"}
        assert host.enrolled(conn, "n1", site.act, **key).state == "bootstrapping"
        assert host.enrolled(conn, "n1", site.act, **key).state == "bootstrapping"
        identity = {**key, "boot_id": "b"}
        node = host.bootstrapped(conn, "n1", site.act, identity=identity)
        assert (node.state, node.mode) == ("ready", "slice")
        assert host.enrolled(conn, "n1", site.act, **key).state == "ready"
        other = {**key, "host_key": "ssh-ed25519 BBBB"}
        assert host.enrolled(conn, "n1", site.act, **other).state == "bootstrapping"
        events = [row.event for row in journal.history_of(conn, "node", "n1")]
        assert events == ["create", "enrol", "bootstrap", "enrol"]


@pytest.mark.covers("CTRL-12")
def test_a_limit_of_time_waits_for_a_bootstrap_that_runs(site: Site) -> None:
    """And takes a node out of use until it is prepared after all."""
    key = {"machine_id": "m", "host_key": "ssh-ed25519 AAAA"}
    identity = {**key, "boot_id": "b"}
    with transaction(site.engine) as conn:
        nodes.create(conn, site.act, id="n1")
        host.enrolled(conn, "n1", site.act, **key)
        queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_BOOTSTRAP, "n1"), site.act)
        (task,) = leasing.lease(conn, "worker")
        late = site.late(conn, "node", "n1")
        assert not recovery.expire(conn, late, site.act)
        assert nodes.get(conn, "n1").state == "bootstrapping"
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, site.act)
        assert recovery.expire(conn, late, site.act)
        assert nodes.get(conn, "n1").state == "maintenance"
        other = {**key, "host_key": "ssh-ed25519 BBBB"}
        host.enrolled(conn, "n1", site.act, **other)
        node = host.bootstrapped(conn, "n1", site.act, identity={**identity, **other})
        assert node.state == "ready"


@pytest.mark.covers("HOST-15")
def test_the_end_of_a_conversion_does_not_end_the_one_that_turned_it_round(sold: Site) -> None:
    """Its worker has read the node before an operator did that."""
    with transaction(sold.engine) as conn:
        host.convert(conn, "n1", NodeMode.BAREMETAL, sold.act)
        before = nodes.get(conn, "n1")
        task = queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_CONVERT, "n1"), sold.act)
        host.convert(conn, "n1", NodeMode.SLICE, sold.act)
        work = Work(conn, task, before, {}, Settings())
        kinds.convert_succeeded(work, {"identity": sold.document(0)["identity"]})
        assert nodes.get(conn, "n1").mode == "converting_to_slice"


@pytest.mark.covers("CTRL-12")
def test_lost_and_regained(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        host.drain(conn, "n1", sold.act)
        host.lost(conn, "n1", sold.act)
        assert host.regained(conn, "n1", sold.act).state == "draining"
        assert host.resume(conn, "n1", sold.act).state == "ready"
        host.lost(conn, "n1", sold.act)
        node = nodes.get(conn, "n1")
        key = {"machine_id": node.machine_id, "host_key": node.host_key}
        assert host.enrolled(conn, "n1", sold.act, **key).state == "ready"
        host.drain(conn, "n1", sold.act)
        assert host.maintain(conn, "n1", sold.act).state == "maintenance"
        assert host.retire(conn, "n1", sold.act).state == "retired"


def test_a_lost_host_that_enrols_again_sells_what_is_proven(sold: Site) -> None:
    """As with an expired certificate, under which it cannot answer otherwise."""
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
        host.lost(conn, "n1", sold.act)
        launch.release(conn, key, sold.act)
        assert sold.statuses(conn) == ["disabled", "available"], "a lost node sells nothing"
        node = nodes.get(conn, "n1")
        identity = {"machine_id": node.machine_id, "host_key": node.host_key}
        assert host.enrolled(conn, "n1", sold.act, **identity).state == "ready"
        assert sold.statuses(conn) == ["available", "available"]


@pytest.mark.covers("CTRL-12")
def test_a_node_is_not_retired_under_its_tenants(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        host.drain(conn, "n1", sold.act)
        host.maintain(conn, "n1", sold.act)
        # By hand, as if the node had been sold again in between.
        conn.execute(sa.update(tables.nodes).values(state="ready"))
        gate.open_gate(conn, "n1", sold.act)
        allocation_id = sold.active(conn)
        conn.execute(sa.update(tables.nodes).values(state="maintenance"))
        assert code(host.retire, conn, "n1", sold.act) == "node_in_use"
        launch.release(conn, allocation_id, sold.act)
        slices.release_failed(conn, allocation_id, sold.act, step="x", error={})
        recovery.force_cleanup(conn, allocation_id, sold.act, runtime_verified_absent=False)
        assert code(host.retire, conn, "n1", sold.act) == "node_in_use", "something may be left"


@pytest.mark.covers("CTRL-12", "I12")
def test_a_node_that_never_answers_again_is_retired_and_its_devices_are_free(sold: Site) -> None:
    """After each allocation's release was forced; the disk it takes along stays unproven."""
    with transaction(sold.engine) as conn:
        first, second = sold.active(conn), sold.allocate(conn)
        (task,) = leasing.lease(conn, "w")
        mine = (task.id, task.lease_token)
        queue.started(conn, *mine, run_id="r", run_directory="/r")
        host.lost(conn, "n1", sold.act)
        assert code(host.retire, conn, "n1", sold.act) == "node_in_use"
        recovery.force_release(conn, first, sold.act)
        assert code(host.retire, conn, "n1", sold.act) == "node_in_use", "a slice is being built"
        late = sold.late(conn, "allocation", second)
        assert recovery.expire(conn, late, sold.act)
        waiting = queue.enqueue(conn, look("n1"), sold.act)
        held = {slot.id: slot for slot in slots.of_node(conn, "n1")}
        assert code(host.retire, conn, "n1", sold.act.because(" ")) == "reason_required"
        assert host.retire(conn, "n1", sold.act).state == "retired"
        assert slots.of_node(conn, "n1") == []
        for slot_id, slot in held.items():
            row = journal.history_of(conn, "slot", slot_id)[-1]
            assert (row.source, row.event) == ("cleanup_blocked", "withdraw")
            assert slots.get(conn, slot_id).fence > slot.fence
        assert queue.get(conn, waiting.id).state == "canceled"
        (entry,) = journal.audit_rows(conn, action="admin.node.retire")
        assert entry.detail["written_off_slots"] == list(held)
        assert invariants.check(conn) == []
        # Its disks come back in another machine: they are given out only after a wipe.
        sold.enrol(conn, "n2")
        bundle = Bundle.of(sold.document(0)["candidates"][0]["bundle"])
        again = slot_life.approve(conn, "n2", bundle, sold.act)
        assert again.nvme_identity in {slot.nvme_identity for slot in held.values()}
        assert "proof_missing" in {row.code for row in gate.gate(conn, again.id)}


def look(node_id: str) -> queue.Enqueue:
    kind = TaskKind.SLICE_TOPOLOGY_DISCOVER
    return queue.Enqueue(kind=kind, node_id=node_id, subject_kind="node", subject_id=node_id)


@pytest.mark.covers("CTRL-12")
def test_conversion_waits_for_tenants(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        sold.active(conn)
    with pytest.raises(Problem) as caught, transaction(sold.engine) as conn:
        host.convert(conn, "n1", NodeMode.BAREMETAL, sold.act)
    assert caught.value.code == "node_in_use"
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["active", "available"]
        host.drain(conn, "n1", sold.act)
        assert code(host.maintain, conn, "n1", sold.act) == "node_in_use"


def test_conversion_both_ways(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        node = host.convert(conn, "n1", NodeMode.BAREMETAL, sold.act)
        assert (node.mode, node.slice_scheduling) == ("converting_to_baremetal", False)
        assert sold.statuses(conn) == ["disabled", "disabled"]
        assert host.convert(conn, "n1", NodeMode.SLICE, sold.act).mode == "converting_to_slice"
        node = host.convert(conn, "n1", NodeMode.BAREMETAL, sold.act)
        assert node.mode == "converting_to_baremetal", "turned round, and round again"
        assert host.converted(conn, "n1", sold.act).mode == "baremetal"


@pytest.mark.covers("I2")
def test_schema_keeps_bare_metal_and_slices_apart(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.active(conn)
        table = tables.nodes
        mode = sa.update(table).where(table.c.id == "n1").values(mode="baremetal")
        with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
            conn.execute(mode)
        with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
            claims.claim_node(conn, allocation_id, "n1", sold.act)
        nodes.create(conn, sold.act, id="n2", mode=NodeMode.BAREMETAL)
        assert claims.claim_node(conn, allocation_id, "n2", sold.act).live_mode == "baremetal"
        with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
            claims.claim_node(conn, allocation_id, "n2", sold.act)
        slice_mode = sa.update(table).where(table.c.id == "n2").values(mode="slice")
        with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
            conn.execute(slice_mode)


def test_change_and_views(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        assert nodes.change(conn, "n1", sold.act, pool="p2").pool == "p2"
        assert code(nodes.change, conn, "n1", sold.act, state="ready") == "field_not_changeable"
        nodes.change(conn, "n1", sold.act, health_state=HealthState.FAILED.value)
        host.contacted(conn, "n1")
        assert [node.id for node in nodes.every(conn, state=NodeState.READY)] == ["n1"]
        assert nodes.every(conn, mode=NodeMode.BAREMETAL) == []
        assert code(nodes.get, conn, "n9") == "node_not_found"


@pytest.mark.covers("HOST-10", "CTRL-10")
def test_unknown_tags_are_not_the_same_as_none(sold: Site) -> None:
    """Also in the database: unknown is null there, not a document that says null."""
    nobody_knows = sa.select(tables.nodes.c.id).where(tables.nodes.c.maas_tags.is_(None))
    with transaction(sold.engine) as conn:
        assert nodes.get(conn, "n1").maas_tags is None
        assert nodes.create(conn, sold.act, id="n2", maas_tags=[]).maas_tags == []
        assert nodes.create(conn, sold.act, id="n3", maas_tags=["a"]).maas_tags == ["a"]
        assert conn.execute(nobody_knows).scalars().all() == ["n1"]
        assert nodes.change(conn, "n3", sold.act, maas_tags=None).maas_tags is None
        assert set(conn.execute(nobody_knows).scalars()) == {"n1", "n3"}
        (entry,) = journal.audit_rows(conn, action="admin.node.changed")
        assert entry.detail == {"maas_tags": {"from": ["a"], "to": None}}


@pytest.mark.covers("HOST-10", "CTRL-5")
def test_tags_open_nothing_after_a_parity_that_failed(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        host.record_parity(conn, "n1", sold.parity(failures=1), sold.act)
        for tags in (["gpuaas-profile-slice-vm"], ["gpuaas-profile-baremetal"], [], None):
            nodes.change(conn, "n1", sold.act, maas_tags=tags)
            assert sold.statuses(conn) == ["disabled", "disabled"]
            slot_id = slots.of_node(conn, "n1")[0].id
            assert "parity_failed" in {row.code for row in gate.gate(conn, slot_id)}


@pytest.mark.covers("I12")
def test_deadlines_end_in_events(sold: Site) -> None:
    with transaction(sold.engine) as conn:
        allocation_id = sold.allocate(conn)
        nodes.create(conn, sold.act, id="n2")
        assert journal.overdue(conn) == []
        for table in (tables.slots, tables.allocations, tables.claims, tables.tasks, tables.nodes):
            conn.execute(
                sa.update(table).where(table.c.deadline_at.is_not(None)).values(deadline_at=1.0)
            )
        overdue = journal.overdue(conn)
        assert {(row.entity, row.event) for row in overdue} == {
            ("node", ""),
            ("slot", "block"),
            ("allocation", "fail"),
            ("claim", ""),
            ("task", "cancel"),
        }
        acted = {row.entity: recovery.expire(conn, row, sold.act) for row in overdue}
        assert acted["slot"]
        assert not acted["allocation"], "it went with its slot"
        assert not acted["node"]
        assert sold.statuses(conn)[0] == "available", "no work had begun"
        allocation = rows.get(conn, Allocation, allocation_id)
        assert allocation.error["code"] == "deadline_passed"
