"""Write-off of holds: only those that the reconciler has written off; no record is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt, _pinning
from ansible_collections.gpuaas.slice.plugins.modules import slice_writeoff as module

pytestmark = pytest.mark.covers("HOST-15", "CTRL-7", "I10", "I12")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
TWO = "33bd713b-6073-4ef7-8a51-2897e902365d"
DISK = "eui.5e0000000000a003"
DEAD = {"slot_id": "slot-3", "fence": 9, "allocation_id": ONE, "reason": "no disk any more"}
PARAMS: dict[str, Any] = {"slots": [DEAD]}


@pytest.fixture
def host(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk of slot 3 died during a wipe; slot 4 is another tenant's."""
    monkeypatch.setattr(_libvirt, "processes", lambda _name: {})
    _ledger.hold("slot-3", fence=7, allocation_id=ONE, disk_identity=DISK)
    _ledger.mark_dirty("slot-3", fence=8, disk_identity=DISK)
    _ledger.hold("slot-4", fence=3, allocation_id=TWO, disk_identity="eui.5e0000000000a004")
    _pinning.record(ONE, {"cpus": [2]})
    _pinning.record(TWO, {"cpus": [3]})
    return tree


def drive(params: dict[str, Any], *, check_mode: bool = False) -> _change.Outcome:
    return _change.drive(module.SUBJECT, params, check_mode=check_mode)


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code if outcome.failure else ""


def test_it_is_given_up_once_and_stays_unwiped(host: Path) -> None:
    other = _ledger.load("slot-4")
    before = sorted(file.read_text() for file in host.rglob("*.json"))
    assert drive(PARAMS, check_mode=True).changed
    assert sorted(file.read_text() for file in host.rglob("*.json")) == before
    outcome = drive(PARAMS)
    assert (outcome.done, code(outcome)) == (["give_up_lease", "forget_plan"], "")
    assert outcome.facts == {"written_off": ["slot-3"]}
    entry = _ledger.load("slot-3")
    assert (entry.allocation_id, entry.fence, entry.dirty, entry.disk_identity) == (
        "",
        9,
        True,
        DISK,
    )
    assert entry.written_off is not None
    assert {**entry.written_off, "at": ""} == {
        "at": "", "allocation_id": ONE, "reason": "no disk any more"
    }  # fmt: skip
    # A run that was under way when the slot was written off comes too late.
    with pytest.raises(_change.Refusal, match="stale_fence"):
        _ledger.release("slot-3", fence=8)
    again = drive(PARAMS)
    assert (again.changed, again.facts) == (False, {"written_off": ["slot-3"]})
    assert _ledger.load("slot-4") == other
    assert (_pinning.recorded(ONE), _pinning.recorded(TWO)) == (None, {"cpus": [3]})


def test_what_the_host_never_saw_is_left_alone(host: Path) -> None:
    unknown = {**DEAD, "slot_id": "slot-9", "allocation_id": "43bd713b-6073-4ef7-8a51-2897e902365d"}
    outcome = drive({"slots": [unknown]})
    assert (outcome.changed, outcome.facts) == (False, {"written_off": []})
    assert [entry.slot_id for entry in _ledger.entries()] == ["slot-3", "slot-4"]


def test_the_plan_stays_while_the_allocation_has_another_slot(host: Path) -> None:
    _ledger.hold("slot-5", fence=1, allocation_id=ONE, disk_identity="eui.5e0000000000a005")
    assert drive(PARAMS).done == ["give_up_lease"]
    assert _pinning.recorded(ONE) == {"cpus": [2]}
    fifth = {**DEAD, "slot_id": "slot-5"}
    assert drive({"slots": [DEAD, fifth]}).done == ["give_up_lease", "forget_plan"]


def writeoff_params(**changes: Any) -> dict[str, Any]:
    return {"slots": [{**DEAD, **changes}]}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (writeoff_params(fence=7), "stale_fence"),
        (writeoff_params(allocation_id=TWO), "slot_leased"),
        (writeoff_params(slot_id="slot-4"), "slot_leased"),
    ],
)
def test_nothing_else_is_given_up(host: Path, given: dict[str, Any], refused: str) -> None:
    before = _ledger.entries()
    assert code(drive(given)) == refused
    assert _ledger.entries() == before


@pytest.mark.parametrize("what", ["/etc/libvirt/qemu", "/run/libvirt/qemu", "process"])
def test_not_while_its_machine_is_there(
    host: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name = f"gpuaas-slice-{ONE.replace('-', '')}"
    if what == "process":
        processes = {name: {4711: "qemu"}}
        monkeypatch.setattr(_libvirt, "processes", lambda marker: processes.get(marker, {}))
    else:
        _host.write(f"{what}/{name}.xml", "<domain/>")
    before = _ledger.entries()
    assert code(drive(PARAMS)) == "domain_present"
    assert _ledger.entries() == before


def test_the_ledger_itself_gives_up_for_nobody_else(host: Path) -> None:
    """The slot may have a new holder between the read and the act."""
    with pytest.raises(_change.Refusal, match="slot_leased"):
        _ledger.give_up("slot-3", fence=9, allocation_id=TWO, reason="x")
