"""Whole machine in the host's ledger: taken, in use, ended, free again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _proof
from ansible_collections.gpuaas.slice.plugins.modules import baremetal_lease as module
from ansible_collections.gpuaas.slice.plugins.modules import nvme_wipe

pytestmark = pytest.mark.covers("CTRL-15")

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
OTHER = "9c0e1b52-9d5a-4a55-8d0e-0a1d8c7f4f10"
BOOT = "0b0f3b4e-4f0e-4d6a-8f0c-2f6d1f1f7a51"
EUI = "5e0000000000a000"
IDENTITY, SLOT = f"eui.{EUI}", f"disk-{EUI}"
DISK: dict[str, Any] = {
    "slot_id": SLOT,
    "nvme_device": f"/dev/disk/by-id/nvme-eui.{EUI}",
    "nvme_serial": "LABNVME0",
    "nvme_eui": EUI,
    "nvme_size_bytes": 48 << 20,
}
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)
WIPE = _change.Subject(nvme_wipe.observe, nvme_wipe.plan, nvme_wipe.apply, nvme_wipe.facts)


TAKEN_OVER = {"disk": IDENTITY, "verified": True, "finished_at": "2026-01-01"}


@pytest.fixture
def host(bench):
    """A machine with an unused disk that was taken over under its identity."""
    bench.disk()
    _proof.record(IDENTITY, TAKEN_OVER)
    _host.write("/proc/sys/kernel/random/boot_id", BOOT)
    return bench


def lease(
    state: str = "held", subject: Any = SUBJECT, *, check_mode: bool = False, **more: Any
) -> _change.Outcome:
    params = {"allocation_id": ALLOCATION, "fence": 1, "disks": [DISK], "boot_id": BOOT}
    params |= {"written_off": [], "state": state}
    return _change.drive(subject, params | more, check_mode=check_mode)


def code(state: str = "held", **more: Any) -> str:
    outcome = lease(state, **more)
    assert outcome.failure is not None and not outcome.done
    return outcome.failure.code


def wipe(fence: int, *, raw: bool = False) -> _change.Outcome:
    slots = [{**DISK, "fence": fence}]
    params = {"slots": slots, "methods": ["user_data_erase"], "renew": False, "raw": raw}
    return _change.drive(WIPE, params, check_mode=False)


def test_the_life_of_a_lease(host) -> None:
    assert lease(check_mode=True).changed and _ledger.load("machine").fence == 0
    taken = lease()
    assert taken.failure is None and taken.facts["given"] is False
    assert taken.facts["slots"] == [{**DISK, "fence": 1}]
    assert wipe(1).failure is None
    given = lease("given")
    assert (given.facts["given"], given.facts["dirty"]) == (True, [SLOT])
    for state in ("held", "given"):
        assert lease(state).changed is False

    host.write("nvme1n1", 20 << 20, b"tenant")
    assert lease("ending", fence=2).failure is None
    assert code("released", fence=2) == "disk_dirty"
    assert wipe(2).failure is None
    assert host.read("nvme1n1", 20 << 20, 6) == bytes(6)
    free = lease("released", fence=2)
    assert (free.failure, free.facts["given"], free.facts["dirty"]) == (None, False, [])
    assert lease("released", fence=2).changed is False
    assert [entry.allocation_id for entry in _ledger.entries()] == ["", ""]


def test_a_disk_beside_the_tenants_with_the_bytes_of_another_is_refused(host) -> None:
    """It was written off with its slot and has come back: the tenant's root would read it."""
    _ledger.hold("n1-slot-7", fence=3, allocation_id=OTHER, disk_identity=IDENTITY)
    _ledger.mark_dirty("n1-slot-7", fence=3, disk_identity=IDENTITY)
    _ledger.give_up("n1-slot-7", fence=4, allocation_id=OTHER, reason="no disk any more")
    assert code(disks=[]) == "disk_dirty"
    (host.root / "dev/nvme1n1").unlink()
    assert lease(disks=[]).failure is None


def test_the_ledger_has_one_spelling_of_a_disks_identity(host) -> None:
    lease(disks=[{**DISK, "nvme_eui": EUI.upper()}])
    assert _ledger.load(SLOT).disk_identity == IDENTITY
    with pytest.raises(_change.Refusal, match="disk_misnamed"):
        lease(disks=[{**DISK, "nvme_eui": EUI.upper(), "slot_id": f"disk-{EUI.upper()}"}])


def test_a_repeated_provision_finds_the_machine_given_and_asks_nothing_of_its_disks(host) -> None:
    lease()
    lease("given")
    host.mount("259:1", "/data", "/dev/nvme1n1")
    again = lease()
    assert again.failure is None and again.facts["given"] is True


def test_a_crash_before_everything_was_marked_does_not_look_given(host) -> None:
    """Half a wipe leaves the disk dirty; the machine's mark alone shows a tenant in place."""
    lease()
    _ledger.mark_dirty(SLOT, fence=1, disk_identity=IDENTITY)
    again = lease()
    assert again.failure is None and again.facts["given"] is False
    assert wipe(1).done == ["wipe_disk"]


def test_what_the_tenant_wrote_into_the_ledger_saves_no_disk_from_the_wipe(host) -> None:
    lease()
    wipe(1)
    lease("given")
    forged = {"disk": IDENTITY, "verified": True, "finished_at": "2999-01-01"}
    _ledger.mark_clean(SLOT, fence=1, disk_identity=IDENTITY, proof=forged)
    _ledger.release("machine", fence=1)
    lease("ending", fence=2)
    assert wipe(2).done == ["wipe_disk"]


@pytest.mark.covers("I7", "I13")
def test_no_release_begins_on_a_machine_that_another_allocation_holds(host) -> None:
    """The records are older than the host's ledger, and contain only the earlier tenant."""
    present = "33bd713b-6073-4ef7-8a51-2897e902365d"
    lease(fence=2, allocation_id=present)
    wipe(2)
    lease("given", fence=2, allocation_id=present)
    host.write("nvme1n1", 20 << 20, b"tenant")
    for fence in (2, 3):
        assert code("ending", fence=fence) == "slot_leased"
    assert _ledger.load(SLOT).fence == 2
    assert lease("ending", fence=3, allocation_id=present).failure is None


@pytest.mark.parametrize("text", ['{"mode": "slice"}', "{}", "not json", "[]"])
def test_never_on_a_slice_host(host, text: str) -> None:
    _host.write(_host_mode.MARKER, text)
    for state in ("held", "given", "ending", "released"):
        assert code(state) == "node_in_slice_mode"
    assert not _ledger.entries()


def test_a_machine_that_was_a_slice_host_once_is_ordinary(host) -> None:
    _host.write(_host_mode.MARKER, json.dumps({"mode": "baremetal"}))
    assert lease().failure is None


@pytest.mark.covers("I10")
def test_an_older_claim_is_refused_in_every_state(host) -> None:
    lease("ending", fence=5)
    for state in ("held", "given", "ending", "released"):
        assert code(state, fence=4) == "stale_fence"


def test_what_speaks_against_taking_the_machine(host) -> None:
    assert code(boot_id="another") == "boot_changed"
    _ledger.hold("slot-0", fence=1, allocation_id=OTHER, disk_identity="eui.1")
    assert code() == "slot_leased"
    _ledger.release("slot-0", fence=1)
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=IDENTITY)
    assert code() == "disk_belongs_to_slot"
    _ledger.mark_clean("slot-0", fence=1, disk_identity=IDENTITY, proof={})
    _ledger.mark_dirty(SLOT, fence=1, disk_identity=IDENTITY)
    assert code() == "disk_dirty"
    assert wipe(1).failure is None
    assert lease().failure is None


@pytest.mark.covers("CTRL-15", "I5")
def test_a_disk_that_nobody_took_over_is_not_the_tenants(host) -> None:
    """A disk without a signature may hold data; only an approval by identity excludes that."""
    _host.remove(f"{_ledger.PROOFS}/{IDENTITY}.json")
    host.write("nvme1n1", 20 << 20, b"raw data")
    outcome = lease()
    assert outcome.failure is not None and not outcome.done
    assert outcome.failure.code == "not_clean"
    assert IDENTITY in outcome.failure.expected
    assert host.read("nvme1n1", 20 << 20, 8) == b"raw data"


@pytest.mark.covers("CTRL-15", "I5")
def test_a_proof_that_a_later_mark_outdates_does_not_count(host) -> None:
    _ledger.mark_dirty("slot-0", fence=1, disk_identity=IDENTITY)
    _ledger.mark_clean("slot-0", fence=1, disk_identity=IDENTITY, proof={})
    assert code() == "not_clean"


@pytest.mark.covers("CTRL-15", "I7")
@pytest.mark.parametrize(
    ("offset", "mark", "named"),
    [(0, b"XFSB", "xfs on nvme1n1"), (512, b"EFI PART", "gpt on nvme1n1")],
)
def test_a_disk_that_was_formatted_since_the_discovery_is_not_the_tenants(
    host, offset: int, mark: bytes, named: str
) -> None:
    host.write("nvme1n1", offset, mark)
    outcome = lease()
    assert outcome.failure is not None and not outcome.done
    assert (outcome.failure.code, outcome.failure.found) == ("unexpected_filesystem", named)
    assert IDENTITY in outcome.failure.expected
    assert host.read("nvme1n1", offset, len(mark)) == mark


@pytest.mark.covers("CTRL-15", "I7")
def test_a_disk_with_a_partition_is_not_the_tenants(host) -> None:
    host.partition("nvme1n1", 1 << 20, 20 << 20, minor=2)
    host.write("nvme1n1", 1 << 20, b"XFSB")
    outcome = lease()
    assert outcome.failure.code == "unexpected_filesystem"
    assert outcome.failure.found == "partition nvme1n1p1, xfs on nvme1n1p1"


@pytest.mark.covers("CTRL-15", "I7")
@pytest.mark.parametrize("when", ["before the wipe", "after the wipe"])
def test_what_was_made_since_the_lease_is_neither_wiped_nor_given_away(host, when: str) -> None:
    assert lease().failure is None
    if when == "after the wipe":
        assert wipe(1, raw=True).failure is None
    host.write("nvme1n1", 0, b"XFSB")
    assert code("given") == "unexpected_filesystem"
    refused = wipe(1, raw=True)
    assert refused.failure.code == "unexpected_filesystem"
    assert host.read("nvme1n1", 0, 4) == b"XFSB"
    # Nothing was done, so the machine can be given back.
    assert lease("released").failure is None


@pytest.mark.covers("CTRL-15", "I7")
def test_a_disk_that_somebody_uses_since_the_lease_is_not_given_away(host) -> None:
    lease()
    host.mount("259:1", "/data", "/dev/nvme1n1")
    assert code("given") == "disk_in_use"


def test_what_is_on_the_disk_of_an_interrupted_wipe_is_wiped_and_not_asked(host) -> None:
    assert lease().failure is None
    _ledger.mark_dirty(SLOT, fence=1, disk_identity=IDENTITY)
    host.write("nvme1n1", 512, b"EFI PART")
    assert lease().failure is None
    assert wipe(1).done == ["wipe_disk"]


@pytest.mark.covers("I2")
def test_a_slot_leased_between_look_and_lease_is_refused_by_the_ledger(host) -> None:
    looked = module.observe
    racing = _change.Subject(
        lambda params: (looked(params), _lease_slot())[0], module.plan, module.apply, module.facts
    )
    outcome = lease(subject=racing)
    assert (outcome.failure.code, outcome.failed_step) == ("slot_leased", "hold")
    assert _ledger.load("machine").allocation_id == ""


def _lease_slot() -> None:
    _ledger.hold("slot-0", fence=1, allocation_id=OTHER, disk_identity="eui.1")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nvme_serial": "OTHER"}, "identity_mismatch"),
        ({"nvme_size_bytes": 1}, "identity_mismatch"),
        ({"nvme_device": "/dev/disk/by-id/nvme-eui.0"}, "device_not_found"),
    ],
)
def test_another_disk_is_not_the_tenants(host, change: dict[str, Any], expected: str) -> None:
    assert code(disks=[{**DISK, **change}]) == expected


def test_a_disk_in_use_is_not_the_tenants(host) -> None:
    host.mount("259:1", "/mnt/data", "/dev/nvme1n1")
    assert code() == "disk_in_use"
    host.mount("259:1", "/boot", "/dev/nvme1n1")
    assert code() == "os_disk"


def test_a_slots_ledger_entry_is_never_touched_under_a_disks_name(host) -> None:
    with pytest.raises(_change.Refusal, match="disk_misnamed"):
        lease(disks=[{**DISK, "slot_id": "slot-0"}])
    with pytest.raises(_change.Refusal, match="disk_misnamed"):
        lease(disks=[{**DISK, "slot_id": _ledger.MACHINE}])


def test_nothing_is_given_that_is_not_held(host) -> None:
    assert code("given") == "machine_not_held"


def test_giving_back_leaves_another_tenant_alone(host) -> None:
    """A failed provision gives back its hold; by now the machine may have another tenant."""
    assert lease(fence=1).failure is None
    assert lease("released", fence=2, allocation_id=OTHER).done == []
    assert _ledger.load(SLOT).allocation_id == ALLOCATION
    assert lease("released", fence=2).done
    assert _ledger.load(SLOT).allocation_id == ""


def test_a_machine_that_lost_its_holder_but_not_its_mark_is_given_back(host) -> None:
    """A tenant with root removed its name from the ledger; the mark keeps others out."""
    lease()
    wipe(1)
    lease("given")
    _ledger.release("machine", fence=1)
    assert lease("ending", fence=2).failure is None and wipe(2).failure is None
    assert lease("released", fence=2).failure is None
    assert not _ledger.load("machine").dirty and _ledger.machine_taken(OTHER) == []


@pytest.mark.covers("I10", "I12")
def test_a_dead_disk_is_given_up_and_stays_dirty(host) -> None:
    """The disk does not block its machine for ever, and never counts as clean again."""
    dead_eui = "5e0000000000dead"
    dead = {
        **DISK,
        "slot_id": f"disk-{dead_eui}",
        "nvme_eui": dead_eui,
        "nvme_device": f"/dev/disk/by-id/nvme-eui.{dead_eui}",
    }
    for name, disk in ((SLOT, IDENTITY), (dead["slot_id"], f"eui.{dead_eui}"), ("machine", "")):
        _ledger.hold(name, fence=1, allocation_id=ALLOCATION, disk_identity=disk)
        _ledger.mark_dirty(name, fence=1, disk_identity=disk)
    assert code("ending", fence=2, disks=[], written_off=[DISK, dead]) == "disk_present"
    facts = lease("ending", fence=2, written_off=[dead]).facts
    assert [slot["slot_id"] for slot in facts["slots"]] == [SLOT], "the dead one is not wiped"
    assert code("released", fence=2, written_off=[dead]) == "disk_dirty", "the other one counts"
    assert wipe(2).failure is None
    free = lease("released", fence=2, written_off=[dead])
    assert (free.failure, free.facts["dirty"]) == (None, [dead["slot_id"]])
    assert sorted(free.done) == ["release"] * 3
    again = lease("released", fence=2, written_off=[dead])
    assert (again.failure, again.changed) == (None, False)
    entry = _ledger.load(dead["slot_id"])
    assert (entry.allocation_id, entry.dirty) == ("", True)
    assert _ledger.others_leased(OTHER) == []
