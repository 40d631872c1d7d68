"""Outcomes that only the schema refuses: the task ends by name, and nothing is freed.

The rules are the schema's own, or a rule that a newer version might have: no function of ours
checks it. A worker that took the refusal for a database that is away would retry it for ever.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import baremetal, launch, recovery, slots
from reconciler.lifecycle.task_failures import EFFECTS, Failure
from reconciler.model.bundle import Bundle
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, nodes, queue
from reconciler.runs.collect import Outcome
from reconciler.settings import Settings
from reconciler.work.handler import Work
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import settle
from tests.unit.reconciler import wipes
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import ABSENT, Machines
from tests.unit.reconciler.work import test_unreadable
from tests.unit.reconciler.work.test_unreadable import begun, ended

pytestmark = pytest.mark.covers("CTRL-8", "CTRL-9", "I6", "I13")
engine, sold = test_unreadable.engine, test_unreadable.sold
postgresql = test_unreadable.postgresql

TOLD = "a rule of this site"
UNTOUCHED = {"disk_written": False, "leftovers": False}


def rule(conn: sa.Connection, verb: str, table: sa.Table, row: str) -> None:
    """Refuse writes of such rows."""
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(
            "CREATE FUNCTION rule() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN RAISE EXCEPTION '{TOLD}' USING ERRCODE = '23000'; END $$"
        )
        act = "EXECUTE FUNCTION rule()"
    else:
        act = f"BEGIN SELECT RAISE(ABORT, '{TOLD}'); END"
    head = f"CREATE TRIGGER rule BEFORE {verb} ON {table.name} FOR EACH ROW WHEN ({row})"
    conn.exec_driver_sql(f"{head} {act}")


def built(_sold: Site, _conn: sa.Connection, _key: str) -> Outcome:
    """Even such a word of the host frees nothing."""
    return ended(True, {"readiness": {"ip": "192.0.2.7"}, **UNTOUCHED})


def untouched(_sold: Site, _conn: sa.Connection, _key: str) -> Outcome:
    return ended(False, UNTOUCHED, code="no_clone", found="no such image")


def wiped(sold: Site, conn: sa.Connection, key: str) -> Outcome:
    return ended(True, {"proofs": sold.proofs(conn, key), "absence": ABSENT})


ACTIVE = ("UPDATE", tables.claims, "NEW.state = 'active'")
PROVEN = ("INSERT", tables.proofs, "NEW.kind <> 'transition'")


@pytest.mark.parametrize(
    ("had", "refused", "outcome", "left"),
    [
        (False, ACTIVE, built, ("failed", "failed")),
        (False, PROVEN, untouched, ("failed", "failed")),
        (True, PROVEN, wiped, ("releasing", "releasing")),
    ],
    ids=["built", "untouched", "wiped"],
)
def test_its_slot_waits_for_evidence(
    sold: Site, tmp_path: Path, had: bool, refused: Any, outcome: Any, left: tuple[str, str]
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.active(conn) if had else sold.allocate(conn)
        if had:
            launch.release(conn, key, ADMIN)
        rule(conn, *refused)
    settings, task = begun(sold, tmp_path)
    with reading(sold.engine) as conn:
        end = outcome(sold, conn, key)
    settle(sold.engine, settings, HANDLERS[task.kind], task, end)
    with reading(sold.engine) as conn:
        task = queue.get(conn, task.id)
        error = task.error
        assert (task.state, error["code"]) == ("failed", "outcome_refused")
        assert error["found"] == TOLD
        kept = error["evidence"].get("failure", error)
        assert kept["evidence"] == (end.result or {})["evidence"], "the host's evidence"
        if outcome is untouched:
            assert (kept["code"], kept["found"]) == ("no_clone", "no such image")
        row = allocations.get(conn, key)
        assert (row.state, row.claims[0].state) == left
        (slot,) = recovery.blocked(conn)
        assert slot.health_detail["code"] == "outcome_refused"


@pytest.mark.covers("I4")
def test_a_disk_of_a_machine_that_is_let_is_not_taken_over_elsewhere(
    sold: Site, tmp_path: Path
) -> None:
    """It was moved to another host while its tenant has the machine that it came from."""
    machines = Machines(sold)
    machines.machine()
    with transaction(sold.engine) as conn:
        mode = sa.update(tables.nodes).where(tables.nodes.c.id == "m1")
        conn.execute(mode.values(mode="slice"))
        bundle = Bundle.of(sold.document(1)["candidates"][1]["bundle"])
        slot = slots.approve(conn, "m1", bundle, ADMIN)
        conn.execute(mode.values(mode="baremetal"))
        machines.begin(conn, machines.launch(conn))
        baremetal.entered(conn, "m1")
        before = wipes.proofs_of_disk(conn, slot.nvme_identity)
        nodes.change(conn, "n1", ADMIN, profile="lab")
        kind = TaskKind.NODE_STORAGE_TRANSITION
        queue.enqueue(conn, queue.Enqueue(kind, "n1", "node", "n1"), ADMIN)
        (task,) = leasing.lease(conn, "worker", kinds=[kind])
    proof = {"disk": slot.nvme_identity, "method": "discard", "verified": True}
    evidence = {"devices": [{"proof": proof}]}
    settle(sold.engine, Settings(state_dir=tmp_path), HANDLERS[kind], task, ended(True, evidence))
    with reading(sold.engine) as conn:
        error = queue.get(conn, task.id).error
        assert (queue.get(conn, task.id).state, error["code"]) == ("failed", "disk_in_use")
        assert error["evidence"] == evidence
        assert wipes.proofs_of_disk(conn, slot.nvme_identity) == before


def test_who_was_only_slower_is_not_refused(sold: Site, tmp_path: Path) -> None:
    """Another transaction takes a unique value first; the next look finds it taken."""
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    settings, task = begun(sold, tmp_path)
    handler = HANDLERS[task.kind]
    looks: list[Work] = []

    def slower(work: Work, evidence: dict[str, Any]) -> dict[str, Any]:
        looks.append(work)
        if len(looks) == 1:
            work.conn.execute(sa.insert(tables.projects).values(id="p1", name="p1"))
        return handler.succeed(work, evidence)

    end = ended(True, {"readiness": {}})
    settle(sold.engine, settings, replace(handler, succeed=slower), task, end)
    with reading(sold.engine) as conn:
        assert queue.get(conn, task.id).state == "succeeded"
        assert allocations.get(conn, key).state == "active"
    assert len(looks) == 2


def test_a_failure_that_its_handler_cannot_read_is_unknown(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    settings, task = begun(sold, tmp_path)
    effect = EFFECTS[task.kind]

    def strict(conn: sa.Connection, task: tables.Task, failure: Failure) -> None:
        if "failure" not in failure.evidence:
            raise KeyError("leftovers")
        effect(conn, task, failure)

    monkeypatch.setitem(EFFECTS, task.kind, strict)
    settle(sold.engine, settings, HANDLERS[task.kind], task, ended(False, UNTOUCHED))
    with reading(sold.engine) as conn:
        error = queue.get(conn, task.id).error
        assert error["code"] == "outcome_unreadable"
        assert error["evidence"]["failure"]["evidence"] == UNTOUCHED
        assert allocations.get(conn, key).state == "failed"
        assert len(recovery.blocked(conn)) == 1
