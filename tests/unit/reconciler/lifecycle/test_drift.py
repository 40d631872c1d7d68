"""Effects of a comparison: slots closed, blocked and opened; claims never change."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Slot
from reconciler.lifecycle import (
    drift,
    gate,
    host,
    invariants,
    launch,
    maintenance,
    power,
    recovery,
    slice_telemetry,
    slices,
    task_failures,
)
from reconciler.lifecycle import slots as slot_life
from reconciler.model.act import Act
from reconciler.model.bundle import Bundle
from reconciler.model.drift import MOST, STEP
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, NodeState, PowerAction, TaskKind, TaskState
from reconciler.records import allocations, claims, leasing, nodes, proofs, queue
from reconciler.records import slots as slot_records
from tests.unit.reconciler import relay
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.db.test_events import problems, published
from tests.unit.reconciler.holdings import Holdings, drop, nothing, off, put, tenant, unknown

pytestmark = pytest.mark.covers("SLICE-8")

PROOF = [TaskKind.NODE_PARITY, TaskKind.SLICE_TOPOLOGY_DISCOVER]
STRANGER = "43bd713b-6073-4ef7-8a51-2897e902365d"


class Compared:
    """Node n1 of a site, compared with holdings that the test sets."""

    def __init__(self, site: Site) -> None:
        self.site, self.engine = site, site.engine

    def identity(self, boot_id: str = "") -> dict[str, Any]:
        recorded: dict[str, Any] = self.site.document(0)["identity"]
        return recorded | ({"boot_id": boot_id} if boot_id else {})

    def now(self) -> float:
        with transaction(self.engine) as conn:
            return clock.read(conn)

    def __call__(
        self, holdings: Holdings, *, since: float | None = None, boot_id: str = ""
    ) -> dict[str, Any]:
        evidence = {"holdings": holdings, "identity": self.identity(boot_id)}
        # Later than all that was done: a millisecond is as fine as the clock of SQLite goes.
        time.sleep(0.005)
        with transaction(self.engine) as conn:
            at = clock.read(conn) if since is None else since
            return drift.reconcile(conn, "n1", evidence, ADMIN, since=at)

    def slots(self) -> list[Slot]:
        with reading(self.engine) as conn:
            return slot_records.of_node(conn, "n1")

    def bundles(self, *indexes: int) -> dict[str, Bundle]:
        rows = self.slots()
        return {rows[index].id: Bundle.of(vars(rows[index])) for index in indexes or (0, 1)}

    def slot_state(self, index: int = 0) -> tuple[str, str, str]:
        """Status, health, and the code of its detail."""
        slot = self.slots()[index]
        return slot.status, slot.health_state, slot.health_detail.get("code", "")

    def held(self) -> list[tuple[str, ...]]:
        """The state of every allocation and of its claims."""
        with reading(self.engine) as conn:
            return [
                (row.state, *(claim.state for claim in claims.of_allocation(conn, row.id)))
                for row in allocations.every(conn)
            ]

    def sound(self) -> None:
        with reading(self.engine) as conn:
            assert invariants.check(conn) == []


@pytest.fixture
def compare(sold: Site) -> Compared:
    return Compared(sold)


@pytest.fixture
def active(compare: Compared) -> str:
    """An allocation that has both slots of the node."""
    with transaction(compare.engine) as conn:
        return str(compare.site.active(conn, 2))


def stranger(compare: Compared) -> Holdings:
    """A machine without a record, on the first slot."""
    holdings = nothing()
    tenant(holdings, STRANGER, compare.bundles(0))
    drop(holdings, "ports", "guards", "files")
    return holdings


def test_a_host_that_invents_names_is_answered_by_one_search(compare: Compared) -> None:
    """With a search for each name, a table of past allocations was read 500 times."""
    holdings = nothing()
    for number in range(3000):
        put(holdings, "ports", port=f"gs{number:012x}", owner=f"{number:012x}")
    searches = []

    def note(_conn: object, cursor: Any, statement: str, given: Any, *_: object) -> None:
        if "FROM allocations" in statement and (" LIKE " in statement or " BETWEEN " in statement):
            searches.append((statement, given))

    sa.event.listen(compare.engine, "before_cursor_execute", note)
    try:
        began = time.monotonic()
        assert len(compare(holdings)["differences"]) == MOST
        assert time.monotonic() - began < 60
    finally:
        sa.event.remove(compare.engine, "before_cursor_execute", note)
    with reading(compare.engine) as conn:
        (plan,) = [
            [row[3] for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)]
            for statement, given in searches
        ]
    assert not any("SCAN allocations" in step for step in plan), plan


def test_a_host_whose_faults_change_each_time_fills_no_history(
    compare: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """History is kept for ever, the current fault is always known."""

    def changes(count: int) -> set[int]:
        for number in range(count):
            holdings = nothing()
            if number % 2:
                tenant(holdings, f"{number:08x}{STRANGER[8:]}", compare.bundles(0))
                put(holdings, "ports", port=f"gs{number:012x}", owner=f"{number:012x}")
            compare(holdings)
        with reading(compare.engine) as conn:
            query = sa.select(tables.history).where(tables.history.c.entity.endswith("_health"))
            rows = conn.execute(query.order_by(tables.history.c.id)).mappings().all()
        return set(Counter((row["entity"], row["target"]) for row in rows).values())

    (most, _), *_ = journal.HEALTH_ROWS
    assert changes(4 * most) == {most}
    assert f"{4 * most - 1:08x}" in compare.slots()[0].health_detail["reason"]
    with reading(compare.engine) as conn:
        rows = journal.history_of(conn, "slot_health", compare.slots()[0].id)
    assert [row.reason.endswith("may be left out") for row in rows] == [False] * 11 + [True]
    compare.sound()
    monkeypatch.setattr(journal, "HEALTH_ROWS", ((most, 0.0),))
    assert max(changes(2)) > most, "a day later"


@pytest.mark.covers("I14")
def test_a_host_as_the_records_say_changes_nothing(compare: Compared, active: str) -> None:
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    before = compare.slots()
    result = compare(holdings)
    assert result["differences"] == result["skipped"] == [] and result["unknown"] == {}
    assert compare.slots() == before
    with reading(compare.engine) as conn:
        (event,) = [e for e in relay.pending_events(conn) if e.topic == "node.drift"]
        assert [faults for row in published(compare.engine) if (faults := problems(row))] == []
    assert event.payload == {"differences": 0, "skipped": 0, "unknown": 0}


@pytest.mark.covers("CTRL-6", "I15")
def test_a_guest_that_shuts_itself_down_keeps_its_claim(compare: Compared, active: str) -> None:
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    off(holdings)
    held = compare.held()
    result = compare(holdings)
    assert {row["code"] for row in result["differences"]} == {"guest_stopped"}
    assert [compare.slot_state(index) for index in (0, 1)] == [
        ("active", "degraded", "guest_stopped")
    ] * 2
    assert compare.held() == held == [("active", "active", "active")]
    with transaction(compare.engine) as conn, pytest.raises(Problem, match="no_capacity"):
        compare.site.allocate(conn)
    compare.sound()
    # Started again, it is as before; until then a look tells no new story.
    compare(holdings)
    back = nothing()
    tenant(back, active, compare.bundles())
    assert len(compare(back)["healed"]) == 2
    assert compare.slot_state() == ("active", "healthy", "")
    with reading(compare.engine) as conn:
        rows = journal.history_of(conn, "slot_health", compare.slots()[0].id)
    assert [row.target for row in rows] == ["degraded", "healthy"]
    assert "shut off" in rows[0].reason


def test_a_guest_that_no_longer_answers_is_named_until_it_does(
    compare: Compared, active: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    calls: list[tuple[str, bool]] = []
    silent = True

    def read(_conn: object, key: str, *, named: bool) -> bool:
        calls.append((key, named))
        return silent

    monkeypatch.setattr(slice_telemetry, "silent", read)
    result = compare(holdings)
    assert [row["code"] for row in result["differences"]] == ["guest_silent"] * 2
    assert result["blocked"] == result["shut"] == []
    assert compare.slot_state() == ("active", "degraded", "guest_silent")
    assert compare.held() == [("active", "active", "active")]
    compare(holdings)
    # The host may name a machine of any node, and has no word on it.
    compare.site.node("n2", (0,), 2)
    with transaction(compare.engine) as conn:
        conn.execute(sa.update(tables.allocations).values(node_id="n2"))
    compare(holdings)
    with transaction(compare.engine) as conn:
        conn.execute(sa.update(tables.allocations).values(node_id="n1", stopped=True))
    compare(holdings)
    assert calls == [(active, False), (active, True)]
    with transaction(compare.engine) as conn:
        conn.execute(sa.update(tables.allocations).values(stopped=False))
    silent = False
    compare(holdings)
    assert compare.slot_state() == ("active", "healthy", "")
    compare.sound()


@pytest.mark.covers("I15")
def test_a_machine_that_is_gone_keeps_its_claim_and_can_be_released(
    compare: Compared, active: str
) -> None:
    held = compare.held()
    result = compare(nothing())
    assert {"domain_missing", "reservation_missing", "lease_missing"} == {
        row["code"] for row in result["differences"]
    }
    assert compare.slot_state()[:2] == ("active", "failed")
    assert compare.held() == held
    with transaction(compare.engine) as conn:
        assert queue.every(conn, allocation_id=active, state=TaskState.QUEUED) == []
        launch.release(conn, active, ADMIN)
    assert compare.slot_state()[0] == "releasing"
    compare.sound()


@pytest.mark.covers("I4", "I13")
def test_what_nobody_knows_takes_its_slot_off_sale_until_it_is_gone_and_the_disk_is_proven(
    compare: Compared,
) -> None:
    result = compare(stranger(compare))
    slot_id = compare.slots()[0].id
    assert result["shut"] == [slot_id] and result["blocked"] == []
    assert compare.slot_state() == ("disabled", "failed", "orphan_domain")
    assert compare.slots()[0].health_detail["allocation_id"] == STRANGER
    assert compare.slot_state(1)[0] == "available"
    with transaction(compare.engine) as conn:
        (blocker,) = gate.gate(conn, slot_id)
        assert blocker.code == "drift" and "gpuaas-slice-43bd" in blocker.detail
        # Neither an operator nor the next parity opens it.
        assert slot_life.enable(conn, slot_id, ADMIN).status == "disabled"
        assert gate.open_gate(conn, "n1", ADMIN)["opened"] == []
    compare(stranger(compare))
    assert compare.slot_state() == ("disabled", "failed", "orphan_domain")
    # Gone; but it had the disk, and the proof is from before.
    assert compare(nothing())["opened"] == []
    assert compare.slot_state() == ("disabled", "failed", "disk_unproven")
    assert compare(nothing())["opened"] == []
    with transaction(compare.engine) as conn:
        disk = compare.slots()[0].nvme_identity
        proof = {"disk": disk, "method": "discard", "verified": True}
        proofs.record_transition(conn, "n1", proof, ADMIN)
    result = compare(nothing())
    assert result["healed"] == result["opened"] == [slot_id]
    assert compare.slot_state() == ("available", "healthy", "")
    compare.sound()


@pytest.mark.covers("I4", "I13")
@pytest.mark.parametrize("way", ["withdrawn", "blocked", "retired"])
def test_a_disk_that_somebody_used_is_not_clean_in_its_next_slot(
    compare: Compared, way: str
) -> None:
    """Knowledge of the disk goes with the slot; the proof from before must not outlast it."""
    compare(stranger(compare))
    slot = compare.slots()[0]
    bundle = Bundle.of(vars(slot))
    with transaction(compare.engine) as conn:
        before = proofs.current(conn, slot)
        assert before is not None
        if way == "blocked":
            slices.block(conn, slot, "", ADMIN, step="drift", error={"code": "orphan"})
            document = compare.site.document(0)
            document["gpu"] = [
                gpu for gpu in document["gpu"] if gpu["address"] != slot.gpu_pci_address
            ]
            host.record_discovery(conn, "n1", document, ADMIN)
        if way == "retired":
            host.drain(conn, "n1", ADMIN)
            host.maintain(conn, "n1", ADMIN)
            host.retire(conn, "n1", ADMIN)
            gone = slot_records.get(conn, slot.id)
        else:
            gone = slot_life.withdraw(conn, slot.id, ADMIN)
        assert gone.retired_at
        assert proofs.current(conn, gone) is None
        assert proofs.generation(conn, slot.nvme_identity) > before.disk_generation
        if way == "retired":
            return
        host.record_discovery(conn, "n1", compare.site.document(0), ADMIN)
        again = slot_life.approve(conn, "n1", bundle, ADMIN)
        host.record_discovery(conn, "n1", compare.site.document(0), ADMIN)
        host.record_parity(conn, "n1", compare.site.parity(), ADMIN)
        assert "proof_missing" in {row.code for row in gate.gate(conn, again.id)}
        proof = {"disk": bundle.identity, "method": "discard", "verified": True}
        proofs.record_transition(conn, "n1", proof, ADMIN)
        assert slot_life.enable(conn, again.id, ADMIN).status == "available"
    compare.sound()


def test_a_trace_that_never_touched_the_disk_needs_no_new_proof(compare: Compared) -> None:
    holdings = stranger(compare)
    drop(holdings, "domains", "processes", "leases")
    assert compare(holdings)["shut"]
    assert compare.slot_state() == ("disabled", "failed", "orphan_reservation")
    assert compare(nothing())["opened"]
    compare.sound()


@pytest.mark.covers("I4", "I13")
@pytest.mark.parametrize("gone", [True, False])
def test_a_used_disk_stays_unproven_over_a_trace_that_never_touched_it(
    compare: Compared, *, gone: bool
) -> None:
    compare(stranger(compare))
    if gone:
        compare(nothing())
        assert compare.slot_state() == ("disabled", "failed", "disk_unproven")
    holdings = stranger(compare)
    drop(holdings, "domains", "processes", "leases")
    compare(holdings)
    assert compare.slot_state() == ("disabled", "failed", "orphan_reservation")
    assert [compare(nothing())["opened"] for _ in range(2)] == [[], []]
    assert compare.slot_state() == ("disabled", "failed", "disk_unproven")


@pytest.mark.covers("I13")
def test_what_could_not_be_looked_at_heals_nothing(compare: Compared) -> None:
    holdings = stranger(compare)
    drop(holdings, "domains", "processes", "leases")
    compare(holdings)
    blind = nothing()
    unknown(blind, "reservations")
    result = compare(blind)
    assert (result["healed"], list(result["unknown"])) == ([], ["reservations"])
    assert compare.slot_state() == ("disabled", "failed", "orphan_reservation")
    with reading(compare.engine) as conn:
        node = nodes.get(conn, "n1")
    assert (node.health_state, node.health_detail["code"]) == ("degraded", "unknown")
    assert "late" in node.health_detail["reason"]


@pytest.mark.covers("I14")
def test_an_old_look_opens_nothing(compare: Compared) -> None:
    """All was well when the host was asked; another look has shut the slot since."""
    since = compare.now()
    holdings = stranger(compare)
    drop(holdings, "domains", "processes", "leases")
    compare(holdings)
    result = compare(nothing(), since=since)
    assert result["skipped"] == [compare.slots()[0].id]
    assert result["healed"] == result["opened"] == []
    assert compare.slot_state()[0] == "disabled"
    assert compare(nothing())["opened"]


@pytest.mark.covers("I14")
def test_a_task_that_ended_since_makes_a_look_too_old(compare: Compared, active: str) -> None:
    since = compare.now()
    with transaction(compare.engine) as conn:
        item = queue.Enqueue(
            TaskKind.SLICE_WIPE,
            "n1",
            "allocation",
            active,
            parameters={"slots": [{"slot_id": compare.slots()[0].id}]},
        )
        queue.enqueue(conn, item, ADMIN)
        compare.site.finish(conn, TaskKind.SLICE_WIPE)
    result = compare(nothing(), since=since + 0.001)
    assert compare.slots()[0].id in result["skipped"]
    assert compare.slot_state()[:2] == ("active", "healthy")


@pytest.mark.covers("I13", "I17")
def test_what_the_last_tenant_left_goes_through_the_ordinary_clean_up(compare: Compared) -> None:
    with transaction(compare.engine) as conn:
        key = compare.site.failed(conn)
        given = compare.site.proofs(conn, key)
        recovery.force_cleanup(conn, key, ADMIN, runtime_verified_absent=True)
        (task,) = leasing.lease(conn, "w", kinds=[TaskKind.SLICE_WIPE])
        slices.cleanup_succeeded(conn, key, ADMIN, proofs=given, absence={"absent": True})
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
    assert compare.slot_state() == ("available", "healthy", "")
    holdings = nothing()
    tenant(holdings, key, compare.bundles(0))
    result = compare(holdings)
    slot = compare.slots()[0]
    assert result["blocked"] == [slot.id]
    assert slot.status == "cleanup_blocked"
    assert (slot.health_detail["allocation_id"], slot.health_detail["step"]) == (key, "drift")
    # The same again is no news, and nothing was queued by itself.
    assert compare(holdings)["blocked"] == []
    with transaction(compare.engine) as conn:
        assert queue.every(conn, state=TaskState.QUEUED) == []
        assert recovery.repair(conn, slot.id, ADMIN).kind == "slice.wipe"
        slices.cleanup_succeeded(conn, key, ADMIN, proofs=given, absence={"absent": True})
    assert compare.slot_state() == ("available", "healthy", "")
    compare.sound()


def test_a_lease_of_one_slot_leaves_the_other_slots_of_its_owner_on_sale(sold: Site) -> None:
    """One of two GPUs died: its slot is withdrawn, and the ledger of its host has its lease."""
    compare = Compared(sold)
    with transaction(sold.engine) as conn:
        key = sold.failed(conn, 2)
        first, second = (claim.slot_id for claim in claims.of_allocation(conn, key))
        document = sold.document(0)
        dead = slot_records.get(conn, first)
        document["gpu"] = [g for g in document["gpu"] if g["address"] != dead.gpu_pci_address]
        host.record_discovery(conn, "n1", document, ADMIN)
        slot_life.withdraw(conn, first, ADMIN)
        recovery.repair(conn, second, ADMIN)
        sold.finish(conn, TaskKind.SLICE_WIPE)
        given = {second: sold.proofs(conn, key)[second]}
        assert slices.cleanup_succeeded(
            conn, key, ADMIN, proofs=given, absence={"absent": True, "checks": {}}
        )
    holdings = nothing()
    lease = {"allocation_id": key, "fence": 1, "disk": dead.nvme_identity, "dirty": True}
    put(holdings, "leases", slot_id=first, **lease)
    (row,) = compare(holdings)["differences"]
    assert (row["code"], row["slot_id"]) == ("orphan_lease", "")
    with reading(sold.engine) as conn:
        assert slot_records.get(conn, second).status != "cleanup_blocked"


def test_what_concerns_no_slot_is_the_nodes_health(compare: Compared) -> None:
    holdings = nothing()
    put(holdings, "ports", port="gs000000000000", owner="0" * 12)
    assert compare(holdings)["differences"][0]["slot_id"] == ""
    with reading(compare.engine) as conn:
        node = nodes.get(conn, "n1")
    assert (node.health_state, node.health_detail["step"]) == ("degraded", "drift")
    assert [compare.slot_state(index)[0] for index in (0, 1)] == ["available"] * 2
    compare(nothing())
    with reading(compare.engine) as conn:
        node = nodes.get(conn, "n1")
        rows = journal.history_of(conn, "node_health", "n1")
    assert (node.health_state, node.health_detail) == ("healthy", {})
    assert [row.target for row in rows] == ["degraded", "healthy"]
    compare.sound()


def test_another_ones_word_about_the_node_stays(compare: Compared) -> None:
    with transaction(compare.engine) as conn:
        nodes.change(conn, "n1", ADMIN, health_state="failed", health_detail={"code": "fan"})
    holdings = nothing()
    put(holdings, "ports", port="gs000000000000", owner="0" * 12)
    compare(holdings)
    compare(nothing())
    with transaction(compare.engine) as conn:
        assert nodes.get(conn, "n1").health_detail == {"code": "fan"}
        drift.forget(conn, "n1", ADMIN)
        assert nodes.get(conn, "n1").health_detail == {"code": "fan"}


def test_a_node_that_is_no_slice_host_any_more_is_not_judged(compare: Compared) -> None:
    holdings = nothing()
    put(holdings, "ports", port="gs000000000000", owner="0" * 12)
    compare(holdings)
    with transaction(compare.engine) as conn:
        host.convert(conn, "n1", NodeMode.BAREMETAL, ADMIN)
    assert compare(stranger(compare))["skipped"] == ["n1"]
    with transaction(compare.engine) as conn:
        for step in (STEP, host.BOOT):
            nodes.note_fault(conn, "n1", step, ("a", "b"), ADMIN, well="")
            drift.forget(conn, "n1", ADMIN)
            assert nodes.get(conn, "n1").health_state == "unknown"


@pytest.mark.covers("I14", "I16")
def test_another_boot_closes_the_gate_and_an_old_one_opens_nothing(compare: Compared) -> None:
    compare(nothing(), boot_id="another")
    assert [compare.slot_state(index)[0] for index in (0, 1)] == ["disabled"] * 2
    # A look from before the restart comes late: the boot that it names was proven, and is over.
    compare(nothing())
    with transaction(compare.engine) as conn:
        assert sorted(task.kind for task in queue.every(conn, node_id="n1")) == PROOF
        assert nodes.get(conn, "n1").boot_id == ""
        assert gate.open_gate(conn, "n1", ADMIN)["opened"] == []
        host.record_discovery(conn, "n1", compare.site.document(0), ADMIN)
        host.record_parity(conn, "n1", compare.site.parity(0), ADMIN)
        assert len(gate.open_gate(conn, "n1", ADMIN)["opened"]) == 2


@pytest.mark.covers("I13", "I16")
def test_a_boot_that_the_host_cannot_tell_closes_the_gate(
    compare: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "identity", lambda _boot_id: {"boot_id": ""})
    compare(nothing())
    assert [compare.slot_state(index)[0] for index in (0, 1)] == ["disabled"] * 2


@pytest.mark.covers("I16")
def test_a_host_that_lost_power_is_proven_until_its_slices_start(
    compare: Compared, active: str
) -> None:
    def queued(conn: sa.Connection) -> list[str]:
        return sorted(task.kind for task in queue.open_of_node(conn, "n1"))

    def prove(conn: sa.Connection, failures: int) -> dict[str, Any]:
        sold = compare.site
        work_act = ADMIN.because("measured")
        assert leasing.lease(conn, "worker") == [], "the host's services are still starting"
        conn.execute(sa.update(tables.tasks).values(not_before=clock.now()))
        for kind in reversed(PROOF):
            sold.finish(conn, kind)
        document, report = sold.document(0), sold.parity(0, failures)
        document["identity"] = report["identity"] = compare.identity("another")
        host.record_discovery(conn, "n1", document, work_act)
        host.record_parity(conn, "n1", report, work_act)
        return {"started": [] if failures else power.start_after_boot(conn, "n1", work_act)}

    with transaction(compare.engine) as conn:
        power.succeeded(conn, active, boot_id=compare.identity()["boot_id"])
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert queued(conn) == [], "it is the boot that was proven"
    off(holdings)
    compare(holdings, boot_id="another")
    compare(holdings, boot_id="another")
    with transaction(compare.engine) as conn:
        assert queued(conn) == PROOF
        prove(conn, failures=1)
        assert queued(conn) == []
    # Services of the host were still starting. The next comparison has it measured again.
    compare(holdings, boot_id="another")
    with transaction(compare.engine) as conn:
        assert queued(conn) == PROOF
        assert prove(conn, failures=0) == {"started": [active]}
    compare(holdings, boot_id="another")
    with transaction(compare.engine) as conn:
        assert queued(conn) == [TaskKind.SLICE_VM_POWER]


def test_a_slice_whose_stop_failed_is_recorded_as_running(compare: Compared, active: str) -> None:
    """Its run was lost, so only a comparison can tell."""
    error = {"code": "run_lost", "expected": "a", "found": "b", "remedy": "c"}
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    with transaction(compare.engine) as conn:
        power.request(conn, active, PowerAction.STOP, ADMIN)
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert allocations.get(conn, active).stopped, "its stop waits"
        task = compare.site.finish(conn, TaskKind.SLICE_VM_POWER, TaskState.LOST)
        task_failures.record(conn, task, task_failures.Failure("s", error, {}, known=False))
    # As a start that this stop has overtaken leaves it.
    holdings["domains"]["found"][0]["state"] = "paused"
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert allocations.get(conn, active).stopped, "a paused machine does not run"
    holdings["domains"]["found"][0]["state"] = "running"
    compare(holdings)
    with transaction(compare.engine) as conn:
        row = allocations.get(conn, active)
        assert (row.stopped, row.error) == (False, error)
        assert row.started_boot_id == compare.identity()["boot_id"]
        (audited,) = journal.audit_rows(conn, action="allocation.running")
        assert (audited.subject_id, audited.project_id) == (active, row.project_id)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_host_tells_nothing_of_a_machine_of_another_host(
    compare: Compared, active: str, *, stopped: bool
) -> None:
    """A lying host would start a stopped slice of its project, or keep a running slice off."""
    compare.site.node("n2", (0,), 1)
    with transaction(compare.engine) as conn:
        theirs = compare.site.active(conn)
        power.succeeded(conn, theirs, boot_id=compare.identity()["boot_id"])
        if stopped:
            power.request(conn, theirs, PowerAction.STOP, ADMIN)
            compare.site.finish(conn, TaskKind.SLICE_VM_POWER)
            power.succeeded(conn, theirs, boot_id="")
        assert allocations.get(conn, theirs).node_id == "n2"
    machine = {"allocation_id": theirs, "active": stopped, "off_by_guest": not stopped}
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    state = "running" if stopped else "shut off"
    put(holdings, "domains", name="x", state=state, devices=[], disks=[], **machine)
    compare(holdings)
    with reading(compare.engine) as conn:
        assert allocations.get(conn, theirs).stopped is stopped


def test_a_slice_whose_start_was_lost_is_recorded_as_running(
    compare: Compared, active: str
) -> None:
    """Otherwise its guest's own power-off would never count, and its host's next proof undo it."""
    error = {"code": "host_unreachable", "expected": "a", "found": "b", "remedy": "c"}
    holdings, boot_id = nothing(), compare.identity()["boot_id"]
    tenant(holdings, active, compare.bundles())
    with transaction(compare.engine) as conn:
        power.request(conn, active, PowerAction.RESTART, ADMIN)
        task = compare.site.finish(conn, TaskKind.SLICE_VM_POWER, TaskState.FAILED)
        task_failures.record(conn, task, task_failures.Failure("", error, {}, known=False))
        assert allocations.get(conn, active).started_boot_id == ""
    # The lost run may have asked it to power off, which it does soon.
    holdings["domains"]["found"][0]["stops"] = True
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert allocations.get(conn, active).started_boot_id == ""
    holdings["domains"]["found"][0]["stops"] = False
    compare(holdings)
    with transaction(compare.engine) as conn:
        row = allocations.get(conn, active)
        assert (row.stopped, row.error, row.started_boot_id) == (False, {}, boot_id)
    off(holdings)
    holdings["domains"]["found"][0]["off_by_guest"] = True
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert allocations.get(conn, active).stopped
        assert power.start_after_boot(conn, "n1", ADMIN) == []


@pytest.mark.covers("I16")
def test_a_host_without_slices_is_proven_until_it_passes_after_a_boot(compare: Compared) -> None:
    """Its services may still have been starting. Later failures are an operator's to look at."""
    compare(nothing(), boot_id="another")
    for failures, again in ((2, PROOF), (0, []), (1, [])):
        with transaction(compare.engine) as conn:
            conn.execute(sa.delete(tables.tasks))
            document, report = compare.site.document(0), compare.site.parity(0, failures)
            document["identity"] = report["identity"] = compare.identity("another")
            host.record_discovery(conn, "n1", document, ADMIN)
            host.record_parity(conn, "n1", report, ADMIN)
        compare(nothing(), boot_id="another")
        with transaction(compare.engine) as conn:
            assert sorted(task.kind for task in queue.open_of_node(conn, "n1")) == again


@pytest.mark.covers("I16")
def test_a_host_that_passed_without_a_discovery_of_its_boot_is_discovered(
    compare: Compared,
) -> None:
    """Its slots are not sold before that, and nothing else would ask for it."""
    compare(nothing(), boot_id="another")
    with transaction(compare.engine) as conn:
        conn.execute(sa.delete(tables.tasks))
        host.record_parity(
            conn, "n1", compare.site.parity(0) | {"identity": compare.identity("another")}, ADMIN
        )
    for _ in range(2):
        compare(nothing(), boot_id="another")
        with transaction(compare.engine) as conn:
            assert sorted(task.kind for task in queue.open_of_node(conn, "n1")) == PROOF


def test_a_host_of_another_boot_at_each_start_is_asked_later_each_time(
    compare: Compared, active: str
) -> None:
    sold, boot_id = compare.site, compare.identity()["boot_id"]
    error = {"code": host.BOOT_CHANGED, "expected": "a", "found": "b", "remedy": "c"}
    pauses = []
    with transaction(compare.engine) as conn:
        for _ in range(9):
            power.start_after_boot(conn, "n1", ADMIN)
            task = sold.finish(conn, TaskKind.SLICE_VM_POWER)
            task_failures.record(conn, task, task_failures.Failure("s", error, {}, known=True))
            conn.execute(
                sa.update(tables.tasks).where(tables.tasks.c.id == task.id).values(error=error)
            )
            proof = queue.open_of_node(conn, "n1")
            pauses.append((proof[0].not_before or 0) - clock.read(conn))
            conn.execute(
                sa.delete(tables.tasks).where(tables.tasks.c.id.in_([t.id for t in proof]))
            )
            host.record_discovery(conn, "n1", sold.document(0), ADMIN)
            host.record_parity(conn, "n1", sold.parity(0), ADMIN)
    # A machine may pause between the two readings of the clock.
    assert pauses[:3] == pytest.approx([60, 120, 240], abs=25)
    assert pauses[-2:] == pytest.approx([3600, 3600], abs=25)
    holdings = nothing()
    tenant(holdings, active, compare.bundles())
    compare(holdings, boot_id=boot_id)
    with transaction(compare.engine) as conn:
        assert nodes.get(conn, "n1").health_detail["code"] == "boot_unstable"
        conn.execute(sa.update(tables.tasks).values(finished_at=1.0))
    compare(holdings, boot_id=boot_id)
    with transaction(compare.engine) as conn:
        assert nodes.get(conn, "n1").health_detail == {}


@pytest.mark.parametrize("used", [True, False])
def test_a_host_comes_back_from_maintenance_whose_proof_was_lost(
    compare: Compared, used: bool
) -> None:
    """Its restart failed after the stop of its guests, so it was proven under its boot long ago."""
    sold, holdings = compare.site, nothing()
    with transaction(compare.engine) as conn:
        keys = [sold.active(conn, 2)] if used else []
        for key in keys:
            power.succeeded(conn, key, boot_id=compare.identity()["boot_id"])
            tenant(holdings, key, compare.bundles())
            off(holdings)
        maintenance.request_reboot(conn, "n1", ADMIN, allocations=keys)
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.NODE_REBOOT])
        maintenance.began(conn, task)
        error = {"code": "host_in_use", "expected": "a", "found": "b", "remedy": "c"}
        task_failures.record(conn, task, task_failures.Failure("stop", error, {}, known=True))
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ADMIN)
        sold.finish(conn, TaskKind.SLICE_TOPOLOGY_DISCOVER, TaskState.LOST)
        assert not queue.open_of_node(conn, "n1")
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert sorted(task.kind for task in queue.open_of_node(conn, "n1")) == PROOF
        conn.execute(sa.update(tables.tasks).values(not_before=clock.now()))
        for kind in reversed(PROOF):
            sold.finish(conn, kind)
        sold.prove(conn, "n1")
        assert power.start_after_boot(conn, "n1", ADMIN) == keys
        assert maintenance.finish(conn, "n1", ADMIN)
        assert nodes.get(conn, "n1").state == NodeState.READY
        for _ in keys:
            power.failed(conn, sold.finish(conn, TaskKind.SLICE_VM_POWER), error)
    compare(holdings)
    with transaction(compare.engine) as conn:
        assert not queue.open_of_node(conn, "n1"), "a start that failed is its project's to ask for"


@pytest.mark.covers("I1", "I3", "I14")
def test_launches_and_comparisons_at_once(compare: Compared) -> None:
    """The first has the slot, or takes it off sale; never both."""
    holdings = stranger(compare)

    def work(number: int) -> str:
        try:
            if number % 2:
                retrying(compare.engine, compare.site.allocate)
                return "sold"
            evidence = {"holdings": holdings, "identity": compare.identity()}
            since = compare.now() + 0.01
            retrying(
                compare.engine,
                lambda conn: drift.reconcile(conn, "n1", evidence, ADMIN, since=since),
            )
            return "compared"
        except Problem as problem:
            return problem.code

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(16)))
    assert set(results) <= {"sold", "compared", "no_capacity"}, results
    assert compare.slot_state()[0] in ("reserved", "disabled")
    compare.sound()


# Longer than the session whose site is copied for each of these.
DAY_S = 86_400.0


class TestDue:
    """Whose turn it is."""

    @staticmethod
    def due(conn: sa.Connection, at_once: int = 5, every_s: float = DAY_S) -> list[str]:
        return drift.due(conn, every_s=every_s, at_once=at_once)

    @staticmethod
    def age(conn: sa.Connection, seconds: float) -> None:
        table = tables.nodes
        conn.execute(sa.update(table).values(mode_since=table.c.mode_since - seconds))
        made = tables.tasks.c.created_at - seconds
        conn.execute(sa.update(tables.tasks).values(created_at=made))
        ended = sa.update(tables.tasks).where(tables.tasks.c.finished_at.is_not(None))
        times = (tables.tasks.c.started_at, tables.tasks.c.finished_at)
        conn.execute(ended.values({time: time - seconds for time in times}))

    def test_every_so_often_the_longest_unseen_first(self, sold: Site) -> None:
        sold.node("n2", (0,), 1)
        with transaction(sold.engine) as conn:
            assert self.due(conn) == [], "not before a whole interval is over"
            self.age(conn, DAY_S + 1)
            assert self.due(conn) == ["n1", "n2"]
            assert self.due(conn, at_once=1) == ["n1"]
            task = drift.queue_comparison(conn, "n1", ADMIN)
            assert (task.priority, task.exclusive) == (-1, False)
            assert self.due(conn) == ["n2"]
            assert self.due(conn, at_once=1) == [], "a comparison is running"
            lost = sa.update(tables.nodes).where(tables.nodes.c.id == "n1")
            conn.execute(lost.values(state="unreachable"))
            assert self.due(conn, at_once=1) == ["n2"], "its look waits until it is back"
            conn.execute(lost.values(state="ready"))
            sold.finish(conn, TaskKind.SLICE_DRIFT_RECONCILE)
            assert self.due(conn) == ["n2"]
            drift.queue_comparison(conn, "n2", ADMIN)
            sold.finish(conn, TaskKind.SLICE_DRIFT_RECONCILE)
            assert self.due(conn) == []
            self.age(conn, DAY_S + 1)
            assert self.due(conn) == ["n1", "n2"]

    def test_a_host_whose_comparisons_fail_is_asked_ever_later(self, sold: Site) -> None:
        every_s, waits = 900.0, []
        with transaction(sold.engine) as conn:
            for state in (TaskState.FAILED,) * 6 + (TaskState.SUCCEEDED,):
                drift.queue_comparison(conn, "n1", ADMIN)
                sold.finish(conn, TaskKind.SLICE_DRIFT_RECONCILE, state)
                waits.append(0)
                while not self.due(conn, every_s=every_s):
                    self.age(conn, every_s)
                    waits[-1] += 1
        assert waits == [4, 8, 16, 32, 64, 96, 1]

    def test_a_failure_of_all_hosts_takes_no_place_from_them(self, sold: Site) -> None:
        sold.node("n2", (0,), 1)
        with transaction(sold.engine) as conn:
            for node_id in ("n1", "n2"):
                drift.queue_comparison(conn, node_id, ADMIN)
                sold.finish(conn, TaskKind.SLICE_DRIFT_RECONCILE, TaskState.FAILED)
            assert set(drift.every_host(conn)) == {"n1", "n2"}, "without a pause"
            self.age(conn, 5 * DAY_S)
            assert self.due(conn, at_once=2) == ["n1", "n2"]
            drift.queue_comparison(conn, "n1", ADMIN)
            assert drift.every_host(conn) == ["n2"]

    def test_a_host_that_hangs_has_a_place_beside_those_of_the_others(self, sold: Site) -> None:
        kind = TaskKind.SLICE_DRIFT_RECONCILE
        sold.node("n2", (0,), 1)
        with transaction(sold.engine) as conn:
            self.age(conn, DAY_S + 1)
            drift.queue_comparison(conn, "n1", ADMIN)
            (task,) = leasing.lease(conn, "worker", kinds=[kind])
            assert self.due(conn, at_once=1) == [], "a comparison is running"
            began = tables.tasks.c.started_at - drift.SLOW_S - 1
            conn.execute(sa.update(tables.tasks).values(started_at=began))
            assert self.due(conn, at_once=1) == ["n2"]
            drift.queue_comparison(conn, "n2", ADMIN)
            assert self.due(conn, at_once=1) == []
            queue.finish(conn, task.id, task.lease_token, TaskState.LOST, ADMIN)
            sold.finish(conn, kind)
            self.age(conn, 5 * DAY_S)
            assert self.due(conn, at_once=1) == ["n2", "n1"]
            # A host that answers each second time, to count as healthy, keeps a place of its own.
            drift.queue_comparison(conn, "n1", ADMIN)
            assert self.due(conn, at_once=1) == ["n2"]
            sold.finish(conn, kind)
            self.age(conn, DAY_S)
            drift.queue_comparison(conn, "n2", ADMIN)
            assert self.due(conn, at_once=1) == ["n1"]

    def test_hosts_that_begin_to_hang_together_stop_no_others(self, sold: Site) -> None:
        kind = TaskKind.SLICE_DRIFT_RECONCILE
        for number in (2, 3):
            sold.node(f"n{number}", (0,), number)

        def compared(conn: sa.Connection, node_id: str, by: Act = ADMIN) -> str:
            task = drift.queue_comparison(conn, node_id, by)
            leasing.lease(conn, "worker", kinds=[kind])
            return str(task.id)

        def grow_old(conn: sa.Connection) -> None:
            began = tables.tasks.c.started_at - drift.SLOW_S - 1
            conn.execute(sa.update(tables.tasks).values(started_at=began))

        def ended(conn: sa.Connection) -> list[str]:
            return drift.end_hanging(conn, service, every_s=DAY_S)

        service = Act("reconciler", "other hosts wait")
        with transaction(sold.engine) as conn:
            self.age(conn, DAY_S + 1)
            compared(conn, "n1", service)
            grow_old(conn)
            assert self.due(conn, at_once=1) == ["n2"] and ended(conn) == []
            second = compared(conn, "n2", service)
            assert ended(conn) == [], "it has just begun"
            grow_old(conn)
            assert self.due(conn, at_once=1) == [], "the third would wait until their deadline"
            assert ended(conn) == [second]
            assert ended(conn) == [], "once"
            task = queue.get(conn, second)
            assert task.cancel_requested
            queue.finish(conn, second, task.lease_token, TaskState.CANCELED, service)
            assert self.due(conn, at_once=1) == ["n3"]
            # A comparison goes on if a person waits for it, or if it keeps no other waiting.
            third = compared(conn, "n3")
            grow_old(conn)
            assert ended(conn) == []
            conn.execute(sa.update(tables.tasks).values(requested_by="reconciler"))
            assert self.due(conn, at_once=9) == [] and ended(conn) == []
            assert not queue.get(conn, third).cancel_requested

    def test_how_far_it_is_behind(self, sold: Site) -> None:
        with transaction(sold.engine) as conn:
            self.age(conn, DAY_S)
            assert DAY_S <= drift.overdue_nodes(conn) < DAY_S * 2
            drift.queue_comparison(conn, "n1", ADMIN)
            assert drift.overdue_nodes(conn) >= DAY_S, "it is only queued"
            sold.finish(conn, TaskKind.SLICE_DRIFT_RECONCILE, TaskState.SUCCEEDED)
            assert drift.overdue_nodes(conn) < 60
            self.age(conn, DAY_S)
            conn.execute(sa.update(tables.nodes).values(mode_since=clock.now()))
            assert drift.overdue_nodes(conn) < 60, "it was converted since"
            self.age(conn, DAY_S)
            host.lost(conn, "n1", ADMIN)
            assert drift.overdue_nodes(conn) == 0

    @pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.LOST, TaskState.CANCELED])
    def test_one_that_did_not_succeed_has_compared_nothing(
        self, sold: Site, state: TaskState
    ) -> None:
        kind = TaskKind.SLICE_DRIFT_RECONCILE
        with transaction(sold.engine) as conn:
            drift.queue_comparison(conn, "n1", ADMIN)
            sold.finish(conn, kind, TaskState.SUCCEEDED)
            assert drift.failing_nodes(conn) == 0
            self.age(conn, DAY_S)
            drift.queue_comparison(conn, "n1", ADMIN)
            sold.finish(conn, kind, state)
            self.age(conn, 1)
            drift.queue_comparison(conn, "n1", ADMIN)
            assert drift.overdue_nodes(conn) >= DAY_S
            assert drift.failing_nodes(conn) == 1, "also while the next comparison is open"
            sold.finish(conn, kind, TaskState.SUCCEEDED)
            assert drift.overdue_nodes(conn) < 60 and drift.failing_nodes(conn) == 0
            host.lost(conn, "n1", ADMIN)
            assert drift.failing_nodes(conn) == 0

    def test_a_hosts_own_word_takes_no_place_of_others(self, sold: Site) -> None:
        """It names another difference each minute, and lets its comparisons hang."""
        kind = TaskKind.SLICE_DRIFT_RECONCILE
        with transaction(sold.engine) as conn:
            assert drift.queue_unasked(conn, "n1", ADMIN, pause_s=300)
            assert not drift.queue_unasked(conn, "n1", ADMIN), "a comparison is open"
            sold.finish(conn, kind)
            assert not drift.queue_unasked(conn, "n1", ADMIN, pause_s=300), "just compared"
            assert drift.queue_unasked(conn, "n1", ADMIN)
            sold.finish(conn, kind, TaskState.FAILED)
            self.age(conn, DAY_S)
            assert not drift.queue_unasked(conn, "n1", ADMIN, pause_s=300), "the last has failed"

    def test_old_tasks_are_not_read(self, sold: Site) -> None:
        if sold.engine.dialect.name != "sqlite":
            pytest.skip("with so few rows PostgreSQL's planner reads them all")
        with transaction(sold.engine) as conn:
            self.age(conn, DAY_S)
            drift.queue_comparison(conn, "n1", ADMIN)
            host.lost(conn, "n1", ADMIN)
        queries: list[tuple[str, Any]] = []
        with transaction(sold.engine) as conn:
            conn.execute(sa.delete(tables.tasks).where(tables.tasks.c.finished_at.is_(None)))
            sa.event.listen(conn, "before_cursor_execute", lambda *a: queries.append((a[2], a[3])))
            self.due(conn)
            question, given = queries[-1]
            plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {question}", given).all()
        steps = [row[-1] for row in plan if "tasks" in row[-1]]
        assert steps, plan
        for step in steps:
            # The state is read of the newest task.
            assert "INDEX ix_tasks_latest (kind=? AND node_id=?)" in step, steps

    def test_only_slice_hosts_that_answer(self, sold: Site) -> None:
        with transaction(sold.engine) as conn:
            nodes.create(conn, ADMIN, id="n9", address="10.0.2.9")
            nodes.create(conn, ADMIN, id="m9", address="10.0.2.10", mode=NodeMode.BAREMETAL)
            self.age(conn, DAY_S + 1)
            assert self.due(conn) == ["n1"]
            host.lost(conn, "n1", ADMIN)
            assert self.due(conn) == []
            host.regained(conn, "n1", ADMIN)
            host.drain(conn, "n1", ADMIN)
            assert self.due(conn) == ["n1"]
