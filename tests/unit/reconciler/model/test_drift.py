"""Differences between a host and the records, by name; unsettled work is left out."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from reconciler.model.bundle import Bundle
from reconciler.model.drift import (
    LONGEST,
    Difference,
    ExpectedAllocation,
    ExpectedSlot,
    Findings,
    Records,
    compare,
)
from reconciler.model.states import HealthState
from tests.unit.reconciler.holdings import Holdings, drop, nothing, off, put, tenant, unknown

pytestmark = pytest.mark.covers("SLICE-8")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
OLD = "33bd713b-6073-4ef7-8a51-2897e902365d"
LOST = "43bd713b-6073-4ef7-8a51-2897e902365d"
Change = Callable[[Holdings], object]


def bundle(number: int) -> Bundle:
    return Bundle(
        slot_index=number,
        gpu_pci_address=f"0000:4{number}:00.0",
        nvme_device=f"/dev/disk/by-id/nvme-eui.5e0000000000a00{number}",
        nvme_eui=f"5e0000000000a00{number}",
        management_mac=f"52:54:00:64:00:0{number}",
        private_ip=f"10.100.0.1{number}",
        fabric_vf_pci_address=f"0000:61:10.{number}",
    )


# ExpectedSlot a is ONE's, which runs; slot b is free, and was OLD's.
RECORDS = Records(
    (
        ExpectedSlot("a", bundle(0), "active", ONE, settled=True),
        ExpectedSlot("b", bundle(1), "available", OLD, settled=True),
    ),
    (
        ExpectedAllocation(ONE, active=True, settled=True, slots=("a",)),
        ExpectedAllocation(OLD, active=False, settled=True, slots=("b",)),
    ),
)


@pytest.fixture
def holdings() -> Holdings:
    """As the records say."""
    document = nothing()
    tenant(document, ONE, {"a": bundle(0)})
    free = {"slot_id": "b", "allocation_id": "", "fence": 9, "disk": bundle(1).identity}
    put(document, "leases", **free, dirty=False)
    return document


def codes(findings: Findings) -> set[tuple[str, str, str]]:
    return {(row.slot_id, row.code, row.allocation_id) for row in findings.differences}


def test_a_host_as_the_records_say(holdings: Holdings) -> None:
    assert compare(holdings, RECORDS) == Findings((), (), {})


def without(part: str) -> Change:
    return lambda holdings: drop(holdings, part)


def without_limit(holdings: Holdings) -> None:
    holdings["domains"]["found"][0]["limited"] = False


def paused(holdings: Holdings) -> None:
    holdings["domains"]["found"][0]["state"] = "paused"


def without_gpu(holdings: Holdings) -> None:
    holdings["domains"]["found"][0]["devices"].pop(0)


@pytest.mark.covers("CTRL-6", "I15")
@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        (off, "guest_stopped", "degraded"),
        (paused, "guest_unwell", "degraded"),
        (without("addresses"), "guest_unleased", "degraded"),
        (without_limit, "limit_missing", "degraded"),
        (without_gpu, "devices_missing", "failed"),
        (without("ports"), "port_missing", "failed"),
        (without("guards"), "guard_missing", "failed"),
        (without("reservations"), "reservation_missing", "degraded"),
        (without("leases"), "lease_missing", "degraded"),
    ],
)
def test_what_a_tenant_lacks(holdings: Holdings, change: Change, code: str, severity: str) -> None:
    change(holdings)
    (difference,) = compare(holdings, RECORDS).differences
    assert (difference.slot_id, difference.code, difference.severity) == ("a", code, severity)
    assert not difference.orphan


def test_a_guest_that_no_longer_answers_is_named_while_its_machine_runs(holdings: Holdings) -> None:
    silent = replace(RECORDS, allocations=(replace(RECORDS.allocations[0], silent=True),))
    (difference,) = compare(holdings, silent).differences
    assert (difference.slot_id, difference.code) == ("a", "guest_silent")
    assert (difference.severity, difference.orphan) == (HealthState.DEGRADED, False)
    assert "gpuaas reset" in difference.found and len(difference.found) < LONGEST
    for change, code in ((paused, "guest_unwell"), (off, "guest_stopped")):
        change(holdings)
        assert {row.code for row in compare(holdings, silent).differences} == {code}
    unknown(holdings, "domains")
    assert "guest_silent" not in {row.code for row in compare(holdings, silent).differences}


def test_a_machine_that_its_project_stopped_may_be_off(holdings: Holdings) -> None:
    off(holdings)
    stopped = tuple(replace(row, stopped=True) for row in RECORDS.allocations)
    assert compare(holdings, replace(RECORDS, allocations=stopped)).differences == ()


@pytest.mark.covers("I15")
def test_a_machine_that_is_gone_is_lost_and_nobodys_trace_but_its_tenants(
    holdings: Holdings,
) -> None:
    drop(holdings, "domains", "processes", "ports", "guards", "files")
    (difference,) = compare(holdings, RECORDS).differences
    assert (difference.code, difference.severity) == ("domain_missing", HealthState.FAILED)


@pytest.mark.covers("I17")
def test_every_trace_of_a_past_tenant_is_an_orphan_of_its_slot(holdings: Holdings) -> None:
    holdings["leases"]["found"].pop()
    tenant(holdings, OLD, {"b": bundle(1)})
    holdings["processes"]["found"].pop()
    put(holdings, "processes", pid=8, allocation_id=OLD)
    holdings["domains"]["found"][1] |= {"state": "shut off", "active": False}
    findings = compare(holdings, RECORDS)
    kinds = ("domain", "process", "lease", "reservation", "port", "guard", "file")
    assert codes(findings) == {("b", f"orphan_{kind}", OLD) for kind in kinds}
    assert all(row.orphan for row in findings.differences)
    used = {row.code for row in findings.differences if row.disk_used}
    assert used == {"orphan_domain", "orphan_process", "orphan_lease"}


def test_a_rate_limit_that_outlived_its_port_is_an_orphan(holdings: Holdings) -> None:
    put(holdings, "limits", allocation_id=ONE, row="row-1")
    assert compare(holdings, RECORDS).differences == ()
    put(holdings, "limits", allocation_id=OLD, row="row-2")
    assert codes(compare(holdings, RECORDS)) == {("b", "orphan_limit", OLD)}


def test_a_few_digits_name_no_allocation(holdings: Holdings) -> None:
    holdings["ports"]["found"][0]["owner"] = ONE[:8]
    assert ("a", "port_missing", ONE) in codes(compare(holdings, RECORDS))


def test_who_is_in_no_record_is_found_by_what_it_has(holdings: Holdings) -> None:
    """As after a restored backup: a machine that was made since has no record."""
    holdings["leases"]["found"].pop()
    tenant(holdings, LOST, {"b": bundle(1)})
    findings = compare(holdings, RECORDS)
    of_slot = {(slot, code) for slot, code, _ in codes(findings) if slot}
    assert of_slot == {("b", f"orphan_{kind}") for kind in ("domain", "lease", "reservation")}
    assert {code for slot, code, _ in codes(findings) if not slot} == {
        "orphan_port",
        "orphan_guard",
        "orphan_file",
    }
    # A bridge port has room for a part of the id only; the others name it for its removal.
    named = {row.code for row in findings.differences if row.allocation_id == LOST}
    assert named == {f"orphan_{kind}" for kind in ("domain", "lease", "reservation", "file")}


def test_a_strangers_machine_matters_when_it_has_a_slots_devices(holdings: Holdings) -> None:
    other = {"name": "win", "allocation_id": "", "state": "running", "active": True}
    put(holdings, "domains", **other, devices=[], disks=["/dev/sdb"])
    assert compare(holdings, RECORDS).differences == ()
    put(holdings, "domains", **other, devices=[bundle(1).gpu_pci_address], disks=[])
    assert codes(compare(holdings, RECORDS)) == {("b", "orphan_domain", "")}


def test_a_tenant_with_anothers_devices_troubles_the_other(holdings: Holdings) -> None:
    holdings["domains"]["found"][0]["disks"].append(bundle(1).nvme_device)
    (difference,) = compare(holdings, RECORDS).differences
    assert (difference.slot_id, difference.code, difference.allocation_id) == (
        "b",
        "orphan_domain",
        ONE,
    )
    assert difference.disk_used


def test_what_the_host_says_of_an_idle_slot(holdings: Holdings) -> None:
    holdings["leases"]["found"][1]["dirty"] = True
    put(holdings, "addresses", mac=bundle(1).management_mac, ip="10.100.0.99")
    problem = {"expected": "bound", "found": "nouveau"}
    put(holdings, "devices", slot_id="b", code="not_bound", **problem)
    put(holdings, "devices", slot_id="b", code="disk_in_use", **problem)
    findings = compare(holdings, RECORDS)
    assert [(row.code, row.disk_used) for row in findings.differences] == [
        ("device_unfit", True),
        ("device_unfit", False),
        ("disk_dirty", True),
        ("orphan_address", False),
    ]


@pytest.mark.covers("I13")
@pytest.mark.parametrize("part", ["domains", "ports", "guards", "reservations", "leases"])
def test_what_could_not_be_looked_at_is_not_missed(holdings: Holdings, part: str) -> None:
    unknown(holdings, part)
    findings = compare(holdings, RECORDS)
    assert findings.differences == ()
    assert findings.unknown == {part: "unknown: late"}


@pytest.mark.covers("I14")
@pytest.mark.parametrize("unsettled", ["slot", "allocation"])
def test_nothing_is_concluded_where_something_is_at_work(unsettled: str) -> None:
    """A host without traces of the current tenant, and with all of the previous tenant's."""
    holdings = nothing()
    tenant(holdings, OLD, {"b": bundle(1)})
    assert len(compare(holdings, RECORDS).differences) > 5
    slots, allocations = RECORDS.slots, RECORDS.allocations
    if unsettled == "slot":
        slots = tuple(replace(row, settled=False) for row in slots)
    else:
        allocations = tuple(replace(row, settled=False) for row in allocations)
    findings = compare(holdings, Records(slots, allocations))
    assert findings.differences == ()
    assert set(findings.skipped) == ({"a", "b"} if unsettled == "slot" else {ONE, OLD})


def test_a_slot_that_waits_for_evidence_is_judged_by_that() -> None:
    holdings = nothing()
    tenant(holdings, OLD, {"b": bundle(1)})
    blocked = replace(RECORDS.slots[1], status="cleanup_blocked")
    records = Records((blocked,), (RECORDS.allocations[1],))
    assert compare(holdings, records).differences == ()


def test_of_two_that_begin_alike_the_one_that_runs_is_meant(holdings: Holdings) -> None:
    twin = ExpectedAllocation(
        f"{ONE[:20]}0000-000000000000", active=False, settled=True, slots=("b",)
    )
    records = Records(RECORDS.slots, (twin, *RECORDS.allocations))
    assert compare(holdings, records).differences == ()


def test_a_host_that_reports_thousands_of_traces_costs_little(holdings: Holdings) -> None:
    """Every comparison is kept, and comparisons go on for years."""
    owners = [str(uuid.UUID(int=number)) for number in range(4096)]
    runs = {"state": "running", "active": True, "devices": [], "disks": []}
    for number, owner in enumerate(owners):
        put(holdings, "domains", name="x" * 4000, allocation_id=owner, **runs)
        put(holdings, "processes", pid=number, allocation_id=owner[::-1])
        put(holdings, "files", allocation_id=owner, path="/" + "x" * 4000)
    runs["devices"] = [bundle(1).gpu_pci_address]
    put(holdings, "domains", name="last", allocation_id=OLD, **runs)
    begun = time.process_time()
    findings = compare(holdings, RECORDS)
    assert time.process_time() - begun < 2
    assert len(json.dumps([each.document() for each in findings.differences])) < 200_000
    assert any(each.slot_id == "b" and each.disk_used for each in findings.differences)


def test_a_difference_is_a_document() -> None:
    row = Difference("orphan_port", "bridge port gs1", HealthState.DEGRADED, orphan=True)
    assert row.document() == {
        "code": "orphan_port",
        "found": "bridge port gs1",
        "severity": "degraded",
        "slot_id": "",
        "allocation_id": "",
        "orphan": True,
        "disk_used": False,
    }


FAULT = {"expected": "it", "found": "none", "remedy": "bootstrap"}


@pytest.mark.parametrize(
    ("code", "slots"),
    [
        ("nat", {"", "b"}),
        ("guest_egress", {"", "b"}),
        ("host_disk_full", {""}),
        # Each launch would block its slot.
        ("host_read_only", {"", "b"}),
        ("egress_target_silent", {""}),
        ("network_settings_differ", {""}),
    ],
)
def test_a_fault_of_the_host_itself_is_the_nodes_and_closes_idle_slots(
    holdings: Holdings, code: str, slots: set[str]
) -> None:
    holdings["baseline"] = {"known": True, "detail": "", "found": [{"code": code, **FAULT}]}
    findings = compare(holdings, RECORDS)
    assert {(row.code, row.slot_id) for row in findings.differences} == {(code, s) for s in slots}
    assert all(row.found == "expected it, found none; bootstrap" for row in findings.differences)


def test_a_baseline_that_was_not_looked_at_is_unknown(holdings: Holdings) -> None:
    unknown(holdings, "baseline")
    assert compare(holdings, RECORDS) == Findings((), (), {"baseline": "unknown: late"})
