"""Wipe of a slot's disk: once, under its fence, and never a disk of the host."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _device, _mounting, _proof
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _nvme_disks
from ansible_collections.gpuaas.slice.plugins.modules import nvme_wipe

MIB = 1 << 20
DISK = "eui.5e0000000000a000"
SUBJECT = _change.Subject(nvme_wipe.observe, nvme_wipe.plan, nvme_wipe.apply, nvme_wipe.facts)


def slot(number: int) -> dict[str, Any]:
    eui = f"5e0000000000a00{number}"
    return {
        "slot_id": f"slot-{number}",
        "fence": 1,
        "nvme_device": f"/dev/disk/by-id/nvme-eui.{eui}",
        "nvme_eui": eui,
        "nvme_serial": f"LABNVME{number}",
    }


def wipe(
    subject: _change.Subject = SUBJECT, *, fence: int = 3, check_mode: bool = False, **other: Any
) -> _change.Outcome:
    params = {
        "slots": [{**slot(0), "fence": fence}],
        "methods": ["user_data_erase", "zero_fill"],
        "renew": False,
        "raw": False,
    } | other
    return _change.drive(subject, params, check_mode=check_mode)


def code(**other: Any) -> str:
    return wipe(**other).failure.code


@pytest.fixture
def bad_sectors(bench, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Places on the disk that cannot be read or written until the next format."""
    places: set[int] = set()
    read, write, call = os.preadv, os.pwritev, _device.call

    def touched(buffers: Any, offset: int) -> None:
        if any(offset <= place < offset + len(buffers[0]) for place in places):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        touched(buffers, offset)
        return read(descriptor, buffers, offset)

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        touched(buffers, offset)
        return write(descriptor, buffers, offset)

    def ioctl(descriptor: int, request: int, buffer: bytearray) -> int:
        result = call(descriptor, request, buffer)
        if bench.namespace_of(descriptor).formats:
            places.clear()
        return int(result)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(_device, "call", ioctl)
    return places


def test_a_dirty_disk_is_wiped_once(bench) -> None:
    bench.disk()
    bench.write("nvme1n1", 20 * MIB, b"tenant")
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    assert wipe(check_mode=True).changed
    assert bench.read("nvme1n1", 20 * MIB, 6) == b"tenant"

    done = wipe()
    assert done.failure is None and done.changed
    assert bench.read("nvme1n1", 20 * MIB, 6) == bytes(6)
    proof = done.facts["proofs"]["slot-0"]
    assert proof["slot_id"] == "slot-0" and proof["verified"] and proof["disk"] == DISK
    entry = _ledger.load("slot-0")
    assert not entry.dirty and entry.clean_at > entry.dirty_at

    again = wipe()
    assert (again.changed, again.facts["proofs"]["slot-0"]) == (False, proof)


@pytest.mark.covers("I7", "HOST-9", "P11", "SLICE-6")
@pytest.mark.parametrize("dirty", [True, False])
def test_a_tenants_bytes_are_of_no_known_kind_and_go_all_the_same(bench, dirty: bool) -> None:
    bench.disk()
    wipe()
    bench.write("nvme1n1", 24 * MIB, b"rows of a tenant's database")
    if dirty:
        _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    outcome = wipe(renew=True)
    assert outcome.failure is None, outcome.failure
    assert outcome.plan.steps[0].before["written"] == ["raw_data on nvme1n1"]
    assert bench.read("nvme1n1", 24 * MIB, 4) == bytes(4)


@pytest.mark.covers("I7", "HOST-9")
def test_a_boot_card_is_not_wiped_whatever_the_ledger_says(bench) -> None:
    bench.disk(model="DELLBOSS VD")
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    assert code() == "excluded_model"


@pytest.mark.covers("I7", "HOST-9")
@pytest.mark.parametrize("dirty", [True, False])
def test_a_model_that_was_excluded_after_the_disk_was_taken_can_be_released(
    bench, dirty: bool
) -> None:
    bench.disk(model="Some Other Card")
    if dirty:
        _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    outcome = wipe(exclude_models=["Other"])
    assert (outcome.failure and outcome.failure.code) == (None if dirty else "excluded_model")


@pytest.mark.covers("I7", "HOST-9")
def test_what_a_tenant_wrote_does_not_decide_whether_it_goes(bench) -> None:
    """A label with the name of the pool that the host runs from, and a label without a name."""
    bench.disk()
    (bench.root / "proc/spl/kstat/zfs/rpool").mkdir(parents=True)
    bench.mount("0:50", "/var/log", "rpool/log", "zfs")
    for claimed in (set(), {"nvme1n1"}):
        bench.claimed = claimed
        bench.write("nvme1n1", 130 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0")
        _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
        outcome = wipe()
        # Once clean again, the disk gets the same checks as any other disk.
        assert outcome.failure is None, outcome.failure
        assert not any(bench.read("nvme1n1", 130 * 1024, 8))


@pytest.mark.covers("I7", "HOST-9")
def test_a_bad_sector_keeps_no_dirty_disk_from_the_erase_that_cures_it(bench, bad_sectors) -> None:
    bench.disk()
    bench.write("nvme1n1", 20 * MIB, b"tenant")
    bad_sectors.add(0)
    refused = wipe()
    assert refused.failure.code == "device_unreadable"
    assert bench.read("nvme1n1", 20 * MIB, 6) == b"tenant"
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    outcome = wipe(methods=["discard", "user_data_erase"])
    assert outcome.failure is None, outcome.failure
    (proof,) = outcome.facts["proofs"].values()
    assert proof["method"] == "user_data_erase"
    assert "Input/output error" in proof["attempts"][0]["outcome"]


def test_a_disk_without_a_proof_is_wiped(bench) -> None:
    bench.disk()
    assert wipe().changed
    assert _proof.standing(DISK) is not None


def test_a_clean_disk_on_which_something_was_written_by_hand_is_wiped_again(bench) -> None:
    bench.disk()
    wipe()
    bench.write("nvme1n1", 512, b"EFI PART")
    outcome = wipe()
    assert outcome.plan.steps[0].before["written"] == ["gpt on nvme1n1"]
    assert outcome.failure is None and not wipe().changed


def test_what_was_made_on_a_raw_disk_since_it_was_taken_is_not_wiped(bench) -> None:
    bench.disk()
    wipe()
    assert (wipe(raw=True).failure, wipe(raw=True).changed) == (None, False)
    bench.write("nvme1n1", 512, b"EFI PART")
    for check_mode in (True, False):
        refused = wipe(raw=True, check_mode=check_mode)
        assert (refused.failure.code, refused.changed) == ("unexpected_filesystem", False)
        assert refused.failure.found == "gpt on nvme1n1"
    assert bench.read("nvme1n1", 512, 8) == b"EFI PART"
    assert not _ledger.load("slot-0").dirty
    # An interrupted wipe of its own: the present data came after the takeover of the disk.
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    assert wipe(raw=True).failure is None
    assert bench.read("nvme1n1", 512, 8) == bytes(8)


@pytest.mark.covers("I7")
def test_the_mark_of_a_dead_disk_gives_no_right_to_the_content_of_the_next(bench) -> None:
    """The slot's disk was replaced. The content of the new disk belongs to no tenant."""
    bench.disk()
    bench.write("nvme1n1", 512, b"EFI PART")
    _ledger.mark_dirty("slot-0", fence=3, disk_identity="eui.dead")
    refused = wipe(raw=True)
    assert refused.failure.code == "unexpected_filesystem"
    (step,) = wipe(check_mode=True).plan.steps
    bench.write("nvme1n1", MIB + 512, b"more than was planned")
    params = {"slots": [{**slot(0), "fence": 3}], "methods": ["zero_fill"]}
    with pytest.raises(Refusal, match="changed_since_plan"):
        nvme_wipe.apply(params, step)
    # The mark stays until the new disk is proven.
    assert wipe().failure is None
    assert not _ledger.load("slot-0").dirty and not wipe().changed


def test_the_proof_of_the_transition_serves_the_first_release(bench) -> None:
    bench.disk()
    _proof.record(DISK, {"disk": DISK, "verified": True, "finished_at": "2026-01-01"})
    outcome = wipe()
    assert not outcome.changed and outcome.facts["proofs"]["slot-0"]["slot_id"] == "slot-0"


@pytest.mark.covers("I4")
def test_after_a_doubt_only_a_wipe_under_the_present_fence_is_believed(bench) -> None:
    """A VM was run on the disk by hand; the ledger has no record of the use."""
    bench.disk()
    wipe(fence=5)
    bench.write("nvme1n1", 20 * MIB, b"by hand")
    assert not wipe(fence=6).changed
    assert wipe(fence=6, renew=True).failure is None
    assert bench.read("nvme1n1", 20 * MIB, 7) == bytes(7)
    assert not wipe(fence=6, renew=True).changed


@pytest.mark.covers("I10")
def test_a_stale_fence_is_refused_even_when_the_disk_is_clean(bench) -> None:
    bench.disk()
    wipe(fence=5)
    assert code(fence=4) == "stale_fence"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nvme_serial": "OTHER"}, "identity_mismatch"),
        ({"nvme_eui": "5e000000000000ff"}, "identity_mismatch"),
        ({"nvme_size_bytes": 4096}, "identity_mismatch"),
        ({"nvme_device": "/dev/disk/by-id/nvme-eui.00"}, "device_not_found"),
    ],
)
def test_another_disk_is_refused(bench, change: dict[str, Any], expected: str) -> None:
    bench.disk()
    assert code(slots=[slot(0) | change]) == expected


@pytest.mark.covers("I7", "HOST-9")
@pytest.mark.parametrize("dirty", [True, False])
def test_a_disk_with_a_second_path_is_refused_and_kept(bench, dirty: bool) -> None:
    bench.disk()
    bench.disk("nvme2n1", minor=11)
    bench.write("nvme2n1", MIB, b"host")
    if dirty:
        _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    assert code() == "duplicate_identity"
    assert bench.read("nvme2n1", MIB, 4) == b"host"


def test_a_disk_in_use_is_refused_and_kept(bench) -> None:
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 3 * MIB, b"data")
    bench.mount("259:2", "/share0", "/dev/nvme1n1p1")
    assert code() == "disk_in_use"
    bench.mount("259:2", "/boot", "/dev/nvme1n1p1")
    assert code() == "os_disk"
    assert bench.read("nvme1n1", 3 * MIB, 4) == b"data"


ESP = "C12A7328-F81F-11D2-BA4B-00C04FD43B7B"
HOST_ROOT = "0d4c6f6e-5e3b-4c1a-9a67-3f0e6d1b2c4a"


def tool(bench, *words: str, stdin: str = "") -> None:
    """Have a real tool write on the disk, as a guest would."""
    disk = str(bench.root / "dev/nvme1n1")
    words = tuple(disk if word == "DISK" else word for word in words)
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "MTOOLS_SKIP_CHECK": "1"}
    subprocess.run(words, input=stdin, text=True, check=True, capture_output=True, env=environment)


def efi(bench) -> None:
    """An EFI partition with the names of the host's, and a loader."""
    table = f'label: gpt\nstart=2048, size=40960, type={ESP}, uuid={HOST_ROOT}, name="root"\n'
    tool(bench, "sfdisk", "-q", "DISK", stdin=table)
    tool(bench, "mkfs.vfat", "-n", "EFI", "--offset", "2048", "DISK", "20480")
    bench.write("nvme1n1", 3 * MIB, b"MZ a loader")


def twin(bench) -> None:
    """A filesystem with label and UUID of the host's root."""
    tool(bench, "mkfs.ext4", "-q", "-U", HOST_ROOT, "-L", "root", "DISK")


def nested(bench) -> None:
    """A table of partitions inside a partition, with a volume group in the innermost."""
    tool(bench, "sfdisk", "-q", "DISK", stdin="label: gpt\nstart=2048, size=81920\n")
    inner = bench.root / "inner"
    inner.write_bytes(bytes(32 * MIB))
    tool(bench, "sfdisk", "-q", str(inner), stdin="label: dos\nstart=2048, size=4096, type=8e\n")
    bench.write("nvme1n1", MIB, inner.read_bytes())
    bench.write("nvme1n1", 2 * MIB + 512, b"LABELONE" + bytes(16) + b"LVM2 001")


def superblocks(bench) -> None:
    """LUKS, bcache, ZFS, md and btrfs on the same disk."""
    for offset, magic in (
        (0, b"LUKS\xba\xbe\x00\x02"),
        (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
        (4096, b"\xfc\x4e\x2b\xa9"),
        (0x4000, b"SKUL\xba\xbe"),
        (65600, b"_BHRfS_M"),
        (130 * 1024, b"\x0c\xb1\xba\x00\0\0\0\0"),
    ):
        bench.write("nvme1n1", offset, magic)


@pytest.mark.covers("I7", "HOST-9", "SLICE-6")
@pytest.mark.parametrize("write", [efi, twin, nested, superblocks])
def test_a_disk_that_looks_like_the_hosts_is_wiped_without_a_person(
    bench, write: Callable[[Any], None]
) -> None:
    """Only the ledger tells whose disk it is. Without its mark the same content is kept."""
    bench.disk()
    wipe()
    write(bench)
    assert wipe(raw=True).failure is not None
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    outcome = wipe()
    assert outcome.failure is None, outcome.failure
    assert not any(bench.read("nvme1n1", 0, 48 * MIB))
    assert outcome.facts["proofs"]["slot-0"]["verified"]
    assert not _ledger.load("slot-0").dirty and not wipe().changed


@pytest.mark.covers("I7", "HOST-9", "SLICE-6")
def test_an_efi_partition_on_a_real_disk_is_wiped_and_the_disk_sold_again(
    loop, tree: Path, tmp_path: Path
) -> None:
    """By the kernel's own partitions, with the discovery before and after."""
    links = tree / "dev/disk/by-id"
    links.mkdir(parents=True)
    (links / f"nvme-{DISK}").symlink_to(f"../../{loop.name}")
    table = f'label: gpt\nstart=2048, size=65536, type={ESP}, uuid={HOST_ROOT}, name="root"\n'
    # The kernel has this partition already, because it may lack a reader of tables.
    quiet = ("--quiet", "--no-reread", "--no-tell-kernel", "--wipe=never")
    subprocess.run(("sfdisk", *quiet, str(loop.device)), input=table, text=True, check=True)
    # In a file first, because mkfs.vfat refuses a disk with partitions.
    content = tmp_path / "efi"
    content.touch()
    os.truncate(content, 32 * MIB)
    loop.run("mkfs.vfat", "-n", "EFI", str(content))
    with loop.device.open("r+b") as handle:
        handle.seek(MIB)
        handle.write(content.read_bytes())

    def discovered() -> dict[str, Any]:
        rows = {row["kernel_name"]: row for row in _nvme_disks.disks([])}
        return rows[loop.name]

    before = discovered()
    assert before["children"] == [f"{loop.name}p1"]
    assert {"gpt", "vfat"} <= set(before["filesystems"].values())
    codes = {row["code"] for row in before["blockers"]}
    assert codes == {"partitions_present", "unexpected_filesystem"}
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    outcome = wipe(methods=["user_data_erase", "zero_fill"])
    assert outcome.failure is None, outcome.failure
    assert outcome.facts["proofs"]["slot-0"]["verified"]
    after = discovered()
    assert (after["blockers"], after["children"], after["filesystems"]) == ([], [], {})
    assert not any(loop.device.read_bytes())
    assert not _ledger.load("slot-0").dirty and not wipe().changed


@pytest.mark.covers("I7")
@pytest.mark.parametrize("mounted", [False, True])
def test_a_bcache_device_that_the_host_made_of_a_tenants_disk_is_stopped(
    bench, mounted: bool
) -> None:
    bench.disk()
    bench.hold("nvme1n1", "bcache0")
    folder = bench.root / "sys/class/block/bcache0"
    stop = folder / "bcache/stop"
    stop.parent.mkdir()
    os.mkfifo(stop)
    bench.claimed = {"bcache0"} if mounted else set()
    assert code() == "disk_in_use"
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)

    def kernel() -> None:
        if stop.read_text() == "1\n":
            (bench.root / "sys/class/block/nvme1n1/holders/bcache0").rmdir()
            folder.unlink()

    if mounted:
        assert code() == "disk_in_use"
        return
    stopping = threading.Thread(target=kernel, daemon=True)
    stopping.start()
    outcome = wipe()
    stopping.join()
    assert outcome.failure is None, outcome.failure
    assert outcome.done == ["stop_device", "wipe_disk"]


def join(bench, name: str, array: str) -> None:
    """Add a device to an array that exists."""
    (bench.root / f"sys/class/block/{name}/holders/{array}").mkdir(parents=True)
    (bench.root / f"sys/class/block/{array}/slaves/{name}").mkdir(parents=True)


def stoppable(bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let mdadm and dmsetup remove a device from the bench; the commands that ran."""
    ran: list[str] = []

    def run(argv: list[str], **_more: Any) -> None:
        ran.append(" ".join(argv))
        name = {"vg-root": "dm-0"}.get(argv[-1], argv[-1].rpartition("/")[2])
        for link in bench.root.glob(f"sys/class/block/*/holders/{name}"):
            link.rmdir()

    monkeypatch.setattr(_mounting._command, "run", run)
    return ran


@pytest.mark.covers("I7")
@pytest.mark.parametrize("shared", [False, True])
def test_an_array_that_the_host_made_of_a_tenants_disk_does_not_keep_it(
    bench, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """A tenant wrote md and LVM on the disk, with names of the host; udev activated them. With
    `shared` the array was joined by a disk of the host, and only a person may stop it.
    """
    bench.disk()
    bench.disk("nvme2n1", minor=7, eui="5e0000000000a001", serial="LABNVME1")
    bench.hold("nvme1n1", "md127")
    bench.hold("md127", "dm-0", uuid="LVM-x")
    (bench.root / "sys/class/block/dm-0/dm/name").write_text("vg-root\n")
    if shared:
        join(bench, "nvme2n1", "md127")
    ran = stoppable(bench, monkeypatch)
    # Not a tenant's disk: nothing is stopped.
    assert code() == "disk_in_use" and ran == []
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    bench.write("nvme1n1", 3 * MIB, b"tenant")
    if shared:
        assert code() == "disk_in_use" and ran == []
        assert bench.read("nvme1n1", 3 * MIB, 6) == b"tenant"
        return
    outcome = wipe()
    assert outcome.failure is None, outcome.failure
    assert ran == ["dmsetup remove -- vg-root", "mdadm --stop /dev/md127"]
    assert outcome.done == ["stop_device", "stop_device", "wipe_disk"]
    assert bench.read("nvme1n1", 3 * MIB, 6) == bytes(6)


def test_an_array_over_two_slots_of_one_tenant_is_stopped_once(
    bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.disk()
    bench.disk("nvme2n1", minor=7, eui="5e0000000000a001", serial="LABNVME1")
    bench.hold("nvme1n1", "md0")
    join(bench, "nvme2n1", "md0")
    for number in range(2):
        identity = f"eui.5e0000000000a00{number}"
        _ledger.mark_dirty(f"slot-{number}", fence=1, disk_identity=identity)
    ran = stoppable(bench, monkeypatch)
    outcome = wipe(slots=[slot(0), slot(1)])
    assert outcome.failure is None, outcome.failure
    assert ran == ["mdadm --stop /dev/md0"]
    assert len(outcome.facts["proofs"]) == 2


def test_a_mount_of_a_tenants_volume_is_never_taken_away(
    bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.disk()
    bench.hold("nvme1n1", "md0")
    bench.mount("259:1", "/mnt", "/dev/nvme1n1")
    ran = stoppable(bench, monkeypatch)
    _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)
    assert code() == "disk_in_use" and ran == []


def test_a_disk_that_another_slot_has_leased_is_refused(bench) -> None:
    bench.disk()
    _ledger.hold("slot-9", fence=1, allocation_id="alloc", disk_identity=DISK)
    assert code() == "disk_belongs_to_slot"
    _ledger.release("slot-9", fence=1)
    assert wipe().changed


def test_a_wipe_that_fails_leaves_the_disk_dirty(bench) -> None:
    namespace = bench.disk(leaves={"format"})
    bench.write("nvme1n1", 3 * MIB, b"data")
    outcome = wipe(methods=["user_data_erase"])
    assert outcome.failure.code == "wipe_not_verified"
    assert _ledger.load("slot-0").dirty and namespace.formats
    assert outcome.facts["proofs"] == {}


def test_one_blocked_slot_keeps_all_of_them_from_being_wiped(bench) -> None:
    bench.disk()
    bench.disk("nvme2n1", minor=7, eui="5e0000000000a001", serial="LABNVME1")
    bench.write("nvme1n1", 3 * MIB, b"data")
    bench.hold("nvme2n1", "md0")
    outcome = wipe(slots=[slot(0), slot(1)])
    assert outcome.failure is not None and not outcome.changed
    assert bench.read("nvme1n1", 3 * MIB, 4) == b"data"


def test_a_disk_is_not_wiped_by_its_kernel_name_alone(bench) -> None:
    bench.disk()
    with pytest.raises(Refusal, match="bundle_incomplete"):
        wipe(slots=[slot(0) | {"nvme_device": "nvme1n1", "nvme_eui": "", "nvme_serial": ""}])


@pytest.mark.covers("I7")
@pytest.mark.parametrize("dirty", [False, True])
def test_what_was_made_of_the_disk_between_plan_and_act_is_kept_unless_it_is_a_tenants(
    bench, dirty: bool
) -> None:
    bench.disk()
    if dirty:
        _ledger.mark_dirty("slot-0", fence=3, disk_identity=DISK)

    def overtaken(params: _change.Params, step: _change.Step) -> dict[str, Any]:
        bench.write("nvme1n1", 0, b"XFSB")
        return nvme_wipe.apply(params, step)

    racing = _change.Subject(nvme_wipe.observe, nvme_wipe.plan, overtaken, nvme_wipe.facts)
    outcome = wipe(racing)
    if dirty:
        assert outcome.failure is None and bench.read("nvme1n1", 0, 4) == bytes(4)
        return
    assert (outcome.failure.code, outcome.done) == ("changed_since_plan", [])
    assert outcome.failure.found == "xfs on nvme1n1"
    assert bench.read("nvme1n1", 0, 4) == b"XFSB"
    assert _ledger.entries() == [], "and nobody says that it is a tenant's"
