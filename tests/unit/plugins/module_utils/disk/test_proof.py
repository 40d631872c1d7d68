"""Proof of a wipe: samples, residue, and every use that ends the proof."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _slice_mode
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _proof
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("HOST-9")

MIB = 1 << 20
DISK, OTHER = "eui.5e0000000000a000", "eui.5e0000000000a001"


@given(
    size=st.integers(40 * MIB, 8 << 40).map(lambda size: size // 512 * 512),
    marks=st.lists(st.integers(0, 40 * MIB - 512), max_size=6),
    seed=st.binary(min_size=16, max_size=16),
)
def test_samples_cover_both_ends_and_every_mark(size: int, marks: list[int], seed: bytes) -> None:
    chosen = _proof.samples(size, marks, seed)
    assert chosen[0][0] == 0 and chosen[0][1] >= _proof.EDGE
    assert sum(chosen[-1]) == size and chosen[-1][1] >= _proof.EDGE
    assert all(offset % 4096 == 0 and length > 0 for offset, length in chosen)
    assert all(first[0] + first[1] < then[0] for first, then in pairwise(chosen))
    assert all(any(at <= mark < at + length for at, length in chosen) for mark in marks)


def test_samples_are_drawn_anew_for_each_seed() -> None:
    size = 1 << 40
    assert _proof.samples(size, [], b"a") != _proof.samples(size, [], b"b")
    assert len(_proof.samples(size, [], b"a")) >= _proof.SPOTS


def test_residue_names_the_pieces_that_are_not_zero(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(4 * MIB))
    with image.open("r+b") as handle:
        handle.seek(3 * MIB + 449)
        handle.write(b"x")
        handle.flush()
        assert _proof.residue(handle.fileno(), [(0, 4 * MIB)]) == [3 * MIB]
        assert _proof.residue(handle.fileno(), [(0, 2 * MIB)]) == []
        # Unreadable bytes are not proven.
        assert _proof.residue(handle.fileno(), [(4 * MIB, MIB)]) == [4 * MIB]


def proof(finished_at: str) -> dict[str, object]:
    return {"disk": DISK, "verified": True, "finished_at": finished_at}


def test_a_proof_stands_until_the_disk_is_written_to(tree: Path) -> None:
    assert _proof.standing(DISK) is None
    _proof.record(DISK, proof(_host.now()))
    assert _proof.standing(DISK) is not None
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=DISK)
    assert _proof.standing(DISK) is None
    newer = proof(_host.now())
    _ledger.mark_clean("slot-0", fence=1, disk_identity=DISK, proof=newer)
    assert _proof.standing(DISK) == newer


AHEAD, NOW = "2030-01-01T00:00:00+00:00", "2026-05-01T10:00:00+00:00"


def test_a_clock_that_was_ahead_keeps_no_proof_alive(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's clock jumps back after the takeover. The tenant's slot is then given up dirty."""
    _proof.record(DISK, proof(AHEAD))
    monkeypatch.setattr(_host, "now", lambda: NOW)
    _ledger.hold("slot-0", fence=1, allocation_id="23bd713b", disk_identity=DISK)
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=DISK)
    _ledger.give_up("slot-0", fence=2, allocation_id="23bd713b", reason="dead")
    assert _proof.standing(DISK) is None
    # A new erase counts, whatever the time of the mark.
    _proof.record(DISK, proof("2020-01-01T00:00:00+00:00"))
    assert _proof.standing(DISK) is not None


def test_a_used_disk_that_comes_back_has_no_proof_of_its_takeover(tree: Path) -> None:
    """Its slot was given up, and got another disk meanwhile."""
    _proof.record(DISK, proof(_host.now()), manifest="/var/log/gpuaas/taken.txt")
    _ledger.hold("slot-0", fence=1, allocation_id="23bd713b", disk_identity=DISK)
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=DISK)
    _ledger.give_up("slot-0", fence=2, allocation_id="23bd713b", reason="dead")
    _ledger.mark_dirty("slot-0", fence=3, disk_identity="eui.0")
    _ledger.mark_clean("slot-0", fence=3, disk_identity="eui.0", proof=proof("9"))
    assert _proof.standing(DISK) is None
    assert (_ledger.takeover(DISK) or {})["manifest"] == "/var/log/gpuaas/taken.txt"


def test_a_takeover_that_an_earlier_version_recorded_proves_nothing(tree: Path) -> None:
    """It does not tell whether the disk was used since."""
    _proof.record(DISK, proof(_host.now()))
    record = {**(_ledger.takeover(DISK) or {}), "marks": {}}
    _host.write(f"{_ledger.PROOFS}/{DISK}.json", json.dumps(record))
    assert _proof.standing(DISK) is None


def test_a_write_in_one_slot_ends_the_proof_in_another(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk belonged to slot-0 and was approved again in slot-1."""
    _ledger.mark_clean("slot-0", fence=1, disk_identity=DISK, proof=proof(AHEAD))
    monkeypatch.setattr(_host, "now", lambda: NOW)
    _ledger.mark_dirty("slot-1", fence=1, disk_identity=DISK)
    assert _proof.standing(DISK) is None


def test_an_old_transition_does_not_stand_in_for_a_lost_wipe_proof(tree: Path) -> None:
    _proof.record(DISK, proof(_host.now()))
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=DISK)
    _ledger.mark_clean("slot-0", fence=1, disk_identity=DISK, proof={})
    assert _proof.standing(DISK) is None


def slice_mode(state: str = "present", profile: str = "lab") -> _change.Outcome:
    params = {"state": state, "profile": profile}
    return _change.drive(_slice_mode.SUBJECT, params, check_mode=False)


@pytest.mark.covers("HOST-15", "I5")
def test_no_proof_outlives_the_hosts_time_as_an_ordinary_machine(tree: Path) -> None:
    """Its operator may have used any disk meanwhile, and the ledger has no record of it."""
    assert slice_mode().done == ["write_file"]
    _proof.record(DISK, proof(_host.now()), manifest="/var/log/gpuaas/taken.txt")
    _ledger.mark_clean("slot-1", fence=1, disk_identity=OTHER, proof=proof("9") | {"disk": OTHER})
    assert slice_mode(profile="other").done == ["write_file"]
    assert _proof.standing(DISK) and _proof.standing(OTHER), "it was a slice host all the time"
    # The sale of the whole machine relies on the proofs, and wipes the disks first.
    assert slice_mode("absent").done == ["remove_file"]
    assert _proof.standing(DISK) and _proof.standing(OTHER)
    back = slice_mode()
    assert back.done == ["end_proofs", "write_file"]
    assert back.plan.steps[0].before == ["slot-1", DISK]
    assert (_proof.standing(DISK), _proof.standing(OTHER)) == (None, None)
    assert (_ledger.takeover(DISK) or {})["manifest"] == "/var/log/gpuaas/taken.txt"
    assert _ledger.load("slot-1").fence == 1
    _proof.record(DISK, proof(_host.now()))
    assert not slice_mode().changed
    assert _proof.standing(DISK) is not None


@pytest.mark.covers("HOST-15", "I5")
@pytest.mark.parametrize("marker", [None, "not json", '{"mode": "baremetal"}'])
def test_no_interruption_makes_a_slice_host_with_old_proofs(
    tree: Path, monkeypatch: pytest.MonkeyPatch, marker: str | None
) -> None:
    if marker is not None:
        _host.write(_host_mode.MARKER, marker)
    for disk in (DISK, OTHER):
        _proof.record(disk, {**proof(_host.now()), "disk": disk})
    write, left = _host.write, [1]

    def interrupted(path: str, *given: Any, **named: Any) -> None:
        if not left:
            raise OSError("no space left on device")
        left.pop()
        write(path, *given, **named)

    monkeypatch.setattr(_host, "write", interrupted)
    assert slice_mode().failure is not None
    assert not _host_mode.is_slice()
    monkeypatch.setattr(_host, "write", write)
    assert slice_mode().done == ["end_proofs", "write_file"]
    assert (_proof.standing(DISK), _proof.standing(OTHER)) == (None, None)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"{_ledger.PROOFS}/{DISK}.json", "proof_unreadable"),
        (f"{_ledger.DIRECTORY}/slot-0.json", "ledger_unreadable"),
    ],
)
def test_a_host_with_an_unreadable_proof_is_not_put_into_slice_mode(
    tree: Path, path: str, code: str
) -> None:
    _host.write(path, "{")
    with pytest.raises(Refusal) as caught:
        slice_mode()
    assert caught.value.code == code and not _host_mode.is_slice()
    # Slice mode can always be ended.
    assert slice_mode("absent").failure is None


def test_a_wipe_also_answers_for_a_slot_that_is_not_used_any_more(tree: Path) -> None:
    _ledger.mark_dirty("slot-old", fence=1, disk_identity=DISK)
    _proof.record(DISK, proof(_host.now()))
    assert _proof.standing(DISK) is not None
    _ledger.mark_clean("slot-old", fence=1, disk_identity="", proof={})
    _ledger.hold("slot-old", fence=1, allocation_id="alloc", disk_identity=DISK)
    _ledger.mark_dirty("slot-old", fence=1, disk_identity=DISK)
    _proof.record(DISK, proof(_host.now()))
    assert _proof.standing(DISK) is None


def test_proofs_of_other_disks_do_not_count(tree: Path) -> None:
    _ledger.mark_clean("slot-0", fence=1, disk_identity=DISK, proof=proof("9") | {"disk": "eui.0"})
    assert _proof.standing(DISK) is None


def test_the_seal_covers_everything_but_the_slot() -> None:
    sealed = _proof.seal(proof("1"))
    assert _proof.seal({**sealed, "slot_id": "slot-0"})["digest"] == sealed["digest"]
    assert _proof.seal({**sealed, "verified": False})["digest"] != sealed["digest"]
    assert str(sealed["digest"]).startswith("sha256:") and os.sep not in str(sealed["digest"])
