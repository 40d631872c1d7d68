"""Address reservation: made, refused when the address is taken, removed with its DHCP lease."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _slice_network
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq, _reservation
from ansible_collections.gpuaas.slice.plugins.modules import slice_lease_info

from tests.conftest import Script

pytestmark = pytest.mark.covers("SLICE-6")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
TWO = "33bd713b-6073-4ef7-8a51-2897e902365d"
PARAMS: dict[str, Any] = {
    "allocation_id": ONE,
    "mac": "52:54:00:64:00:0d",
    "ip": "10.100.0.13",
    "bridge": "ovsbr0",
    "state": "present",
}
ABSENT = {**PARAMS, "state": "absent"}


@pytest.fixture
def host(tree: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_slice_network, "dnsmasq_pid", lambda: 77)
    monkeypatch.setattr(_dnsmasq, "reload", lambda: None)
    script.on("dnsmasq", "--test", "--conf-file=-")
    for side in ("--orig-src", "--reply-src"):
        script.on("conntrack", "-L", side, "10.100.0.13", rc=0)
    return tree


def reserve(tree: Path, name: str, mac: str, ip: str) -> None:
    file = tree / _dnsmasq.file_of(name).lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{mac},id:*,{ip},other,12h\n")


def lease(tree: Path, mac: str, ip: str) -> Path:
    file = tree / _dnsmasq.LEASES.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"1700000000 {mac} {ip} trainer *\n")
    return file


def drive(params: dict[str, Any]) -> _change.Outcome:
    return _change.drive(_reservation.SUBJECT, params, check_mode=False)


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code if outcome.failure else ""


def test_reserve_and_reserve_again(host: Path) -> None:
    outcome = drive(PARAMS)
    assert (outcome.done, code(outcome)) == (["reserve_address"], "")
    assert outcome.facts["reservation"]["ip"] == "10.100.0.13"
    assert drive(PARAMS).done == []


@pytest.mark.parametrize(
    ("mac", "ip", "expected"),
    [
        ("52:54:00:64:00:0d", "10.100.0.99", "mac_in_use"),
        ("52:54:00:64:00:99", "10.100.0.13", "ip_in_use"),
    ],
)
def test_an_address_of_another_is_refused(host: Path, mac: str, ip: str, expected: str) -> None:
    reserve(host, TWO, mac, ip)
    assert code(drive(PARAMS)) == expected
    assert not (host / _dnsmasq.file_of(ONE).lstrip("/")).exists()


def test_a_live_lease_of_another_is_refused(host: Path) -> None:
    lease(host, "52:54:00:64:00:99", "10.100.0.13")
    assert code(drive(PARAMS)) == "ip_in_use"


def test_without_dnsmasq_nothing_is_written(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slice_network, "dnsmasq_pid", lambda: 0)
    assert code(drive(PARAMS)) == "dnsmasq_down"


def test_what_dnsmasq_does_not_accept_is_not_written(host: Path, script: Script) -> None:
    script.answers[("dnsmasq", "--test", "--conf-file=-")] = []
    script.on("dnsmasq", "--test", "--conf-file=-", rc=1, err="bad dhcp-host")
    assert code(drive(PARAMS)) == "command_failed"
    assert not (host / _dnsmasq.file_of(ONE).lstrip("/")).exists()


def test_give_back_and_give_back_again(
    host: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    leases = lease(host, "52:54:00:64:00:0d", "10.100.0.13")

    def release(interface: str, entry: _dnsmasq.Lease) -> str:
        assert (interface, entry.ip) == ("ovsbr0", "10.100.0.13")
        leases.write_text("")
        return "released"

    monkeypatch.setattr(_dnsmasq, "release", release)
    listing = ("conntrack", "-L", "--orig-src", "10.100.0.13")
    script.answers[listing] = []
    script.on(*listing, out="tcp 6\n").on(*listing)
    script.on("ss", "--kill", "--tcp", "--", "state", "connected", "dst", "10.100.0.13")
    for side in ("--orig-src", "--reply-src"):
        script.on("conntrack", "-D", side, "10.100.0.13", rc=1)
    script.on("nft", "-f", "-")
    outcome = drive(ABSENT)
    assert outcome.done == ["remove_reservation", "release_lease", "forget_connections"]
    assert outcome.evidence["release_lease"] == {"10.100.0.13": "released"}
    assert drive(ABSENT).done == []


def test_a_late_release_leaves_the_next_holder_alone(host: Path) -> None:
    reserve(host, TWO, "52:54:00:64:00:0d", "10.100.0.13")
    lease(host, "52:54:00:64:00:0d", "10.100.0.13")
    assert drive(ABSENT).done == []


def test_a_late_run_reserves_nothing(host: Path) -> None:
    """Its reservation would shut out the slot's next tenant; a removal is never too late."""
    slots = [{"slot_id": "s1", "fence": 3}]
    assert drive({**PARAMS, "slots": slots}).done == ["reserve_address"]
    drive(ABSENT)
    _ledger.raise_fence("s1", fence=4)
    with pytest.raises(Refusal) as refusal:
        drive({**PARAMS, "slots": slots})
    assert refusal.value.code == "stale_fence"
    assert not (host / _dnsmasq.file_of(ONE).lstrip("/")).exists()
    assert code(drive({**ABSENT, "slots": slots})) == ""


@pytest.mark.covers("ECO-1")
def test_the_list_of_holds_has_leases_machine_and_addresses(host: Path) -> None:
    drive(PARAMS)
    reserve(host, TWO, "52:54:00:64:00:0e", "10.100.0.14")
    # The second guest has leased the first guest's address, too; the first guest has no lease.
    lines = lease(host, "52:54:00:64:00:0e", "10.100.0.13")
    lines.write_text(lines.read_text() + "1700000000 52:54:00:64:00:0e 10.100.0.14 vm *\n")
    _ledger.hold("slot-3", fence=7, allocation_id=ONE, disk_identity="eui.03")
    _ledger.mark_dirty("slot-3", fence=7, disk_identity="eui.03")
    _ledger.raise_fence("slot-4", fence=2)
    everything = slice_lease_info.look({"allocation_id": None})
    rows = [(row["slot_id"], row["fence"], row["allocation_id"]) for row in everything["leases"]]
    assert rows == [("slot-3", 7, ONE), ("slot-4", 2, "")]
    assert (everything["leases"][0]["disk"], everything["leases"][0]["dirty"]) == ("eui.03", True)
    assert [(row["allocation_id"], row["leased"]) for row in everything["reservations"]] == [
        (ONE, False),
        (TWO, True),
    ]
    theirs = slice_lease_info.look({"allocation_id": TWO})
    assert (theirs["leases"], theirs["machine"]["allocation_id"]) == ([], "")
    assert [row["ip"] for row in theirs["reservations"]] == ["10.100.0.14"]


@pytest.mark.covers("ECO-1")
def test_the_holder_of_the_whole_machine_is_in_every_list(host: Path) -> None:
    _ledger.hold(_ledger.MACHINE, fence=1, allocation_id=TWO, disk_identity="")
    holds = slice_lease_info.look({"allocation_id": ONE})
    assert (holds["leases"], holds["machine"]["allocation_id"]) == ([], TWO)


@pytest.mark.covers("ECO-1")
def test_an_unreadable_hold_is_not_left_out(host: Path) -> None:
    _ledger.raise_fence("slot-4", fence=2)
    (host / _ledger.DIRECTORY.lstrip("/") / "slot-4.json").write_text("{")
    with pytest.raises(Refusal, match="ledger_unreadable"):
        slice_lease_info.look({"allocation_id": ONE})
    with pytest.raises(Refusal, match="spec_invalid"):
        slice_lease_info.look({"allocation_id": "slot-4"})
