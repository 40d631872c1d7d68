"""Power cuts of the slice host while a VM is built, removed and wiped (I12, I13), and runs.

Plays on the host that test_upkeep.py left: two slots, bound and available. After each cut the host
comes back by itself, its interrupted work counts as unknown, and a command brings the slot back.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _object_names

from lab.demo import slice_steps
from lab.demo.stage import Stage
from reconciler.model.errors import Problem
from tests.lab import byhand
from tests.lab.conftest import Chapter
from tests.lab.proof import prove_again

# With longer pauses, a step could end before the power is cut.
BETWEEN_LOOKS_S = 0.2
# A step of an emulated host takes seconds to begin; the steps before it take some minutes.
STEP_DEADLINE_S = 1200
# Unreachable hosts are probed again after two minutes at most.
BACK_DEADLINE_S = 600


@pytest.mark.covers("I6", "I12", "I13")
def test_power_is_lost_while_the_image_is_written(stage: Stage, story: Chapter) -> None:
    story.needs("prepared")
    launched = slice_steps.launch(stage)
    # The claims are not visible to the tenant.
    allocation = stage.api().get(f"/admin/allocations/{launched['id']}")
    task_id = _begun(stage, allocation["id"], "Clone the image on the raw boot disk")
    end = time.monotonic() + STEP_DEADLINE_S
    while not _ledger(stage, allocation)["dirty"]:
        assert time.monotonic() < end, "the disk was never marked dirty"
    byhand.power_cut(stage)
    _is_unknown(stage, task_id, allocation["id"], "failed")
    # The ledger was durable on the host before the first byte of the image was on the tenant's
    # disk.
    assert _ledger(stage, allocation)["dirty"]
    _comes_back(stage, allocation["id"])


@pytest.mark.covers("I12", "I13", "I17")
@pytest.mark.parametrize(
    "step", ["Shut the domain down and undefine it", "Wipe and read back"], ids=["release", "wipe"]
)
def test_power_is_lost_while_a_tenant_is_removed(stage: Stage, story: Chapter, step: str) -> None:
    story.needs("prepared")
    slice_steps.provision(stage)
    key = stage.facts["allocation"]["id"]
    stage.api().post(f"/projects/{stage.facts['project']}/allocations/{key}/release")
    task_id = _begun(stage, key, step)
    byhand.power_cut(stage)
    _is_unknown(stage, task_id, key, "releasing")
    _comes_back(stage, key)


@pytest.mark.covers("HOST-8", "I14", "SLICE-8")
def test_power_comes_back_without_the_gpu_of_a_slice(stage: Stage, story: Chapter) -> None:
    """Its slice is reported and stays off, the other slice starts. With the GPU back, both run."""
    story.needs("prepared")
    launched = [slice_steps.launch(stage) for _ in range(2)]
    slices = [slice_steps.wait_for(stage, each["id"], {"active", "failed"}) for each in launched]
    assert [each["state"] for each in slices] == ["active", "active"]
    stage.facts["allocation"] = slices[0]
    gpus = [slice_steps.slot_of(stage, each)["gpu_pci_address"] for each in slices]
    lost = sorted(_gpus(stage)).index(gpus[0])
    byhand.power_cut(stage, lost_gpus=[lost])
    assert _gpus(stage) & set(gpus) == {gpus[1]}
    _await_ready(stage)
    prove_again(stage)
    ended = [_powered(stage, each["id"]) for each in slices]
    assert [each["state"] for each in ended] == ["active", "active"]
    assert gpus[0] in ended[0]["error"]["expected"], ended[0]["error"]
    assert ended[1]["error"] == {}
    assert stage.api().get(stage.path())["health_detail"]["reason"] == "3 of 4 GPUs are present"
    domains = [_object_names.domain_name(each["id"]) for each in slices]
    assert [_domain_state(stage, domain) for domain in domains] == ["shut off", "running"]
    byhand.power_cut(stage)
    _await_ready(stage)
    prove_again(stage)
    assert [_powered(stage, each["id"])["error"] for each in slices] == [{}, {}]
    assert [_domain_state(stage, domain) for domain in domains] == ["running", "running"]
    for each in slices:
        stage.facts["allocation"] = stage.api().get(f"/admin/allocations/{each['id']}")
        assert slice_steps.release(stage)["slots"] == ["available"]


def _gpus(stage: Stage) -> set[str]:
    lines = stage.on_host("sh", "-c", "'grep -lx 0x11e8 /sys/bus/pci/devices/*/device'")
    return {Path(line).parent.name for line in lines.split()}


def _domain_state(stage: Stage, domain: str) -> str:
    return stage.on_host("virsh", "domstate", domain).strip()


def _powered(stage: Stage, allocation_id: str) -> dict[str, Any]:
    """The allocation once its newest task has ended, well or not."""
    path = f"/admin/allocations/{allocation_id}"
    stage.api().wait(stage.api().get(path)["task_ids"][-1], deadline_s=STEP_DEADLINE_S)
    ended: dict[str, Any] = stage.api().get(path)
    return ended


def _begun(stage: Stage, allocation_id: str, step: str) -> str:
    """Return the allocation's newest task, once its run has begun this step on the host."""
    end = time.monotonic() + STEP_DEADLINE_S
    while time.monotonic() < end:
        allocation = stage.api().get(f"/admin/allocations/{allocation_id}")
        task = stage.api().get(f"/admin/tasks/{allocation['task_ids'][-1]}")
        stage.show_progress(task)
        if (task.get("progress") or {}).get("task") == step:
            return str(task["id"])
        assert task["state"] in ("queued", "running"), f"{task['state']} before {step!r}"
        time.sleep(BETWEEN_LOOKS_S)
    raise AssertionError(f"{step!r} did not begin in {STEP_DEADLINE_S} s")


def _is_unknown(stage: Stage, task_id: str, allocation_id: str, state: str) -> None:
    """The outcome is unknown: the slot stays unavailable, and the ledger's hold stands."""
    ended = stage.api().wait(task_id, deadline_s=BACK_DEADLINE_S)
    assert ended["state"] in ("failed", "lost"), ended
    assert ended["error"]["code"] in ("host_unreachable", "run_lost"), ended["error"]
    allocation = stage.api().get(f"/admin/allocations/{allocation_id}")
    assert allocation["state"] == state
    assert slice_steps.slot_of(stage, allocation)["status"] == "cleanup_blocked"
    assert _ledger(stage, allocation)["allocation_id"] == allocation_id


def _ledger(stage: Stage, allocation: dict[str, Any]) -> dict[str, Any]:
    """Return the host ledger's entry for the allocation's slot."""
    slot_id = allocation["claims"][0]["slot_id"]
    text = stage.on_host("cat", f"/var/lib/gpuaas/ledger/{slot_id}.json")
    entry: dict[str, Any] = json.loads(text)
    return entry


def _await_ready(stage: Stage) -> None:
    end = time.monotonic() + BACK_DEADLINE_S
    while (state := stage.api().get(stage.path())["state"]) != "ready":
        assert time.monotonic() < end, f"the node is still {state}"
        time.sleep(2)


def _comes_back(stage: Stage, allocation_id: str) -> None:
    _await_ready(stage)
    # The first discovery reports another boot id, under which the host has no proof: nothing is
    # sold.
    stage.task(stage.path("/slice-topology/discovery"))
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"cleanup_blocked", "disabled"}
    with pytest.raises(Problem) as refused:
        slice_steps.launch(stage)
    assert refused.value.code == "no_capacity"
    assert stage.service is not None
    words = ("recover", allocation_id, "--reason", "the host lost its power")
    json.loads(stage.service.cli("--output", "json", *words))
    prove_again(stage)
    result = stage.task(stage.path("/drift"))
    assert (result["unknown"], result["skipped"], result["differences"]) == ({}, [], [])
