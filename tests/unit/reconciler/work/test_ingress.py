"""Life of a rule of public ingress: a real store, scripted runs; unknown never frees its port."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import clock, journal, rows
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import IngressRule
from reconciler.lifecycle import drift, host, ingress, launch, recovery, slices
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind
from reconciler.records import leasing, nodes, queue, slots
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work import loops, worker
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.holdings import nothing, put, tenant
from tests.unit.reconciler.work.conftest import Attend, Runs, attending
from tests.unit.reconciler.work.test_unreachable import SILENT

pytestmark = pytest.mark.covers("SLICE-9")

KIND = TaskKind.SLICE_INGRESS_APPLY
ADDRESS = "192.0.2.10"
ERROR = {
    "code": "guest_port_silent",
    "expected": "an answer",
    "found": "Connection refused",
    "remedy": "start the service",
}
CHECKS = {name: {"absent": True, "known": True} for name in ("ingress", "ingress_file")}
ABSENT = {"absent": True, "checks": CHECKS}


@pytest.fixture
def allocation(sold: Site) -> str:
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        return sold.active(conn)


@pytest.fixture
def attend(sold: Site, settings: Settings, runs: Runs) -> Attend:
    """Lease the next task of a rule and bring it to its end."""
    return attending(sold.engine, settings, runs, KIND)


def _request(conn: sa.Connection, allocation: str, port: int) -> str:
    wish = ingress.NewRule(
        protocol="tcp",
        public_address=ADDRESS,
        public_port=port,
        guest_port=8443,
        sources=["198.51.100.0/24"],
        expires_at=clock.read(conn) + 3600,
    )
    return ingress.request(conn, "p1", allocation, wish, ADMIN, site={ADDRESS}).id


def request(site: Site, allocation: str, port: int = 443) -> str:
    with transaction(site.engine) as conn:
        return _request(conn, allocation, port)


def applied(site: Site, allocation: str, runs: Runs, attend: Attend, port: int = 443) -> str:
    rule_id = request(site, allocation, port)
    runs.ends(evidence={"ingress": {"rules": [rule_id]}})
    attend()
    assert state(site, rule_id) == "applied"
    return rule_id


def remove(site: Site, rule_id: str) -> None:
    with transaction(site.engine) as conn:
        ingress.remove(conn, rule_id, ADMIN)


def state(site: Site, rule_id: str) -> str:
    with transaction(site.engine) as conn:
        return rows.get(conn, IngressRule, rule_id).state


def port_is_taken(site: Site, allocation: str) -> bool:
    try:
        with transaction(site.engine) as conn:
            _request(conn, allocation, 443)
            raise Problem("undo", expected="", found="", remedy="")
    except Problem as problem:
        return problem.code == "ingress_port_in_use"


def age(site: Site, table: sa.Table, **values: Any) -> None:
    with transaction(site.engine) as conn:
        conn.execute(sa.update(table).values(values))


def test_a_rule_is_applied_and_removed_on_the_hosts_word(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    rule_id = request(sold, allocation)
    runs.ends(evidence={"ingress": {"rules": [rule_id]}})
    assert attend().state == "succeeded"
    (spec,) = runs.launched
    assert spec.playbook == "apply_ingress"
    contract.check_vars("apply_ingress", spec.variables)
    assert spec.variables["slice_ingress"]["state"] == "present"
    assert spec.variables["slice_slots"][0]["fence"] == 1
    assert state(sold, rule_id) == "applied"
    remove(sold, rule_id)
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removing", True)
    runs.ends(evidence={"ingress": {"rules": []}})
    assert attend().state == "succeeded"
    assert runs.launched[1].variables["slice_ingress"]["state"] == "absent"
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removed", False)
    with transaction(sold.engine) as conn:
        audited = journal.audit_rows(conn, subject_id=rule_id)
    assert [row.action.partition(".")[2] for row in audited][::-1] == [
        "requested", "applied", "removing", "removed"]  # fmt: skip
    assert audited[0].detail["sources"] == ["198.51.100.0/24"]


def test_a_guest_that_does_not_answer_fails_the_rule(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    rule_id = request(sold, allocation)
    runs.ends("failed", step="Probe", error=ERROR, evidence={"ingress": {"rules": []}})
    assert attend().state == "failed"
    with transaction(sold.engine) as conn:
        rule = ingress.get(conn, "p1", allocation, rule_id)
    assert (rule.state, rule.failure) == ("failed", ERROR)
    assert not port_is_taken(sold, allocation)


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    "how", ["lost", "lost after a report", "still forwards", "fails unseen", "says nothing"]
)
def test_an_effect_that_is_unknown_keeps_the_port_until_it_is_removed(
    sold: Site, allocation: str, runs: Runs, attend: Attend, settings: Settings, how: str
) -> None:
    rule_id = request(sold, allocation)
    if how == "lost":
        runs.ends("lost")
    elif how == "lost after a report":
        # AWX has lost its job, which may go on and forward after all.
        runs.ends("failed", step="s", error=ERROR, evidence={"ingress": {"rules": []}})
        assert runs.outcome
        runs.outcome = replace(runs.outcome, status="lost", problem="awx_job_gone: no such job")
    elif how == "still forwards":
        runs.ends("failed", step="s", error=ERROR, evidence={"ingress": {"rules": [rule_id]}})
    elif how == "fails unseen":
        runs.ends("failed", step="s", error=ERROR, evidence={})
    else:
        runs.ends(evidence={"ingress": {"rules": []}})
    attend()
    loops.tend_ingress(sold.engine, settings)
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removing", True)
    # The first removal fails as well. It is tried again, after a while.
    age(sold, tables.tasks, finished_at=clock.now() - 600)
    loops.tend_ingress(sold.engine, settings)
    runs.ends("lost")
    attend()
    loops.tend_ingress(sold.engine, settings)
    with transaction(sold.engine) as conn:
        assert leasing.lease(conn, "worker", kinds=[KIND]) == [], "not at once"
    age(sold, tables.tasks, finished_at=clock.now() - 600)
    loops.tend_ingress(sold.engine, settings)
    runs.ends(evidence={"ingress": {"rules": []}})
    attend()
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removed", False)


def test_a_rule_whose_task_never_began_ends_at_once(
    sold: Site, allocation: str, runs: Runs, attend: Attend, settings: Settings
) -> None:
    rule_id = request(sold, allocation)
    runs.outcome = SILENT
    assert attend().state == "waiting"
    loops.tend_ingress(sold.engine, settings)
    assert state(sold, rule_id) == "requested", "its task may still do it"
    remove(sold, rule_id)
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removed", False)
    with transaction(sold.engine) as conn:
        assert queue.open_of_allocation(conn, allocation) == []


@pytest.mark.covers("I13")
def test_a_removal_after_which_the_host_still_forwards_keeps_the_port(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    rule_id = applied(sold, allocation, runs, attend)
    remove(sold, rule_id)
    runs.ends(evidence={"ingress": {"rules": [rule_id]}})
    attend()
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removing", True)


def test_a_rule_ends_at_its_expiry(
    sold: Site, allocation: str, runs: Runs, attend: Attend, settings: Settings
) -> None:
    assert loops.tend_ingress in [loop.act for loop in loops.LOOPS]
    rule_id = applied(sold, allocation, runs, attend)
    loops.tend_ingress(sold.engine, settings)
    assert state(sold, rule_id) == "applied"
    age(sold, tables.ingress_rules, expires_at=clock.now() - 1)
    loops.tend_ingress(sold.engine, settings)
    runs.ends(evidence={"ingress": {"rules": []}})
    attend()
    assert state(sold, rule_id) == "removed"


def test_no_run_begins_for_a_rule_that_has_expired(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    rule_id = request(sold, allocation)
    age(sold, tables.ingress_rules, expires_at=clock.now() - 1)
    assert attend().state == "canceled"
    assert runs.launched == []
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("failed", False)


def test_no_run_begins_for_a_rule_that_was_removed_after_its_task_was_leased(
    sold: Site, allocation: str, runs: Runs, settings: Settings, attend: Attend
) -> None:
    """It would forward again, and its port may be another's by then."""
    rule_id = request(sold, allocation)
    with transaction(sold.engine) as conn:
        (task,) = leasing.lease(conn, "worker", kinds=[KIND])
    remove(sold, rule_id)
    assert (state(sold, rule_id), port_is_taken(sold, allocation)) == ("removing", True)
    runs.ends(evidence={"ingress": {"rules": [rule_id]}})
    worker.attend(sold.engine, settings, task, threading.Event())
    assert runs.launched == []
    runs.ends(evidence={"ingress": {"rules": []}})
    attend()
    (spec,) = runs.launched
    assert spec.variables["slice_ingress"]["state"] == "absent"
    assert state(sold, rule_id) == "removed"


@pytest.mark.covers("I17")
def test_a_release_frees_the_port_with_its_proof(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    rule_id = applied(sold, allocation, runs, attend)
    queued = request(sold, allocation, 444)
    with transaction(sold.engine) as conn:
        launch.release(conn, allocation, ADMIN)
    assert attend().state == "canceled", "the release does it"
    assert (state(sold, rule_id), state(sold, queued)) == ("removing", "removing")
    with transaction(sold.engine) as conn:
        given = sold.proofs(conn, allocation)
        assert slices.release_succeeded(conn, allocation, ADMIN, proofs=given, absence=ABSENT)
    assert (state(sold, rule_id), state(sold, queued)) == ("removed", "removed")


@pytest.mark.covers("I13", "I17")
def test_the_end_of_an_allocation_leaves_the_rules_of_another(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    """Its host still forwards them, so their ports are not given out."""
    with transaction(sold.engine) as conn:
        other = sold.active(conn)
    rule_id = applied(sold, allocation, runs, attend)
    others = applied(sold, other, runs, attend, 444)
    with transaction(sold.engine) as conn:
        launch.release(conn, allocation, ADMIN)
    assert (state(sold, rule_id), state(sold, others)) == ("removing", "applied")
    with transaction(sold.engine) as conn:
        given = sold.proofs(conn, allocation)
        assert slices.release_succeeded(conn, allocation, ADMIN, proofs=given, absence=ABSENT)
    assert (state(sold, rule_id), state(sold, others)) == ("removed", "applied")


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    "checks",
    [{}, {"ingress": CHECKS["ingress"]}, {**CHECKS, "ingress": {"absent": False, "known": False}}],
)
def test_a_report_that_did_not_look_at_ingress_frees_nothing(
    sold: Site, allocation: str, runs: Runs, attend: Attend, checks: dict[str, Any]
) -> None:
    rule_id = applied(sold, allocation, runs, attend)
    with transaction(sold.engine) as conn:
        ingress.proven_absent(conn, allocation, {"absent": True, "checks": checks}, ADMIN)
    assert state(sold, rule_id) == "applied"


@pytest.mark.covers("I13")
@pytest.mark.parametrize("how", ["its slots are clean", "it stops to forward"])
def test_a_silent_host_keeps_the_port_until_it_answers_and(
    sold: Site, allocation: str, runs: Runs, attend: Attend, settings: Settings, how: str
) -> None:
    rule_id = applied(sold, allocation, runs, attend)
    with transaction(sold.engine) as conn:
        host.record_silence(conn, "n1", ADMIN.because("silent"))
        recovery.force_release(conn, allocation, ADMIN)
    age(sold, tables.tasks, finished_at=clock.now() - 600)
    loops.tend_ingress(sold.engine, settings)
    assert state(sold, rule_id) == "removing"
    with transaction(sold.engine) as conn:
        assert queue.open_of_allocation(conn, allocation) == []
        host.regained(conn, "n1", ADMIN)
    if how == "it stops to forward":
        loops.tend_ingress(sold.engine, settings)
        runs.ends(evidence={"ingress": {"rules": []}})
        assert attend().state == "succeeded"
        assert state(sold, rule_id) == "removed"
        return
    with transaction(sold.engine) as conn:
        (slot,) = recovery.blocked(conn)
        recovery.repair(conn, slot.id, ADMIN)
        given = sold.proofs(conn, allocation)
        assert slices.cleanup_succeeded(conn, allocation, ADMIN, proofs=given, absence=ABSENT)
    assert state(sold, rule_id) == "removed"


def test_the_operator_who_gives_a_lost_host_up_frees_its_ports(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    rule_id = applied(sold, allocation, runs, attend)
    with transaction(sold.engine) as conn:
        host.record_silence(conn, "n1", ADMIN.because("silent"))
        recovery.force_release(conn, allocation, ADMIN)
    sold.node("n2", number=1)
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n2", ADMIN, profile="lab")
        elsewhere = sold.active(conn)
    others = applied(sold, elsewhere, runs, attend, 444)
    with transaction(sold.engine) as conn:
        host.retire(conn, "n1", ADMIN)
    assert (state(sold, rule_id), state(sold, others)) == ("removed", "applied")


@pytest.mark.covers("SLICE-8")
def test_drift_compares_the_rules(sold: Site, allocation: str, runs: Runs, attend: Attend) -> None:
    rule_id = applied(sold, allocation, runs, attend)
    held = nothing()
    with transaction(sold.engine) as conn:
        ours = [slot for slot in slots.of_node(conn, "n1") if slot.status == "active"]
    tenant(held, allocation, {slot.id: Bundle.of(vars(slot)) for slot in ours})

    def codes() -> list[str]:
        with transaction(sold.engine) as conn:
            identity = sold.document(0)["identity"]
            since = clock.read(conn) + 1
            document = {"holdings": held, "identity": identity}
            done = drift.reconcile(conn, "n1", document, ADMIN, since=since)
        return [row["code"] for row in done["differences"] if "ingress" in row["code"]]

    assert codes() == ["ingress_missing"]
    put(held, "ingress", allocation_id=allocation, rule_id=rule_id)
    assert codes() == []
    put(held, "ingress", allocation_id=allocation, rule_id="another")
    assert codes() == ["ingress_unrecorded"]
    put(held, "ingress", allocation_id="33bd713b-6073-4ef7-8a51-2897e902365d", rule_id="x")
    assert codes() == ["ingress_unrecorded", "orphan_ingress"]


def test_the_schema_itself_refuses_a_second_live_rule_of_a_port(
    sold: Site, allocation: str, runs: Runs, attend: Attend
) -> None:
    applied(sold, allocation, runs, attend)
    with pytest.raises(sa.exc.IntegrityError), transaction(sold.engine) as conn:
        (rule,) = conn.execute(sa.select(tables.ingress_rules)).mappings()
        conn.execute(sa.insert(IngressRule.TABLE).values({**rule, "id": "second"}))
