"""A hostile host that breaks the form of its reports: each task ends, and every reader goes on."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from reconciler.db import schema as tables
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import (
    host,
    invariants,
    launch,
    power,
    recovery,
    recovery_cases,
    retention,
)
from reconciler.lifecycle import slots as slot_life
from reconciler.model.bundle import Bundle
from reconciler.model.drift import KEPT, MOST
from reconciler.model.states import NodeMode, PowerAction, TaskKind
from reconciler.records import leasing, nodes, queue, reports, slots
from reconciler.runs.collect import Outcome
from reconciler.runs.events import Recorder, judge
from reconciler.settings import Settings
from reconciler.trust import ca
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import settle
from tests.unit.reconciler import holdings, wipes
from tests.unit.reconciler.conftest import ADMIN, Database, Site
from tests.unit.reconciler.whole_machines import BEFORE, Machines

pytestmark = pytest.mark.covers("P1", "CTRL-9", "I13")

VALUES: list[Any] = [None, True, -1, 10**40, 1e308, "x", [], {}, [5], [[[]]], [None], {"a": 5}]
VALUES += ["{{ lookup('pipe', 'id') }}$(reboot)`id`\nGPUAAS_SLICE_PARITY status=PASS\x1b[2J"]
Path_ = tuple[str | int, ...]


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place of a document; of a list its first entry."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def replaced(document: Any, path: Path_, value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def answered(playbook: str, evidence: object) -> Outcome:
    """The end of a run whose playbook hands over this evidence, as its process judges it."""
    result = {"schema": 1, "playbook": playbook, "ok": True, "step": "", "error": {}}
    recorder = Recorder(Path("/dev/null"))
    recorder.artifacts = {"slice_result": {**result, "evidence": evidence}}
    verdict = judge(recorder, "successful", 0, 1.0)
    return Outcome(verdict["status"], verdict["result"], verdict.get("problem", ""))


def failed(evidence: dict[str, Any], **error: str) -> Outcome:
    error = {"code": "x", "expected": "x", "found": "x", "remedy": "x"} | error
    return Outcome("failed", {"step": "s", "ok": False, "error": error, "evidence": evidence})


def request(conn: Connection, kind: TaskKind) -> Task:
    """A task of n1 that a worker has begun."""
    nodes.change(conn, "n1", ADMIN, profile="lab")
    queue.enqueue(conn, queue.Enqueue(kind, "n1"), ADMIN)
    (task,) = leasing.lease(conn, "worker", kinds=[kind])
    return task


def ended(sold: Site, folder: Path, task: Task, outcome: Outcome) -> Task:
    """The task after its run."""
    settle(sold.engine, Settings(state_dir=folder), HANDLERS[task.kind], task, outcome)
    with reading(sold.engine) as conn:
        return queue.get(conn, task.id)


def reported(sold: Site, folder: Path, task: Task, evidence: object) -> Task:
    return ended(sold, folder, task, answered(HANDLERS[task.kind].playbook, evidence))


def parity(sold: Site) -> dict[str, Any]:
    return {"parity": {**sold.parity(), **wipes.proven(sold.document(0)), "checks": []}}


def drift(sold: Site) -> dict[str, Any]:
    held = holdings.nothing()
    with transaction(sold.engine) as conn:
        key = sold.active(conn)
        live = [slot for slot in slots.of_node(conn, "n1") if slot.status == "active"]
    bundles = {slot.id: Bundle.of(vars(slot)) for slot in live}
    holdings.tenant(held, key, bundles)
    return {"holdings": held, "identity": sold.document(0)["identity"]}


def provision(sold: Site, conn: Connection) -> dict[str, Any]:
    sold.allocate(conn)
    names = ("mac", "expected_ip", "actual_ip", "lease_state")
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"
    readiness = {**dict.fromkeys(names, "x"), "host_keys": [key], "probes": []}
    done = {"disk_written": True, "leftovers": True}
    image = {"digest": f"sha256:{'a' * 64}"}
    return {"plan": {}, "image": image, "domain": {}, "readiness": readiness, **done}


def release(sold: Site, conn: Connection) -> dict[str, Any]:
    key = sold.active(conn)
    launch.release(conn, key, ADMIN)
    absence = {"absent": True, "checks": {"ingress": {"absent": True}}}
    return {"shutdown": "graceful", "absence": absence, "proofs": wipes.proofs(conn, key)}


def absence(sold: Site, conn: Connection) -> dict[str, Any]:
    item = queue.Enqueue(TaskKind.SLICE_ABSENCE_VERIFY, "n1", allocation_id=sold.active(conn))
    queue.enqueue(conn, item, ADMIN)
    return {"absence": {"absent": False, "checks": {"domain": {"absent": False, "detail": "x"}}}}


def change_power(sold: Site, conn: Connection) -> dict[str, Any]:
    power.request(conn, sold.active(conn), PowerAction.STOP, ADMIN)
    return {"shutdown": "graceful", "domain": {"state": "shut off"}, "readiness": {}}


def reboot(sold: Site, conn: Connection) -> dict[str, Any]:
    identity = sold.document(0)["identity"]
    guests = [{"allocation_id": sold.active(conn), "slots": []}]
    parameters = {"guests": guests, "boot_id": identity["boot_id"]}
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_REBOOT, "n1", parameters=parameters), ADMIN)
    off = [guest["allocation_id"] for guest in guests]
    return {"rebooted": True, "identity": {**identity, "boot_id": "next"}, "powered_off": off}


def bootstrap(sold: Site, conn: Connection) -> dict[str, Any]:
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_BOOTSTRAP, "n1"), ADMIN)
    return {"rebooted": True, "identity": sold.document(0)["identity"]}


def take_over(sold: Site, conn: Connection) -> dict[str, Any]:
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_STORAGE_TRANSITION, "n1"), ADMIN)
    # A disk of no slot.
    proof = {"disk": "eui.5e0000000000ffff", "verified": True, "method": "discard"}
    return {"devices": [{"proof": proof, "manifest": "m"}], "manifest": "m"}


@functools.cache
def signed(key: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return ca.certify_host(ca.open_trust(Path(folder)), key, "n1")


def enrol(sold: Site, conn: Connection) -> dict[str, Any]:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"
    parameters = {"certificate": signed(key), "public_key": key}
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_ENROL, "n1", parameters=parameters), ADMIN)
    until = "2026-08-29T10:00:00Z"
    return {"certificate": {"serial": "42", "principals": ["n1"], "valid_until": until}}


def plan_firmware(sold: Site, conn: Connection) -> dict[str, Any]:
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_FIRMWARE, "n1", parameters={}), ADMIN)
    step = {"name": "set_attribute", "subject": "ProcVirtualization", "before": "Disabled"}
    attribute = {"name": "ProcVirtualization", "wanted": "Enabled", "current": "Disabled"}
    bios = {"settled": False, "attributes": [attribute], "jobs": [], "differences": [step]}
    check = {"check": "bios_settings", "status": "FAIL", "detail": "x", "remediation": "y"}
    preflight = {"failures": 1, "warnings": 0, "checks": [check], "lines": ["x"], "summary": "x"}
    return {"bios": bios, "preflight": preflight}


def change_firmware(sold: Site, conn: Connection) -> dict[str, Any]:
    report = plan_firmware(sold, conn)
    boot = sold.document(0)["identity"]["boot_id"]
    parameters = {"apply": True, "digest": "x", "acknowledged_jobs": [], "boot_id": boot}
    conn.execute(sa.update(tables.tasks).values(parameters=parameters))
    report["bios"]["differences"] = []
    return report


def convert(sold: Site, conn: Connection) -> dict[str, Any]:
    host.convert(conn, "n1", NodeMode.BAREMETAL, ADMIN)
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_CONVERT, "n1"), ADMIN)
    compared = [{"check": "nat", "name": "x", "expected": "none", "found": "none", "ok": True}]
    seen = {"rebooted": False, "identity": sold.document(0)["identity"], "remnants": 0}
    return {**seen, "compared": compared, "kept": {"packages": ["dnsmasq"]}}


def bind(sold: Site, conn: Connection) -> dict[str, Any]:
    queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_BIND_TOPOLOGY, "n1"), ADMIN)
    bound = {"address": "0000:43:00.0", "driver": "vfio-pci", "iommu_group": 37, "answers": True}
    return {"bound": [bound], "proofs": {"slot-0": {"gpu": wipes.gpu("0000:43:00.0")}}}


def machine_given(sold: Site, conn: Connection) -> dict[str, Any]:
    Machines(sold).launch(conn)
    account, done = {"username": "alice", "uid": 59000}, {"disk_written": True, "leftovers": True}
    return {"account": account, "proofs": {}, "baseline": BEFORE, **done}


def machine_returned(sold: Site, conn: Connection) -> dict[str, Any]:
    machines = Machines(sold)
    key = machines.active(conn)
    launch.release(conn, key, ADMIN)
    drift = [{"section": "keys", "name": "/root", "change": "changed", "access": True}]
    return machines.evidence(conn, key, drift=drift)


# For each kind of task: the preparation, and the report of a host that did its part.
OTHERS: tuple[Callable[[Site, Connection], dict[str, Any]], ...] = (
    *(provision, release, absence, change_power, reboot, bootstrap, take_over),
    *(enrol, plan_firmware, change_firmware, convert, bind, machine_given, machine_returned),
)
# Forms that no playbook has: a name of its own, and more than a bound.
UNKNOWN: tuple[dict[str, Any], ...] = ({"surprise": 1}, {"identity": {"boot_id": "x" * 5000}})


@pytest.mark.parametrize("prepare", OTHERS, ids=lambda prepare: prepare.__name__)
def test_no_other_report_of_another_form_stops_or_frees_anything(
    database: Database,
    sold_template: Path,
    tmp_path: Path,
    prepare: Callable[[Site, Connection], dict[str, Any]],
) -> None:
    chosen = random.Random(prepare.__name__)  # noqa: S311
    # The first report is valid.
    path: Path_ | None = None
    for number in range(14):
        sold = Site(database.restore(sold_template))
        if prepare.__name__.startswith("machine_"):
            Machines(sold).machine(profile="lab")
        with transaction(sold.engine) as conn:
            nodes.change(conn, "n1", ADMIN, profile="lab")
            good = prepare(sold, conn)
            (task,) = leasing.lease(conn, "worker")
        path = chosen.choice(list(places(good))[1:]) if number > len(UNKNOWN) else None
        report = replaced(good, path, chosen.choice(VALUES)) if path else good
        unknown = UNKNOWN[number - 1] if 0 < number <= len(UNKNOWN) else {}
        done = reported(sold, tmp_path, task, report | unknown)
        if path:
            assert done.state in ("succeeded", "failed"), (path, report)
            assert done.state == "succeeded" or done.error["code"], (path, done.error)
        elif unknown:
            assert done.error["code"] == "result_invalid", unknown
        else:
            assert done.state == "succeeded", done.error
        with reading(sold.engine) as conn:
            assert invariants.check(conn) == [], (path, report)


@pytest.mark.covers("P1")
def test_no_host_speaks_for_the_disk_of_another(sold: Site, tmp_path: Path) -> None:
    """A takeover that names the disk of another host's slot, which is disabled."""
    sold.node("n2", (0,), 2)
    with transaction(sold.engine) as conn:
        slot_life.disable(conn, slots.of_node(conn, "n2")[0].id, ADMIN)
        (slot,) = slots.of_node(conn, "n2")
        task = request(conn, TaskKind.NODE_STORAGE_TRANSITION)
    proof = {"disk": slot.nvme_identity, "verified": True, "method": "discard"}
    done = reported(sold, tmp_path, task, {"devices": [{"proof": proof}], "manifest": "m"})
    assert done.error["code"] == "disk_in_use"
    with reading(sold.engine) as conn:
        assert slots.of_node(conn, "n2") == [slot]
        proofs = wipes.proofs_of_disk(conn, slot.nvme_identity)
        assert {proof.node_id for proof in proofs} == {"n2"}


REPORTS: dict[TaskKind, Callable[[Site], dict[str, Any]]] = {
    TaskKind.SLICE_TOPOLOGY_DISCOVER: lambda sold: {"discovery": sold.document(0)},
    TaskKind.NODE_PARITY: parity,
    TaskKind.SLICE_DRIFT_RECONCILE: drift,
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_of_another_form_ends_its_task(sold: Site, tmp_path: Path, kind: TaskKind) -> None:
    good, chosen = REPORTS[kind](sold), random.Random(2026)  # noqa: S311
    states = set()
    every = list(places(good))
    for path in ((), *chosen.sample(every, min(40, len(every)))):
        report = replaced(good, path, chosen.choice(VALUES)) if path else good
        with transaction(sold.engine) as conn:
            task = request(conn, kind)
        done = reported(sold, tmp_path, task, report)
        assert done.state in ("succeeded", "failed"), path
        assert done.state == "succeeded" or done.error["code"], path
        states.add(done.state)
        with reading(sold.engine) as conn:
            assert invariants.check(conn) == [], path
            stored = reports.latest_discovery(conn, "n1")
            assert stored is not None
            assert answered("discover", {"discovery": stored.document}).ok
    assert states == {"succeeded", "failed"}


@pytest.mark.covers("CTRL-4")
@pytest.mark.parametrize("count", [8, 10**40])
def test_no_count_of_a_host_fails_a_launch_or_raises_its_price(
    on_either: Site, tmp_path: Path, count: int
) -> None:
    """Its document shows four GPUs."""
    machines = Machines(on_either)
    machines.machine(profile="lab")
    document = on_either.document(1)
    document["candidate_summary"]["gpu_devices"] = count
    with transaction(machines.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(TaskKind.SLICE_TOPOLOGY_DISCOVER, "m1"), ADMIN)
        (task,) = leasing.lease(conn, "worker")
    done = reported(on_either, tmp_path, task, {"discovery": document})
    assert done.state in ("succeeded", "failed")
    with transaction(machines.engine) as conn:
        assert machines.launch(conn).gpu_count == 4


def test_a_failure_leaves_no_megabytes_with_its_task(sold: Site, tmp_path: Path) -> None:
    with transaction(sold.engine) as conn:
        task = request(conn, TaskKind.NODE_PARITY)
    outcome = failed({"unrepaired": ["x" * 2_000_000]}, found="the cause")
    kept = ended(sold, tmp_path, task, outcome).error
    assert kept["found"] == "the cause" and "bytes" in kept["evidence"]["left_out"]
    assert len(json.dumps(kept)) < 1000


def test_comparisons_leave_no_megabytes_for_ever(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host finds another thousand faults of a slot's devices in each."""
    monkeypatch.setattr(retention, "REPORTS", 2)
    for number in range(3):
        report = {"holdings": holdings.nothing(), "identity": sold.document(0)["identity"]}
        with transaction(sold.engine) as conn:
            slot = slots.of_node(conn, "n1")[0].id
            task = request(conn, TaskKind.SLICE_DRIFT_RECONCILE)
        for fault in range(1000):
            texts = {"code": f"fault_{fault}", "expected": "x" * 50, "found": f"{number}" * 250}
            holdings.put(report["holdings"], "devices", slot_id=slot, **texts)
        reported(sold, tmp_path, task, report)
    with reading(sold.engine) as conn:
        done = queue.every(conn, node_id="n1", kind=task.kind)
        lists = [len(task.result.get("differences", [])) for task in done]
        changes = conn.execute(sa.select(tables.history.c.evidence)).scalars().all()
        counted = done[-1].result["counts"]["differences"]
    assert (lists, counted) == ([MOST, MOST, 0], MOST)
    assert all(len(json.dumps(evidence)) < 16_384 for evidence in changes)
    assert any(evidence.get("left_out") == MOST - KEPT for evidence in changes)


def test_blockers_leave_no_megabytes_for_ever(
    sold: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host has blockers of everything in a discovery, and none in the next, again and again."""
    monkeypatch.setattr(retention, "REPORTS", 1)
    every = [{"code": "x" * 60, "detail": "y" * 1900}] * 250
    isolated = {"check": "fabric_isolation", "status": "PASS", "detail": "", "remediation": ""}
    passed = parity(sold)
    passed["parity"]["checks"] = [isolated]
    for number in range(4):
        document, many = sold.document(0), number % 2 == 0
        parts = [document[name][0] for name in ("gpu", "nvme", "fabric")]
        for part in [document["bootstrap"], document["slice_network"], *parts] if many else []:
            part["blockers"] = every
        document["candidate_summary"]["degraded"] = every[:60] if many else []
        for kind, report in (
            (TaskKind.SLICE_TOPOLOGY_DISCOVER, {"discovery": document}),
            (TaskKind.NODE_PARITY, passed),
        ):
            with transaction(sold.engine) as conn:
                task = request(conn, kind)
            assert reported(sold, tmp_path, task, report).state == "succeeded"
        with reading(sold.engine) as conn:
            on_sale = [slot.status == "available" for slot in slots.of_node(conn, "n1")]
        assert on_sale == [not many] * 2
    with reading(sold.engine) as conn:
        changes = conn.execute(sa.select(tables.history.c.reason, tables.history.c.evidence)).all()
        done = queue.every(conn, node_id="n1")
    assert max(len(json.dumps([*change])) for change in changes) < 32_768
    assert sum(len(json.dumps(task.result)) for task in done[2:]) < 8_192


def stored(conn: Connection) -> int:
    """Characters of all that the database has."""
    return sum(
        len(json.dumps([*row], default=str))
        for table in tables.metadata.sorted_tables
        for row in conn.execute(sa.select(table))
    )


@pytest.mark.parametrize(("checks", "rows"), [(64, 61), (24, 20)])
def test_a_release_without_proof_leaves_no_megabytes(
    sold: Site, tmp_path: Path, checks: int, rows: int
) -> None:
    """A host fills its report of absence as far as the form of results allows, and is recovered."""
    check = {f"{number}": "x" * 240 for number in range(rows)} | {"absent": False}
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        report = release(sold, conn)
        (task,) = leasing.lease(conn, "worker")
        before = stored(conn)
    filled = {f"check_{number}": check for number in range(checks)}
    report["absence"] = {"absent": False, "checks": filled}
    reported(sold, tmp_path, task, report)
    with transaction(sold.engine) as conn:
        (slot,) = recovery.blocked(conn)
        assert slot.health_detail["code"] in ("absence_unproven", "result_invalid")
        recovery_cases.open_case(conn, str(task.allocation_id), ADMIN)
        assert stored(conn) - before < 65_536


@pytest.mark.parametrize("prepare", [provision, machine_given])
def test_a_launch_that_fails_leaves_no_megabytes(
    sold: Site, tmp_path: Path, prepare: Callable[[Site, Connection], dict[str, Any]]
) -> None:
    """The host says that it is untouched, with all that a report may have."""
    if prepare is machine_given:
        Machines(sold).machine(profile="lab")
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        prepare(sold, conn)
        (task,) = leasing.lease(conn, "worker")
        before = stored(conn)
    evidence = {"disk_written": False, "leftovers": False, "plan": {"x": "x" * 250_000}}
    text = dict.fromkeys(("found", "expected", "remedy"), "y" * 16_384)
    assert ended(sold, tmp_path, task, failed(evidence, **text)).error["code"] == "x"
    with reading(sold.engine) as conn:
        assert stored(conn) - before < 65_536
        kept = {"disk_written": False, "leftovers": False}
        ours = [row for row in conn.execute(sa.select(tables.proofs)) if row.kind == "untouched"]
        assert [row.document.items() >= kept.items() for row in ours] == [True] * len(ours)
        assert invariants.check(conn) == []


@pytest.mark.covers("CTRL-3")
@pytest.mark.parametrize("code", ["canceled", "deadline_passed", "awx_silent", "ufm_silent"])
def test_a_host_that_fails_each_launch_by_a_code_of_ours_is_not_sold(
    sold: Site, tmp_path: Path, code: str
) -> None:
    """Failures with these codes are not the host's, and keep its slots on sale."""
    settings = Settings(state_dir=tmp_path)
    error = {"code": code, "expected": "a", "found": "b", "remedy": "c"}
    result = {"schema": 1, "playbook": "provision_slice", "ok": False, "step": "s", "error": error}
    result["evidence"] = {"disk_written": False, "leftovers": False}
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
    for _ in range(2):
        with transaction(sold.engine) as conn:
            sold.allocate(conn)
            (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.SLICE_VM_PROVISION])
            HANDLERS[task.kind].start(open_work(conn, settings, task))
        settle(sold.engine, settings, HANDLERS[task.kind], task, Outcome("failed", result))
        with reading(sold.engine) as conn:
            assert queue.get(conn, task.id).error["code"] == "step_failed"
    with reading(sold.engine) as conn:
        assert sold.statuses(conn) == ["disabled", "disabled"]


def test_a_machine_that_is_not_clean_leaves_no_megabytes(sold: Site, tmp_path: Path) -> None:
    Machines(sold).machine(profile="lab")
    with transaction(sold.engine) as conn:
        machine_returned(sold, conn)
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.BAREMETAL_RELEASE])
        before = stored(conn)
    evidence = {"drift": ["x" * 4096] * 1000}
    ended(sold, tmp_path, task, failed(evidence, found="y" * 65_536))
    with reading(sold.engine) as conn:
        assert nodes.get(conn, "m1").unclean_allocation_id
        assert stored(conn) - before < 65_536


def test_a_machine_that_is_clean_leaves_no_megabytes(sold: Site, tmp_path: Path) -> None:
    """Its host names differences as far as the form of results allows."""
    Machines(sold).machine(profile="lab")
    with transaction(sold.engine) as conn:
        report = machine_returned(sold, conn)
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.BAREMETAL_RELEASE])
        before = stored(conn)
    row = {"section": "keys", "name": "x" * 4000, "change": "changed", "access": False}
    report["drift"] = [row] * 900
    done = reported(sold, tmp_path, task, report)
    assert done.state == "succeeded", done.error
    assert done.result["counts"]["drift"] == 900
    with reading(sold.engine) as conn:
        assert stored(conn) - before < 65_536


@pytest.mark.parametrize("part", ["absence", "proofs"])
def test_no_proof_has_megabytes(sold: Site, tmp_path: Path, part: str) -> None:
    """Proofs and reports of absence are kept for ever, so their form bounds them."""
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        report = release(sold, conn)
    assert answered("release_slice", report).ok
    if part == "absence":
        check = {f"detail_{number}": "x" * 4096 for number in range(40)} | {"absent": True}
        report["absence"]["checks"]["domain"] = check
    else:
        (proof,) = report["proofs"].values()
        proof["more"] = "x" * 20_000
    assert answered("release_slice", report).problem.startswith("result_invalid")
