"""Fabric functions of an allocation, on answers of iproute2 as igb and mlx5 give them; not run on
hardware.
"""

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
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _function_guards,
    _slice_fabric,
    _virtual_functions,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _upkeep

from tests.unit.plugins.module_utils.fabric.test_virtual_functions import (
    ALLOCATION,
    MACS,
    OTHER,
    PF,
    VF,
    Card,
    drive,
    guarded,
    guards,
)

pytestmark = pytest.mark.covers("SLICE-9", "HOST-7")

SLOT = {"slot_id": "slot-0", "fence": 1, "fabric_vf_pci_address": VF[0]}
ELSEWHERE = "0000:25:10.6"


@pytest.fixture
def card(pci: Any, monkeypatch: pytest.MonkeyPatch) -> Card:
    """A bootstrapped card with two functions, both without a tenant."""
    pci.add(PF, "8086:10c9", class_code="020000", driver="igb", totalvfs=7, interface="ens30")
    card = Card(pci, monkeypatch)
    settings = {"pfs": [PF], "pf_ids": [], "count": 2, "macs": {}, "idle_vlan": 3000}
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    assert drive(2, idle_vlan=3000).failure is None
    return card


def run(state: str = "present", *, check: bool = False, **more: Any) -> _change.Outcome:
    params = {
        "allocation_id": ALLOCATION,
        "slots": [SLOT],
        "link": "ethernet",
        "vlan": 3001,
        "identities": {},
        "state": state,
        **more,
    }
    return _change.drive(_slice_fabric.SUBJECT, params, check_mode=check)


def test_a_tenants_function_is_in_its_vlan_until_it_is_taken_back(card: Card) -> None:
    assert run(check=True).changed and guards() == [guarded(3000)] * 2
    outcome = run()
    assert outcome.failure is None and outcome.done == ["keep_guard", "guard_function"]
    assert guards() == [guarded(3001), guarded(3000)]
    assert outcome.facts["functions"] == [
        {
            **{"address": VF[0], "pf": PF, "index": 0, "link": "ethernet", "identity": MACS[0]},
            **{"link_state": "auto", "vlan": 3001, "spoof_check": True, "trust": False},
        }
    ]
    assert not run().changed
    assert _slice_fabric.unguarded(VF[0]) == []
    back = run("absent")
    assert back.done == ["forget_guard", "guard_function"] and not run("absent").changed
    assert guards() == [guarded(3000)] * 2
    assert back.facts["functions"][0]["vlan"] == 3000


@pytest.mark.parametrize(
    ("more", "code", "found"),
    [
        ({"vlan": 0}, "vlan_invalid", "no VLAN"),
        ({"vlan": 3000}, "vlan_invalid", "VLAN 3000"),
        ({"vlan": 4095}, "vlan_invalid", "4095"),
        ({"vlan": -1}, "vlan_invalid", "-1"),
        ({"link": "infiniband"}, "wrong_link", "ethernet"),
        ({"identities": {VF[0]: "02:00:00:00:00:99"}}, "function_renamed", MACS[0]),
        ({"slots": [SLOT | {"fabric_vf_pci_address": ELSEWHERE}]}, "function_missing", "none"),
        ({"slots": [SLOT | {"fabric_vf_pci_address": PF}]}, "function_missing", "none"),
    ],
)
def test_what_would_isolate_nobody_is_refused(
    card: Card, more: dict[str, Any], code: str, found: str
) -> None:
    outcome = run(**more)
    assert outcome.failure is not None and not outcome.done
    assert (outcome.failure.code, outcome.failure.found) == (code, found)
    assert guards() == [guarded(3000)] * 2


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        ({"address": "02:00:00:00:00:99"}, "function_renamed"),
        ({"address": ""}, "function_renamed"),
        ({"link_state": "disable"}, "function_link_state"),
    ],
)
def test_a_function_that_is_not_as_approved_is_refused(
    card: Card, shown: dict[str, str], code: str
) -> None:
    card.identities[0].update(shown)
    outcome = run(identities={VF[0]: MACS[0]})
    assert outcome.failure.code == code


def test_another_allocations_function_is_not_touched(card: Card) -> None:
    _function_guards.save(OTHER, {VF[0]: 3002})
    drive(2, idle_vlan=3000)
    outcome = run()
    assert outcome.failure.code == "function_guarded"
    # The late release of an earlier tenant.
    _function_guards.save(ALLOCATION, {VF[1]: 3001})
    assert run("absent").done == ["forget_guard"]
    assert guards()[0] == guarded(3002)


def test_a_late_run_is_refused(card: Card) -> None:
    _ledger.hold(SLOT["slot_id"], fence=2, allocation_id=OTHER, disk_identity="eui.1")
    with pytest.raises(Refusal, match="stale_fence"):
        run()


def test_a_broken_guard_is_removed_with_the_slice(card: Card) -> None:
    run()
    _host.write(_slice_fabric._object_names.fabric_guard_path(ALLOCATION), "{")
    assert run("absent").failure is None
    assert _function_guards.saved(ALLOCATION) is None


def test_a_fabric_of_one_tenant_has_no_vlan(card: Card) -> None:
    settings = {"pfs": [PF], "pf_ids": [], "count": 2, "idle_vlan": 0}
    _host.write(_virtual_functions.SETTINGS, json.dumps(settings))
    drive(2)
    assert run(vlan=0).failure is None and guards()[0] == guarded(0)
    outcome = run()
    assert outcome.failure.code == "vlan_invalid"


def test_a_release_without_settings_moves_no_function(card: Card) -> None:
    """The VLAN of idle functions is unknown, and 0 is the cards' native network."""
    run()
    _host.remove(_virtual_functions.SETTINGS)
    with pytest.raises(Refusal, match="settings_unreadable"):
        run("absent")
    assert guards() == [guarded(3001), guarded(3000)]


def test_drift_and_absence_name_a_function_outside_its_vlan(card: Card) -> None:
    run()
    for shown in ({"vlan_list": [{}]}, {"spoofchk": False}, {"trust": True}):
        card.identities[0].update(shown)
        (problem,) = _slice_fabric.unguarded(VF[0])
        assert problem.code == "function_not_isolated"
        assert problem.expected == f"{VF[0]} with {guarded(3001)}"
        drive(2, idle_vlan=3000)
    _function_guards.forget(ALLOCATION)
    (problem,) = _slice_fabric.unguarded(VF[0])
    assert (problem.expected, problem.found) == (f"{VF[0]} with {guarded(3000)}", guarded(3001))


@pytest.mark.covers("SLICE-8")
def test_drift_restores_a_guard_and_makes_no_function(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = tuple(name for name in _upkeep.CHECKS if name == "fabric_isolation")
    monkeypatch.setattr(_upkeep, "CHECKS", checks)
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    fabric = {"pf_ids": ["8086:10c9"], "link": "ethernet", "vlans": [3000, 3099]}
    network = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
    _host.write(_baseline_files.SETTINGS, json.dumps(_baseline_files.settings(network)))
    params = {"profile": {"network": network, "vm": {}, "fabric": fabric}, "slots": []}
    run()
    assert _upkeep.keep(params, check_mode=False) == ([], [])
    card.identities[0].update({"vlan_list": [{}], "trust": True})
    (row,) = _upkeep.keep(params, check_mode=True)[1]
    assert row["code"] == "fabric_isolation" and guarded(3001) in row["found"]
    card.calls.clear()
    done, left = _upkeep.keep(params, check_mode=False)
    was = "was VLAN 0, spoof check on, trust on"
    assert (done, left) == ([f"{VF[0]} with {guarded(3001)}, {was}"], [])
    assert [argv[6:8] for argv in card.calls if "vf" in argv] == [["0", "trust"], ["0", "vlan"]]


def test_infiniband_verifies_names_and_ports_and_sets_nothing(card: Card, pci: Any) -> None:
    pci.interface("ens30", kind="32")
    drive(2)
    guid = _virtual_functions.card_at(PF).identities[0]
    card.calls.clear()
    outcome = run(link="infiniband", vlan=0, identities={VF[0]: guid})
    assert outcome.failure is None and not outcome.changed
    assert outcome.facts["functions"][0]["vlan"] is None
    assert not [argv for argv in card.calls if "set" in argv]
    card.identities[0]["link_state"] = "disable"
    refused = run(link="infiniband", vlan=0).failure
    assert refused.code == "function_link_state"
