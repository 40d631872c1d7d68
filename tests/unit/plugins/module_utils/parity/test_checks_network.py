"""Network checks: a host without network for its guests never passes, whatever services report."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _boot_units,
    _change,
    _command,
    _file_edits,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _function_guards,
    _ipoib_address,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _bridge,
    _guards,
    _host_filter,
    _nat,
    _ovs_nat,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _checks_network,
    _guest_probe,
)

from tests.unit.plugins.fake_switch import FakeSwitch
from tests.unit.plugins.module_utils import netplan
from tests.unit.plugins.module_utils.conftest import UNITS

pytestmark = pytest.mark.covers("HOST-10")

NAT = ("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING")
FILTER = ("iptables", "--wait", "10", "-S")
NETWORK: dict[str, Any] = {
    "bridge": "ovsbr0",
    "address": "10.100.0.1/24",
    "subnet": "10.100.0.0/24",
    "tmfifo": False,
    "allowed_networks": [],
    "denied_networks": [],
    "name_servers": [],
    "packets_per_second": 200_000,
    "egress_probe": "10.0.2.2",
}
RULES = _nat.rules(NETWORK)
UP = "loaded/active/enabled/success"
FABRIC_SETTINGS: dict[str, Any] = {
    "count": 1,
    "idle_vlan": 3000,
    "link": "ethernet",
    "macs": {},
    "pf_ids": ["8086:10c9"],
    "pfs": [],
}


@pytest.fixture
def bootstrapped(machine: Any) -> Any:
    """A host with the files of the network baseline, written by bootstrap's own code."""
    _boot_service.install(_ovs_nat.unit(NETWORK))
    _host.write(_baseline_files.SYSCTL, _baseline_files.SYSCTLS)
    _host.write(_baseline_files.DNSMASQ, _baseline_files.dnsmasq(NETWORK))
    return machine


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (UP, "PASS"),
        ("loaded/active/disabled/success", "FAIL"),
        ("loaded/failed/enabled/exit-code", "FAIL"),
        ("not-found/inactive//", "FAIL"),
    ],
)
def test_the_baseline_service(
    parity: Any, bootstrapped: Any, script: Any, state: str, status: str
) -> None:
    parity.units(baseline=state)
    assert _checks_network.network_service(parity.facts()).status == status


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps({**NETWORK, "subnet": "10.9.0.0/24"}), "has another subnet than the profile"),
        (json.dumps({**NETWORK, "extra": 1}), "has another extra than the profile"),
        (
            json.dumps({**NETWORK, "allowed_networks": ["10.0.0.0/8"]}),
            "has another allowed_networks than the profile",
        ),
        (
            "[]",
            "has another address, allowed_networks, bridge, denied_networks, egress_probe, "
            "name_servers, packets_per_second, subnet, tmfifo than the profile",
        ),
        ("not json", "is missing or unreadable"),
    ],
)
def test_a_boot_service_told_otherwise_is_no_proof(
    parity: Any, bootstrapped: Any, text: str, problem: str
) -> None:
    parity.units(baseline=UP)
    assert _checks_network.network_service(parity.facts()).status == "PASS"
    bootstrapped.file(_baseline_files.SETTINGS, text)
    result = _checks_network.network_service(parity.facts())
    assert result == _check.failed(f"{_baseline_files.SETTINGS} {problem}")


def test_the_older_service_is_at_most_a_warning(parity: Any, script: Any) -> None:
    parity.units(old="loaded/active/enabled/success")
    assert _checks_network.historical_network_service(parity.facts()).status == "WARN"


CARD = {"class": "0x020000", "sriov_numvfs": "1", "sriov_totalvfs": "7"}


def test_functions_must_be_there_and_be_functions(parity: Any, machine: Any) -> None:
    parity.units(fabric=UP)
    parity.installed(_boot_units.FABRIC, **FABRIC_SETTINGS)
    assert _checks_network.fabric_vfs(parity.facts()).status == "FAIL"
    card = {"class": "0x020000", "sriov_numvfs": "0", "sriov_totalvfs": "7"}
    machine.pci("0000:25:00.0", "8086:10c9", **card)
    assert _checks_network.fabric_vfs(parity.facts()).detail == "0000:25:00.0 has 0 of 1 functions"
    (machine.root / "sys/bus/pci/devices/0000:25:00.0/sriov_numvfs").write_text("1")
    machine.pci("0000:25:10.0", "8086:10ca")
    assert "is no virtual function" in _checks_network.fabric_vfs(parity.facts(parity.slot)).detail
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    parity.identified({"address": parity.mac})
    assert _checks_network.fabric_vfs(parity.facts(parity.slot)).status == "PASS"
    # A second card has lost its function, which a slot has.
    machine.pci("0000:45:00.0", "8086:10c9", **card)
    second = parity.slot | {"fabric_vf_pci_address": "0000:45:10.0"}
    assert _checks_network.fabric_vfs(parity.facts(parity.slot, second)) == _check.warned(
        "0000:45:00.0 has 0 of 1 functions; 0000:45:10.0 is not there: its slot is blocked"
    )
    # Without a slot that has it, the whole check fails, because it blocks no slot.
    assert _checks_network.fabric_vfs(parity.facts(parity.slot)).status == "FAIL"
    assert _checks_network.fabric_vfs(parity.facts(second)).status == "FAIL"


GUID = "02:a4:79:e9:da:2a:a8:ac"
OTHER = "02:00:00:00:00:00:00:01"
AUTO = {"link_state": "auto"}


@pytest.mark.parametrize(
    ("kind", "shown", "problem"),
    [
        ("1", {"address": "02:a4:79:e9:da:2a"}, ""),
        ("1", {"address": "02:00:00:00:00:01"}, "is 02:00:00:00:00:01, not 02:a4:79:e9:da:2a"),
        ("1", {"address": "00:00:00:00:00:00"}, "is 00:00:00:00:00:00, not"),
        ("1", {}, "is nobody, not 02:a4:79:e9:da:2a"),
        ("1", {"address": "02:a4:79:e9:da:2a", "link_state": "disable"}, "link state disable, not"),
        ("32", {"node guid": GUID, "port guid": GUID, **AUTO}, ""),
        ("32", {"node guid": GUID, "port guid": OTHER}, f"is {GUID} and {OTHER}, not {GUID}"),
        ("32", {"node guid": OTHER, "port guid": GUID}, f"is {OTHER} and {GUID}, not {GUID}"),
        (
            "32",
            {"node guid": GUID, "port guid": GUID, "link_state": "disable"},
            "function 0 of 0000:25:00.0 has link state disable, not auto",
        ),
        ("32", {"node guid": GUID, "port guid": GUID}, "has link state unknown, not auto"),
    ],
)
def test_functions_have_the_identities_that_slice_mode_gives(
    parity: Any, machine: Any, kind: str, shown: dict[str, str], problem: str
) -> None:
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    machine.pci("0000:25:10.0", "8086:10ca")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    machine.file("/sys/class/net/ens30/type", f"{kind}\n")
    parity.units(fabric=UP)
    link = {"1": "ethernet", "32": "infiniband"}[kind]
    parity.installed(_boot_units.FABRIC, **FABRIC_SETTINGS | {"link": link})
    parity.identified(shown)
    fabric = {**parity.profile["fabric"], "link": link}
    result = _checks_network.fabric_vfs(parity.facts(fabric=fabric))
    assert (result.status == "FAIL", problem in result.detail) == (bool(problem), True), result


IDLE = {"vlan_list": [{"vlan": 3000}], "spoofchk": True, "trust": False}
ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    ("shown", "fabric", "problem"),
    [
        (IDLE, {}, ""),
        (IDLE | {"spoofchk": False}, {}, "found VLAN 3000, spoof check off, trust off"),
        (IDLE | {"trust": True}, {}, "found VLAN 3000, spoof check on, trust on"),
        (IDLE | {"vlan_list": [{"vlan": 3001}]}, {}, "found VLAN 3001"),
        (IDLE | {"vlan_list": [{}]}, {}, "found VLAN 0"),
        ({"vlan_list": [{"vlan": 3000}]}, {}, "spoof check not reported, trust not reported"),
        (IDLE, {"vlans": []}, "the profile names no fabric.vlans"),
        (IDLE, {"isolation": "partition"}, "partition does not isolate a fabric of this link"),
        (IDLE | {"vlan_list": [{}]}, {"isolation": "single_tenant", "vlans": []}, ""),
        (IDLE | {"trust": True}, {"isolation": "single_tenant", "vlans": []}, "trust on"),
    ],
)
def test_functions_are_kept_apart_as_the_profile_says(
    parity: Any, machine: Any, shown: dict[str, Any], fabric: dict[str, Any], problem: str
) -> None:
    """On answers of iproute2 as igb and mlx5 give them; not run on hardware."""
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    machine.pci("0000:25:10.0", "8086:10ca")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    parity.identified({"address": parity.mac, **shown})
    facts = parity.facts(fabric={**parity.profile["fabric"], **fabric})
    result = _checks_network.fabric_isolation(facts)
    assert (result.status == "FAIL", problem in result.detail) == (bool(problem), True), result


@pytest.mark.covers("SLICE-9")
def test_a_kept_guard_is_of_the_profiles_vlans(parity: Any, machine: Any) -> None:
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    machine.pci("0000:25:10.0", "8086:10ca")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    for vlan, status in ((3001, "PASS"), (3099, "PASS"), (3100, "FAIL"), (3000, "FAIL")):
        _function_guards.save(ALLOCATION, {"0000:25:10.0": vlan})
        parity.identified({"address": parity.mac, **IDLE, "vlan_list": [{"vlan": vlan}]})
        assert _checks_network.fabric_isolation(parity.facts()).status == status


@pytest.mark.covers("SLICE-9")
def test_a_guard_that_a_run_is_about_to_set_is_waited_for(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    machine.pci("0000:25:10.0", "8086:10ca")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    parity.identified({"address": parity.mac, **IDLE})
    facts = parity.facts()
    _function_guards.save(ALLOCATION, {"0000:25:10.0": 3001})
    facts.card("0000:25:00.0")

    def end_run(**_wait: float) -> contextlib.AbstractContextManager[None]:
        parity.identified({"address": parity.mac, **IDLE, "vlan_list": [{"vlan": 3001}]})
        return contextlib.nullcontext()

    monkeypatch.setattr(_function_guards, "exclusive", end_run)
    assert _checks_network.fabric_isolation(facts).status == "PASS"


@pytest.mark.covers("SLICE-9")
def test_a_fabric_without_functions_isolates_nobody(parity: Any) -> None:
    assert _checks_network.fabric_isolation(parity.facts()).status == "FAIL"


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("ethernet", ""),
        ("infiniband", "0000:25:00.0 is ethernet, the fabric is infiniband"),
        ("", "0000:25:00.0 is ethernet; the profile names none"),
    ],
)
def test_a_slots_function_is_of_a_card_with_the_fabrics_link(
    parity: Any, machine: Any, link: str, problem: str
) -> None:
    """Next to a fabric card with the same id, whose functions are correct."""
    parity.units(fabric=UP)
    parity.installed(_boot_units.FABRIC, **FABRIC_SETTINGS | {"link": link})
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    machine.pci("0000:25:10.0", "8086:10ca")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    parity.identified({"address": parity.mac})
    machine.pci("0000:26:00.0", "8086:10c9", **CARD | {"class": "0x020700", "sriov_numvfs": "2"})
    fabric = {**parity.profile["fabric"], "link": link, "vfs_per_pf": 1}
    result = _checks_network.fabric_vfs(parity.facts(parity.slot, fabric=fabric))
    assert (result.status == "FAIL", problem in result.detail) == (bool(problem), True), result
    assert (f"0000:25:10.0 is a slot's: {problem}" in result.detail) == bool(problem)


def test_a_slots_function_is_of_a_card_of_the_profile(parity: Any, machine: Any) -> None:
    parity.units(fabric=UP)
    parity.installed(_boot_units.FABRIC, **FABRIC_SETTINGS)
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    parity.identified({"address": parity.mac})
    machine.pci("0000:27:00.0", "8086:1521", **CARD)
    machine.pci("0000:25:10.0", "8086:1520")
    machine.function("0000:27:00.0", 0, "0000:25:10.0")
    result = _checks_network.fabric_vfs(parity.facts(parity.slot))
    why = "0000:27:00.0 is no card of the profile's fabric"
    assert result == _check.failed(f"0000:25:10.0 is a slot's: {why}")


@pytest.mark.parametrize(
    ("unit", "settings", "problem"),
    [
        (UP, {}, ""),
        (UP, {"count": 0}, "has another count than the profile"),
        (UP, {"pf_ids": []}, "has another pf_ids than the profile"),
        (UP, {"macs": {"0000:25:00.0/0": "02:00:00:00:00:01"}}, "has another macs than"),
        (UP, None, "is missing or unreadable"),
        ("loaded/active/disabled/success", {}, "would not start at boot"),
        ("not-found/inactive//", {}, "is not-found"),
    ],
)
def test_functions_must_come_back_at_the_next_boot(
    parity: Any, machine: Any, unit: str, settings: dict[str, Any] | None, problem: str
) -> None:
    machine.pci("0000:25:00.0", "8086:10c9", **CARD)
    parity.units(fabric=unit)
    parity.installed(_boot_units.FABRIC, **{**FABRIC_SETTINGS, **(settings or {})})
    if settings is None:
        machine.file(_boot_units.FABRIC.settings_path, "no json")
    result = _checks_network.fabric_vfs(parity.facts())
    assert (result.status == "FAIL", problem in result.detail) == (bool(problem), True)


NETPLAN = """network:
  version: 2
  ethernets:
    ibp65s0:
      addresses: [10.20.0.7/16]
"""


@pytest.fixture
def planned(machine: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host whose files netplan reads."""
    monkeypatch.setattr(_command, "run", netplan.before(script.run))
    return machine


def route_by(script: Any, *links: str) -> None:
    hops = [{"dev": link, "weight": 1, "flags": []} for link in links]
    rows = [{"dst": "10.20.0.0/16", "flags": [], "nexthops": hops}]
    script.on("ip", "-j", "-4", "route", "show", "table", "main", out=json.dumps(rows))


def test_fabric_address_route_and_netplan(parity: Any, planned: Any, script: Any) -> None:
    parity.shown(("ibp65s0", "10.20.0.7/16"), ("tmfifo_net0", "192.168.100.1/30"))
    route_by(script, "ibp65s0")
    planned.file(_ipoib_address.FILE, NETPLAN)
    assert _checks_network.fabric_address(parity.facts()).status == "PASS"
    assert _checks_network.fabric_route(parity.facts()).status == "PASS"
    assert _checks_network.ipoib_netplan(parity.facts()).status == "PASS"
    assert _checks_network.tmfifo(parity.facts()).status == "PASS"


@pytest.mark.parametrize(
    "links", [("ibp",), ("ibp66s0",), ("eth0",), ("ibp65s0", "eth0"), ("eth0", "ibp65s0")]
)
def test_a_route_by_another_link_than_the_addresss_is_none(
    parity: Any, script: Any, links: tuple[str, ...]
) -> None:
    """This holds even if only a single hop of several leads elsewhere, first or last."""
    parity.shown(("eth0", "192.0.2.7/24"), ("ibp66s0", "10.30.0.7/16"), ("ibp65s0", "10.20.0.7/16"))
    route_by(script, *links)
    result = _checks_network.fabric_route(parity.facts())
    other = f"one leads by {', '.join(links)}"
    assert result == _check.failed(f"no route to 10.20.0.0/16 by ibp65s0; {other}")


@pytest.mark.parametrize("site_address", ["", "10.20.0.7"])
def test_a_route_over_several_links_of_the_fabric_passes(
    parity: Any, script: Any, site_address: str
) -> None:
    parity.shown(("eth0", "192.0.2.7/24"), ("ibp66s0", "10.20.0.7/16"), ("ibp65s0", "10.20.0.7/16"))
    route_by(script, "ibp65s0", "ibp66s0")
    fabric = {**parity.profile["fabric"], "site_address": site_address}
    result = _checks_network.fabric_route(parity.facts(fabric=fabric))
    assert result == _check.passed("10.20.0.0/16 by ibp65s0, ibp66s0")


def test_the_profiles_interface_is_the_one_that_counts(
    parity: Any, planned: Any, script: Any
) -> None:
    fabric = {**parity.profile["fabric"], "interface": "ibp66s0"}
    parity.shown(("ibp65s0", "10.20.0.7/16"), ("ibp66s0", "10.30.0.7/16"))
    route_by(script, "ibp65s0")
    planned.file(_ipoib_address.FILE, NETPLAN)
    facts = parity.facts(fabric=fabric)
    assert [
        _checks_network.fabric_address(facts),
        _checks_network.fabric_route(facts),
        _checks_network.ipoib_netplan(facts),
    ] == [
        _check.failed("no interface ibp66s0 has 10.20.0.7/16"),
        _check.failed("no interface has 10.20.0.7/16 for a route to 10.20.0.0/16"),
        _check.failed(f"{_ipoib_address.FILE} gives 10.20.0.7/16 to ibp65s0, not to ibp66s0"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (NETPLAN, "network: {}\n", "does not give 10.20.0.7/16"),
        (NETPLAN, "addresses: [10.20.0.7/16]\n", "unknown key 'addresses'"),
        ("  addresses: [10.20.0.7/16]", "  # was: 10.20.0.7/16\n      {}", "does not give"),
        ("10.20.0.7/16", "110.20.0.7/16", "does not give"),
        ("10.20.0.7/16", "10.20.0.7/160", "invalid prefix length"),
        ("10.20.0.7/16", "10.20.0.7", "is missing /prefixlength"),
        ("ibp65s0", "eth0", "gives 10.20.0.7/16 to eth0, not to an interface ibp*"),
    ],
)
def test_a_file_that_does_not_give_the_address_is_no_proof(
    parity: Any, planned: Any, old: str, new: str, problem: str
) -> None:
    parity.shown()
    assert old in NETPLAN
    planned.file(_ipoib_address.FILE, NETPLAN.replace(old, new))
    result = _checks_network.ipoib_netplan(parity.facts())
    assert (result.status, problem in result.detail) == ("FAIL", True), result.detail


def test_another_file_that_netplan_refuses_is_no_proof(parity: Any, planned: Any) -> None:
    """netplan takes all of its files or none."""
    parity.shown()
    planned.file(_ipoib_address.FILE, NETPLAN)
    assert _checks_network.ipoib_netplan(parity.facts()).status == "PASS"
    planned.file("/etc/netplan/99-site.yaml", "networks: {}\n")
    result = _checks_network.ipoib_netplan(parity.facts())
    assert result.status == "FAIL"
    assert "/etc/netplan/99-site.yaml:1:1: Error" in result.detail


def test_a_netplan_of_ours_is_as_it_was_written(parity: Any, planned: Any) -> None:
    fabric = {**parity.profile["fabric"], "interface": "ibp65s0"}
    facts = parity.facts(fabric=fabric)
    settings = {"interface": "ibp65s0", "address": "10.20.0.7/16", "route": "10.20.0.0/16"}
    planned.file(_ipoib_address.FILE, _ipoib_address.text(settings))
    assert _checks_network.ipoib_netplan(facts).status == "PASS"
    planned.file(_ipoib_address.FILE, f"{_ipoib_address.text(settings)}      mtu: 2044\n")
    result = _checks_network.ipoib_netplan(facts)
    assert (result.status, "mtu: 2044" in result.detail) == ("FAIL", True)


def test_fabric_missing(parity: Any, machine: Any, script: Any) -> None:
    parity.shown()
    assert _checks_network.fabric_address(parity.facts()).status == "FAIL"
    assert _checks_network.fabric_route(parity.facts()).status == "FAIL"
    assert _checks_network.ipoib_netplan(parity.facts()).status == "FAIL"
    assert _checks_network.tmfifo(parity.facts()).status == "FAIL"


@pytest.mark.parametrize(
    ("file", "link", "problem"),
    [
        ("enabled", ("tmfifo_net0", "192.168.100.1/30"), ""),
        ("disabled", ("tmfifo_net0", "192.168.100.1/30"), "rshim.service is disabled: "),
        ("", ("tmfifo_net0", "192.168.100.1/30"), "rshim.service is not-found: "),
        ("enabled", ("tmfifo_net0", "192.168.7.1/30"), "tmfifo_net0: 192.168.7.1/30"),
        ("enabled", ("ens30", "192.168.100.1/30"), "tmfifo_net0 is missing"),
    ],
)
def test_the_cards_link_is_there_now_and_after_the_next_boot(
    parity: Any, script: Any, file: str, link: tuple[str, str], problem: str
) -> None:
    parity.shown(link)
    units = (*UNITS[:-1], "rshim.service", UNITS[-1])
    row = f"LoadState={'loaded' if file else 'not-found'}\nUnitFileState={file}\n"
    script.on(*units, out="\n".join([row] * len(units[4:])))
    result = _checks_network.tmfifo(parity.facts(network=NETWORK | {"tmfifo": True}))
    assert (result.status, result.detail.startswith(problem or link[1])) == (
        "FAIL" if problem else "PASS", True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("took", "verdict"),
    [
        (None, _check.failed("192.168.100.2 is silent")),
        (0.26, _check.passed("0.3 ms")),
        # An answer faster than the clock's resolution counts too.
        (0.0, _check.passed("0.0 ms")),
    ],
)
def test_the_cards_own_system_must_answer(
    parity: Any, monkeypatch: pytest.MonkeyPatch, took: float | None, verdict: _check.Verdict
) -> None:
    """The link may be up, with its address, while the system on the card is down."""
    monkeypatch.setattr(
        _guest_probe, "echo", lambda target: took if target == "192.168.100.2" else 9.9
    )
    assert _checks_network.rshim_peer(parity.facts()) == verdict


def test_a_linux_bridge_of_the_right_name_is_not_enough(
    parity: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity.shown(("ovsbr0", "10.100.0.1/24"))
    guest(monkeypatch, Refusal("command_failed", expected="", found="no bridge", remedy=""))
    monkeypatch.setattr(_guards, "tables", lambda _network: None)
    script.on("ovs-vsctl", "--timeout=10", "br-exists", "ovsbr0", rc=2)
    result = _checks_network.ovs_bridge(parity.facts())
    assert result.detail == "ovsbr0 is no bridge of Open vSwitch"


def test_a_switch_that_cannot_hold_a_guard_is_named(
    parity: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = FakeSwitch(features="CT state: No\n", meter_features="max_meter:0\n")
    switch.add_bridge()
    monkeypatch.setattr(_command, "run", switch.run)
    monkeypatch.setattr(_guards, "ROUND_S", 0)
    guest(monkeypatch, Refusal("command_failed", expected="", found="no meters", remedy=""))
    (tree / "proc/net").mkdir(parents=True, exist_ok=True)
    (tree / "proc/net/fib_trie").write_text("Local:\n |-- 10.20.0.2\n  /32 host LOCAL\n")
    network = {**NETWORK, "allowed_networks": ["10.20.0.0/16"], "egress_probe": "9.9.9.9"}
    problems = " ".join(_checks_network._isolation(parity.facts(network=network)))
    for code in ("connection_tracking_missing", "packet_limit_missing", "contains 10.20.0.2"):
        assert code in problems


_OWN = "-A POSTROUTING -s 10.0.0.0/8 ! -d 10.40.0.0/16 -j SNAT --to-source 192.0.2.1"


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        # As an earlier release left it.
        (RULES[-1:], f"POSTROUTING lacks {RULES[0]}"),
        (RULES[::-1], "are out of their place"),
        ([*RULES, RULES[-1]], "are out of their place"),
        (["-A POSTROUTING -o eth0 -j MASQUERADE", *RULES], "are out of their place"),
        ([_OWN, *RULES], f"{_OWN} comes first"),
        ([f"{_OWN}:1024-65535", *RULES], "restrict it to ports 32768-65535 for tcp and udp"),
        ([f"{_OWN}:32768-60999", *RULES], ""),
        (["-A POSTROUTING ! -s 172.17.0.0/16 -j SNAT --to-source 192.0.2.1", *RULES], "! -s 172"),
        (["-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE", *RULES, _OWN], ""),
        (['-A POSTROUTING -m comment --comment "it\'s" -j RETURN', *RULES], ""),
    ],
)
def test_guests_take_no_port_of_a_service(
    parity: Any, script: Any, listed: list[str], problem: str
) -> None:
    script.on(*NAT, out="\n".join(listed))
    result = _checks_network.nat(parity.facts())
    assert (result.status == "FAIL", problem in result.detail) == (bool(problem), True), result


# Sockets as the kernel lists them: listening at 0.0.0.0, 127.0.0.1 and 192.0.2.1, and connected.
_TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:AFC8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 1 1 0 100 0 0 10 0
   1: 0100007F:AFC9 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 2 1 0 100 0 0 10 0
   2: 010200C0:AFCA 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 3 1 0 100 0 0 10 0
   3: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4 1 0 100 0 0 10 0
   4: 010200C0:AFCB 02020000:01BB 01 00000000:00000000 00:00000000 00000000 0 0 5 1 0 100 0 0 10 0
"""
# The same in IPv6: at every address, ::1, 192.0.2.1 and an address of IPv6.
_TCP6 = "\n".join(
    [
        "  sl  local_address remote_address st",
        *(
            f"   0: {local}:{port} {'0' * 32}:0000 0A 0"
            for local, port in (
                ("0" * 32, "AFD0"),
                ("0" * 24 + "01000000", "AFD1"),
                ("0" * 16 + "FFFF0000010200C0", "AFD2"),
                ("B80D0120" + "0" * 16 + "01000000", "AFD3"),
            )
        ),
    ]
)


@pytest.mark.covers("SLICE-9")
def test_a_service_on_the_ports_of_guests_is_named(parity: Any, machine: Any, script: Any) -> None:
    script.on(*NAT, out="\n".join(RULES))
    machine.file("/proc/net/tcp", _TCP)
    assert _nat.services() == ["0.0.0.0:45000", "192.0.2.1:45002"]
    machine.file("/proc/net/tcp", _TCP.splitlines()[0])
    machine.file("/proc/net/tcp6", _TCP6)
    assert _nat.services() == ["0.0.0.0:45008", "192.0.2.1:45010"]
    result = _checks_network.nat(parity.facts())
    assert result.status == "WARN"
    assert "the service at 192.0.2.1:45010: give it a port below 32768" in result.detail


def test_nat_and_forwarding(parity: Any, machine: Any, script: Any) -> None:
    script.on(*NAT, out="\n".join(RULES)).on(*NAT, out="-P POSTROUTING ACCEPT\n")
    admitted, *forwarded = _host_filter.rules("ovsbr0")
    script.on(*FILTER, "INPUT", out=admitted)
    script.on(*FILTER, "FORWARD", out="\n".join(forwarded))
    assert _checks_network.nat(parity.facts()) == _check.passed(RULES[-1])
    assert _checks_network.nat(parity.facts()).status == "FAIL"
    assert _checks_network.ip_forwarding(parity.facts()).status == "FAIL"
    machine.file("/proc/sys/net/ipv4/ip_forward", "1\n")
    machine.file(_baseline_files.SYSCTL, _baseline_files.SYSCTLS)
    assert _checks_network.ip_forwarding(parity.facts()).status == "PASS"
    machine.file("/proc/sys/net/ipv4/neigh/default/gc_thresh3", "1024\n")
    assert "gc_thresh3 is 1024, less than 65536" in (
        _checks_network.ip_forwarding(parity.facts()).detail
    )
    machine.file("/proc/sys/net/ipv4/neigh/default/gc_thresh3", "65536\n")
    # As docker leaves it: nothing admits guests.
    script.answers.pop((*FILTER, "FORWARD"))
    script.on(*FILTER, "FORWARD", out="-P FORWARD DROP\n")
    script.on(*FILTER, "FORWARD", out="\n".join(forwarded))
    assert "the host's filter needs -I FORWARD 1 -i ovsbr0" in (
        _checks_network.ip_forwarding(parity.facts()).detail
    )
    machine.file(_baseline_files.SYSCTL, "net.ipv4.ip_forward = 0\n")
    result = _checks_network.ip_forwarding(parity.facts())
    assert result == _check.failed(
        "/etc/sysctl.d/60-gpuaas-slice.conf is not what bootstrap writes: "
        "has 'net.ipv4.ip_forward = 0'"
    )


def guest(monkeypatch: pytest.MonkeyPatch, finding: _guest_probe.Finding | Refusal) -> None:
    def look(_probe: _guest_probe.Probe) -> _guest_probe.Finding:
        if isinstance(finding, Refusal):
            raise finding
        return finding

    monkeypatch.setattr(_guest_probe, "look", look)


def test_a_guest_without_egress_fails_whatever_services_say(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest(monkeypatch, _guest_probe.Finding(None, True, ""))
    result = _checks_network.guest_egress(parity.facts())
    assert (result.status, "10.0.2.2" in result.detail) == ("FAIL", True)
    guest(monkeypatch, _guest_probe.Finding(4.2, True, "", ("10.0.2.15",)))
    result = _checks_network.guest_egress(parity.facts())
    assert result == _check.passed("10.0.2.2 answered a guest in 4.2 ms, seen as 10.0.2.15")


def test_an_answer_without_translation_is_no_pass(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on the lab host: its gateway answers guests even when the NAT rule is gone."""
    guest(monkeypatch, _guest_probe.Finding(4.2, True, "", ("10.100.0.254",)))
    result = _checks_network.guest_egress(parity.facts())
    assert result == _check.failed("a guest's packets leave untranslated, as 10.100.0.254")
    guest(monkeypatch, _guest_probe.Finding(4.2, True, ""))
    assert _checks_network.guest_egress(parity.facts()).status == "FAIL"


def test_a_guest_whose_tcp_stops_is_named(parity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guest(monkeypatch, _guest_probe.Finding(4.2, True, "", ("10.0.2.15",), tcp="TCP stops"))
    assert _checks_network.guest_egress(parity.facts()).status == "PASS"
    assert _checks_network.guest_tcp(parity.facts()) == _check.failed("TCP stops")
    guest(monkeypatch, _guest_probe.Finding(None, True, ""))
    assert _checks_network.guest_tcp(parity.facts()).status == "PASS"


def test_without_a_target_there_is_no_proof(parity: Any, machine: Any) -> None:
    network = parity.profile["network"] | {"egress_probe": ""}
    assert _checks_network.guest_egress(parity.facts(network=network)).status == "FAIL"


def test_without_a_target_a_guest_still_shows_the_rest(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other check fails with `guest_egress` on a host without a default gateway."""

    def look(probe: _guest_probe.Probe) -> _guest_probe.Finding:
        # The probe's packet filter needs an address as target.
        assert ipaddress.IPv4Address(probe.target.partition(":")[0])
        return _guest_probe.Finding(None, True, "")

    monkeypatch.setattr(_guest_probe, "look", look)
    facts = parity.facts(network=parity.profile["network"] | {"egress_probe": ""})
    assert facts.guest_problem == "" and _checks_network.guest_tcp(facts).status == "PASS"
    assert _checks_network.guest_egress(facts).status == "FAIL"


def test_dnsmasq_must_answer_a_guest(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _checks_network.dnsmasq(parity.facts()).detail == "dnsmasq does not run"
    machine.file("/run/dnsmasq/dnsmasq.pid", "7")
    machine.file("/proc/7/comm", "dnsmasq")
    offered = "10.100.0.254"
    for finding, why in (
        (_guest_probe.Finding(1, False, offered), "process 7 runs, but does not answer"),
        (_guest_probe.Finding(1, True, ""), "is offered no address, not 10.100.0.254"),
        (_guest_probe.Finding(1, True, "192.0.2.7"), "is offered 192.0.2.7, not 10.100.0.254"),
    ):
        guest(monkeypatch, finding)
        result = _checks_network.dnsmasq(parity.facts())
        assert (result.status, why in result.detail) == ("FAIL", True), result
    guest(monkeypatch, _guest_probe.Finding(1, True, offered))
    assert _checks_network.dnsmasq(parity.facts()).status == "PASS"


TEST = ("dnsmasq", "--test", "--conf-dir=/etc/dnsmasq.d,.dpkg-dist,.dpkg-old,.dpkg-new")


def test_dnsmasq_settings(parity: Any, bootstrapped: Any, script: Any) -> None:
    machine = bootstrapped
    machine.file("/var/lib/gpuaas/dnsmasq/hosts.d/a", "52:54:00:64:00:0a,10.100.0.10,a\n")
    # A run is about to replace the file.
    machine.file("/var/lib/gpuaas/dnsmasq/hosts.d/.a.x", "52:54:00:64:00:0a,10.100.0.10,a\n")
    script.on(*TEST, err="dnsmasq: syntax check OK.")
    assert _checks_network.dnsmasq_config(parity.facts()).status == "PASS"
    machine.file("/var/lib/gpuaas/dnsmasq/hosts.d/b", "52:54:00:64:00:0b,10.100.0.10,b\n")
    machine.file("/etc/dnsmasq.d/gpuaas-gpuaas-slice-old.conf", "")
    result = _checks_network.dnsmasq_config(parity.facts())
    assert result.detail == (
        "stale gpuaas-gpuaas-slice-old.conf; 10.100.0.10 is reserved in a and b"
    )


def test_a_slot_with_the_address_of_paritys_guest_is_named(
    parity: Any, bootstrapped: Any, script: Any
) -> None:
    """dnsmasq reports no error, and offers the slot's guest no address."""
    bootstrapped.file("/var/lib/gpuaas/dnsmasq/hosts.d/a", "52:54:00:64:00:fe,10.100.0.254,a\n")
    script.on(*TEST, err="dnsmasq: syntax check OK.")
    result = _checks_network.dnsmasq_config(parity.facts())
    assert (result.status, result.detail) == (
        "FAIL",
        "10.100.0.254 is reserved in bootstrap's own file and a",
    )


def test_dnsmasq_settings_that_do_not_parse(parity: Any, machine: Any, script: Any) -> None:
    script.on(*TEST, rc=1, err="dnsmasq: bad option\n")
    result = _checks_network.dnsmasq_config(parity.facts())
    assert result.detail.endswith("gpuaas-slice.conf is missing; dnsmasq: bad option")


# Each is valid for dnsmasq, and each would give guests other settings than the profile's.
EDITS = [
    (lambda text: f"{text}dhcp-option=option:dns-server,192.0.2.53\n", "has 'dhcp-option="),
    (lambda text: text.replace("static", "10.100.0.200"), "has 'dhcp-range="),
    (lambda text: text.replace("dhcp-ignore=tag:!known\n", ""), "lacks 'dhcp-ignore=tag:!known'"),
    (lambda text: "".join(reversed(text.splitlines(keepends=True))), "has its lines otherwise"),
    (lambda _text: "", "lacks "),
]


@pytest.mark.parametrize(("edit", "shown"), EDITS)
def test_an_edited_but_valid_configuration_is_noticed_and_what_bootstrap_does_repairs_it(
    parity: Any,
    bootstrapped: Any,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    edit: Any,
    shown: str,
) -> None:
    script.on(*TEST, err="dnsmasq: syntax check OK.")
    look = _checks_network.dnsmasq_config
    assert look(parity.facts()).status == "PASS"
    bootstrapped.file(_baseline_files.DNSMASQ, edit(_baseline_files.dnsmasq(NETWORK)))
    result = look(parity.facts())
    assert (result.status, shown in result.detail) == ("FAIL", True), result.detail

    # The remedy is the role slice_network, which executes this plan.
    idle = _boot_service.Service(active=True, enabled=True, started_at=2**40)
    monkeypatch.setattr(_boot_service, "services", lambda names: dict.fromkeys(names, idle))
    live = _bridge.State((), {}, forwarding=True, nat=True, uplink="eno1")
    monkeypatch.setattr(_bridge, "observe", lambda _params: live)
    monkeypatch.setattr(_bridge, "plan", lambda *_: _change.Plan())
    steps = _ovs_nat.plan(NETWORK, _ovs_nat.observe(NETWORK)).steps
    repair = [step for step in steps if step.subject == _baseline_files.DNSMASQ]
    assert "restart_dnsmasq" in [step.name for step in steps]
    script.on("dnsmasq", "--test", "--conf-file=-")
    for step in repair:
        _ovs_nat.apply(NETWORK, step)
    assert look(parity.facts()).status == "PASS"


def test_another_profiles_network_is_not_this_ones(parity: Any, bootstrapped: Any) -> None:
    network = parity.profile["network"] | {"address": "10.9.0.1/24", "subnet": "10.9.0.0/24"}
    facts = parity.facts(network=network)
    problems = _file_edits.unlike(_baseline_files.DNSMASQ, _baseline_files.dnsmasq(facts.network))
    assert problems and "10.100.0.0" in problems[0]
