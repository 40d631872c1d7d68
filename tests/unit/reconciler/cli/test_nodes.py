"""From a deployed machine to a slice host, as typed."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from reconciler.store import discoveries, tasks
from reconciler.store.engine import reading
from tests.unit.reconciler.api.world import ACT, NODE, World, bundle, discovery
from tests.unit.reconciler.cli.conftest import Gpuaas


def test_add_and_look(new: World, gpuaas: Gpuaas) -> None:
    gpuaas.at(new)("nodes", "add", "n2", "--address", "192.0.2.8", "--profile", "lab")
    assert (gpuaas.status, "enrolling" in gpuaas.out) == (0, True)
    table = gpuaas("nodes", "list")
    assert table.splitlines()[0].split()[:3] == ["id", "state", "mode"]
    assert {line.split()[0] for line in table.splitlines()[1:]} == {"n2", NODE}
    assert json.loads(gpuaas("nodes", "show", "n2", "--output", "json"))["id"] == "n2"


def test_userdata_is_a_script(new: World, gpuaas: Gpuaas) -> None:
    script = gpuaas.at(new)("nodes", "userdata", NODE)
    assert script.startswith("#!/bin/sh")
    assert "good until" in gpuaas.err


def test_discover_shows_candidates(new: World, gpuaas: Gpuaas) -> None:
    def act(conn: Any, task: Any) -> dict[str, Any]:
        discoveries.record(conn, NODE, discovery(), ACT, task_id=task["id"])
        return {}

    gpuaas.at(new).ending(new, act)("nodes", "discover", NODE)
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
    ],
)
def test_work_can_be_left_alone(
    new: World, gpuaas: Gpuaas, words: list[str], kind: str, parameters: dict[str, Any]
) -> None:
    gpuaas.at(new)("nodes", *words, "--no-wait", "--output", "json")
    task = json.loads(gpuaas.out)
    assert (task["kind"], task["parameters"], task["state"]) == (kind, parameters, "queued")


def test_a_failed_task_tells_its_error(new: World, gpuaas: Gpuaas) -> None:
    error = {"code": "no_kvm", "expected": "KVM", "found": "none", "remedy": "BIOS", "step": "kvm"}
    gpuaas.at(new).ending(new, lambda _conn, _task: {"error": error})("nodes", "bootstrap", NODE)
    assert gpuaas.status == 1
    for word in ("no_kvm", "KVM", "none at step 'kvm'", "BIOS"):
        assert word in gpuaas.err


def test_parity_shows_what_is_open(prepared: World, gpuaas: Gpuaas) -> None:
    checks = [
        {"check": "kvm", "status": "PASS", "detail": "", "remediation": ""},
        {"check": "nat", "status": "FAIL", "detail": "no rule", "remediation": "bootstrap"},
    ]
    report = {"failures": 1, "warnings": 0, "checks": checks, "identity": discovery()["identity"]}

    def act(conn: Any, task: Any) -> dict[str, Any]:
        discoveries.record_parity(conn, NODE, report, ACT, task_id=task["id"])
        return {}

    gpuaas.at(prepared).ending(prepared, act)("nodes", "parity", NODE)
    assert (gpuaas.status, "nat" in gpuaas.out, "kvm" in gpuaas.out) == (1, True, False)


def test_a_transition_names_the_identities(prepared: World, gpuaas: Gpuaas) -> None:
    disk = bundle(0)["nvme_device"]
    words = ("nodes", "transition", NODE, "--device", disk, "--no-wait", "--output", "json")
    gpuaas.at(prepared)(*words)
    assert json.loads(gpuaas.out)["parameters"]["apply"] is False
    gpuaas(*words, "--apply", "--yes")
    expected = {disk: {"serial": "LABNVME0", "eui": "5e0000000000a000"}}
    assert json.loads(gpuaas.out)["parameters"]["expected"] == expected
    gpuaas("nodes", "transition", NODE, "--device", "/dev/nvme9n1", "--apply", "--yes")
    assert "disk_not_found" in gpuaas.err


def test_a_transition_asks_before_it_wipes(
    prepared: World, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    gpuaas.at(prepared)(
        "nodes", "transition", NODE, "--device", bundle(0)["nvme_device"], "--apply"
    )
    assert (gpuaas.status, "serial LABNVME0" in gpuaas.err) == (1, True)
    with reading(prepared.engine) as conn:
        assert tasks.every(conn) == []


def test_switches(selling: World, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)("nodes", "scheduling", NODE, "off")
    assert "slice_scheduling" in gpuaas.out
    assert json.loads(gpuaas("scheduling", "off", "--output", "json")) == {"enabled": False}
