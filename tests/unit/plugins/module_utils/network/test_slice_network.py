"""Evidence on the slice network, above all the detection of a missing NAT rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _slice_network

pytestmark = pytest.mark.covers("HOST-11")

RULE = "-A POSTROUTING -s 10.100.0.0/24 -j MASQUERADE"
NAT = ("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING")
SHOW = ("ip", "-j", "address", "show")
WAYS = ("ip", "-j", "-4", "route", "show", "table", "main")
PROFILE: dict[str, Any] = {
    "network": {
        "bridge": "ovsbr0",
        "address": "10.100.0.1/24",
        "subnet": "10.100.0.0/24",
        "tmfifo": False,
    },
    "fabric": {"route": ""},
    "not_applicable": ["fabric_route"],
}
BRIDGE = {
    "ifname": "ovsbr0",
    "flags": ["BROADCAST", "UP"],
    "addr_info": [{"local": "10.100.0.1", "prefixlen": 24}],
}
ROUTES = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    "mgmt0\t00000000\t0202000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "ovsbr0\t0000640A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (RULE, True),
        ("-A POSTROUTING -s 10.100.0.0/24 ! -o ovsbr0 -j MASQUERADE", True),
        ('-A POSTROUTING -s 10.100.0.0/24 -m comment --comment "a b" -j MASQUERADE', True),
        ("-A POSTROUTING -s 10.100.0.0/24 -j SNAT --to-source 192.0.2.1", True),
        ("-A POSTROUTING -s 10.100.0.0/24 -j RETURN", False),
        ("-A POSTROUTING -s 10.100.1.0/24 -j MASQUERADE", False),
        ("-A POSTROUTING -s 10.100.0.0/24 -d 192.0.2.0/24 -j MASQUERADE", False),
        ("-A POSTROUTING -s 10.100.0.0/24 -p tcp -j MASQUERADE", False),
        ("-A POSTROUTING ! -s 10.100.0.0/24 -j MASQUERADE", False),
        ("-A POSTROUTING -o eth0 -j MASQUERADE", False),
    ],
)
def test_which_rules_translate_the_whole_subnet(rule: str, expected: bool) -> None:
    assert _slice_network.translates(rule, "10.100.0.0/24") is expected


def healthy(machine: Any, script: Any) -> None:
    machine.file("/proc/sys/net/ipv4/ip_forward", "1\n")
    machine.file("/proc/net/route", ROUTES)
    machine.file("/run/dnsmasq/dnsmasq.pid", "77\n")
    machine.file("/proc/77/comm", "dnsmasq\n")
    script.on(*SHOW, out=json.dumps([BRIDGE]))


def test_a_prepared_host_has_no_blockers(machine: Any, script: Any) -> None:
    healthy(machine, script)
    script.on(*NAT, out=f"-P POSTROUTING ACCEPT\n{RULE}\n")
    state = _slice_network.observe(PROFILE)
    assert state["blockers"] == []
    assert state["nat"] == {"present": True, "rules": [RULE]}
    assert _slice_network.gateway() == "10.0.2.2"


def test_a_missing_rule_is_a_blocker_under_green_services(machine: Any, script: Any) -> None:
    healthy(machine, script)
    script.on(*NAT, out="-P POSTROUTING ACCEPT\n")
    assert [b["code"] for b in _slice_network.observe(PROFILE)["blockers"]] == ["missing_nat"]


def test_before_bootstrap_everything_is_missing(machine: Any, script: Any) -> None:
    machine.file("/etc/dnsmasq.d/gpuaas-gpuaas-slice-1.conf", "")
    script.on(*SHOW, out="[]").on(*WAYS, out="[]")
    script.on(*NAT, rc=4, err="no nat table")
    profile = PROFILE | {"fabric": {"route": "10.20.0.0/16"}, "not_applicable": []}
    assert [b["code"] for b in _slice_network.observe(profile)["blockers"]] == [
        "missing_ovsbr0",
        "missing_nat",
        "missing_forwarding",
        "missing_dnsmasq",
        "stale_reservations",
        "missing_fabric_route",
    ]


@pytest.mark.covers("HOST-7")
def test_a_profile_without_a_route_needs_to_say_that_there_is_no_fabric(
    machine: Any, script: Any
) -> None:
    healthy(machine, script)
    script.on(*NAT, out=f"-P POSTROUTING ACCEPT\n{RULE}\n")
    state = _slice_network.observe(PROFILE | {"not_applicable": []})
    assert [b["code"] for b in state["blockers"]] == ["missing_fabric_route"]
    assert state["fabric_route"] == {"required": True, "present": False, "route": ""}


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize(
    ("links", "named", "any_"),
    [
        (["ibp65s0"], True, True),
        (["ibp65s0", "ibp65s0"], True, True),
        (["ibp65s0", "eth0"], False, True),
        (["eth0", "ibp65s0"], False, True),
        (["ibp"], False, True),
        ([], False, False),
    ],
)
def test_the_fabric_route_is_one_by_the_profiles_interface(
    machine: Any, script: Any, links: list[str], named: bool, any_: bool
) -> None:
    hops = [{"dev": link, "weight": 1, "flags": []} for link in links]
    rows = [{"dst": "10.20.0.0/16", "flags": [], "nexthops": hops}] if hops else []
    script.on(*SHOW, out="[]").on(*NAT).on(*WAYS, out=json.dumps(rows))
    for interface, present in (("ibp65s0", named), ("", any_)):
        fabric = {"route": "10.20.0.0/16", "interface": interface}
        state = _slice_network.observe(PROFILE | {"fabric": fabric})
        assert state["fabric_route"]["present"] is present


# A host's routes as iproute2 6.1 shows them.
SHOWN = """[{"type":"unreachable","dst":"10.22.0.0/16","flags":[]},
{"dst":"default","gateway":"10.8.0.5","dev":"t0","flags":["linkdown"]},
{"dst":"10.8.0.0/24","dev":"t0","protocol":"kernel","scope":"link","prefsrc":"10.8.0.1","flags":[]},
{"dst":"10.20.0.0/16","flags":[],"nexthops":[{"dev":"t0","weight":1,"flags":["linkdown"]},
{"dev":"t1","weight":1,"flags":[]}]},{"dst":"10.20.0.0/16","dev":"t1","metric":9,"flags":[]},
{"dst":"10.23.0.1","dev":"t1","scope":"link","flags":[]}]"""


@pytest.mark.parametrize(
    ("destination", "ways"),
    [
        ("0.0.0.0/0", [("t0",)]),
        ("10.8.0.0/24", [("t0",)]),
        ("10.20.0.0/16", [("t0", "t1"), ("t1",)]),
        ("10.22.0.0/16", []),
        ("10.23.0.1/32", [("t1",)]),
        ("10.20.0.0/15", []),
    ],
)
def test_every_hop_of_every_route(
    script: Any, destination: str, ways: list[tuple[str, ...]]
) -> None:
    script.on(*WAYS, out=SHOWN)
    assert _slice_network.ways(destination) == ways


def test_a_dead_dnsmasq_with_a_pid_file_does_not_run(machine: Any) -> None:
    machine.file("/run/dnsmasq/dnsmasq.pid", "77\n")
    assert _slice_network.dnsmasq_pid() == 0
    machine.file("/proc/77/comm", "sshd\n")
    assert _slice_network.dnsmasq_pid() == 0
    machine.file("/proc/77/comm", "dnsmasq\n")
    assert _slice_network.dnsmasq_pid() == 77


def test_without_open_vswitch_there_are_no_bridges(tree: Path, script: Any) -> None:
    assert _slice_network.bridges() == []


def test_ports_of_a_bridge(script: Any) -> None:
    script.on("ovs-vsctl", "--timeout=20", "list-ports", "ovsbr0", out="gs1\ngs2\n")
    assert _slice_network.ports("ovsbr0") == ["gs1", "gs2"]
