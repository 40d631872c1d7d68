"""`gpuaas nodes onboard`, stopped at each plan and resumed until slots are on sale."""

from __future__ import annotations

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import gate, host
from reconciler.records import proofs, queue, slots
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import ACT, FREE, NODE, Stack, bundle, discovery
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("CTRL-15")

ONBOARD = ("nodes", "onboard", NODE, "--reason", "a new machine")


class Host:
    """The machine behind the tasks. mounts: reported by a look at its disks. foreseen: the plan of
    its bootstrap. broken: candidates that cannot be a slot yet.
    """

    def __init__(self) -> None:
        self.mounts: list[str] = []
        self.failures = 0
        self.foreseen = f"sha256:{'a' * 64}"
        self.kernel: dict[str, Any] = {"arguments": ["iommu=pt"], "reboot_reasons": ["x"]}
        self.unforeseen = ""
        # A bootstrap of an earlier command ends before the plan of the next command.
        self.late = False
        self.identity: dict[str, Any] = discovery()["identity"]
        self.erased: set[str] = set()
        self.broken: set[int] = set()

    def discovery(self) -> dict[str, Any]:
        """The recorded discovery, a fabric function for each free slot, and a disk to erase."""
        document = copy.deepcopy(discovery())
        document["identity"] = self.identity
        used = bundle(FREE[0])["nvme_device"] not in self.erased
        fabric = [{"code": "fabric_vf_missing", "detail": "none"}]
        blockers = dict.fromkeys(self.broken, fabric) | {
            FREE[0]: [{"code": "partitions_present", "detail": "gpt"}] if used else []
        }
        document["candidates"] = [
            {"slot_index": index, "bundle": bundle(index), "blockers": blockers.get(index, [])}
            for index in FREE
        ]
        return document

    def __call__(self, conn: Any, task: Task) -> dict[str, Any]:
        match task.kind:
            case "node.bootstrap" if task.parameters.get("plan_only"):
                if self.late:
                    host.bootstrapped(conn, NODE, ACT, identity=self.identity)
                packages = {"part": "packages", "steps": "install_package(zstd)", "open": ""}
                libvirt = {"part": "libvirt", "steps": "", "open": "command_missing"}
                kernel = {"part": "kernel", "steps": "", "open": self.unforeseen}
                plan = {"plan": [packages, libvirt, kernel], "plan_digest": self.foreseen}
                return {**plan, "kernel": {"running": ["quiet"], **self.kernel}}
            case "node.bootstrap":
                assert task.parameters["expected_plan"] == self.foreseen
                host.bootstrapped(conn, NODE, ACT, identity=self.identity)
            case "slice.topology_discover":
                host.record_discovery(conn, NODE, self.discovery(), ACT, task_id=task.id)
            case "node.storage_transition":
                return {"devices": [self._disk(conn, task, d) for d in task.parameters["devices"]]}
            case "node.parity":
                report = {"failures": self.failures, "warnings": 0, "checks": []}
                report |= wipes.proven(self.discovery())
                host.record_parity(conn, NODE, report, ACT, task_id=task.id)
                gate.open_gate(conn, NODE, ACT)
        return {}

    def _disk(self, conn: Any, task: Task, device: str) -> dict[str, Any]:
        (disk,) = [row for row in discovery()["nvme"] if row["by_id"] == device]
        approval = {"serial": disk["serial"], "eui": disk["eui"], "mounts": self.mounts}
        answer: dict[str, Any] = {"nvme_device": device, "approval": approval}
        if task.parameters["apply"]:
            assert task.parameters["expected"][device] == approval
            proof = {"disk": f"eui.{disk['eui']}", "verified": True, "method": "discard"}
            proofs.record_transition(conn, NODE, proof, ACT, task_id=task.id)
            answer["proof"] = proof
            self.erased.add(device)
        return answer


@pytest.fixture(autouse=True)
def _nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


def plan(gpuaas: Gpuaas) -> str:
    """The digest of the plan at which the last command stopped."""
    assert gpuaas.status == 1, gpuaas.out + gpuaas.err
    return re.findall(r"plan (sha256:[0-9a-f]{64})", gpuaas.err)[-1]


def kinds(stack: Stack) -> list[str]:
    with reading(stack.engine) as conn:
        return [
            task.kind + "".join(f".{w}" for w in ("apply", "plan_only") if task.parameters.get(w))
            for task in reversed(queue.every(conn))
        ]


def test_it_walks_from_added_to_on_sale_and_resumes_at_each_plan(
    new: Stack, gpuaas: Gpuaas
) -> None:
    machine = Host()
    gpuaas.at(new).ending(new, machine)
    gpuaas(*ONBOARD)
    assert "node_not_enrolled" in gpuaas.err
    with transaction(new.engine) as conn:
        host.enrolled(conn, NODE, ACT, **discovery()["identity"])
    gpuaas(*ONBOARD)
    bootstrap = plan(gpuaas)
    assert kinds(new) == ["node.bootstrap.plan_only"]
    for line in (
        "packages: install_package(zstd)",
        "libvirt: not to be foretold yet: command_missing",
        "kernel arguments now: quiet",
        "kernel arguments to be had: iommu=pt",
        "restart needed; none without --allow-reboot",
    ):
        assert f"  {line}\n" in gpuaas.err
    # The boot loader was removed meanwhile: the word was for another plan.
    machine.foreseen, machine.unforeseen = f"sha256:{'b' * 64}", "command_missing"
    machine.kernel = {"arguments": [], "reboot_reasons": []}
    gpuaas(*ONBOARD, "--yes-to", bootstrap)
    assert "  restart not to be foretold yet; none without --allow-reboot\n" in gpuaas.err
    assert (plan(gpuaas) != bootstrap, "plan_unapproved" in gpuaas.err) == (True, True)
    assert "node.bootstrap" not in kinds(new)
    gpuaas(*ONBOARD, "--yes-to", plan(gpuaas))
    takeover = plan(gpuaas)
    planned = ["node.bootstrap.plan_only"] * 3
    before = [*planned, "node.bootstrap", "slice.topology_discover", "node.storage_transition"]
    assert kinds(new) == before
    assert "to be wiped" in gpuaas.err
    assert gpuaas.err.count("to be wiped: ") == len(FREE)
    gpuaas(*ONBOARD, "--yes-to", takeover)
    approve = plan(gpuaas)
    assert kinds(new).count("node.storage_transition.apply") == 1
    with reading(new.engine) as conn:
        assert slots.of_node(conn, NODE) == []
    # A program reads a single document, in spite of two discoveries and a parity report before.
    gpuaas("--output", "json", *ONBOARD, "--yes-to", approve)
    assert gpuaas.status == 0, gpuaas.err
    assert {slot["status"] for slot in json.loads(gpuaas.out)} == {"available"}
    assert kinds(new).count("node.bootstrap") == 1
    assert kinds(new).count("node.storage_transition.apply") == 1
    assert kinds(new)[-3:] == ["node.bind_topology", "slice.topology_discover", "node.parity"]
    assert "the site sells no slices" in gpuaas.err
    ended = kinds(new)
    gpuaas(*ONBOARD)
    assert (gpuaas.status, kinds(new)) == (0, ended)


def test_a_bootstrap_that_outlived_its_command_is_not_asked_for_again(
    new: Stack, gpuaas: Gpuaas
) -> None:
    machine = Host()
    gpuaas.at(new).ending(new, machine)
    with transaction(new.engine) as conn:
        host.enrolled(conn, NODE, ACT, **discovery()["identity"])
    machine.late, machine.foreseen = True, f"sha256:{'c' * 64}"
    gpuaas(*ONBOARD)
    assert kinds(new)[1:] == ["slice.topology_discover", "node.storage_transition"]


def test_a_host_that_was_installed_anew_is_erased_bound_and_proven_again(
    selling: Stack, gpuaas: Gpuaas
) -> None:
    """Its slots are still approved. The new installation has no proof of their disks."""
    machine = Host()
    gpuaas.at(selling).ending(selling, machine)
    gpuaas("nodes", "bind", NODE)
    with transaction(selling.engine) as conn:
        machine.identity = {**machine.identity, "machine_id": "f" * 32, "boot_id": "b2"}
        host.enrolled(conn, NODE, ACT, **machine.identity)
    words: list[str] = []
    for _plan in range(2):
        gpuaas(*ONBOARD, *words)
        words += ["--yes-to", plan(gpuaas)]
    assert gpuaas.err.count("to be wiped: ") == len(FREE)
    gpuaas(*ONBOARD, *words)
    assert gpuaas.status == 0, gpuaas.err
    assert kinds(selling)[-4:] == [
        "slice.topology_discover", "node.bind_topology", "slice.topology_discover", "node.parity",
    ]  # fmt: skip
    with reading(selling.engine) as conn:
        assert {slot.status for slot in slots.of_node(conn, NODE)} == {"available"}


def test_a_candidate_that_was_left_out_becomes_a_slot_once_it_is_mended(
    prepared: Stack, gpuaas: Gpuaas
) -> None:
    def walk(*words: str) -> None:
        for _plan in range(2):
            gpuaas(*ONBOARD, *words)
            words = (*words, "--yes-to", plan(gpuaas))
        gpuaas(*ONBOARD, *words)

    machine = Host()
    gpuaas.at(prepared).ending(prepared, machine)
    machine.broken = {FREE[-1]}
    walk()
    assert gpuaas.status == 0, gpuaas.err
    machine.broken, done = set(), kinds(prepared)
    gpuaas(*ONBOARD)
    assert (gpuaas.status, kinds(prepared)) == (0, done)
    assert f"left out: slot {FREE[-1]}, fabric_vf_missing" in gpuaas.err
    walk("--left-out")
    assert gpuaas.status == 0, gpuaas.err
    with reading(prepared.engine) as conn:
        sold = {slot.slot_index: slot.status for slot in slots.of_node(conn, NODE)}
    assert sold == dict.fromkeys(FREE, "available")


def test_a_word_is_for_the_plan_that_was_shown_and_no_other(
    prepared: Stack, gpuaas: Gpuaas
) -> None:
    machine = Host()
    gpuaas.at(prepared).ending(prepared, machine)
    gpuaas(*ONBOARD)
    shown = plan(gpuaas)
    forged = f"plan sha256:{'f' * 64}"
    machine.mounts = ["/srv/data", f"/srv\n{forged}\n"]
    gpuaas(*ONBOARD, "--yes-to", shown)
    assert plan(gpuaas) != shown
    assert "plan_unapproved" in gpuaas.err
    assert "mounted on /srv/data" in gpuaas.err
    assert forged not in gpuaas.err.splitlines()
    assert "node.storage_transition.apply" not in kinds(prepared)


def test_a_host_that_fails_parity_is_not_sold(prepared: Stack, gpuaas: Gpuaas) -> None:
    machine = Host()
    machine.failures = 1
    gpuaas.at(prepared).ending(prepared, machine)
    words: list[str] = []
    for _plan in range(2):
        gpuaas(*ONBOARD, *words)
        words += ["--yes-to", plan(gpuaas)]
    gpuaas(*ONBOARD, *words)
    assert (gpuaas.status, "failures 1" in gpuaas.err) == (1, True)
    assert (
        "false"
        in gpuaas("nodes", "show", NODE, "--output", "json").split("slice_scheduling")[1][:10]
    )


def test_a_node_out_of_use_is_refused(prepared: Stack, gpuaas: Gpuaas) -> None:
    with transaction(prepared.engine) as conn:
        host.drain(conn, NODE, ACT)
    gpuaas.at(prepared)(*ONBOARD)
    assert (gpuaas.status, "node_state_mismatch" in gpuaas.err) == (1, True)


def test_it_writes_the_enrolment_script_and_waits_until_it_has_run(
    new: Stack, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, other = tmp_path / "enrol.sh", tmp_path / "open-to-all"
    other.write_text("")
    script.symlink_to(other)

    def run_it(_seconds: float) -> None:
        assert script.read_text().startswith("#!/bin/sh")
        with transaction(new.engine) as conn:
            host.enrolled(conn, NODE, ACT, **discovery()["identity"])

    monkeypatch.setattr("reconciler.cli.onboard.time.sleep", run_it)
    gpuaas.at(new).ending(new, Host())(*ONBOARD, "--userdata", str(script))
    assert "to be made a slice host" in gpuaas.err
    assert script.lstat().st_mode & 0o777 == 0o600
    assert other.read_text() == ""
