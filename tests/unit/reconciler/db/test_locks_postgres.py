"""Locks on PostgreSQL: a judgement of a slot or node holds still all that it is based on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import locks, rows
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Allocation, Slot
from reconciler.lifecycle import gate, host, launch, placement, recovery, slices, task_failures
from reconciler.lifecycle import slots as slot_life
from reconciler.lifecycle.task_failures import Failure
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.scheduler.snapshot import Want
from reconciler.model.states import ProofKind, TaskKind
from reconciler.records import claims, leasing, nodes, proofs, queue, slots
from reconciler.runs.collect import Outcome
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import HANDLERS, node
from reconciler.work.kinds import slices as slice_kinds
from reconciler.work.settle import settle
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.holdings import nothing, off, tenant
from tests.unit.reconciler.lifecycle import test_races_postgres

pytestmark = pytest.mark.postgres
engine = test_races_postgres.engine
sold = test_races_postgres.sold
beside = test_races_postgres.beside
SOON_S = test_races_postgres.SOON_S
A_WHILE_S = test_races_postgres.A_WHILE_S
Beside = Callable[[Callable[[], Any]], Future[Any]]
ERROR = {"code": "cpus_unavailable", "expected": "CPUs", "found": "none", "remedy": "wait"}
UNTOUCHED = {"disk_written": False, "leftovers": False}


def restart(conn: sa.Connection) -> bool:
    return host.restarted(conn, "n1", ADMIN, since=nodes.get(conn, "n1").boot_id)


def enable(site: Site) -> Callable[[sa.Connection], Any]:
    with transaction(site.engine) as conn:
        gate.close(conn, "n1", ADMIN)
        key = slots.of_node(conn, "n1")[0].id

    def again(conn: sa.Connection) -> None:
        # As of a request with an ETag.
        locks.require_generation(conn, "slot", key, {slots.get(conn, key).generation})
        slot_life.enable(conn, key, ADMIN)

    return again


def open_gate(site: Site) -> Callable[[sa.Connection], Any]:
    with transaction(site.engine) as conn:
        gate.close(conn, "n1", ADMIN)
    return lambda conn: gate.open_gate(conn, "n1", ADMIN)


def withdraw(site: Site) -> Callable[[sa.Connection], Any]:
    with transaction(site.engine) as conn:
        key = site.allocate(conn)
    return lambda conn: launch.release(conn, key, ADMIN)


def fail(site: Site) -> Callable[[sa.Connection], Any]:
    """The host was too full, and says that it has touched nothing."""
    with transaction(site.engine) as conn:
        key = site.allocate(conn)
        slices.provision_started(conn, key, ADMIN)
        given = {claim.slot_id: UNTOUCHED for claim in claims.of_allocation(conn, key)}
    failure: Any = {"step": "slice_lease", "error": ERROR, "untouched": given}
    return lambda conn: slices.provision_failed(conn, key, ADMIN, **failure)


def release(site: Site) -> Callable[[sa.Connection], Any]:
    with transaction(site.engine) as conn:
        key = site.active(conn)
        launch.release(conn, key, ADMIN)
        given: Any = {"proofs": site.proofs(conn, key), "absence": {"absent": True}}
    return lambda conn: slices.release_succeeded(conn, key, ADMIN, **given)


def clean(site: Site) -> Callable[[sa.Connection], Any]:
    with transaction(site.engine) as conn:
        key = site.failed(conn)
        (claim,) = claims.of_allocation(conn, key)
        recovery.repair(conn, claim.slot_id, ADMIN)
        given: Any = {"proofs": site.proofs(conn, key), "absence": {"absent": True}}
    return lambda conn: slices.cleanup_succeeded(conn, key, ADMIN, **given)


def force(site: Site) -> Callable[[sa.Connection], Any]:
    """Absence and a clean disk were both shown since it failed."""
    with transaction(site.engine) as conn:
        key = site.failed(conn)
        (claim,) = claims.of_allocation(conn, key)
        slot, given = slots.get(conn, claim.slot_id), site.proofs(conn, key)
        slices.require_absence(conn, key, {"absent": True}, ADMIN)
        proofs.record(conn, slot, ProofKind.WIPE, given[slot.id], allocation_id=key)
    return lambda conn: recovery.force_cleanup(conn, key, ADMIN, runtime_verified_absent=True)


WAYS = [enable, open_gate, withdraw, fail, release, clean, force]


@pytest.mark.covers("CTRL-6", "I16")
@pytest.mark.parametrize("way", WAYS)
def test_the_boot_that_a_slot_is_sold_under_stands_still_meanwhile(
    sold: Site, beside: Beside, way: Callable[[Site], Callable[[sa.Connection], Any]]
) -> None:
    sell = way(sold)
    with transaction(sold.engine) as conn:
        sell(conn)
        assert "available" in sold.statuses(conn)
        second = beside(lambda: retrying(sold.engine, restart))
        with pytest.raises(TimeoutError):
            second.result(A_WHILE_S)
    assert second.result(SOON_S)
    with reading(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "disabled"]


@pytest.mark.covers("CTRL-6", "I16")
@pytest.mark.parametrize("way", WAYS)
def test_no_slot_is_sold_under_a_boot_that_ends_meanwhile(
    sold: Site, beside: Beside, way: Callable[[Site], Callable[[sa.Connection], Any]]
) -> None:
    sell = way(sold)
    with transaction(sold.engine) as conn:
        restart(conn)
        second = beside(lambda: retrying(sold.engine, sell))
        with pytest.raises(TimeoutError):
            second.result(A_WHILE_S)
        # The holder of the node may go on to its slots: the waiting transaction holds none of them.
        query = sa.select(tables.slots).where(tables.slots.c.node_id == "n1")
        assert len(conn.execute(query.with_for_update(nowait=True)).all()) == 2
    second.result(SOON_S)
    with reading(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "disabled"]


@pytest.mark.covers("CTRL-7", "I4", "I13")
@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_clean_up_decides_nothing_about_a_slot_that_is_fenced_off_meanwhile(
    sold: Site, beside: Beside, ends: str
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (claim,) = claims.of_allocation(conn, key)
        first = recovery.repair(conn, claim.slot_id, ADMIN)
        given = sold.proofs(conn, key)

    def late() -> None:
        with transaction(sold.engine) as conn:
            work = Work(conn, first, nodes.get(conn, "n1"), {}, Settings())
            if ends == "well":
                slice_kinds.wipe_succeeded(work, {"proofs": given, "absence": {"absent": True}})
            else:
                failure = Failure("nvme_wipe", dict(ERROR), {}, known=False)
                task_failures.record(conn, first, failure)

    with transaction(sold.engine) as conn:
        slot = rows.get(conn, Slot, claim.slot_id, lock=True)
        slices.block(conn, slot, key, ADMIN, step="deadline", error=ERROR)
        recovery.repair(conn, slot.id, ADMIN)
        second = beside(late)
        with pytest.raises(TimeoutError):
            second.result(A_WHILE_S)
    second.result(SOON_S)
    with reading(sold.engine) as conn:
        assert slots.get(conn, claim.slot_id).status == "cleanup", "of the second one"


def maintain(conn: sa.Connection) -> Any:
    host.drain(conn, "n1", ADMIN)
    return host.maintain(conn, "n1", ADMIN)


def prepare(conn: sa.Connection) -> Any:
    """The start of a bootstrap that may restart the host."""
    task: Any = SimpleNamespace(node_id="n1", parameters={"allow_reboot": True})
    return node.bootstrap_start(Work(conn, task, nodes.get(conn, "n1"), {}, Settings()))


@pytest.mark.covers("CTRL-3", "CTRL-4", "I13")
@pytest.mark.parametrize("what", [maintain, prepare])
def test_a_launch_that_has_not_committed_is_waited_for(
    sold: Site, beside: Beside, what: Callable[[sa.Connection], Any]
) -> None:
    began = threading.Event()

    def alone() -> None:
        with transaction(sold.engine) as conn:
            began.set()
            what(conn)

    with transaction(sold.engine) as conn:
        placement.reserve(conn, Want(1))
        second = beside(alone)
        assert began.wait(SOON_S)
        with pytest.raises(TimeoutError):
            second.result(A_WHILE_S)
        sold.allocate(conn)
    with pytest.raises(Problem, match="node_in_use"):
        second.result(SOON_S)


@pytest.mark.covers("CTRL-3", "CTRL-4")
def test_nothing_is_launched_on_a_node_that_goes_out_of_use_meanwhile(
    sold: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots were chosen before, and are locked after."""
    likely = placement.likely

    def then_maintained(conn: sa.Connection, *given: Any, **named: Any) -> Any:
        candidates = likely(conn, *given, **named)
        monkeypatch.undo()
        with transaction(sold.engine) as other:
            host.drain(other, "n1", ADMIN)
            host.maintain(other, "n1", ADMIN)
        return candidates

    monkeypatch.setattr(placement, "likely", then_maintained)
    with pytest.raises(Problem, match="no_capacity"):
        retrying(sold.engine, sold.allocate)
    with transaction(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "disabled"]
        host.resume(conn, "n1", ADMIN)
        gate.open_gate(conn, "n1", ADMIN)
        assert sold.statuses(conn) == ["available", "available"]


@pytest.mark.covers("CTRL-7", "I16")
def test_who_removes_a_known_machine_waits_for_its_allocation_and_holds_no_slot(
    sold: Site, beside: Beside
) -> None:
    """Who holds the allocation may want the slot next."""
    with transaction(sold.engine) as conn:
        key = sold.failed(conn)
        (slot,) = recovery.blocked(conn)
    with transaction(sold.engine) as conn, locks.allocation(conn, key):
        removed = beside(
            lambda: retrying(
                sold.engine, lambda other: recovery.remove_orphan(other, slot.id, key, sold.act)
            )
        )
        with pytest.raises(TimeoutError):
            removed.result(A_WHILE_S)
        query = sa.select(tables.slots.c.id).where(tables.slots.c.id == slot.id)
        assert conn.execute(query.with_for_update(nowait=True)).scalar_one() == slot.id
    assert removed.result(SOON_S).subject_id == key


@pytest.mark.covers("SLICE-8", "I16")
@pytest.mark.parametrize(
    "kind", [TaskKind.SLICE_DRIFT_RECONCILE, TaskKind.NODE_PARITY, TaskKind.NODE_REBOOT]
)
def test_the_end_of_a_look_at_a_host_waits_for_its_slices_and_does_not_hold_the_host(
    sold: Site, beside: Beside, kind: TaskKind
) -> None:
    """It may find a slice powered off, or start it. The holder of the slice locks the node next."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        key, identity = sold.active(conn), sold.document(0)["identity"]
        holdings = nothing()
        tenant(
            holdings, key, {slot.id: Bundle.of(vars(slot)) for slot in slots.of_node(conn, "n1")}
        )
        off(holdings)
        holdings["domains"]["found"][0]["off_by_guest"] = True
        work = queue.Enqueue(kind, "n1", "node", "n1", parameters={"guests": [], "boot_id": "b"})
        queue.enqueue(conn, work, ADMIN)
    with transaction(sold.engine) as conn:
        (task,) = leasing.lease(conn, "worker", kinds=[kind])
    evidence = {"holdings": holdings, "identity": identity, "parity": sold.parity(0)}
    evidence["powered_off"] = []
    outcome = Outcome("successful", {"ok": True, "evidence": evidence})
    with transaction(sold.engine) as conn:
        rows.get(conn, Allocation, key, lock=True)
        settled = beside(lambda: settle(sold.engine, Settings(), HANDLERS[kind], task, outcome))
        with pytest.raises(TimeoutError):
            settled.result(A_WHILE_S)
        query = sa.select(tables.nodes.c.id).where(tables.nodes.c.id == "n1")
        assert conn.execute(query.with_for_update(nowait=True)).scalar_one() == "n1"
    settled.result(SOON_S)
    with reading(sold.engine) as conn:
        assert queue.get(conn, task.id).state == "succeeded"
