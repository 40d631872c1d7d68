"""Network checks: a host whose guests have no network never passes, whatever its services say."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _baseline,
    _bridge,
    _parity,
    _parity_checks_network,
    _parity_probe,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

pytestmark = pytest.mark.covers("HOST-10")

NAT = ("iptables", "-w", "-t", "nat", "-S", "POSTROUTING")
RULE = "-A POSTROUTING -s 10.100.0.0/24 -j MASQUERADE"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("loaded/active/enabled/success", "PASS"),
        ("loaded/active/disabled/success", "FAIL"),
        ("loaded/failed/enabled/exit-code", "FAIL"),
        ("not-found/inactive//", "FAIL"),
    ],
)
def test_the_baseline_service(parity: Any, script: Any, state: str, status: str) -> None:
    parity.units(baseline=state)
    assert _parity_checks_network.network_service(parity.facts()).status == status


def test_the_older_service_is_at_most_a_warning(parity: Any, script: Any) -> None:
    parity.units(old="loaded/active/enabled/success")
    assert _parity_checks_network.historical_network_service(parity.facts()).status == "WARN"


def test_functions_must_be_there_and_be_functions(parity: Any, machine: Any) -> None:
    assert _parity_checks_network.fabric_vfs(parity.facts()).status == "FAIL"
    machine.pci("0000:25:00.0", "8086:10c9", sriov_numvfs="0", sriov_totalvfs="7")
    assert (
        _parity_checks_network.fabric_vfs(parity.facts()).detail
        == "0000:25:00.0 has 0 of 1 functions"
    )
    (machine.root / "sys/bus/pci/devices/0000:25:00.0/sriov_numvfs").write_text("1")
    machine.pci("0000:25:10.0", "8086:10ca")
    assert (
        "is no virtual function"
        in _parity_checks_network.fabric_vfs(parity.facts(parity.slot)).detail
    )
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    assert _parity_checks_network.fabric_vfs(parity.facts(parity.slot)).status == "PASS"


def test_fabric_address_route_and_netplan(parity: Any, machine: Any, script: Any) -> None:
    parity.shown(("ibp65s0", "10.20.0.7/16"), ("tmfifo_net0", "192.168.100.1/30"))
    machine.file("/proc/net/route", "Iface\n" + "ibp 0000140A 0 0001 0 0 0 0000FFFF 0 0 0\n")
    machine.file("/etc/netplan/60-ipoib.yaml", "addresses: [10.20.0.7/16]\n")
    assert _parity_checks_network.fabric_address(parity.facts()).status == "PASS"
    assert _parity_checks_network.fabric_route(parity.facts()).status == "PASS"
    assert _parity_checks_network.ipoib_netplan(parity.facts()).status == "PASS"
    assert _parity_checks_network.tmfifo(parity.facts()).status == "PASS"


@pytest.mark.parametrize(
    "text", ["network: {}\n", "addresses: [110.20.0.7/16]\n", "addresses: [10.20.0.7/160]\n"]
)
def test_another_sites_netplan_is_no_proof(parity: Any, machine: Any, text: str) -> None:
    machine.file("/etc/netplan/60-ipoib.yaml", text)
    found = _parity_checks_network.ipoib_netplan(parity.facts())
    assert found.detail == "/etc/netplan/60-ipoib.yaml does not give 10.20.0.7/16"


def test_fabric_missing(parity: Any, machine: Any, script: Any) -> None:
    parity.shown()
    assert _parity_checks_network.fabric_address(parity.facts()).status == "FAIL"
    assert _parity_checks_network.fabric_route(parity.facts()).status == "FAIL"
    assert _parity_checks_network.ipoib_netplan(parity.facts()).status == "FAIL"
    assert _parity_checks_network.tmfifo(parity.facts()).status == "FAIL"


def test_a_linux_bridge_of_the_right_name_is_not_enough(
    parity: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity.shown(("ovsbr0", "10.100.0.1/24"))
    guest(monkeypatch, Refusal("command_failed", expected="", found="no bridge", remedy=""))
    script.on("ovs-vsctl", "--timeout=10", "br-exists", "ovsbr0", rc=2)
    found = _parity_checks_network.ovs_bridge(parity.facts())
    assert found.detail == "ovsbr0 is no bridge of Open vSwitch"


def test_what_bootstrap_writes_is_what_is_looked_for() -> None:
    checks = _parity_checks_network
    assert (checks.DNSMASQ, checks.RESERVATIONS) == (_baseline.DNSMASQ, _baseline.RESERVATIONS)
    assert (checks.TMFIFO, checks.TMFIFO_ADDRESS, checks.TMFIFO_PEER) == (
        _bridge.TMFIFO,
        _bridge.TMFIFO_ADDRESS,
        _bridge.TMFIFO_PEER,
    )


def test_nat_and_forwarding(parity: Any, machine: Any, script: Any) -> None:
    script.on(*NAT, out=f"{RULE}\n").on(*NAT, out="-P POSTROUTING ACCEPT\n")
    assert _parity_checks_network.nat(parity.facts()) == _parity.passed(RULE)
    assert _parity_checks_network.nat(parity.facts()).status == "FAIL"
    assert _parity_checks_network.ip_forwarding(parity.facts()).status == "FAIL"
    machine.file("/proc/sys/net/ipv4/ip_forward", "1\n")
    assert _parity_checks_network.ip_forwarding(parity.facts()).status == "PASS"


def guest(monkeypatch: pytest.MonkeyPatch, finding: _parity_probe.Finding | Refusal) -> None:
    def look(_probe: _parity_probe.Probe) -> _parity_probe.Finding:
        if isinstance(finding, Refusal):
            raise finding
        return finding

    monkeypatch.setattr(_parity_probe, "look", look)


def test_a_guest_without_egress_fails_whatever_services_say(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest(monkeypatch, _parity_probe.Finding(None, True))
    found = _parity_checks_network.guest_egress(parity.facts())
    assert (found.status, "10.0.2.2" in found.detail) == ("FAIL", True)
    guest(monkeypatch, _parity_probe.Finding(4.2, True, ("10.0.2.15",)))
    found = _parity_checks_network.guest_egress(parity.facts())
    assert found == _parity.passed("10.0.2.2 answered a guest in 4.2 ms, seen as 10.0.2.15")


def test_an_answer_without_translation_is_no_pass(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on the lab host: its gateway answers guests even when the NAT rule is gone."""
    guest(monkeypatch, _parity_probe.Finding(4.2, True, ("10.100.0.254",)))
    found = _parity_checks_network.guest_egress(parity.facts())
    assert found == _parity.failed("a guest's packets leave untranslated, as 10.100.0.254")
    guest(monkeypatch, _parity_probe.Finding(4.2, True))
    assert _parity_checks_network.guest_egress(parity.facts()).status == "FAIL"


def test_without_a_target_there_is_no_proof(parity: Any, machine: Any) -> None:
    network = parity.profile["network"] | {"egress_probe": ""}
    assert _parity_checks_network.guest_egress(parity.facts(network=network)).status == "FAIL"


def test_dnsmasq_must_answer_a_guest(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _parity_checks_network.dnsmasq(parity.facts()).detail == "dnsmasq does not run"
    machine.file("/run/dnsmasq/dnsmasq.pid", "7")
    machine.file("/proc/7/comm", "dnsmasq")
    guest(monkeypatch, _parity_probe.Finding(1, False))
    assert _parity_checks_network.dnsmasq(parity.facts()).status == "FAIL"
    guest(monkeypatch, _parity_probe.Finding(1, True))
    found = _parity_checks_network.dnsmasq(parity.facts())
    assert found.detail == "process 7 does not listen for DHCP"
    row = "0: 00000000:0043 00000000:0000 07 0:0 0:0 0 0 0 4711 2"
    machine.file("/proc/net/udp", f"  sl  local_address\n{row}\n")
    assert _parity_checks_network.dnsmasq(parity.facts()).status == "FAIL"
    (machine.folder("/proc/7/fd") / "4").symlink_to("socket:[4711]")
    assert _parity_checks_network.dnsmasq(parity.facts()).status == "PASS"


TEST = ("dnsmasq", "--test", "--conf-dir=/etc/dnsmasq.d,.dpkg-dist,.dpkg-old,.dpkg-new")


def test_dnsmasq_settings(parity: Any, machine: Any, script: Any) -> None:
    machine.file("/etc/dnsmasq.d/gpuaas-slice.conf", "interface=ovsbr0\n")
    machine.file("/var/lib/gpuaas/dnsmasq/hosts.d/a", "52:54:00:64:00:0a,10.100.0.10,a\n")
    script.on(*TEST, err="dnsmasq: syntax check OK.")
    assert _parity_checks_network.dnsmasq_config(parity.facts()).status == "PASS"
    machine.file("/var/lib/gpuaas/dnsmasq/hosts.d/b", "52:54:00:64:00:0b,10.100.0.10,b\n")
    machine.file("/etc/dnsmasq.d/gpuaas-gpuaas-slice-old.conf", "")
    found = _parity_checks_network.dnsmasq_config(parity.facts())
    assert found.detail == (
        "stale gpuaas-gpuaas-slice-old.conf; 10.100.0.10 is reserved in a and b"
    )


def test_dnsmasq_settings_that_do_not_parse(parity: Any, machine: Any, script: Any) -> None:
    script.on(*TEST, rc=1, err="dnsmasq: bad option\n")
    found = _parity_checks_network.dnsmasq_config(parity.facts())
    assert found.detail.endswith("gpuaas-slice.conf is missing; dnsmasq: bad option")
