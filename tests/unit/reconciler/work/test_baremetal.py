"""Tasks of a whole machine, against the run contract and the answers of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Proof, Task
from reconciler.lifecycle import host, launch, slices, task_failures
from reconciler.lifecycle import slots as slot_life
from reconciler.lifecycle.task_failures import Failure
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, TaskKind
from reconciler.profiles import hardware_profile
from reconciler.records import allocations, nodes, proofs, queue, reports, slots
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.whole_machines import BEFORE, Machines

PROFILES = Path(__file__).parents[4] / "profiles"
RESULT = {"account": {"username": "alice", "uid": 59000}, "proofs": {}, "baseline": BEFORE}


def work(conn: sa.Connection, task: Task) -> Work:
    node = nodes.get(conn, task.node_id)
    settings = Settings(profiles_dir=PROFILES)
    return Work(conn, task, node, hardware_profile(PROFILES, "lab"), settings)


def variables(item: Work) -> dict[str, Any]:
    """Variables of the run, checked against the contract."""
    given = HANDLERS[item.task.kind].variables(item)
    run = {
        "id": "r", "task_id": item.task.id, "kind": item.task.kind,
        "node_id": item.node.id, "correlation_id": "c",
    }  # fmt: skip
    playbook = HANDLERS[item.task.kind].playbook
    contract.check_vars(playbook, {"slice_run": run, "slice_profile": item.profile, **given})
    return given


def only_task(conn: sa.Connection, kind: str) -> Task:
    (task,) = [task for task in queue.every(conn) if task.kind == kind]
    return task


@pytest.mark.covers("CTRL-15", "CTRL-9")
def test_a_tenant_comes_and_goes(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.launch(conn).id
        came = work(conn, only_task(conn, "baremetal.provision"))
        handler = HANDLERS["baremetal.provision"]
        first = variables(came)
        assert (first["slice_fence"], len(first["slice_disks"])) == (1, 3)
        assert first["boot_id"] == came.node.boot_id
        handler.start(came)
        assert variables(came) == first
        result = handler.succeed(came, {**RESULT, "disk_written": True, "leftovers": True})
        # It is large, and belongs to the node's evidence rather than to every list of tasks.
        assert "baseline" not in result
        assert allocations.get(conn, allocation_id).connection["host"] == "203.0.113.1"

        conn.execute(sa.update(tables.tasks).values(state="succeeded", started_at=1.0))
        launch.release(conn, allocation_id, machines.act)
        goes = work(conn, only_task(conn, "baremetal.release"))
        given = variables(goes)
        assert (given["slice_fence"], given["slice_baseline"]) == (2, BEFORE)
        assert given["slice_disks"] == first["slice_disks"]
        HANDLERS["baremetal.release"].succeed(goes, machines.evidence(conn, allocation_id))
        assert allocations.get(conn, allocation_id).state == "released"


@pytest.mark.covers("I4", "CTRL-15")
def test_no_proof_from_before_the_machines_tenant_lets_a_slot_on_sale(machines: Machines) -> None:
    """The schema refuses it from any writer; the release's own proofs count."""
    with transaction(machines.engine) as conn:
        candidates = machines.site.document(1)["candidates"]
        bundle = Bundle.of(candidates[1]["bundle"])
        mode = sa.update(tables.nodes)
        conn.execute(mode.values(mode="slice"))
        slot = slot_life.approve(conn, "m1", bundle, machines.act)
        conn.execute(mode.values(mode="baremetal"))
        before = proofs.current(conn, slot)
        assert before is not None
        allocation_id = machines.launch(conn).id
        came = work(conn, only_task(conn, "baremetal.provision"))
        HANDLERS["baremetal.provision"].start(came)
        HANDLERS["baremetal.provision"].succeed(came, RESULT)
        conn.execute(sa.update(tables.tasks).values(state="succeeded", started_at=1.0))
        launch.release(conn, allocation_id, machines.act)
        goes = work(conn, only_task(conn, "baremetal.release"))
        HANDLERS["baremetal.release"].succeed(goes, machines.evidence(conn, allocation_id))

        def sell(proof: Proof) -> None:
            of_it = sa.update(tables.slots).where(tables.slots.c.id == slot.id)
            conn.execute(of_it.values(status="available", available_proof_id=proof.id))

        with pytest.raises(sa.exc.IntegrityError), conn.begin_nested():
            sell(before)
        after = proofs.current(conn, slots.get(conn, slot.id))
        assert after is not None and after.allocation_id == allocation_id
        sell(after)


@pytest.mark.covers("CTRL-15", "CTRL-8", "I13")
def test_no_run_begins_for_a_tenant_who_does_not_wait(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.launch(conn).id
        item = work(conn, only_task(conn, "baremetal.provision"))
        start = HANDLERS["baremetal.provision"].start
        with conn.begin_nested() as begun:
            start(item)
            start(item)
            assert allocations.get(conn, allocation_id).state == "provisioning", "goes on"
            begun.rollback()
        slices.provision_failed(conn, allocation_id, machines.act, step="x", error=ERROR)
        with pytest.raises(Problem, match="canceled"):
            start(item)
        assert allocations.get(conn, allocation_id).state == "failed"


ERROR = {"code": "disk_in_use", "expected": "", "found": "held", "remedy": ""}
TOUCHED = {"disk_written": True, "leftovers": False}
UNTOUCHED = {"disk_written": False, "leftovers": False}


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize(
    ("evidence", "known", "unclean"),
    [(UNTOUCHED, True, False), (TOUCHED, True, True), (UNTOUCHED, False, True), ({}, True, True)],
)
def test_only_the_host_itself_says_that_nothing_was_touched(
    machines: Machines, evidence: dict[str, Any], known: bool, unclean: bool
) -> None:
    with transaction(machines.engine) as conn:
        machines.launch(conn)
        conn.execute(sa.update(tables.tasks).values(started_at=1.0))
        item = work(conn, only_task(conn, "baremetal.provision"))
        failure = Failure("Take the machine", ERROR, {**evidence, "baseline": BEFORE}, known=known)
        task_failures.record(conn, item.task, failure)
        assert bool(nodes.get(conn, "m1").unclean_allocation_id) is unclean
        assert reports.baseline(conn, item.task.allocation_id) == BEFORE


def test_a_restarted_host_is_discovered_before_it_is_given_away(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        machines.launch(conn)
        conn.execute(sa.update(tables.tasks).values(started_at=1.0))
        item = work(conn, only_task(conn, "baremetal.provision"))
        error = {**ERROR, "code": "boot_changed"}
        failure = Failure("s", error, UNTOUCHED, known=True)
        task_failures.record(conn, item.task, failure)
        assert nodes.get(conn, "m1").boot_id == ""
        assert machines.reasons(conn) == {"m1": "discovery_stale"}


@pytest.mark.covers("CTRL-15")
def test_an_ordinary_machine_is_ready_once_it_was_seen(machines: Machines) -> None:
    """A machine that is sold as a whole needs no bootstrap."""
    identity = machines.site.document(2)["identity"]
    with transaction(machines.engine) as conn:
        values = {"mode": NodeMode.BAREMETAL, "profile": "lab"}
        nodes.create(conn, machines.act, id="m2", address="10.0.2.15", **values)
        host.enrolled(conn, "m2", machines.act, **{**identity, "boot_id": ""})
        look = queue.Enqueue(TaskKind.SLICE_TOPOLOGY_DISCOVER, "m2", "node", "m2")
        item = work(conn, queue.enqueue(conn, look, machines.act))
        HANDLERS[item.task.kind].succeed(item, {"discovery": machines.site.document(2)})
        node = nodes.get(conn, "m2")
        assert (node.state, node.mode) == ("ready", "baremetal")
        assert machines.reasons(conn, node_id="m2")["m2"] == "tenant_address_missing"


def test_a_failed_release_blocks_the_machine(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        allocation_id = machines.active(conn)
        launch.release(conn, allocation_id, machines.act)
        item = work(conn, only_task(conn, "baremetal.release"))
        failure = Failure("Wipe", ERROR, {}, known=True)
        task_failures.record(conn, item.task, failure)
        assert nodes.get(conn, "m1").unclean_allocation_id == allocation_id


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("hostile", [[], {"accounts": ["x"]}, {"accounts": {"x": {"y": "z"}}}])
def test_a_baseline_that_no_release_could_be_given_is_never_recorded(
    ok: bool, hostile: Any
) -> None:
    """The release of such a machine would be refused by the run contract for ever."""
    error = {} if ok else ERROR
    evidence = {**RESULT, "disk_written": True, "leftovers": True}
    document = {
        "schema": 1,
        "playbook": "provision_baremetal",
        "ok": ok,
        "step": "",
        "error": error,
    }
    contract.check_result({**document, "evidence": evidence})
    with pytest.raises(contract.ContractError, match="baseline"):
        contract.check_result({**document, "evidence": {**evidence, "baseline": hostile}})
