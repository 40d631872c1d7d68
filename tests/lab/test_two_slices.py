"""Two tenants with root on one host: nothing of one reaches the other, the host or its networks.

One slice boots by BIOS and one by UEFI, at the same time. Both send the whole table of attacks
before, during and after a crash and a restart of the switch, and from their first packet after a
power loss of the host.

Plays on the host that test_main_path.py left: two slots, bound and available.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from lab.command import LabError
from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.lab import byhand
from tests.lab.attacks import Attacks
from tests.lab.conftest import Chapter
from tests.lab.proof import differences, prove_again

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
    assert differences(stage) == {"guest_stopped"}
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
    assert differences(stage) == set()
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
    assert differences(stage) == set()
    story.done["both released"] = True


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
