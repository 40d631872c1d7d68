"""The units under a real systemd: the service works within their restrictions."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.packaging.machine import Machine, booted, installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a machine of its own needs root"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs openssh-server"),
]
READY = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:8080/readyz")
RUNS = ("pgrep", "-u", "gpuaas", "-f", "bin/ansible-playbook")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Machine]:
    """The service as an operator installs it, on a host that it enrols: the machine itself."""
    folder = tmp_path_factory.mktemp("systemd")
    (packages,) = [entry for entry in sys.path if entry.endswith("site-packages")]
    (folder / "machine").mkdir()
    shown = {
        Path(sys.base_prefix): "/opt/python",
        Path(packages): "/opt/dependencies",
        wheel.parent: "/opt/wheel",
    }
    with booted(folder / "machine", shown) as machine:
        installed(machine, Path("/opt/wheel", wheel.name))
        gpuaas(machine, "token", "create", "--role", "platform-admin", "--name", "me", "--save")
        machine.run("systemctl", "enable", "--now", "gpuaas.service")
        gpuaas(machine, "nodes", "add", "n1", "--address", "127.0.0.1", "--profile", "lab")
        machine.run("systemctl", "start", "ssh.service")
        machine.run("sh", "-s", text=gpuaas(machine, "nodes", "userdata", "n1"))
        yield machine


def gpuaas(machine: Machine, *words: str) -> str:
    """`gpuaas` as the service's user types it."""
    return machine.run("/opt/gpuaas/bin/gpuaas", *words, user="gpuaas")


def ready(machine: Machine) -> bool:
    return machine.try_(*READY).stdout == "200"


def until(machine: Machine, holds: Callable[[Machine], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not holds(machine):
        assert time.monotonic() < deadline, machine.journal()
        time.sleep(0.2)


def shown(machine: Machine, unit: str, *names: str) -> list[str]:
    """Properties of a unit, in the order of the names."""
    lines = machine.run("systemctl", "show", f"--property={','.join(names)}", unit).splitlines()
    values = dict(line.split("=", 1) for line in lines)
    return [values[name] for name in names]


def newest(machine: Machine) -> dict[str, Any]:
    """The newest task."""
    tasks = json.loads(gpuaas(machine, "tasks", "list", "--output", "json"))
    return dict(max(tasks, key=lambda task: str(task["created_at"])))


@pytest.mark.covers("CTRL-9")
def test_a_host_is_discovered_from_within_the_unit(machine: Machine) -> None:
    """The database, ssh-keygen, ansible-runner and SSH, under the unit's filters."""
    gpuaas(machine, "nodes", "discover", "n1")
    (main,) = shown(machine, "gpuaas.service", "MainPID")
    status = machine.run("cat", f"/proc/{main}/status")
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status and "CapBnd:\t0" in status
    report = json.loads(gpuaas(machine, "doctor", "--output", "json"))
    wrong = [finding for finding in report["findings"] if finding["status"] != "ok"]
    assert [finding for finding in wrong if finding["check"] != "disk_space"] == []


@pytest.mark.covers("CTRL-9")
def test_a_run_outlives_a_restart_of_its_unit(machine: Machine) -> None:
    gpuaas(machine, "nodes", "discover", "n1", "--no-wait")
    until(machine, lambda machine: machine.try_(*RUNS).stdout != "")
    run = machine.run(*RUNS).split()
    # Stop the run's processes: otherwise it might end before the service has stopped.
    machine.run("kill", "-STOP", *run)
    machine.run("systemctl", "restart", "gpuaas.service")
    until(machine, ready)
    assert machine.run(*RUNS).split() == run
    machine.run("kill", "-CONT", *run)
    until(machine, lambda machine: newest(machine)["finished_at"] is not None)
    task = newest(machine)
    assert (task["state"], task["attempt"]) == ("succeeded", 1), task


@pytest.mark.covers("ORCH-1")
def test_a_pool_of_the_unit_answers_and_outlives_its_restart(machine: Machine) -> None:
    """The shipped model, within the unit's filters and limits."""
    gpuaas(machine, "projects", "add", "p")
    gpuaas(machine, "pools", "start", "a", "--model", "digits", "--memory", "512", "--wait")
    machine.run("tee", "/tmp/call.json", text='{"segments": [[0, 1, 1, 0, 0, 0, 0]]}')

    def digit() -> Any:
        of = ("--project", "p", "--wait", "--output", "json")
        return json.loads(gpuaas(machine, "jobs", "submit", "digits", "/tmp/call.json", *of))

    def pids() -> list[int]:
        pool = json.loads(gpuaas(machine, "pools", "show", "a", "--output", "json"))
        return [worker["pid"] for worker in pool["workers"]]

    assert digit()["result"]["digit"] == [1]
    before = pids()
    machine.run("systemctl", "restart", "gpuaas.service")
    until(machine, ready)
    assert digit()["result"]["digit"] == [1] and pids() == before
    gpuaas(machine, "pools", "stop", "a", "--wait")
    assert machine.try_("test", "-e", f"/proc/{before[0]}").returncode == 1


def test_a_killed_service_is_started_again(machine: Machine) -> None:
    before = shown(machine, "gpuaas.service", "MainPID")
    machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "gpuaas.service")
    until(machine, lambda machine: shown(machine, "gpuaas.service", "NRestarts") == ["1"])
    until(machine, ready)
    assert shown(machine, "gpuaas.service", "MainPID") != before


def test_the_two_units_of_a_larger_site_take_the_ones_place(machine: Machine) -> None:
    machine.run("systemctl", "start", "gpuaas-api.service", "gpuaas-worker.service")
    # In its place, not beside it: they would share a socket and a state folder.
    assert shown(machine, "gpuaas.service", "ActiveState", "Result") == ["inactive", "success"]
    until(machine, ready)
    gpuaas(machine, "nodes", "discover", "n1")
    for unit in ("gpuaas-api.service", "gpuaas-worker.service"):
        machine.run("systemctl", "stop", unit)
        assert shown(machine, unit, "ActiveState", "Result") == ["inactive", "success"]
    # For tests that pytest-xdist moves to this worker.
    machine.run("systemctl", "start", "gpuaas.service")
    until(machine, ready)
