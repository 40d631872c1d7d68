"""Takeover of disks: dry run, approval, erase with proof, and disks that are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _slice_mode
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device, _proof
from ansible_collections.gpuaas.slice.plugins.modules import nvme_transition

from tests.unit.plugins.modules.test_transition_approval import (
    BY_ID,
    EUI,
    IDENTITY,
    MIB,
    approval,
    drive,
)

pytestmark = pytest.mark.covers("HOST-9")

SHARE = "UUID=abc /share\\0400 ext4 defaults,nofail 0 2"
FSTAB = f"# hosts\nUUID=root / ext4 defaults 0 1\n{SHARE}\n"


def take(**approved: Any) -> _change.Outcome:
    return drive(apply=True, expected={BY_ID: IDENTITY | approved})


def codes(outcome: _change.Outcome) -> list[str]:
    assert not outcome.changed and outcome.failure is not None
    return [blocker.code for blocker in outcome.plan.blockers]


@pytest.fixture
def shared(bench, script, monkeypatch: pytest.MonkeyPatch):
    """A disk that a bare-metal host uses as a share, with a line in fstab."""
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", MIB, b"XFSB")
    bench.link("nvme1n1p1", "abc", "by-uuid")
    bench.mount("259:2", "/share\\0400", "/dev/nvme1n1p1")
    _host.write("/etc/fstab", FSTAB)
    script.on("umount", "--", "/share 0").on("systemctl", "daemon-reload")
    answer, ioctl = script.run, bench.call

    def run(argv, **how):
        if argv[0] == "umount":
            bench.unmount("/share\\0400")
        return answer(argv, **how)

    def call(descriptor: int, request: int, buffer: bytearray) -> int:
        # Rereading the partition table removes the partitions from sysfs, as in a kernel.
        if request == _device.BLKRRPART:
            (bench.root / "sys/class/block/nvme1n1p1/partition").unlink()
        return int(ioctl(descriptor, request, buffer))

    monkeypatch.setattr(_command, "run", run)
    monkeypatch.setattr(_device, "call", call)
    return bench


def test_a_dry_run_shows_the_steps_and_changes_nothing(shared, script) -> None:
    outcome = drive()
    assert (outcome.failure, outcome.changed, script.calls) == (None, False, [])
    (device,) = outcome.facts["devices"]
    assert [step["name"] for step in device["steps"]] == ["unmount", "erase_disk"]
    assert (device["mounts"], device["fstab"]) == (["/share 0"], [SHARE])
    assert device["filesystems"] == {"nvme1n1": "gpt", "nvme1n1p1": "xfs"}
    assert (device["serial"], device["eui"], device["proof"]) == ("LABNVME0", EUI, None)
    assert outcome.facts["applied"] is False
    assert drive(devices=["/dev/nvme1n1"]).failure is None


def test_check_mode_plans_what_apply_would_do(shared, script) -> None:
    outcome = drive(apply=True, expected={BY_ID: approval()}, check_mode=True)
    names = [step.name for step in outcome.plan.steps]
    assert names == ["unmount", "disable_fstab", "erase_disk", "write_manifest"]
    assert outcome.changed and script.calls == []


def test_an_approved_disk_is_taken_once(shared) -> None:
    approved = approval()
    outcome = take(**approved)
    assert outcome.failure is None, outcome.failure
    assert not any(shared.read("nvme1n1", 0, 48 * MIB))

    fstab = (_host.read("/etc/fstab") or "").splitlines()
    assert fstab[2] == f"# gpuaas-slice-storage-disabled {SHARE}"
    assert fstab[:2] == FSTAB.splitlines()[:2]
    (backup,) = _host.path("/etc").glob("fstab.gpuaas-slice-storage-backup-*")
    assert backup.read_text() == FSTAB

    path = outcome.facts["manifest"]
    assert re.fullmatch(r"/var/log/gpuaas/slice-storage-transition-\d{14}\.txt", path), path
    manifest = json.loads(_host.read(path) or "")
    (device,) = manifest["devices"]
    assert device["mounts"] == ["/share 0"] and device["proof"]["verified"]
    assert manifest["fstab_backup"] == f"/etc/{backup.name}"

    again = take(**approved)
    assert (again.failure, again.changed) == (None, False)
    assert again.facts["devices"][0]["proof"] == device["proof"]
    assert again.facts["manifest"] == path


@pytest.mark.covers("I7")
def test_the_root_disk_is_not_erased_through_its_other_path(bench) -> None:
    """With `nvme_core.multipath=N` the by-id link names the path without mounts."""
    for name, minor in (("nvme1n1", 1), ("nvme2n1", 11)):
        bench.disk(name, minor=minor)
        bench.partition(name, MIB, 20 * MIB, minor=minor + 1)
        bench.write(name, MIB, b"XFSB")
    bench.mount("259:2", "/", "/dev/nvme1n1p1", "xfs")
    assert codes(drive()) == ["duplicate_identity"]
    assert codes(take(mounts=[], filesystems=["xfs"])) == ["duplicate_identity"]
    assert bench.read("nvme2n1", MIB, 4) == b"XFSB"


def test_a_blank_disk_gets_its_first_proof(bench) -> None:
    bench.disk()
    outcome = take()
    assert outcome.done == ["erase_disk", "write_manifest"]
    assert _proof.standing(f"eui.{EUI}") is not None


@pytest.mark.covers("HOST-15", "I5")
def test_what_the_operator_wrote_on_an_ordinary_machine_is_erased(bench) -> None:
    """It lies between the samples of a signature scan, which does not see it."""
    size, hidden = 1 << 30, (1 << 29) + 3 * MIB
    bench.disk(size=size)
    mode: dict[str, Any] = {"profile": "lab", "state": "present"}
    _change.drive(_slice_mode.SUBJECT, mode, check_mode=False)
    assert "erase_disk" in take().done
    _change.drive(_slice_mode.SUBJECT, mode | {"state": "absent"}, check_mode=False)
    bench.write("nvme1n1", hidden, b"payroll")
    _change.drive(_slice_mode.SUBJECT, mode, check_mode=False)
    assert _proof.standing(f"eui.{EUI}") is None
    assert "erase_disk" in take().done
    assert bench.read("nvme1n1", hidden, 7) == bytes(7)


def test_a_manifest_brings_no_proof_back(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may get the disk while it is written."""
    bench.disk()
    _host.remove(take().facts["manifest"])
    write = _host.write

    def used_meanwhile(path: str, *given: Any, **named: Any) -> None:
        write(path, *given, **named)
        if "slice-storage-transition" in path:
            _ledger.hold("slot-1", fence=1, allocation_id=EUI, disk_identity=f"eui.{EUI}")
            _ledger.mark_dirty("slot-1", fence=1, disk_identity=f"eui.{EUI}")
            _ledger.release("slot-1", fence=1)

    monkeypatch.setattr(_host, "write", used_meanwhile)
    take()
    assert _proof.standing(f"eui.{EUI}") is None


def test_a_lost_manifest_is_written_again(bench) -> None:
    bench.disk()
    _host.remove(take().facts["manifest"])
    outcome = take()
    assert outcome.done == ["write_manifest"] and outcome.failure is None


def test_apply_needs_identity_and_a_stable_path(bench) -> None:
    bench.disk()
    assert codes(drive(apply=True)) == ["approval_missing"]
    assert codes(take(serial="OTHER")) == ["identity_mismatch"]
    assert codes(take(eui="5e000000000000ff")) == ["identity_mismatch"]
    assert "kernel_name_not_allowed" in codes(drive(devices=["/dev/nvme1n1"], apply=True))
    assert codes(drive(devices=[BY_ID, "/dev/nvme1n1"])) == ["duplicate_device"]
    assert codes(drive(devices=["/dev/nvme7n1"])) == ["device_not_found"]


def test_the_os_disk_is_refused_in_a_dry_run_too(shared) -> None:
    shared.mount("259:2", "/boot/efi", "/dev/nvme1n1p1")
    assert codes(drive()) == ["os_disk"]


@pytest.mark.parametrize(
    ("holder", "code"), [("md127", "md_member"), ("dm-3", "dm_holder"), ("bcache0", "held")]
)
def test_what_is_stacked_on_it_is_refused(bench, holder: str, code: str) -> None:
    bench.disk()
    bench.hold("nvme1n1", holder)
    assert codes(take()) == [code]


def test_swap_in_use_is_refused(bench) -> None:
    bench.disk()
    bench.swap("/dev/nvme1n1")
    assert codes(take()) == ["swap_in_use"]


@pytest.mark.parametrize(
    ("offset", "magic", "code"),
    [
        (512, b"LABELONE", "lvm_member"),
        (4096, b"\xfc\x4e\x2b\xa9", "md_member"),
        (0, b"LUKS\xba\xbe", "unexpected_filesystem"),
        (65600, b"_BHRfS_M", "unexpected_filesystem"),
    ],
)
def test_what_may_be_part_of_something_bigger_is_refused(
    bench, offset: int, magic: bytes, code: str
) -> None:
    bench.disk()
    bench.write("nvme1n1", offset, magic)
    assert codes(take()) == [code]


def test_an_unusual_filesystem_can_be_named_in_the_approval_an_array_cannot(bench) -> None:
    bench.disk()
    bench.write("nvme1n1", 0, b"LUKS\xba\xbe")
    assert take(filesystems=["crypto_LUKS"]).failure is None
    bench.write("nvme1n1", 4096, b"\xfc\x4e\x2b\xa9")
    assert codes(take(filesystems=["linux_raid_member"])) == ["md_member"]


def test_the_disk_of_a_slot_is_refused(bench) -> None:
    bench.disk()
    _ledger.hold("slot-0", fence=1, allocation_id="a", disk_identity=f"eui.{EUI}")
    assert codes(take()) == ["disk_belongs_to_slot"]


def test_a_disk_swapped_between_plan_and_erase_is_refused(bench) -> None:
    namespace = bench.disk()
    step = _change.Step("erase_disk", BY_ID, destroys=f"eui.{EUI}")
    bench.write("nvme1n1", 3 * MIB, b"data")
    namespace.serial = "OTHER"
    params = {"expected": {BY_ID: {"serial": "LABNVME0", "eui": EUI}}, "methods": ["zero_fill"]}
    with pytest.raises(nvme_transition.Refusal, match="identity_mismatch"):
        nvme_transition.apply(params, step)
    assert bench.read("nvme1n1", 3 * MIB, 4) == b"data"


@pytest.mark.covers("I7")
def test_a_filesystem_made_after_the_plan_was_never_approved(bench) -> None:
    bench.disk()
    bench.write("nvme1n1", 512, b"EFI PART")

    def overtaken(params: _change.Params, step: _change.Step) -> Any:
        bench.write("nvme1n1", 0, b"LUKS\xba\xbe")
        return nvme_transition.apply(params, step)

    racing = _change.Subject(
        nvme_transition.observe, nvme_transition.plan, overtaken, nvme_transition.facts
    )
    outcome = drive(racing, apply=True, expected={BY_ID: approval()})
    assert (outcome.failure.code, outcome.failed_step) == ("changed_since_plan", "erase_disk")
    assert outcome.failure.found == "crypto_LUKS on nvme1n1"
    assert bench.read("nvme1n1", 512, 8) == b"EFI PART"
    assert _ledger.takeover(f"eui.{EUI}") is None
