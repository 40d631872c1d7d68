"""The ledger: an unreadable entry differs from an entry that was never written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

pytestmark = pytest.mark.covers("I10")

REPOSITORY = Path(__file__).resolve().parents[5]
SLOT, TENANT, OTHER = "slot-0", "23bd713b", "9c0e1b52"


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def cut_short(file: Path) -> None:
    file.write_text(file.read_text()[:-10])


def no_text(file: Path) -> None:
    file.write_bytes(b'{"slot_id": "slot-0", "allocation_id": "\xff"}')


def other_slot(file: Path) -> None:
    file.write_text(json.dumps({"slot_id": "slot-1"}))


def no_fence(file: Path) -> None:
    file.write_text(json.dumps({"slot_id": SLOT, "fence": None}))


def no_holder(file: Path) -> None:
    file.write_text(json.dumps({"slot_id": SLOT, "fence": 7, "allocation_id": False}))


BROKEN = [folder, loop, cut_short, no_text, other_slot, no_fence, no_holder]


@pytest.fixture
def entry(tree: Path) -> Path:
    """A slot that a tenant has, dirty, under fence 7."""
    _ledger.hold(SLOT, fence=7, allocation_id=TENANT, disk_identity="eui.1")
    _ledger.mark_dirty(SLOT, fence=7, disk_identity="eui.1")
    return tree / f"var/lib/gpuaas/ledger/{SLOT}.json"


@pytest.mark.parametrize("damage", BROKEN, ids=lambda case: case.__name__)
def test_a_broken_entry_is_no_fresh_one(entry: Path, damage: Callable[[Path], None]) -> None:
    damage(entry)
    asks: list[Callable[[], object]] = [
        lambda: _ledger.load(SLOT),
        lambda: _ledger.check(SLOT, 1),
        lambda: _ledger.hold(SLOT, fence=8, allocation_id=OTHER, disk_identity="eui.1"),
        lambda: _ledger.hold(_ledger.MACHINE, fence=8, allocation_id=OTHER, disk_identity=""),
        lambda: _ledger.mark_clean(SLOT, fence=8, disk_identity="eui.1", proof={}),
        lambda: _ledger.release(SLOT, fence=8),
        _ledger.entries,
    ]
    for ask in asks:
        with pytest.raises(Refusal) as caught:
            ask()
        assert caught.value.code == "ledger_unreadable"
        assert entry.name in caught.value.expected


def test_a_damaged_entry_is_written_anew_as_the_page_says(entry: Path) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text().partition("<!-- ledger entry -->")[2]
    anew = page.split("```")[1].removeprefix("json")
    words = {"SLOT": SLOT, "FENCE": "7", "IDENTITY": "1", "HOLDER": TENANT, "POWER": "5"}
    for word, value in words.items():
        anew = anew.replace(word, value)
    entry.write_text(anew)
    assert (_ledger.load(SLOT).disk_identity, _ledger.load(SLOT).dirty) == ("1", True)
    assert _ledger.load(SLOT).power_fence == 5
    for fence, holder in ((6, TENANT), (8, OTHER)):
        with pytest.raises(Refusal, match=r"stale_fence|disk_dirty"):
            _ledger.hold(SLOT, fence=fence, allocation_id=holder, disk_identity="1")


def test_a_ledger_that_is_no_folder_is_not_an_empty_one(tree: Path) -> None:
    (tree / "var/lib/gpuaas").mkdir(parents=True)
    (tree / "var/lib/gpuaas/ledger").write_text("")
    for ask in (_ledger.entries, lambda: _ledger.machine_taken("")):
        with pytest.raises(Refusal, match="ledger_unreadable"):
            ask()


def test_what_was_never_written_is_fresh(tree: Path) -> None:
    assert (_ledger.load(SLOT), _ledger.entries()) == (_ledger.Entry(SLOT), [])


def test_an_entry_of_an_earlier_release_is_read(tree: Path) -> None:
    """The entry has fewer fields; a missing field has its initial value."""
    file = tree / f"var/lib/gpuaas/ledger/{SLOT}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"slot_id": SLOT, "fence": 3}))
    assert _ledger.load(SLOT) == _ledger.Entry(SLOT, fence=3)


def test_the_file_names_the_disk_as_earlier_releases_did(tree: Path) -> None:
    entry = _ledger.hold(SLOT, fence=7, allocation_id=TENANT, disk_identity="eui.1")
    file = tree / f"var/lib/gpuaas/ledger/{SLOT}.json"
    kept = json.loads(file.read_text())
    assert kept == entry.document() and kept["disk"] == "eui.1" and "disk_identity" not in kept
    file.write_text(json.dumps({**kept, "disk_identity": "eui.2"}))
    with pytest.raises(Refusal, match="ledger_unreadable"):
        _ledger.load(SLOT)


def test_a_disk_that_is_used_in_one_slot_is_proven_in_none(tree: Path) -> None:
    """Its devices may have been approved anew, as another slot."""
    for slot in (SLOT, "slot-1"):
        _ledger.mark_clean(slot, fence=1, disk_identity="eui.1", proof={"verified": True})
    _ledger.mark_clean("slot-2", fence=1, disk_identity="eui.2", proof={"verified": True})
    _ledger.record_takeover("eui.1", {"proof": {"verified": True}})
    _ledger.mark_dirty("slot-1", fence=1, disk_identity="eui.1")
    assert _ledger.proven() == ["slot-2"]


def test_a_run_that_hangs_with_the_lock_is_named(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host, "LOCK_S", 0.2)
    with _ledger.locked(), pytest.raises(Refusal) as caught:
        _ledger.release(SLOT, fence=7)
    assert caught.value.code == "lock_held"
    assert _ledger.release(SLOT, fence=7).allocation_id == ""


def test_an_entry_refuses_what_the_hold_would(tree: Path) -> None:
    def codes(allocation_id: str, fence: int) -> list[str]:
        return [refusal.code for refusal in _ledger.load(SLOT).refusals(allocation_id, fence)]

    assert codes(OTHER, 7) == []
    _ledger.hold(SLOT, fence=7, allocation_id=TENANT, disk_identity="eui.1")
    assert codes(OTHER, 7) == ["slot_leased"]
    assert codes(OTHER, 6) == ["stale_fence"]
    assert codes(OTHER, 8) == []
    _ledger.mark_dirty(SLOT, fence=7, disk_identity="eui.1")
    assert codes(OTHER, 8) == ["disk_dirty"]
    assert codes(TENANT, 7) == []
