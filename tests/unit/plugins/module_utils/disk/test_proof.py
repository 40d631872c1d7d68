from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _proof
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.covers("HOST-9")

MIB = 1 << 20
DISK = "eui.5e0000000000a000"


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
