"""Whole-machine allocation: a tenant with root comes, uses the machine, and leaves no trace.

After each tenant the machine is sold again only when it was installed anew with a new host key.

Plays on the host that test_way_back.py made an ordinary machine again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import canary, machine, userdata
from lab.command import LabError
from lab.demo import slice_steps
from lab.demo.stage import Stage
from reconciler.model.errors import Problem
from tests.lab import byhand
from tests.lab.conftest import Chapter

USER = "owner"
MODE = "/etc/gpuaas/slice-mode.json"


@pytest.mark.covers("CTRL-15")
def test_a_machine_is_not_given_away_before_its_tenant_could_reach_it(
    stage: Stage, story: Chapter
) -> None:
    story.needs("baremetal")
    assert stage.api().get(stage.path())["mode"] == "baremetal"
    stage.task(stage.path("/slice-topology/discovery"))
    with pytest.raises(Problem) as refused:
        _launch(stage)
    assert refused.value.code == "no_capacity"
    change = {"tenant_address": "127.0.0.1", "tenant_port": stage.host().ssh_port}
    stage.api().patch(stage.path(), change)


@pytest.mark.covers("CTRL-15", "CTRL-4")
def test_a_tenant_has_the_whole_machine(stage: Stage, story: Chapter) -> None:
    story.needs("baremetal")
    allocation = slice_steps.wait_for(stage, _launch(stage)["id"], {"active", "failed"})
    assert allocation["state"] == "active", allocation["error"]
    (claim,) = allocation["claims"]
    assert claim["kind"] == "node_exclusive"
    assert claim["disks"], "the story has taken disks over"
    taken_over = {device["identity"] for device in story.done["transition"]["applied"]}
    assert {f"eui.{disk['nvme_eui']}" for disk in claim["disks"]} <= taken_over
    serials = {disk["nvme_serial"] for disk in claim["disks"]}
    assert "LABOS" not in serials
    task = stage.api().get(f"/admin/tasks/{allocation['task_ids'][0]}")
    proofs = task["result"]["proofs"]
    assert set(proofs) == {disk["slot_id"] for disk in claim["disks"]}
    story.done["whole_machine"] = allocation
    assert _as_tenant(stage, allocation, "sudo -n id -u").strip() == "0"
    with pytest.raises(Problem) as refused:
        _launch(stage)
    assert refused.value.code == "no_capacity"
    with pytest.raises(Problem) as refused:
        stage.api().post(stage.path("/conversion"), {"to": "slice"})
    assert refused.value.code == "node_in_use"


@pytest.mark.covers("CTRL-15")
def test_a_tenant_leaves_no_trace(stage: Stage, story: Chapter) -> None:
    """The tenant leaves mounted disks, an fstab line, processes (also of sudo) and public files."""
    story.needs("whole_machine")
    allocation = story.done["whole_machine"]
    mark = secrets.token_hex(32)
    disk = allocation["claims"][0]["disks"][0]
    device = disk["nvme_device"]
    script = f"""set -e
sudo mkfs.ext4 -q {device}
sudo mkdir -p /srv/data
sudo mount {device} /srv/data
echo {device} /srv/data ext4 defaults,nofail 0 2 | sudo tee -a /etc/fstab > /dev/null
touch /tmp/left-by-the-tenant
nohup sleep 9991 > /dev/null 2>&1 &
sudo nohup sleep 9992 > /dev/null 2>&1 &
sleep 1
"""
    _as_tenant(stage, allocation, script)
    writer = canary.writer(mark).replace("/var/tmp/canary", "/srv/data/canary")
    _as_tenant(stage, allocation, "sudo python3 -", stdin=writer)
    assert canary.count(_file(stage, disk["nvme_eui"]), mark) > 0

    result = _release(stage, allocation["id"])
    assert result["absence"]["absent"], result["absence"]
    assert all(proof["verified"] for proof in result["proofs"].values())
    assert result["compared"]
    # sudo writes records and mkfs loads a module, but no change gives the tenant access again.
    assert [row for row in result["drift"] if row["access"]] == []
    for claimed in allocation["claims"][0]["disks"]:
        assert canary.count(_file(stage, claimed["nvme_eui"]), mark) == 0
    left = stage.on_host("sh", "-c", "'ps -eo args; getent passwd; ls /tmp /home; cat /etc/fstab'")
    for trace in ("sleep 9991", "sleep 9992", f"{USER}:", "left-by-the-tenant", device):
        assert trace not in left, trace
    node = stage.api().get(stage.path())
    assert (node["health_state"], node["unclean_allocation_id"]) == ("healthy", "")
    with pytest.raises(LabError):
        _as_tenant(stage, allocation, "true")
    story.done["whole_machine_released"] = True


@pytest.mark.covers("CTRL-15")
def test_its_installation_is_not_believed_any_more(stage: Stage, story: Chapter) -> None:
    """It reported no remnants, but it is sold only after a new installation with a new host key."""
    story.needs("whole_machine_released")
    assert stage.api().get(stage.path())["reinstall_required"]
    with pytest.raises(Problem) as refused:
        _launch(stage)
    assert refused.value.code == "no_capacity"
    with pytest.raises(Problem) as refused:
        stage.api().post(stage.path("/conversion"), {"to": "slice"})
    assert refused.value.code == "reinstall_required"
    # The old host key is revoked, so the same installation gets no other certificate.
    answer = _enrol(stage)
    assert answer.exit_code != 0 and "HTTP 409" in answer.output, answer.output
    _install_anew(stage)
    node = stage.api().get(stage.path())
    assert not node["reinstall_required"]
    # Read from the real UEFI variables, disks and cards of the lab host, before and after.
    assert (node["firmware_differences"], node["firmware_unverified"]) == ([], False)
    report = stage.api().get(stage.path("/slice-topology/discovery"))["document"]["firmware"]
    assert report["unreadable"] == {} and "BootOrder" in report["sections"]["uefi"]
    story.done["reinstalled"] = True


@pytest.mark.covers("CTRL-15", "CTRL-7")
def test_what_a_forced_release_leaves_is_cleaned_and_drift_is_named(
    stage: Stage, story: Chapter
) -> None:
    story.needs("reinstalled")
    allocation = slice_steps.wait_for(stage, _launch(stage)["id"], {"active", "failed"})
    assert allocation["state"] == "active", allocation["error"]
    backdoor = "/etc/sudoers.d/backdoor"
    rule = f"echo 'daemon ALL=(ALL) NOPASSWD:ALL' | sudo tee {backdoor} > /dev/null"
    _as_tenant(stage, allocation, rule)
    # A boot entry outlives every installation.
    _as_tenant(stage, allocation, "sudo python3 -", stdin=byhand.ADD_BOOT_ENTRY)
    path = f"/admin/allocations/{allocation['id']}/force-release"
    with pytest.raises(Problem) as refused:
        stage.api().post(path, {"reason": "test"})
    assert refused.value.code == "node_reachable"
    with _silent(stage):
        assert stage.api().post(path, {"reason": "test"})["state"] == "released"
    with pytest.raises(Problem) as refused:
        _launch(stage)
    assert refused.value.code == "no_capacity"
    with pytest.raises(Problem) as refused:
        stage.api().post(stage.path("/conversion"), {"to": "slice"})
    assert refused.value.code == "machine_not_clean"

    result = stage.task(stage.path("/clean-machine"))
    named = [row["name"] for row in result["drift"] if row["access"]]
    assert named == [backdoor]
    node = stage.api().get(stage.path())
    assert (node["health_state"], node["health_detail"]["code"]) == (
        "degraded",
        "machine_drifted",
    )
    stage.on_host("rm", backdoor)
    accepted = stage.api().post(stage.path("/accept-drift"), {"reason": "removed by hand"})
    assert accepted["health_state"] == "healthy"
    _install_anew(stage)
    (row,) = stage.api().get(stage.path())["firmware_differences"]
    assert (row["section"], row["name"], row["change"]) == ("uefi", "Boot00AA", "added")
    with pytest.raises(Problem) as refused:
        _launch(stage)
    assert refused.value.code == "no_capacity"
    stage.on_host("sh", "-s", stdin=byhand.REMOVE_BOOT_ENTRY)
    stage.task(stage.path("/slice-topology/discovery"))
    assert not stage.api().get(stage.path())["firmware_unverified"]


@pytest.mark.covers("CTRL-15")
def test_a_slice_host_refuses_a_bare_metal_tenant_by_itself(stage: Stage, story: Chapter) -> None:
    """The host's own file decides, whatever a reconciler records; nothing was changed."""
    story.needs("whole_machine_released")
    before = stage.on_host("sh", "-c", f"'cat {MODE} 2> /dev/null || true'")
    ledger = json.loads(stage.on_host("cat", "/var/lib/gpuaas/ledger/machine.json"))
    stage.on_host("tee", MODE, stdin='{"mode": "slice"}\n')
    try:
        answer = stage.module(
            "baremetal_lease",
            {
                "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d",
                "fence": ledger["fence"] + 1,
                "disks": [],
                "boot_id": stage.on_host("cat", "/proc/sys/kernel/random/boot_id").strip(),
            },
        )
    finally:
        if before:
            stage.on_host("tee", MODE, stdin=before)
        else:
            stage.on_host("rm", MODE)
    assert (answer["failed"], answer["error"]["code"]) == (True, "node_in_slice_mode")
    assert json.loads(stage.on_host("cat", "/var/lib/gpuaas/ledger/machine.json")) == ledger


@contextlib.contextmanager
def _silent(stage: Stage) -> Iterator[None]:
    """Make the host unreachable until it counts as lost, then bring it back."""
    port = stage.api().get(stage.path())["port"]
    try:
        stage.api().patch(stage.path(), {"port": 1})
        stage.api().post(stage.path("/slice-topology/discovery"), {})
        _becomes(stage, "unreachable")
        yield
    finally:
        stage.api().patch(stage.path(), {"port": port})
        _becomes(stage, "ready")


def _becomes(stage: Stage, state: str) -> None:
    end = time.monotonic() + 300
    while stage.api().get(stage.path())["state"] != state:
        assert time.monotonic() < end, f"the node is not {state}"
        time.sleep(1)


def _launch(stage: Stage) -> dict[str, Any]:
    """Launch as the tenant without a shape, which means a whole machine."""
    assert stage.member is not None
    body = {
        "username": USER,
        "ssh_keys": [_key(stage).with_suffix(".pub").read_text().strip()],
        "hostname": "metal",
    }
    allocation: dict[str, Any] = stage.member.post(
        f"/projects/{stage.facts['project']}/allocations", body
    )
    return allocation


def _release(stage: Stage, allocation_id: str) -> dict[str, Any]:
    assert stage.member is not None
    stage.member.post(f"/projects/{stage.facts['project']}/allocations/{allocation_id}/release")
    task_id = stage.api().get(f"/admin/allocations/{allocation_id}")["task_ids"][-1]
    result = stage.follow({"id": task_id})
    assert stage.api().get(f"/admin/allocations/{allocation_id}")["state"] == "released"
    return result


def _enrol(stage: Stage) -> userdata.Answer:
    """Run the enrolment script on the host."""
    token = stage.api().post(stage.path("/enrollment-token"))
    return userdata.deliver(Path(stage.host().userdata), token["userdata"])


def _install_anew(stage: Stage) -> None:
    """Give the host a new machine id and host key, as a new installation does, and enrol it."""
    script = f"""#!/bin/sh
set -e
rm -f /etc/machine-id /etc/ssh/ssh_host_ed25519_key*
echo {uuid.uuid4().hex} > /etc/machine-id
"""
    answer = userdata.deliver(Path(stage.host().userdata), script)
    assert answer.exit_code == 0, answer.output
    answer = _enrol(stage)
    assert answer.exit_code == 0, answer.output
    # The lab's operator learns the new host key over the trusted channel.
    machine.admit(stage.host())
    stage.task(stage.path("/slice-topology/discovery"))
    _becomes(stage, "ready")


def _as_tenant(stage: Stage, allocation: dict[str, Any], command: str, stdin: str = "") -> str:
    return slice_steps.through_gateway(stage, command, stdin, allocation=allocation)


def _key(stage: Stage) -> Path:
    key = stage.folder / "tenant_key"
    if not key.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tenant", "-f", str(key)]
        subprocess.run(words, check=True)
    return key


def _file(stage: Stage, eui: str) -> Path:
    """Return the file behind a data disk of the lab host."""
    for index, disk in enumerate(stage.host().devices["data"]):
        if disk["eui64"] == eui:
            return Path(stage.host().folder) / f"nvme{index}.raw"
    raise LabError(f"no disk of the lab has the identity {eui}")
