"""Virtual functions of the fabric cards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _change,
    _command,
    _host,
    _pci,
    _sriov,
)

pytestmark = pytest.mark.covers("HOST-7")

PF = "0000:25:00.0"
MACS = ["02:a4:79:e9:da:2a", "02:af:19:91:4e:3d"]
GUID = "02:a4:79:e9:da:2a:a8:ac"


class Card:
    """iproute2 in front of one card: shows and sets what a card keeps per function."""

    def __init__(self, pci: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pci, self.calls = pci, []
        self.identities: dict[int, dict[str, str]] = {}
        monkeypatch.setattr(_command, "run", self.run)
        self._make = pci._functions
        monkeypatch.setattr(pci, "_functions", self.make)

    def make(self, address: str, count: int) -> None:
        """What a function was told goes with it."""
        self.identities.clear()
        self._make(address, count)

    def run(self, argv: list[str], **_: Any) -> _command.Result:
        self.calls.append(argv)
        assert argv[0] == "ip", argv
        if "show" in argv:
            count = _pci.read(PF).sriov_numvfs
            plain = {"address": "00:00:00:00:00:00"}
            functions = [{"vf": i, **self.identities.get(i, plain)} for i in range(count)]
            return _command.Result(0, json.dumps([{"vfinfo_list": functions[::-1]}]), "")
        if argv[-1] == "up":
            self.pci.set_flags(argv[4], "0x1003")
            return _command.Result(0, "", "")
        key = {"mac": "address", "node_guid": "node guid", "port_guid": "port guid"}[argv[7]]
        self.identities.setdefault(int(argv[6]), {})[key] = argv[8]
        return _command.Result(0, "", "")


@pytest.fixture
def card(pci: Any, monkeypatch: pytest.MonkeyPatch) -> Card:
    pci.add(PF, "8086:10c9", class_code="020000", driver="igb", totalvfs=7, interface="ens30")
    return Card(pci, monkeypatch)


def drive(count: int, **more: Any) -> _change.Outcome:
    params = {"pfs": [], "pf_ids": ["8086:10c9"], "count": count, "macs": {}, **more}
    return _change.drive(_sriov.LIVE, params, check_mode=False)


def refused(outcome: _change.Outcome) -> str:
    assert outcome.failure is not None and not outcome.done
    return outcome.failure.code


def test_makes_functions_with_derived_identities_once(card: Card) -> None:
    outcome = drive(2)
    assert outcome.failure is None
    assert outcome.done == ["make_functions", "raise_card", "name_functions"]
    assert outcome.facts["vfs"] == [
        {"pf": PF, "index": 0, "address": "0000:25:10.0", "identity": MACS[0]},
        {"pf": PF, "index": 1, "address": "0000:25:10.1", "identity": MACS[1]},
    ]
    assert drive(2).plan.steps == ()


def test_no_driver_of_the_host_may_take_a_function(card: Card) -> None:
    drive(1)
    assert _host.read(f"{_pci.DEVICES}/{PF}/sriov_drivers_autoprobe") == "0"
    drive(0)
    assert _host.read(f"{_pci.DEVICES}/{PF}/sriov_drivers_autoprobe") == "1"


def test_another_number_goes_through_zero(card: Card) -> None:
    drive(1)
    assert drive(3).failure is None
    assert len(_pci.functions(PF)) == 3
    assert drive(0).failure is None
    assert _pci.functions(PF) == []


def test_given_identities_win(card: Card) -> None:
    given = {f"{PF}/0": "02:00:00:00:00:AA"}
    assert drive(1, macs=given).facts["vfs"][0]["identity"] == "02:00:00:00:00:aa"


def test_infiniband_functions_get_guids(card: Card, pci: Any) -> None:
    pci.interface("ens30", kind="32")
    outcome = drive(1)
    assert outcome.failure is None
    assert card.identities[0] == dict.fromkeys(["node guid", "port guid"], GUID)


@pytest.mark.parametrize("wrong", ["node guid", "port guid"])
def test_one_guid_that_is_right_says_nothing_about_the_other(
    card: Card, pci: Any, wrong: str
) -> None:
    pci.interface("ens30", kind="32")
    drive(1)
    card.identities[0][wrong] = "02:00:00:00:00:00:00:01"
    assert _sriov.card_at(PF).ours({}), "it must not stay on the way back"
    assert drive(1).done == ["name_functions"]
    assert card.identities[0] == dict.fromkeys(["node guid", "port guid"], GUID)


def test_what_ipoib_puts_before_the_cards_guid_names_nobody(card: Card, pci: Any) -> None:
    """The queue pair and the subnet's prefix are others after the driver has started again."""
    link, names = pci.interface("ens30", kind="32"), set()
    for before in ("80:00:10:29:fe:80:00:00:00:00:00:00", "80:00:0a:28:fe:c0:00:00:00:00:00:01"):
        (link / "address").write_text(f"{before}:0c:42:a1:03:00:7e:54:10\n")
        names.update(_sriov.card_at(PF).wanted({}, 1))
    assert len(names) == 1


def test_a_function_bound_for_a_slice_survives_every_wish(card: Card, pci: Any) -> None:
    drive(2)
    pci._bind("0000:25:10.1", "vfio-pci")
    assert refused(drive(3)) == "vf_in_use"
    assert refused(drive(2, macs={f"{PF}/1": "02:00:00:00:00:bb"})) == "vf_in_use"
    assert drive(2).plan.steps == ()


def test_an_interface_of_the_host_that_is_up_counts_as_use(card: Card, pci: Any) -> None:
    drive(1)
    pci.interface("eth9", "0000:25:10.0")
    pci.set_flags("eth9", "0x1003")
    assert refused(drive(0)) == "vf_in_use"


def test_more_than_the_card_has_is_refused(card: Card) -> None:
    assert refused(drive(8)) == "too_many_functions"


def test_a_card_without_a_driver_is_refused(pci: Any) -> None:
    pci.add(PF, "8086:10c9", totalvfs=7)
    assert refused(drive(1)) == "interface_missing"


@pytest.mark.parametrize(
    "wish", [{"pf_ids": ["15b3:a2dc"]}, {"pfs": ["0000:99:00.0"], "pf_ids": []}]
)
def test_a_missing_card_is_refused(card: Card, wish: dict[str, list[str]]) -> None:
    assert refused(drive(1, **wish)) == "device_missing"


def test_boot_makes_them_again(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"pfs": [PF], "pf_ids": [], "count": 2, "macs": {}}
    _host.write(_sriov.SETTINGS, json.dumps(settings))
    assert _sriov.boot(_sriov.SETTINGS) == 0
    assert capsys.readouterr().out == "done: make_functions, raise_card, name_functions\n"


@pytest.mark.covers("HOST-15")
def test_a_card_that_is_gone_keeps_nothing_from_going_back(card: Card) -> None:
    drive(1)
    (card.pci.folder(PF) / "net" / "ens30").rmdir()
    outcome = drive(0, pfs=[PF, "0000:99:00.0"])
    assert (outcome.failure, outcome.done) == (None, ["make_functions"])
    assert not drive(0, pfs=[PF, "0000:99:00.0"]).changed
