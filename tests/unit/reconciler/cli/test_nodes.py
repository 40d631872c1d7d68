"""From a deployed machine to a slice host and back, as typed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import drift, host
from reconciler.model.states import TaskKind
from reconciler.records import nodes, queue
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.kinds.node import firmware_succeeded
from reconciler.work.settle import queue_next_step
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import ACT, NODE, Stack, bundle, discovery
from tests.unit.reconciler.cli.conftest import Gpuaas

IDENTITY = {"identity": discovery()["identity"]}
PROVEN = wipes.proven(discovery())


def test_add_and_look(new: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("nodes", "add", "n2", "--address", "192.0.2.8", "--profile", "lab")
    assert (gpuaas.status, "enrolling" in gpuaas.out) == (0, True)
    table = gpuaas("nodes", "list")
    assert table.splitlines()[0].split()[:3] == ["id", "state", "mode"]
    assert {line.split()[0] for line in table.splitlines()[1:]} == {"n2", NODE}
    assert json.loads(gpuaas("nodes", "show", "n2", "--output", "json"))["id"] == "n2"


@pytest.mark.covers("HOST-7")
def test_what_is_known_of_a_machine_can_be_changed(new: Stack, gpuaas: Gpuaas) -> None:
    fabric = ["--fabric-interface", "ibp65s0", "--fabric-address", "10.20.0.7/16"]
    gpuaas.at(new)("nodes", "add", "n2", "--address", "192.0.2.8", "--profile", "lab", *fabric)
    assert gpuaas.status == 0, gpuaas.err
    words = ["--fabric-address", "10.20.0.8/16", "--region", "", "--output", "json"]
    gpuaas("nodes", "change", "n2", *words)
    document = json.loads(gpuaas.out)
    assert (document["fabric_interface"], document["fabric_address"]) == ("ibp65s0", "10.20.0.8/16")
    assert (document["address"], document["region"]) == ("192.0.2.8", "")


@pytest.mark.covers("HOST-10")
def test_tags_of_maas_are_said_one_by_one_or_none_or_taken_back(new: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)

    def tags(verb: str, node: str, *words: str) -> Any:
        gpuaas("nodes", verb, node, *words, "--output", "json")
        assert gpuaas.status == 0, gpuaas.err
        return json.loads(gpuaas.out)["maas_tags"]

    machine = ("--address", "192.0.2.8", "--profile", "lab")
    assert tags("add", "n2", *machine) is None
    assert tags("add", "n3", *machine, "--maas-tag", "") == []
    assert tags("add", "n4", *machine, "--maas-tag", "b", "--maas-tag", "a") == ["a", "b"]
    assert tags("change", "n4", "--region", "r2") == ["a", "b"]
    assert tags("change", "n4", "--maas-tag", "") == []
    assert tags("change", "n4", "--maas-tags-unknown") is None
    assert tags("change", "n4", "--maas-tag", "c") == ["c"]
    gpuaas("nodes", "change", "n4", "--maas-tag", "", "--maas-tags-unknown")
    assert gpuaas.status == 2
    assert "either --maas-tag or --maas-tags-unknown" in gpuaas.err
    assert tags("show", "n4") == ["c"]


def test_userdata_is_a_script(new: Stack, gpuaas: Gpuaas) -> None:
    script = gpuaas.at(new)("nodes", "userdata", NODE)
    assert script.startswith("#!/bin/sh")
    assert "good until" in gpuaas.err
    answer = json.loads(gpuaas("nodes", "userdata", NODE, "-o", "json"))
    assert answer["userdata"].startswith("#!/bin/sh") and answer["expires_at"]


def test_discover_shows_candidates(prepared: Stack, gpuaas: Gpuaas) -> None:
    def act(conn: Any, task: Task) -> dict[str, Any]:
        host.record_discovery(conn, NODE, discovery(), ACT, task_id=task.id)
        return {}

    gpuaas.at(prepared).ending(prepared, act)("nodes", "discover", NODE)
    assert gpuaas.status == 0, gpuaas.err
    lines = gpuaas.out.splitlines()
    assert len(lines) == 5
    assert "mounted_child" in lines[1]
    assert bundle(1)["nvme_device"] in lines[2]
    assert "node blockers: none" in gpuaas.err


@pytest.mark.parametrize(
    ("words", "kind", "parameters"),
    [
        (["bootstrap", NODE, "--allow-reboot"], "node.bootstrap", {"allow_reboot": True}),
        (["bind", NODE], "node.bind_topology", {}),
        (["parity", NODE], "node.parity", {}),
        (["discover", NODE], "slice.topology_discover", {}),
        (["drift", NODE], "slice.drift_reconcile", {}),
    ],
)
def test_work_can_be_left_alone(
    prepared: Stack, gpuaas: Gpuaas, words: list[str], kind: str, parameters: dict[str, Any]
) -> None:
    gpuaas.at(prepared)("nodes", *words, "--no-wait", "--output", "json")
    task = json.loads(gpuaas.out)
    assert (task["kind"], task["parameters"], task["state"]) == (kind, parameters, "queued")


@pytest.mark.parametrize("output", ["table", "json"])
def test_drift_names_what_differs_and_fails(prepared: Stack, gpuaas: Gpuaas, output: str) -> None:
    difference = {
        "severity": "failed",
        "slot_id": "s1",
        "code": "orphan_domain",
        "found": "machine x",
    }
    repair = {"step": "add_nat nat rule", "times": 2, "first_at": "early", "last_at": "late"}
    result = {
        "differences": [difference],
        "unknown": {"ports": "unknown: late"},
        "skipped": ["s2"],
        "repairs": [repair],
    }
    gpuaas.at(prepared)("nodes", "drift", NODE, "--latest")
    assert (gpuaas.status, "never compared" in gpuaas.err) == (0, True)
    gpuaas.ending(prepared, lambda _conn, _task: dict(result))
    gpuaas("nodes", "drift", NODE, "--output", output)
    first = gpuaas.out
    gpuaas("nodes", "drift", NODE, "--latest", "--output", output)
    assert gpuaas.out == first
    assert gpuaas.status == 1
    assert "differences 1, unknown 1" in gpuaas.err
    if output == "json":
        assert json.loads(gpuaas.out) == result
        return
    rows = [line.split() for line in gpuaas.out.splitlines()]
    assert rows[1][:3] == ["failed", "s1", "orphan_domain"]
    assert ["late", "2", "add_nat", "nat", "rule"] in rows
    assert "not looked at: ports: unknown: late" in gpuaas.err
    assert "work in progress, not judged: s2" in gpuaas.err


def test_an_old_comparison_is_no_success_when_later_ones_failed(
    prepared: Stack, gpuaas: Gpuaas
) -> None:
    nothing: dict[str, Any] = {"differences": [], "unknown": {}, "skipped": []}
    error = {"code": "host_odd", "expected": "x", "found": "y", "remedy": "z"}
    latest = ("nodes", "drift", NODE, "--latest")
    gpuaas.at(prepared).ending(prepared, lambda _conn, _task: {"error": error})
    gpuaas("nodes", "drift", NODE)
    gpuaas(*latest)
    assert gpuaas.status == 1
    assert "later comparisons failed: host_odd, `gpuaas tasks show " in gpuaas.err
    assert "never compared" in gpuaas.err
    gpuaas.ending(prepared, lambda _conn, _task: dict(nothing))("nodes", "drift", NODE)
    gpuaas(*latest)
    assert (gpuaas.status, "failed" in gpuaas.err) == (0, False)
    with transaction(prepared.engine) as conn:
        task = drift.queue_comparison(conn, NODE, ACT)
        queue.cancel(conn, task.id, ACT)
    gpuaas(*latest)
    assert gpuaas.status == 1
    assert f"later comparisons failed: canceled, `gpuaas tasks show {task.id}`" in gpuaas.err
    assert "differences 0" in gpuaas.err


def test_no_drift_is_no_failure(prepared: Stack, gpuaas: Gpuaas) -> None:
    nothing: dict[str, Any] = {"differences": [], "unknown": {}, "skipped": []}
    gpuaas.at(prepared).ending(prepared, lambda _conn, _task: dict(nothing))("nodes", "drift", NODE)
    assert (gpuaas.status, "differences 0" in gpuaas.err) == (0, True)


STAGE = {
    "name": "stage_attribute",
    "subject": "ProcSettings.LogicalProc",
    "before": {"current": "Disabled"},
    "after": {"current": "Disabled", "pending": "Enabled"},
    "destroys": False,
}
REFUSAL = {"code": "job_in_queue", "expected": "none", "found": "JID_1", "remedy": "let it end"}
UNKNOWN = {**REFUSAL, "code": "attribute_unknown", "expected": "the BIOS setting LogicalProc"}
NO_PLAN = "no plan: settings that cannot be changed: 1"
POWER = {**REFUSAL, "code": "power_cycle_not_allowed"}
UNREAD = {"check": "bios_settings", "status": "FAIL", "detail": "no key", "remediation": "get it"}


@pytest.mark.covers("HOST-1")
@pytest.mark.parametrize(
    ("bios", "check", "status", "words"),
    [
        ({"differences": [STAGE], "refusals": [POWER]}, {}, 0, ["LogicalProc", "digest sha256:"]),
        ({"differences": [], "refusals": [], "settled": True}, {}, 0, ["none: nothing to change"]),
        ({"differences": [STAGE], "refusals": [REFUSAL]}, {}, 0, ["JID_1", "let it end"]),
        ({"differences": [], "refusals": [UNKNOWN]}, {}, 1, ["attribute_unknown", NO_PLAN]),
        ({"differences": [STAGE], "refusals": [UNKNOWN, POWER]}, {}, 1, [NO_PLAN]),
        ({}, UNREAD, 1, ["not read: no key", "get it"]),
        ({}, {**UNREAD, "status": "PASS", "detail": "not_applicable"}, 0, ["not_applicable"]),
    ],
)
def test_a_firmware_plan_shows_what_would_change_and_its_digest(
    prepared: Stack,
    gpuaas: Gpuaas,
    bios: dict[str, Any],
    check: dict[str, str],
    status: int,
    words: list[str],
) -> None:
    report = {"bios": bios, "preflight": {"checks": [check] if check else []}}
    work: Any = SimpleNamespace(parameters={})

    def act(_conn: Any, _task: Task) -> dict[str, Any]:
        return firmware_succeeded(work, report)

    gpuaas.at(prepared).ending(prepared, act)("nodes", "plan-firmware", NODE)
    shown = gpuaas.out + gpuaas.err
    assert gpuaas.status == status and all(word in shown for word in words), shown
    assert "power_cycle_not_allowed" not in shown, "apply-firmware allows it"
    assert ("digest" in shown) == bool(bios and status == 0), shown
    assert ("nothing to change" in shown) == bool(bios.get("settled"))
    gpuaas("nodes", "plan-firmware", NODE, "--output", "json")
    digest = json.loads(gpuaas.out)["digest"]
    assert gpuaas.status == status and bool(digest) == bool(bios.get("differences"))
    approve = ("apply-firmware", NODE, "--reason", "slices", "--no-wait", "--digest")
    gpuaas("nodes", *approve, f"sha256:{'0' * 64}")
    assert (gpuaas.status, "firmware_plan_changed" in gpuaas.err) == (1, True)
    if digest:
        gpuaas("nodes", *approve, digest, "--acknowledged-job", "JID_500000000002")
        with reading(prepared.engine) as conn:
            (task,) = queue.open_of_node(conn, NODE)
        assert task.parameters["acknowledged_jobs"] == ["JID_500000000002"]


def test_a_failed_task_tells_its_error(prepared: Stack, gpuaas: Gpuaas) -> None:
    error = {"code": "no_kvm", "expected": "KVM", "found": "none", "remedy": "BIOS", "step": "kvm"}
    gpuaas.at(prepared).ending(prepared, lambda _conn, _task: {"error": error})(
        "nodes", "bootstrap", NODE
    )
    assert gpuaas.status == 1
    for word in ("no_kvm", "KVM", "none at step 'kvm'", "BIOS"):
        assert word in gpuaas.err


def test_parity_shows_what_is_open(prepared: Stack, gpuaas: Gpuaas) -> None:
    checks = [
        {"check": "kvm", "status": "PASS", "detail": "", "remediation": ""},
        {"check": "nat", "status": "FAIL", "detail": "no rule", "remediation": "bootstrap"},
    ]
    report = {"failures": 1, "warnings": 0, "checks": checks, "identity": discovery()["identity"]}

    def act(conn: Any, task: Task) -> dict[str, Any]:
        host.record_parity(conn, NODE, report, ACT, task_id=task.id)
        return {}

    gpuaas.at(prepared).ending(prepared, act)("nodes", "parity", NODE)
    assert (gpuaas.status, "nat" in gpuaas.out, "kvm" in gpuaas.out) == (1, True, False)


def test_a_transition_names_the_identities(prepared: Stack, gpuaas: Gpuaas) -> None:
    disk = bundle(0)["nvme_device"]
    words = ("nodes", "transition", NODE, "--device", disk, "--no-wait", "--output", "json")
    gpuaas.at(prepared)(*words)
    assert json.loads(gpuaas.out)["parameters"]["apply"] is False
    gpuaas(*words, "--apply", "--yes")
    (approved,) = json.loads(gpuaas.out)["parameters"]["expected"].values()
    assert (approved["serial"], approved["eui"]) == ("LABNVME0", "5e0000000000a000")
    assert set(approved) == {"serial", "eui", "mounts", "filesystems"}
    gpuaas("nodes", "transition", NODE, "--device", "/dev/nvme9n1", "--apply", "--yes")
    assert "disk_not_found" in gpuaas.err


def test_a_transition_asks_before_it_wipes(
    prepared: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    gpuaas.at(prepared)(
        "nodes", "transition", NODE, "--device", bundle(0)["nvme_device"], "--apply"
    )
    assert (gpuaas.status, "serial LABNVME0" in gpuaas.err) == (1, True)
    with reading(prepared.engine) as conn:
        assert queue.every(conn) == []


def test_switches(selling: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("nodes", "scheduling", NODE, "off", "--reason", "why")
    assert "slice_scheduling" in gpuaas.out
    assert json.loads(gpuaas("scheduling", "off", "--reason", "why", "--output", "json")) == {
        "enabled": False
    }


@pytest.mark.covers("HOST-11")
def test_a_dead_gpu_is_shown_with_the_node(selling: Stack, gpuaas: Gpuaas) -> None:
    document = discovery()
    fault = {"code": "gpu_count_mismatch", "detail": "7 of 8 GPUs are present"}
    document["candidate_summary"]["degraded"] = [fault]
    with transaction(selling.engine) as conn:
        host.record_discovery(conn, NODE, document, ACT)
    gpuaas.at(selling)
    shown = json.loads(gpuaas("nodes", "show", NODE, "--output", "json"))
    assert shown["health_state"] == "degraded"
    assert shown["health_detail"]["reason"] == fault["detail"]
    assert "degraded" in gpuaas("nodes", "list")


@pytest.mark.covers("CTRL-15")
def test_changed_firmware_is_shown_and_accepted(new: Stack, gpuaas: Gpuaas, tmp_path: Path) -> None:
    gpuaas.at(new)("nodes", "firmware", NODE)
    assert gpuaas.status == 0, gpuaas.err
    before = discovery()["firmware"]
    before["sections"]["bios"]["bios_version"] = "an older one"
    with transaction(new.engine) as conn:
        nodes.update(conn, NODE, firmware_before=before)
        host.record_discovery(conn, NODE, discovery(), ACT)
    table = gpuaas("nodes", "firmware", NODE)
    assert gpuaas.status == 1
    assert "bios_version" in table and "an older one" in table and "changed" in table
    report = tmp_path / "bmc.json"
    report.write_text(json.dumps({"sections": {"redfish_users": {"user 2": "root"}}}))
    gpuaas("nodes", "record-bmc", NODE, str(report))
    assert gpuaas.status == 0, gpuaas.err
    report.write_text(json.dumps({"sections": {"evil": {}}}))
    gpuaas("nodes", "record-bmc", NODE, str(report))
    assert gpuaas.status == 1 and "request_invalid" in gpuaas.err
    gpuaas("nodes", "record-bmc", NODE, str(tmp_path / "missing"))
    assert gpuaas.status == 1 and "report_invalid" in gpuaas.err
    gpuaas("nodes", "accept-firmware", NODE, "--reason", "updated by hand")
    assert gpuaas.status == 0, gpuaas.err
    gpuaas("nodes", "firmware", NODE)
    assert gpuaas.status == 0


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize(
    ("failures", "hint"),
    [(0, "next: `gpuaas nodes onboard"), (1, "not proven: `gpuaas nodes parity")],
)
def test_one_conversion_is_followed_to_the_takeover_of_its_disks_or_to_its_failure(
    selling: Stack, gpuaas: Gpuaas, failures: int, hint: str
) -> None:
    report = {"intent": "slice", "warnings": 0, "checks": [], **PROVEN, "failures": failures}
    evidence: dict[str, dict[str, Any]] = {
        TaskKind.NODE_CONVERT: IDENTITY,
        TaskKind.NODE_BOOTSTRAP: IDENTITY,
        TaskKind.NODE_BIND_TOPOLOGY: {"bound": []},
        TaskKind.SLICE_TOPOLOGY_DISCOVER: {"discovery": discovery()},
        TaskKind.NODE_PARITY: {"parity": report},
    }

    def act(conn: Any, task: Task) -> dict[str, Any]:
        work = open_work(conn, selling.settings, task)
        kind = task.kind
        return queue_next_step(work, HANDLERS[kind].succeed(work, evidence[kind]))

    run = gpuaas.at(selling).ending(selling, act)
    run("nodes", "convert", NODE, "baremetal")
    assert (run.status, " follows" in run.err) == (0, False), run.err
    run("nodes", "convert", NODE, "slice", "--allow-reboot")
    assert run.status == failures, run.err
    assert run.err.count(" follows") == 3
    assert f"{hint} {NODE}`" in run.err
    run("slots", "list", NODE)
    assert "available" not in run.out
