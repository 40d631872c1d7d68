"""Clone of an image: byte for byte, once for each claim, never over a tenant's bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _device,
    _image_cache,
    _image_clone,
    _proof,
    _usage,
)
from ansible_collections.gpuaas.slice.plugins.modules import image_clone

pytestmark = pytest.mark.covers("SLICE-2")

MIB = 1 << 20
CONTENT = os.urandom(5 * MIB) + bytes(11 * MIB) + os.urandom(3 * MIB + 700)
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
DISK = "eui.5e0000000000a000"
SUBJECT = _change.Subject(
    image_clone.observe, image_clone.plan, image_clone.apply, image_clone.facts
)


SLOT = {
    "slot_id": "slot-0",
    "fence": 1,
    "nvme_device": "/dev/disk/by-id/nvme-eui.5e0000000000a000",
    "nvme_serial": "LABNVME0",
    "nvme_eui": "5e0000000000a000",
}


def clone(
    subject: _change.Subject = SUBJECT, *, fence: int = 1, check_mode: bool = False, **other: Any
) -> _change.Outcome:
    params = {
        "image_path": _image_cache.path_of(DIGEST),
        "digest": DIGEST,
        "size_bytes": len(CONTENT),
        "slot": {**SLOT, "fence": fence},
        "allocation_id": "alloc",
        "progress_path": "/run/gpuaas/clone.json",
    } | other
    return _change.drive(subject, params, check_mode=check_mode)


def codes(outcome: _change.Outcome) -> list[str]:
    assert outcome.failure is not None and not outcome.changed
    return [blocker.code for blocker in outcome.plan.blockers]


@pytest.fixture
def ready(bench):
    """A clean, proven disk held by the allocation, and the image in the cache."""
    bench.disk()
    # Old bytes that the proof missed; BLKZEROOUT must overwrite them.
    bench.write("nvme1n1", 7 * MIB, b"old bytes")
    _proof.record(DISK, {"disk": DISK, "verified": True, "finished_at": _host.now()})
    _ledger.hold("slot-0", fence=1, allocation_id="alloc", disk_identity=DISK)
    place = _host.path(_image_cache.path_of(DIGEST))
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    _image_cache.verify(_image_cache.path_of(DIGEST), DIGEST, len(CONTENT))
    return bench


def test_the_image_is_on_the_disk_byte_for_byte(ready) -> None:
    outcome = clone()
    assert outcome.failure is None, outcome.failure
    assert ready.read("nvme1n1", 0, len(CONTENT)) == CONTENT
    assert (outcome.facts["bytes"], outcome.facts["digest"]) == (len(CONTENT), DIGEST)
    assert outcome.facts["seconds"] > 0
    progress = json.loads(_host.read("/run/gpuaas/clone.json") or "")
    assert progress == {"done": len(CONTENT), "total": len(CONTENT)}
    assert _ledger.load("slot-0").dirty


def test_a_second_run_leaves_the_tenants_bytes_alone(ready, monkeypatch) -> None:
    clone()
    ready.write("nvme1n1", 2 * MIB, b"tenant")
    held = {"259:1": [_usage.Opener(9, "qemu-system-x86")]}
    monkeypatch.setattr(_usage, "openers", lambda _numbers: held)
    again = clone()
    assert (again.failure, again.changed) == (None, False)
    assert again.facts["bytes"] == len(CONTENT)
    assert ready.read("nvme1n1", 2 * MIB, 6) == b"tenant"


@pytest.mark.covers("I7", "P5")
def test_a_complete_clone_is_not_written_over_under_the_same_claim(ready) -> None:
    """Neither another image nor a run that hung between plan and clone writes it again."""

    def late(params: Any, step: _change.Step) -> Any:
        assert clone().failure is None
        ready.write("nvme1n1", 2 * MIB, b"tenant")
        return image_clone.apply(params, step)

    hung = clone(_change.Subject(image_clone.observe, image_clone.plan, late, image_clone.facts))
    assert hung.failure is not None and hung.failure.code == "already_cloned"
    other = clone(digest=f"sha256:{'0' * 64}")
    assert codes(other) == ["already_cloned"]
    assert ready.read("nvme1n1", 2 * MIB, 6) == b"tenant"


def test_check_mode_writes_nothing(ready) -> None:
    assert clone(check_mode=True).changed
    assert not any(ready.read("nvme1n1", 0, MIB)) and not _ledger.load("slot-0").dirty


@pytest.mark.covers("I7", "HOST-9")
@pytest.mark.parametrize(
    ("left_out", "code"),
    [
        ({"nvme_eui": ""}, "bundle_incomplete"),
        ({"nvme_serial": ""}, "bundle_incomplete"),
        ({"nvme_device": "/dev/nvme1n1"}, "kernel_name_not_allowed"),
    ],
)
def test_a_disk_is_not_written_to_by_its_place_alone(
    ready, left_out: dict[str, str], code: str
) -> None:
    with pytest.raises(image_clone.Refusal, match=code):
        clone(slot={**SLOT, **left_out})
    assert not any(ready.read("nvme1n1", 0, MIB))


@pytest.mark.covers("HOST-9")
def test_bytes_of_no_known_kind_on_a_proven_disk_are_somebodys(ready) -> None:
    ready.write("nvme1n1", 24 * MIB, b"rows of a database")
    assert codes(clone()) == ["unexpected_filesystem"]
    assert not _ledger.load("slot-0").dirty


@pytest.mark.covers("HOST-9")
def test_no_image_goes_onto_a_boot_card(ready) -> None:
    (namespace,) = ready.namespaces.values()
    namespace.model = "DELLBOSS VD"
    assert codes(clone()) == ["excluded_model"]
    namespace.model = "Other Card"
    assert codes(clone(exclude_models=["Other"])) == ["excluded_model"]


@pytest.mark.covers("P14")
def test_an_image_whose_digest_differs_reaches_no_disk(ready) -> None:
    assert codes(clone(digest="sha256:" + "0" * 64)) == ["image_digest_mismatch"]
    assert codes(clone(size_bytes=1)) == ["image_digest_mismatch"]
    assert codes(clone(image_path="/none.raw")) == ["image_not_cached"]
    assert not _ledger.load("slot-0").dirty


@pytest.mark.covers("P14")
def test_a_touched_image_is_read_whole_before_the_first_byte_is_written(ready) -> None:
    place = _host.path(_image_cache.path_of(DIGEST))
    os.utime(place)
    checked = clone(check_mode=True)
    assert [step.name for step in checked.plan.steps] == ["verify_image", "clone_image"]
    with place.open("r+b") as handle:
        handle.write(b"wrong")
    outcome = clone()
    assert outcome.failure.code == "image_digest_mismatch"
    assert outcome.failed_step == "verify_image" and not _ledger.load("slot-0").dirty
    assert not any(ready.read("nvme1n1", 0, MIB))


@pytest.mark.covers("P14")
def test_bytes_that_rot_unseen_are_caught_before_they_are_written(ready, monkeypatch) -> None:
    path = _image_cache.path_of(DIGEST)
    index = _image_cache.verified(path)
    with _host.path(path).open("r+b") as handle:
        handle.write(b"rotten")
    monkeypatch.setattr(_image_cache, "verified", lambda _path: index)
    outcome = clone()
    assert outcome.failure.code == "image_digest_mismatch"
    assert ready.read("nvme1n1", 0, 6) == bytes(6)
    assert _ledger.load("slot-0").dirty and _image_clone.finished("slot-0") is None
    # The next launch does not trust the file again, and fetches it.
    assert _image_cache.files(path) == [path]


@pytest.mark.covers("P14")
def test_an_image_that_its_disk_cannot_read_is_not_trusted_again(ready, monkeypatch) -> None:
    fill = _device.fill

    def failing(descriptor: int, view: memoryview, offset: int) -> int:
        if threading.current_thread() is not threading.main_thread() and offset:
            raise OSError(errno.EIO, "Input/output error")
        return fill(descriptor, view, offset)

    monkeypatch.setattr(_device, "fill", failing)
    outcome = clone()
    assert outcome.failure is not None and outcome.failure.code == "image_digest_mismatch"
    assert _image_cache.files(_image_cache.path_of(DIGEST)) == [_image_cache.path_of(DIGEST)]


@pytest.mark.covers("P14")
@pytest.mark.parametrize("verified", [True, False], ids=["another image", "a changed file"])
def test_a_file_that_was_replaced_after_the_plan_reaches_no_disk(ready, verified: bool) -> None:
    """The file in the cache is good when the clone is planned, and replaced before it begins."""
    path, other = _image_cache.path_of(DIGEST), bytes(MIB) + os.urandom(len(CONTENT) - MIB)

    def plan(params: _change.Params, state: image_clone.State) -> _change.Plan:
        planned = image_clone.plan(params, state)
        assert [step.name for step in planned.steps] == ["clone_image"] and not planned.blockers
        _host.path(path).write_bytes(other)
        if verified:
            _image_cache.verify(path, f"sha256:{hashlib.sha256(other).hexdigest()}", len(other))
        return planned

    late = _change.Subject(image_clone.observe, plan, image_clone.apply, image_clone.facts)
    outcome = clone(late)
    assert outcome.failure.code == "image_digest_mismatch"
    assert not any(ready.read("nvme1n1", 0, MIB)) and not _ledger.load("slot-0").dirty


def test_an_interrupted_clone_is_done_again_by_the_same_claim_only(ready) -> None:
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=DISK)
    assert clone(check_mode=True).failure is None
    assert "lease_not_held" in codes(clone(allocation_id="other"))
    assert codes(clone(fence=2)) == ["not_clean"]
    assert clone().failure is None


@pytest.mark.covers("I10")
def test_a_stale_fence_is_refused(ready) -> None:
    _ledger.hold("slot-0", fence=7, allocation_id="alloc", disk_identity=DISK)
    with pytest.raises(image_clone.Refusal, match="stale_fence"):
        clone(fence=6)


@pytest.mark.parametrize("clock", ["", "2100-01-01T00:00:00+00:00"], ids=["in order", "jumped"])
def test_a_wipe_after_the_clone_makes_it_due_again(ready, monkeypatch, clock: str) -> None:
    with monkeypatch.context() as patch:
        if clock:
            patch.setattr(_host, "now", lambda: clock)
        clone()
    ready.write("nvme1n1", 0, bytes(48 * MIB))
    proof = {"disk": DISK, "verified": True, "finished_at": _host.now()}
    _ledger.mark_clean("slot-0", fence=1, disk_identity=DISK, proof=proof)
    assert clone(check_mode=True).changed
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=DISK)
    assert clone(check_mode=True).changed


@pytest.mark.covers("I5")
def test_a_disk_without_proof_too_small_or_in_use_is_refused(ready) -> None:
    _host.remove(f"{_ledger.PROOFS}/{DISK}.json")
    assert codes(clone()) == ["not_clean"]
    ready.mount("259:1", "/mnt", "/dev/nvme1n1")
    assert codes(clone()) == ["disk_in_use", "not_clean"]
    os.truncate(ready.root / "dev/nvme1n1", MIB)
    assert "disk_too_small" in codes(clone())


@pytest.mark.covers("I7")
def test_a_filesystem_that_somebody_made_on_the_clean_disk_is_not_written_over(ready) -> None:
    def overtaken(params: _change.Params, step: _change.Step) -> Any:
        ready.write("nvme1n1", 0, b"XFSB")
        return image_clone.apply(params, step)

    racing = _change.Subject(image_clone.observe, image_clone.plan, overtaken, image_clone.facts)
    outcome = clone(racing)
    assert (outcome.failure.code, outcome.failed_step) == ("changed_since_plan", "clone_image")
    assert codes(clone()) == ["unexpected_filesystem"]
    assert ready.read("nvme1n1", 0, 4) == b"XFSB" and not _ledger.load("slot-0").dirty


def test_pieces_cover_the_image_and_join_zeros() -> None:
    stamp = _image_cache.Stamp(10 * 4, 0, 0, 0)
    index = _image_cache.Index(DIGEST, stamp, 8, ("a", "", "", "b", ""))
    assert list(_image_clone.pieces(index)) == [
        _image_clone.Piece(0, 8, "a"),
        _image_clone.Piece(8, 16, ""),
        _image_clone.Piece(24, 8, "b"),
        _image_clone.Piece(32, 8, ""),
    ]
