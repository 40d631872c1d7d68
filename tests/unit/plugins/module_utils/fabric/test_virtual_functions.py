"""Virtual functions of the fabric cards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _function_guards,
    _virtual_functions,
)

pytestmark = pytest.mark.covers("HOST-7")

PF = "0000:25:00.0"
MACS = ["02:a4:79:e9:da:2a", "02:af:19:91:4e:3d"]
GUID = "02:a4:79:e9:da:2a:a8:ac"
AUTO = {"link_state": "auto"}
NOBODY = "00:00:00:00:00:00:00:00"
NEW = {
    # As mlx5 makes them: without spoof check.
    "ethernet": {
        "address": "00:00:00:00:00:00",
        "link_state": "auto",
        "vlan_list": [{}],
        "spoofchk": False,
        "trust": False,
    },
    "infiniband": {"node guid": NOBODY, "port guid": NOBODY, "link_state": "disable"},
}
WORDS = {
    "mac": "address",
    "node_guid": "node guid",
    "port_guid": "port guid",
    "state": "link_state",
    "spoofchk": "spoofchk",
    "trust": "trust",
}


class Card:
    """iproute2 in front of a card: shows and sets the card's values per function."""

    def __init__(self, pci: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pci, self.calls = pci, []
        self.identities: dict[int, dict[str, Any]] = {}
        monkeypatch.setattr(_command, "run", self.run)
        self._make = pci._functions
        monkeypatch.setattr(pci, "_functions", self.make)

    def make(self, address: str, count: int) -> None:
        """Create functions. A function's values go with it, except values that mlx5 has set on
        InfiniBand: non-zero values there are given to functions that are created later."""
        if _pci.link(PF) == "ethernet":
            self.identities.clear()
        for identity in self.identities.values():
            for key in [key for key in identity if identity[key] in (NOBODY, "disable")]:
                del identity[key]
        self._make(address, count)

    def run(self, argv: list[str], **_: Any) -> _command.Result:
        self.calls.append(argv)
        assert argv[0] == "ip", argv
        if "show" in argv:
            count = _pci.read(PF).sriov_numvfs
            new = NEW[_pci.link(PF)]
            functions = [{"vf": i, **new, **self.identities.get(i, {})} for i in range(count)]
            return _command.Result(0, json.dumps([{"vfinfo_list": functions[::-1]}]), "")
        if argv[-1] == "up":
            self.pci.set_flags(argv[4], "0x1003")
            return _command.Result(0, "", "")
        values = self.identities.setdefault(int(argv[6]), {})
        if argv[7] == "vlan":
            values["vlan_list"] = [{"vlan": int(argv[8])}] if argv[8] != "0" else [{}]
        else:
            values[WORDS[argv[7]]] = {"on": True, "off": False}.get(argv[8], argv[8])
        return _command.Result(0, "", "")


@pytest.fixture
def card(pci: Any, monkeypatch: pytest.MonkeyPatch) -> Card:
    pci.add(PF, "8086:10c9", class_code="020000", driver="igb", totalvfs=7, interface="ens30")
    return Card(pci, monkeypatch)


def drive(count: int, **more: Any) -> _change.Outcome:
    cards = {"pfs": [], "pf_ids": ["8086:10c9"], "macs": {}}
    params = {**cards, "count": count, "idle_vlan": 0, **more}
    return _change.drive(_virtual_functions.LIVE, params, check_mode=False)


def refused(outcome: _change.Outcome) -> str:
    assert outcome.failure is not None and not outcome.done
    return outcome.failure.code


def test_makes_functions_with_derived_identities_once(card: Card) -> None:
    outcome = drive(2)
    assert outcome.failure is None
    assert outcome.done == ["make_functions", "raise_card", "name_functions", "guard_functions"]
    guard = {"vlan": 0, "spoof_check": True, "trust": False}
    assert outcome.facts["vfs"] == [
        {
            "pf": PF,
            "index": index,
            "address": f"0000:25:10.{index}",
            "identity": mac,
            **AUTO,
            **guard,
        }
        for index, mac in enumerate(MACS)
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
    assert card.identities[0] == dict.fromkeys(["node guid", "port guid"], GUID) | AUTO


def test_the_port_of_an_infiniband_function_follows_the_cards(card: Card, pci: Any) -> None:
    """A new function's port is down, and so is the guest's adapter, whatever its names are."""
    pci.interface("ens30", kind="32")
    outcome = drive(2)
    assert outcome.done == ["make_functions", "raise_card", "name_functions", "link_functions"]
    assert [vf["link_state"] for vf in outcome.facts["vfs"]] == ["auto", "auto"]
    assert drive(2).plan.steps == ()
    assert drive(3).failure is None
    assert _virtual_functions.card_at(PF).states == ("auto",) * 3


@pytest.mark.parametrize(("kind", "state"), [("32", "disable"), ("32", "enable"), ("1", "disable")])
def test_a_port_that_somebody_set_follows_again(
    card: Card, pci: Any, kind: str, state: str
) -> None:
    """This includes a guest's function: it comes up again, under its present name."""
    pci.interface("ens30", kind=kind)
    drive(2)
    pci._bind("0000:25:10.1", "vfio-pci")
    card.identities[1]["link_state"] = state
    assert _virtual_functions.card_at(PF).unlinked() == [
        f"function 1 of {PF} has link state {state}, not auto"
    ]
    assert drive(2).done == ["link_functions"]
    assert _virtual_functions.card_at(PF).unlinked() == []


def test_a_state_that_is_not_shown_is_none_on_infiniband(
    card: Card, pci: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(1)
    monkeypatch.setattr(
        "tests.unit.plugins.module_utils.fabric.test_virtual_functions.NEW",
        {"ethernet": {"trust": False}},
    )
    assert drive(1).plan.steps == ()
    pci.interface("ens30", kind="32")
    monkeypatch.setattr(
        "tests.unit.plugins.module_utils.fabric.test_virtual_functions.NEW", {"infiniband": {}}
    )
    assert _virtual_functions.card_at(PF).unlinked() == [
        f"function 0 of {PF} has link state unknown, not auto"
    ]


# A single id stands for these in a real server: port and class.
PORTS = [("32", "020700", "infiniband"), ("1", "020000", "ethernet"), ("", "020700", "infiniband")]


@pytest.mark.parametrize(("kind", "class_code", "speaks"), PORTS)
@pytest.mark.parametrize("link", ["infiniband", "ethernet"])
def test_only_cards_of_the_fabrics_link_get_functions(
    card: Card, pci: Any, kind: str, class_code: str, speaks: str, link: str
) -> None:
    """The id is the same; before a driver has taken a card, the class distinguishes the cards."""
    (pci.folder(PF) / "class").write_text(f"0x{class_code}\n")
    pci.interface("ens30", kind=kind)
    outcome = drive(1, link=link)
    if speaks == link:
        assert outcome.failure is None
        return
    assert refused(outcome) == "device_missing"
    assert f"{PF} is {speaks}, the fabric is {link}" in str(outcome.failure)
    assert _pci.functions(PF) == []


def test_a_card_that_shows_no_link_is_of_no_fabric(card: Card, pci: Any) -> None:
    (pci.folder(PF) / "class").write_text("0x028000\n")
    pci.interface("ens30", kind="772")
    outcome = drive(1, link="ethernet")
    assert refused(outcome) == "device_missing"
    assert f"{PF} shows no link" in str(outcome.failure)


def test_a_card_that_is_named_must_have_the_link_too(card: Card) -> None:
    named = {"pfs": [PF], "pf_ids": []}
    assert refused(drive(1, link="infiniband", **named)) == "wrong_link"
    assert _pci.functions(PF) == []
    assert drive(1, link="ethernet", **named).failure is None
    # Such a card can still lose its functions.
    assert drive(0, link="infiniband", **named).done == ["make_functions"]


@pytest.mark.parametrize("wrong", ["node guid", "port guid"])
def test_one_guid_that_is_right_says_nothing_about_the_other(
    card: Card, pci: Any, wrong: str
) -> None:
    pci.interface("ens30", kind="32")
    drive(1)
    card.identities[0][wrong] = "02:00:00:00:00:00:00:01"
    assert _virtual_functions.card_at(PF).ours({}), "it must not stay on the way back"
    assert drive(1).done == ["name_functions"]
    assert card.identities[0] == dict.fromkeys(["node guid", "port guid"], GUID) | AUTO


def test_what_ipoib_puts_before_the_cards_guid_names_nobody(card: Card, pci: Any) -> None:
    """Queue pair and subnet prefix differ after the driver has started again."""
    link, names = pci.interface("ens30", kind="32"), set()
    for before in ("80:00:10:29:fe:80:00:00:00:00:00:00", "80:00:0a:28:fe:c0:00:00:00:00:00:01"):
        (link / "address").write_text(f"{before}:0c:42:a1:03:00:7e:54:10\n")
        names.update(_virtual_functions.card_at(PF).desired_identities({}, 1))
    assert len(names) == 1


@pytest.mark.parametrize("kind", ["1", "32"])
def test_a_card_in_a_bond_names_its_functions_as_without(card: Card, pci: Any, kind: str) -> None:
    """The bond gives each of its cards the address of the same member."""
    link = pci.interface("ens30", kind=kind)
    assert drive(2).failure is None
    address = (link / "address").read_text()
    (link / "bonding_slave").mkdir()
    (link / "bonding_slave" / "perm_hwaddr").write_text(address)
    (link / "address").write_text("52:54:00:00:fa:99\n")
    assert _virtual_functions.card_at(PF).misnamed({}) == []
    assert drive(2).plan.steps == ()


def test_a_bond_that_cannot_be_read_gives_no_other_names(card: Card, pci: Any) -> None:
    (pci.interface("ens30") / "bonding_slave" / "perm_hwaddr").mkdir(parents=True)
    with pytest.raises(Refusal, match="file_unreadable"):
        drive(2)


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


class Over(BaseException):
    """The end of a watch, which has none by itself."""


def boot(*events: Callable[[], object]) -> None:
    """The boot service from its start; each event happens after one more round of its watch."""
    left = list(events)

    def sleep(_seconds: float) -> None:
        if not left:
            raise Over
        left.pop(0)()

    assert _boot_service.boot(_virtual_functions.LIVE, _virtual_functions.SETTINGS) == 0
    with contextlib.suppress(Over):
        _virtual_functions.watch(_virtual_functions.SETTINGS, sleep=sleep)


def test_boot_makes_them_again(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"pfs": [PF], "pf_ids": [], "count": 2, "macs": {}, "idle_vlan": 0}
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    boot()
    done = "done: make_functions, raise_card, name_functions, guard_functions\n"
    assert capsys.readouterr().out == done


@pytest.mark.covers("HOST-15")
def test_a_card_that_is_gone_keeps_nothing_from_going_back(card: Card) -> None:
    drive(1)
    (card.pci.folder(PF) / "net" / "ens30").rmdir()
    outcome = drive(0, pfs=[PF, "0000:99:00.0"])
    assert (outcome.failure, outcome.done) == (None, ["make_functions"])
    assert not drive(0, pfs=[PF, "0000:99:00.0"]).changed


VF = ["0000:25:10.0", "0000:25:10.1"]
ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
OTHER = "7d0f9a2e-1c34-4b5d-9e21-0a1b2c3d4e5f"


def guards() -> list[str]:
    return [guard.text() for guard in _virtual_functions.card_at(PF).guards]


def guarded(vlan: int) -> str:
    return f"VLAN {vlan}, spoof check on, trust off"


@pytest.mark.covers("SLICE-9")
def test_a_function_without_a_tenant_is_in_the_idle_vlan(card: Card) -> None:
    assert drive(2, idle_vlan=3000).failure is None
    assert guards() == [guarded(3000)] * 2
    # Rights go before the VLAN changes, for each function.
    words = [argv[7] for argv in card.calls if "vf" in argv and argv[6] == "0"]
    assert words == ["mac", "spoofchk", "vlan"]
    _function_guards.save(ALLOCATION, {VF[1]: 3001})
    outcome = drive(2, idle_vlan=3000)
    assert outcome.done == ["guard_functions"]
    assert outcome.facts["vfs"][1] | {"vlan": 3001} == outcome.facts["vfs"][1]
    assert not drive(2, idle_vlan=3000).changed


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    "shown",
    [
        {"vlan_list": [{"vlan": 3002}]},
        {"vlan_list": [{}]},
        {"vlan_list": [{"vlan": 3001}, {"vlan": 3002}]},
        {"vlan_list": [{"vlan": 3001, "protocol": "802.1ad"}]},
        {"spoofchk": False},
        {"trust": True},
    ],
)
def test_the_service_restores_a_guard_and_nothing_else(
    card: Card, shown: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _function_guards.save(ALLOCATION, {VF[1]: 3001})
    settings = {"pfs": [PF], "pf_ids": [], "count": 2, "macs": {}, "idle_vlan": 3000}
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    before: list[str] = []

    def disturb() -> None:
        before.extend(guards())
        card.identities[1].update(shown)
        card.calls.clear()

    boot(disturb, lambda: None)
    assert before == guards() == [guarded(3000), guarded(3001)]
    changed = [argv[6:8] for argv in card.calls if "vf" in argv]
    assert len(changed) == 1 and changed[0][0] == "1"
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and out[1].startswith(f"restored: {VF[1]} with {guarded(3001)}, was VLAN")


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    "text", [None, "null", "[]", "{", json.dumps({"pfs": [PF], "count": 2, "macs": {}})]
)
def test_lost_settings_move_no_function(
    card: Card, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """VLAN 0 is the cards' native network."""
    settings = {"pfs": [PF], "pf_ids": [], "count": 2, "macs": {}, "idle_vlan": 3000}
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    _function_guards.save(ALLOCATION, {VF[1]: 3001})

    def lose() -> None:
        _host.remove(_virtual_functions.SETTINGS)
        if text is not None:
            _host.write(_virtual_functions.SETTINGS, text)

    boot(lose, lambda: None, lambda: None)
    assert guards() == [guarded(3000), guarded(3001)]
    warning = "cannot compare the guards: settings_unreadable: "
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(warning)]
    # Neither does a restart of the service, nor a comparison.
    assert _virtual_functions.boot(_virtual_functions.SETTINGS) == 1
    with pytest.raises(Refusal, match="settings_unreadable"):
        list(_virtual_functions.restore_guards(_virtual_functions.recorded()))
    assert guards() == [guarded(3000), guarded(3001)]


@pytest.mark.covers("SLICE-9")
def test_the_service_reads_the_hosts_other_devices_once_a_minute(
    card: Card, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"pfs": [], "pf_ids": ["8086:10c9"], "count": 1, "macs": {}, "idle_vlan": 3000}
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    everything = _pci.devices
    rounds = 0
    looks: list[int] = []

    def look() -> list[_pci.Device]:
        looks.append(rounds)
        return everything()

    monkeypatch.setattr(_pci, "devices", look)

    def disturb() -> None:
        nonlocal rounds
        rounds += 1
        card.identities[0]["trust"] = True

    boot(*[disturb] * 24, lambda: None)
    assert guards() == [guarded(3000)]
    assert capsys.readouterr().out.count("restored: ") == 24
    assert [turn for turn in looks if turn] == [12, 24]


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"allocation_id": "' + OTHER + '", "vlans": {"0000:25:10.0": 3001}}',
        '{"allocation_id": "' + ALLOCATION + '", "vlans": {"0000:25:10.0": 4095}}',
        '{"allocation_id": "' + ALLOCATION + '", "vlans": {"0000:25:10.0": true}}',
        '{"allocation_id": "' + ALLOCATION + '", "vlans": {"../../25:10.0": 3001}}',
        '{"allocation_id": "' + ALLOCATION + '", "vlans": []}',
    ],
)
def test_a_guard_that_cannot_be_read_gives_nothing(card: Card, text: str) -> None:
    _host.write(f"/var/lib/gpuaas/fabric-guards/gpuaas-slice-{ALLOCATION}.json", text)
    _host.write(_object_names.fabric_guard_path(ALLOCATION), text)
    drive(1, idle_vlan=3000)
    assert guards() == [guarded(3000)]


@pytest.mark.covers("SLICE-9")
def test_a_function_that_two_allocations_name_belongs_to_neither(card: Card) -> None:
    _function_guards.save(ALLOCATION, {VF[0]: 3001})
    _function_guards.save(OTHER, {VF[0]: 3002})
    drive(1, idle_vlan=3000)
    assert guards() == [guarded(3000)]


@pytest.mark.covers("SLICE-9")
def test_a_card_that_cannot_isolate_is_no_success(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that takes the command and does not report the attribute."""
    monkeypatch.setitem(WORDS, "spoofchk", "ignored")
    outcome = drive(1, idle_vlan=3000)
    assert outcome.failure is not None
    assert "guard_functions" in str(outcome.failure)
    assert guards() == ["VLAN 3000, spoof check off, trust off"]
