"""Two tenants with root on one host: nothing of one reaches the other, the host or its networks.

One slice boots by BIOS and one by UEFI, at the same time. Both send the whole table of attacks
before, during and after a crash and a restart of the switch, and from their first packet after a
power loss of the host. Then a third slice gets both slots.

Plays on the host that test_main_path.py left: two slots, bound and available.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import pytest

from lab import canary
from lab.command import LabError
from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.lab import byhand
from tests.lab.attacks import Attacks
from tests.lab.conftest import Chapter
from tests.lab.proof import prove_again

# The guests of an emulated host need some minutes to boot.
BOOT_S = 900


@pytest.fixture(scope="module")
def attacks(story: Chapter) -> Attacks:
    story.needs("attacks")
    attacks: Attacks = story.done["attacks"]
    return attacks


@pytest.mark.covers("I14", "I15", "I17")
def test_two_slices_start_at_once_one_by_bios_and_one_by_uefi(stage: Stage, story: Chapter) -> None:
    story.needs("prepared")
    launched = [_launch(stage, firmware) for firmware in ("bios", "uefi")]
    stage.use_vm(firmware=stage.firmware)
    allocations = []
    for allocation in launched:
        ended = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
        assert ended["state"] == "active", slice_steps.why(stage, ended)
        allocations.append(ended)
    attacks = Attacks(stage, allocations)
    assert attacks.install() == [["bios", "0"], ["uefi", "0"]]
    story.done["attacks"] = attacks


@pytest.mark.covers("SLICE-9", "HOST-6", "P9")
def test_every_frame_is_seen_only_where_it_should_be(attacks: Attacks, story: Chapter) -> None:
    attacks.lay_out()
    assert attacks.one_round() == []
    story.done["attacked"] = True


@pytest.mark.covers("SLICE-9", "HOST-6", "P9")
@pytest.mark.parametrize("command", [byhand.KILL, byhand.RESTART], ids=["crash", "restart"])
def test_nothing_passes_while_the_switch_comes_back(
    attacks: Attacks, stage: Stage, story: Chapter, command: str
) -> None:
    story.needs("attacked")
    attacks.order("loop")
    attacks.await_world()
    down, back = byhand.switch_down(stage, command)
    attacks.await_world(after=back)
    attacks.order("stop")
    assert attacks.strays() == []
    sent = [event for event in attacks.departures(attacks.events()) if down < event.at < back]
    places = {attacks.attacks[event.token].place for event in sent}
    assert places >= {each.place for each in attacks.slices}
    assert attacks.one_round() == [], "the guards are not as before"


@pytest.mark.long
@pytest.mark.covers("SLICE-9", "HOST-6", "I14", "I17", "P9")
def test_guests_are_guarded_from_their_first_packet_after_a_power_loss(
    attacks: Attacks, stage: Stage, story: Chapter
) -> None:
    """The attack starts with each guest. An operator starts both by hand."""
    story.needs("attacked")
    attacks.close()
    boot = byhand.boot(stage)
    byhand.power_cut(stage)
    byhand.booted(stage, after=boot)
    assert _differences(stage) == {"guest_stopped"}
    attacks.lay_out()
    for each in attacks.slices:
        domain = f"gpuaas-slice-{each.allocation['id'].replace('-', '')}"
        stage.on_host("virsh", "start", domain, limit_s=600)
    attacks.await_world(limit_s=BOOT_S)
    for each in attacks.slices:
        _is_up(stage, each.allocation)
    attacks.order("stop")
    assert attacks.strays() == []
    assert attacks.one_round() == []
    attacks.close()
    # Slices that ran before the power loss are started as soon as the host is proven: these run.
    prove_again(stage)
    for each in attacks.slices:
        path = f"/admin/allocations/{each.allocation['id']}"
        stage.follow({"id": stage.api().get(path)["task_ids"][-1]})
        ended = stage.api().get(path)
        assert (ended["state"], ended["error"]) == ("active", {})


@pytest.mark.covers("I14", "I15", "I17")
def test_the_host_holds_what_the_records_say_until_both_are_gone(
    attacks: Attacks, stage: Stage, story: Chapter
) -> None:
    attacks.close()
    assert _differences(stage) == set()
    # Both at once: each waits for its guest most of the time.
    for each in attacks.slices:
        path = f"/projects/{stage.facts['project']}/allocations/{each.allocation['id']}"
        stage.api().post(f"{path}/release")
    for each in attacks.slices:
        path = f"/admin/allocations/{each.allocation['id']}"
        stage.follow({"id": stage.api().get(path)["task_ids"][-1]})
        ended = stage.api().get(path)
        assert ended["state"] == "released"
        assert slice_steps.slot_of(stage, ended)["status"] == "available"
    assert _differences(stage) == set()
    story.done["both released"] = True


@pytest.mark.long
@pytest.mark.covers("SLICE-3", "SLICE-4", "SLICE-6", "P11")
def test_one_slice_has_both_gpus_and_leaves_both_slots_clean(stage: Stage, story: Chapter) -> None:
    """Its GPUs are on two NUMA nodes of the host, and so of the guest."""
    story.needs("both released")
    allocation = slice_steps.launch(stage, gpu_count=2)
    allocation = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
    assert allocation["state"] == "active", slice_steps.why(stage, allocation)
    stage.facts["allocation"] = allocation
    assert [claim["position"] for claim in allocation["claims"]] == [0, 1]
    proof = json.loads(slice_steps.in_guest(stage, "sudo python3 -", slice_steps.PROOF.read_text()))
    assert (len(proof["gpus"]), proof["ok"]) == (2, True), proof
    guest = json.loads(slice_steps.in_guest(stage, "sudo python3 -", SEEN))
    assert guest["gpu_nodes"] == [0, 1]
    assert guest["nodes"] == {"0": "0", "1": "1"}
    assert guest["disks"]["root"] != guest["disks"]["data1"]
    assert min(guest["memory_mib"].values()) > 0.5 * stage.profile()["vm"]["memory_mib_per_gpu"]

    mark = secrets.token_hex(32)
    writing = f"echo {mark} | sudo dd of=/dev/disk/by-id/virtio-data1 seek=9 conv=fsync 2>&1"
    slice_steps.in_guest(stage, writing)
    assert canary.count(slice_steps.disk_file(stage, 1), mark) == 1
    assert _differences(stage) == set()
    evidence = slice_steps.release(stage)
    assert (evidence["allocation"], evidence["shutdown"]) == ("released", "graceful")
    assert canary.count(slice_steps.disk_file(stage, 1), mark) == 0
    held = {claim["slot_id"] for claim in allocation["claims"]}
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    for slot in [slot for slot in slots if slot["id"] in held]:
        assert slot["status"] == "available"
        assert slot["last_proof"]["kind"] == "wipe"
        assert slot["last_proof"]["allocation_id"] == allocation["id"]
        assert slot["last_proof"]["document"]["gpu"]["verified"]
        words = ("python3", "-", "--remains", slot["gpu_pci_address"])
        left = json.loads(stage.on_host(*words, stdin=slice_steps.PROOF.read_text()))
        assert left["ok"], left
    assert _differences(stage) == set()


# Run in the guest: NUMA nodes of its GPUs, CPUs and memory of its nodes, and its disks by role.
SEEN = """
import glob, json, os, re
def text(path):
    with open(path) as file:
        return file.read().strip()
gpus = [p for p in glob.glob("/sys/bus/pci/devices/*") if text(p + "/device") == "0x11e8"]
nodes = {p[-1]: p for p in glob.glob("/sys/devices/system/node/node[0-9]")}
total = {n: re.search(r"MemTotal:\\s+(\\d+) kB", text(p + "/meminfo")) for n, p in nodes.items()}
print(json.dumps({
    "gpu_nodes": sorted(int(text(p + "/numa_node")) for p in gpus),
    "nodes": {n: text(p + "/cpulist") for n, p in sorted(nodes.items())},
    "memory_mib": {n: int(found.group(1)) // 1024 for n, found in total.items()},
    "disks": {n: os.path.realpath("/dev/disk/by-id/virtio-" + n) for n in ("root", "data1")},
}))
"""


def _launch(stage: Stage, firmware: str) -> dict[str, Any]:
    """Launch a slice; its run has read the firmware of the profile when this returns."""
    stage.use_vm(firmware=firmware)
    allocation = slice_steps.launch(stage)
    task_id = stage.api().get(f"/admin/allocations/{allocation['id']}")["task_ids"][-1]
    end = time.monotonic() + 120
    while not stage.api().get(f"/admin/tasks/{task_id}").get("progress"):
        assert time.monotonic() < end, "the run did not start in two minutes"
        time.sleep(0.5)
    return allocation


def _differences(stage: Stage) -> set[str]:
    """Differences between the host and the records, by code."""
    result = stage.task(stage.path("/drift"))
    assert (result["unknown"], result["skipped"]) == ({}, [])
    return {each["code"] for each in result["differences"]}


def _is_up(stage: Stage, allocation: dict[str, Any]) -> None:
    """Wait until the tenant can log in, under the host key that the guest had before."""
    end = time.monotonic() + BOOT_S
    while True:
        try:
            assert slice_steps.in_guest(stage, "id -un", allocation=allocation).strip() == (
                slice_steps.USER
            )
        except LabError:
            assert time.monotonic() < end, "the guest does not answer"
            time.sleep(15)
        else:
            return
