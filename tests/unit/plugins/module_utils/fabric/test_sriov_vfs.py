"""Virtual functions of the site: they survive the way to slice mode and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_units,
    _change,
    _command,
    _host,
    _host_snapshot,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _sriov_vfs,
    _virtual_functions,
)

from tests.unit.plugins.module_utils.fabric.test_virtual_functions import NOBODY, PF, Card
from tests.unit.plugins.modules.test_forecast import Units, files

pytestmark = pytest.mark.covers("HOST-7", "HOST-15")

OTHER = "0000:26:00.0"
RECORD = _host_snapshot.file_of(_sriov_vfs.RECORD)
AUTOPROBE = f"{_pci.DEVICES}/{PF}/sriov_drivers_autoprobe"


class Host:
    """A host with a fabric card: iproute2, systemctl and a kernel that makes functions."""

    def __init__(self, pci: Any, patch: pytest.MonkeyPatch) -> None:
        pci.add(PF, "8086:10c9", class_code="020000", driver="igb", totalvfs=7, interface="ens30")
        self.pci, self.card, self.units = pci, Card(pci, patch), Units()
        patch.setattr(_command, "run", self.run)

    def run(self, argv: list[str], **more: Any) -> _command.Result:
        if argv[0] == "systemctl":
            return _command.Result(0, self.units.run(argv), "")
        return self.card.run(argv, **more)

    def has(self, count: int, *, autoprobe: bool = True, card: str = PF) -> None:
        """Set the site's own configuration."""
        self.pci.store(f"{_pci.DEVICES}/{card}/sriov_drivers_autoprobe", f"{autoprobe:d}")
        self.pci.store(f"{_pci.DEVICES}/{card}/sriov_numvfs", "0")
        self.pci.store(f"{_pci.DEVICES}/{card}/sriov_numvfs", str(count))

    def state(self) -> tuple[int, str | None]:
        return _pci.read(PF).sriov_numvfs, _host.read(AUTOPROBE)


@pytest.fixture
def host(pci: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(pci, monkeypatch)


def drive(
    count: int, subject: _change.Subject = _sriov_vfs.SUBJECT, *, check: bool = False, **more: Any
) -> _change.Outcome:
    params = {
        "pfs": [],
        "pf_ids": ["8086:10c9"],
        "link": "ethernet",
        "count": count,
        "macs": {},
        "idle_vlan": 0,
        **more,
    }
    return _change.drive(subject, params, check_mode=check)


def done(count: int, **more: Any) -> list[str]:
    outcome = drive(count, **more)
    assert outcome.failure is None, outcome.failure
    return outcome.done


def refused(outcome: _change.Outcome) -> Refusal:
    assert outcome.failure is not None
    return outcome.failure


def earlier(count: int) -> None:
    """Leave the state of a version that kept no record."""
    done(count)
    _host.remove(RECORD)


@pytest.mark.parametrize(("count", "autoprobe"), [(0, True), (2, True), (4, False)])
@pytest.mark.covers("I11")
def test_a_card_gets_back_exactly_what_it_had(host: Host, count: int, autoprobe: bool) -> None:
    host.has(count, autoprobe=autoprobe)
    was = host.state()
    assert done(4)[0] == "remember_before"
    assert host.state() == (4, "0")
    assert drive(4).facts["before"] == {PF: {"count": count, "autoprobe": autoprobe}}
    assert not drive(4).changed
    unit = _host.read("/etc/systemd/system/gpuaas-slice-fabric.service") or ""
    assert "Before=gpuaas-slice-vfio.service" in unit
    assert json.loads(_host.read(_virtual_functions.SETTINGS) or "")["count"] == 4

    names = set(_virtual_functions.card_at(PF).identities)
    assert done(0) == ["make_functions", "remove_service", "forget_before"]
    assert host.state() == was
    assert not names & set(_virtual_functions.card_at(PF).identities), (
        "none of ours stays under its name"
    )
    assert not _host.path(RECORD).exists()
    assert not drive(0).changed
    assert host.state() == was


def test_check_mode_tells_the_way_back(host: Host) -> None:
    host.has(2)
    done(4)
    before = files(host.pci.root)
    forecast = drive(0, check=True)
    assert files(host.pci.root) == before
    assert forecast.plan.steps[0].after == {"count": 2, "autoprobe": True, "remembered": True}
    outcome = drive(0)
    assert outcome.plan == forecast.plan
    assert outcome.done == [step.name for step in forecast.plan.steps]


def test_the_first_word_counts(host: Host) -> None:
    host.has(4, autoprobe=False)
    for index, name in enumerate(_virtual_functions.card_at(PF).desired_identities({}, 4)):
        host.card.identities[index] = {"address": name, "spoofchk": True}
    host.pci.set_flags("ens30", "0x1003")
    # The card needs no change, but its earlier state is still recorded.
    assert done(4) == ["remember_before", "install_service", "start_service"]
    host.has(1)
    assert "remember_before" not in done(4)
    done(0)
    assert host.state() == (4, "0")


def test_what_is_served_already_is_not_what_was_before(host: Host) -> None:
    earlier(2)
    host.has(1)
    assert done(2) == ["make_functions", "name_functions", "guard_functions"]
    assert not _host.path(RECORD).exists()
    assert drive(2).facts["before"] == {}

    forecast, outcome = drive(0, check=True), drive(0)
    plain = {"count": 0, "autoprobe": True, "remembered": False}
    assert forecast.plan.steps[0].after == outcome.plan.steps[0].after == plain
    assert outcome.done == ["make_functions", "remove_service"]
    assert host.state() == (0, "1")
    assert not drive(0).changed


def test_a_kind_of_card_that_the_profile_forgot_goes_back_without_a_record(host: Host) -> None:
    earlier(2)
    outcome = drive(0, pf_ids=[])
    assert outcome.done == ["make_functions", "remove_service"]
    assert host.state() == (0, "1")


# A site's own InfiniBand functions: the first configured by the site, the second not.
OWN = {"node guid": "0c:42:a1:03:00:7e:54:11", "port guid": "0c:42:a1:03:00:7e:54:12"}
OWNS = {
    0: {**OWN, "link_state": "enable"},
    1: {"node guid": NOBODY, "port guid": NOBODY, "link_state": "disable"},
}


@pytest.fixture
def infiniband(host: Host) -> Host:
    host.pci.interface("ens30", kind="32")
    return host


def vf_identities(host: Host) -> dict[int, dict[str, str]]:
    every = _virtual_functions._shown("ens30")
    return {int(vf["vf"]): {key: vf[key] for key in OWNS[0]} for vf in every}


@pytest.mark.covers("I11")
def test_a_sites_own_functions_of_infiniband_are_again_who_they_were(infiniband: Host) -> None:
    """The driver gives the identity of our functions to functions that are created later."""
    infiniband.has(2)
    infiniband.card.identities |= {index: dict(row) for index, row in OWNS.items()}
    assert drive(4, link="infiniband").failure is None
    assert {row["link_state"] for row in vf_identities(infiniband).values()} == {"auto"}
    assert done(4, link="infiniband") == []

    before = files(infiniband.pci.root)
    forecast = drive(0, link="infiniband", check=True)
    assert files(infiniband.pci.root) == before
    outcome = drive(0, link="infiniband")
    assert (outcome.plan, outcome.failure) == (forecast.plan, None)
    assert outcome.done == [
        "make_functions", "name_functions", "link_functions", "remove_service", "forget_before",
    ]  # fmt: skip
    assert vf_identities(infiniband) == OWNS
    assert not drive(0, link="infiniband").changed


def test_functions_of_which_a_record_says_nothing_are_nobody(infiniband: Host) -> None:
    """The site's functions, recorded by an earlier version: they may keep no identity of ours."""
    infiniband.has(2)
    done(4, link="infiniband")
    _host.write(RECORD, json.dumps({PF: {"count": 2, "autoprobe": True}}))
    done(0, link="infiniband")
    assert vf_identities(infiniband) == dict.fromkeys((0, 1), OWNS[1])
    assert not drive(0, link="infiniband").changed


def test_a_sites_link_state_on_ethernet_comes_back(host: Host) -> None:
    host.has(2)
    host.card.identities[1] = {"link_state": "enable"}
    assert done(2)[-2:] == ["install_service", "start_service"]
    assert _virtual_functions.card_at(PF).states == ("auto", "auto")
    assert "link_functions" in done(0)
    assert _virtual_functions.card_at(PF).states == ("auto", "enable")
    assert not drive(0).changed


def test_nothing_is_forgotten_while_the_sites_functions_are_others(
    infiniband: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes the names away between the restore and the removal of the record."""
    infiniband.has(2)
    infiniband.card.identities |= {index: dict(row) for index, row in OWNS.items()}
    done(4, link="infiniband")
    set_attribute = _virtual_functions._set_attribute

    def renamed_by_another(card: Any, index: int, word: str, value: str) -> None:
        set_attribute(card, index, word, value)
        infiniband.card.identities.clear()

    monkeypatch.setattr(_virtual_functions, "_set_attribute", renamed_by_another)
    assert refused(drive(0, link="infiniband")).code == "vfs_not_restored"
    assert _host.path(RECORD).exists()


@pytest.mark.parametrize(
    "functions",
    [
        "2",
        [{"identity": "", "link_state": "auto"}],
        [{"identity": "", "link_state": "auto"}, 7],
        [{"identity": "", "link_state": "auto"}, {"identity": "-rf", "link_state": "auto"}],
        [{"identity": "", "link_state": "auto"}, {"identity": "", "link_state": "down"}],
        [{"identity": "", "link_state": "auto"}, {"link_state": "auto"}],
    ],
)
def test_functions_in_the_record_that_nothing_can_be_told_are_refused(
    host: Host, functions: object
) -> None:
    done(4)
    was = {"count": 2, "autoprobe": True, "functions": functions}
    _host.write(RECORD, json.dumps({PF: was}))
    with pytest.raises(Refusal, match="before_unreadable"):
        drive(0)


def test_ids_without_the_link_are_refused(host: Host) -> None:
    """An Ethernet port with the same id would be sold as a function of the fabric."""
    assert refused(drive(2, link="")).code == "link_missing"
    assert host.state() == (0, "1")
    assert not _host.path(RECORD).exists()
    assert drive(2, link="", pfs=[PF], pf_ids=[]).failure is None


@pytest.mark.parametrize("recorded", [True, False])
def test_a_card_that_was_of_the_fabric_by_its_id_alone_is_given_back(
    host: Host, recorded: bool
) -> None:
    """A service of an earlier version, which had no link setting, made its functions."""
    host.has(1)
    done(2)
    settings = json.loads(_host.read(_virtual_functions.SETTINGS) or "")
    del settings["link"]
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    if not recorded:
        _host.remove(RECORD)
    assert refused(drive(2, link="infiniband")).code == "device_missing"
    assert done(0, link="infiniband")[0] == "make_functions"
    assert host.state() == ((1, "1") if recorded else (0, "1"))


@pytest.mark.parametrize(
    "settings",
    [
        "{broken",
        "[]",
        None,
        '{"pfs": "all", "pf_ids": []}',
        '{"pfs": ["0000:C1:00.0 "], "pf_ids": []}',
    ],
)
def test_settings_that_say_nothing_do_not_make_ours_the_sites(
    host: Host, settings: str | None
) -> None:
    earlier(2)
    if settings is None:
        _host.remove(_virtual_functions.SETTINGS)
    else:
        _host.write(_virtual_functions.SETTINGS, settings)
    assert done(2) == ["install_service"]
    assert not _host.path(RECORD).exists()


def test_a_card_that_came_later_has_its_own_first_word(host: Host) -> None:
    done(2)
    host.pci.add(OTHER, "15b3:a2dc", totalvfs=7, interface="ens31")
    host.has(1, card=OTHER)
    more = {"pf_ids": ["8086:10c9", "15b3:a2dc"]}
    first = drive(2, check=True, **more).plan.steps[0]
    was = {"count": 1, "autoprobe": True}
    assert (first.name, first.after[OTHER]) == ("remember_before", was)


def test_what_nobody_of_us_made_is_left_alone(host: Host) -> None:
    done(2)
    done(0)
    host.has(3)
    assert not drive(0).changed
    assert host.state() == (3, "1")


def test_a_card_that_the_profile_forgot_is_given_back_too(host: Host) -> None:
    host.has(2)
    done(4)
    done(0, pf_ids=[])
    assert host.state() == (2, "1")


def test_a_remembered_card_that_is_gone_keeps_nothing_from_going_back(host: Host) -> None:
    done(2)
    kept = json.loads(_host.read(RECORD) or "")
    _host.write(RECORD, json.dumps({**kept, OTHER: {"count": 2, "autoprobe": True}}))
    assert done(0) == ["make_functions", "remove_service", "forget_before"]


FORTH = ("remember_before", "make_functions", "name_functions", "install_service")
BACK = ("make_functions", "remove_service", "forget_before")


@pytest.mark.parametrize("last", FORTH)
@pytest.mark.covers("I11", "I12")
def test_an_interrupted_way_forth_can_be_gone_back(host: Host, last: str) -> None:
    host.has(2)
    interrupted(4, last)
    done(0)
    assert_restored(host)


@pytest.mark.parametrize("last", BACK)
@pytest.mark.covers("I11", "I12")
def test_an_interrupted_way_back_goes_on(host: Host, last: str) -> None:
    host.has(2)
    done(4)
    interrupted(0, last)
    done(0)
    assert_restored(host)


@pytest.mark.covers("I11", "I12")
def test_an_interrupted_way_either_way_may_be_turned(host: Host) -> None:
    host.has(2)
    interrupted(4, "make_functions")
    done(4)
    interrupted(0, "make_functions")
    done(4)
    done(0)
    assert_restored(host)


def interrupted(count: int, last: str) -> None:
    """Stop after the step is done and before it is recorded."""

    def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
        evidence = _sriov_vfs.apply(params, step)
        if step.name == last:
            raise OSError("killed")
        return evidence

    subject = _change.Subject(_sriov_vfs.observe, _sriov_vfs.plan, apply, _sriov_vfs.facts)
    assert drive(count, subject).failed_step == last


def assert_restored(host: Host) -> None:
    assert host.state() == (2, "1")
    assert not _virtual_functions.card_at(PF).ours({})
    assert not _host.path(RECORD).exists() and not _host.path(_virtual_functions.SETTINGS).exists()


def test_the_record_stays_until_the_card_is_what_it_says(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.has(2)
    done(4)
    make = host.pci._functions
    monkeypatch.setattr(host.pci, "_functions", lambda address, _count: make(address, 0))
    outcome = drive(0)
    assert (refused(outcome).code, outcome.failed_step) == ("vfs_not_restored", "remove_service")
    assert "0000:25:00.0: 0, autoprobe 1" in refused(outcome).found
    assert _host.path(RECORD).exists() and _host.path(_boot_units.FABRIC.path).exists()
    monkeypatch.setattr(host.pci, "_functions", make)
    done(0)
    assert host.state() == (2, "1")


def test_what_cannot_be_given_back_says_where_it_is_remembered(host: Host) -> None:
    done(2)
    _host.write(RECORD, json.dumps({PF: {"count": 9, "autoprobe": True}}))
    refusal = refused(drive(0))
    assert (refusal.code, refusal.found) == ("too_many_functions", "9")
    assert RECORD in refusal.remedy
    _host.write(RECORD, json.dumps({PF: {"count": 3, "autoprobe": True}}))
    (host.pci.folder(PF) / "net" / "ens30").rmdir()
    assert refused(drive(0)).code == "interface_missing"
    assert host.state() == (2, "0")


def test_functions_in_use_are_not_taken_for_the_sites(host: Host) -> None:
    host.has(2)
    done(2)
    host.pci._bind("0000:25:10.0", "vfio-pci")
    assert refused(drive(0)).code == "vf_in_use"
    assert host.state() == (2, "0")


@pytest.mark.parametrize(
    "record",
    [
        {PF: 2},
        {PF: {"count": 2}},
        {PF: {"count": True, "autoprobe": True}},
        {PF: {"count": -1, "autoprobe": True}},
        {PF: {"count": 2, "autoprobe": "1"}},
        {"../../etc": {"count": 2, "autoprobe": True}},
    ],
)
def test_a_record_that_says_something_else_is_refused(host: Host, record: dict[str, Any]) -> None:
    _host.write(RECORD, json.dumps(record))
    for count in (2, 0):
        with pytest.raises(Refusal, match="before_unreadable"):
            drive(count)
    assert host.state() == (0, "1")


def test_what_cannot_be_read_is_not_remembered_as_none(host: Host) -> None:
    host.has(2)
    number = host.pci.folder(PF) / "sriov_numvfs"
    number.unlink()
    number.mkdir()
    with pytest.raises(Refusal, match="file_unreadable"):
        drive(4)
    assert not _host.path(RECORD).exists()
