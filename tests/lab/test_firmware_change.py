"""A task changes BIOS settings of the slice host over a power cycle, and the host is sold again.

Plays on the host that test_power_cut.py left: two slots, bound and available. The tests' stand-in
for RACADM is on the host. Its job waits for another boot, and the test restarts the machine as the
controller of a real one would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest

from lab import machine
from lab.demo.stage import Stage
from lab.paths import REPOSITORY
from tests.lab import byhand
from tests.lab.conftest import Chapter
from tests.lab.proof import refusal

STANDIN = REPOSITORY / "tests" / "standin" / "racadm"
# Its path in Dell's packages.
RACADM = PurePosixPath("/opt/dell/srvadmin/sbin/racadm")
STATE = RACADM.with_name("racadm-state.json")
# An emulated host takes some minutes from the start of the run to the job.
JOB_S = 900


@pytest.fixture
def bios(stage: Stage, story: Chapter) -> Iterator[None]:
    """A BIOS whose settings are all off, under a profile that judges them."""
    story.needs("prepared")
    before = stage.profile()
    checked = [name for name in before["not_applicable"] if name != "bios_settings"]
    install = f"mkdir -p {RACADM.parent} && cat > {RACADM} && chmod 755 {RACADM}"
    try:
        stage.use(not_applicable=checked, deadlines={**before["deadlines"], "firmware": 1200})
        stage.on_host("sh", "-c", f"'{install}'", stdin=STANDIN.read_text())
        stage.on_host("sh", "-c", f"'cat > {STATE}'", stdin='{"boots": true}')
        yield
    finally:
        stage.use(**before)
        stage.on_host("rm", "-rf", "/opt/dell")


@pytest.mark.covers("HOST-1", "CTRL-12", "I16", "P15")
def test_an_approved_change_is_applied_over_a_power_cycle(stage: Stage, bios: None) -> None:
    api, path, boot = stage.api(), stage.path("/firmware"), byhand.boot(stage)
    plan = stage.task(path)
    assert _values(plan) == {("Disabled", "wrong")}
    steps = [row["name"] for row in plan["bios"]["differences"]]
    assert steps == [*["stage_attribute"] * 3, "commit_job"]
    assert _controller(stage)["pending"] == {}
    assert _sale(stage) == ("ready", {"available"}, True)

    body = {"apply": True, "reason": "what slices need"}
    other = {**body, "digest": f"sha256:{'0' * 64}"}
    assert refusal(stage, lambda: api.post(path, other)) == "firmware_plan_changed"
    task = api.post(path, {**body, "digest": plan["digest"]})
    assert _sale(stage) == ("draining", {"available"}, False)
    _await_job(stage, task["id"])
    # The state of a real controller is not on the host.
    stage.on_host("sync")
    machine.power_cut(restart=True)
    changed = stage.follow(task)

    # Nothing is sold before the new boot is proven.
    assert _sale(stage) == ("draining", {"disabled"}, False)
    assert byhand.boot(stage) != boot
    assert _values(changed) == {("Enabled", "right")} and changed["bios"]["settled"]
    jobs = {job["status"] for job in changed["bios"]["jobs"]}
    assert jobs == {"Completed", "Reboot Completed"}
    checks = {check["check"]: check["status"] for check in changed["preflight"]["checks"]}
    assert checks["bios_settings"] == "PASS"
    assert _controller(stage)["cycles"] == 1
    (entry,) = api.get("/admin/audit", action="admin.node.firmware")["items"]
    assert (entry["reason"], entry["detail"]["digest"]) == (body["reason"], plan["digest"])

    kinds, result = [], changed
    while following := result.get("next_task_id"):
        result = stage.follow({"id": following})
        kinds.append(api.get(f"/admin/tasks/{following}")["kind"])
    assert kinds == ["slice.topology_discover", "node.parity"]
    assert (result["failures"], result["resumed"]) == (0, True), result
    assert api.get(stage.path())["boot_id"] == byhand.boot(stage)
    assert _sale(stage) == ("ready", {"available"}, True)
    assert stage.task(path)["digest"] == ""


def _controller(stage: Stage) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(stage.on_host("cat", str(STATE)))
    return state


def _values(result: dict[str, Any]) -> set[tuple[str, str]]:
    """Values of the BIOS settings that the host has read, each with its judgement."""
    return {(row["current"], row["status"]) for row in result["bios"]["attributes"]}


def _sale(stage: Stage) -> tuple[str, set[str], bool]:
    """State of the node, states of its slots, and whether a launch would get a slot."""
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    judged = stage.api().get("/admin/placement/explain", gpus=1)
    state = stage.api().get(stage.path())["state"]
    return state, {slot["status"] for slot in slots}, judged["placement"] is not None


def _await_job(stage: Stage, task_id: str) -> None:
    """Return once the controller has the job with which it would restart the machine."""
    end = time.monotonic() + JOB_S
    while not any(job["status"] == "Scheduled" for job in _controller(stage)["jobs"]):
        task = stage.api().get(f"/admin/tasks/{task_id}")
        assert task["state"] in ("queued", "running") and time.monotonic() < end, task
        time.sleep(1)
