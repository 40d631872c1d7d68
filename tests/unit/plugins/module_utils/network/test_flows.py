"""Port guard: its flows in the switch, and the parsing of the switch's output.

The effect of the rules is shown with packets in test_isolation.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows
from ansible_collections.gpuaas.slice.plugins.module_utils.network._flows import Flow, Guard

from tests.conftest import Script
from tests.unit.plugins.fake_switch import FakeSwitch

ROOT = Path(__file__).parents[5]

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
OTHER = "0f8fad5b-d9cb-469f-a165-70867728950e"
COOKIE = "cookie=0x23bd713b60734ef7/-1"
GUARD = Guard(ALLOCATION, "ovsbr0", "52:54:00:64:00:0a", "10.100.0.10", "10.100.0.1/24")
NUMBER = (
    *("ovs-vsctl", "--timeout=10", "--format=json", "--columns=ofport"),
    *("find", "Interface", "name=gs1"),
)
FIB = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.0.2.0
        /24 link UNICAST
Local:
     |-- 10.0.2.15
        /32 host LOCAL
     |-- 10.0.2.255
        /32 link BROADCAST
     |-- 10.100.0.1
        /32 host LOCAL
     |-- 127.0.0.1
        /32 host LOCAL
"""


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> FakeSwitch:
    fake = FakeSwitch()
    fake.add_bridge()
    monkeypatch.setattr(_command, "run", fake.run)
    return fake


def test_the_kernel_sees_both_ways_of_a_guests_connections() -> None:
    """The rig's switch, in user space, cannot show this: it passes TCP seen one way only."""
    dhcp = "tp_src=67"
    answers = [
        flow
        for flow in _flows.rules(GUARD, 5, ["10.0.2.15"])
        if flow.table == _flows.TO_GUEST and not {"arp", dhcp} & flow.match
    ]
    assert {flow.priority for flow in answers} == {80, 90}
    for flow in answers:
        assert flow.actions.startswith("ct(") and "zone=5" in flow.actions, flow.text()


def test_what_the_switch_prints_is_what_was_asked(switch: FakeSwitch) -> None:
    rules = _flows.rules(GUARD, 5, ["10.0.2.15"])
    _flows.install(GUARD, 5, ["10.0.2.15"])
    assert _flows.installed("ovsbr0", GUARD.cookie) == rules
    _flows.load("ovsbr0", _flows.BASE_LOAD)
    assert _flows.every("ovsbr0") == {GUARD.cookie: rules, _flows.BASE_COOKIE: _flows.BASE}
    assert _flows.guards("ovsbr0") == {GUARD.cookie: len(rules)}


def test_flows_of_the_switch_itself_are_no_ones(script: Script) -> None:
    """As ovs-vswitchd 3.1 prints them."""
    printed = (
        "OFPST_FLOW reply (OF1.3) (xid=0x2):\n"
        " cookie=0x0, duration=3.1s, table=0, n_packets=7, n_bytes=98, priority=0 actions=NORMAL\n"
        " cookie=0x2, duration=0.008s, table=20, n_packets=0, n_bytes=0, idle_age=4,"
        " priority=100,arp,in_port=LOCAL actions=output:5\n"
        " cookie=0x0, duration=9s, table=254, n_packets=0, n_bytes=0, priority=2,recirc_id=0"
        " actions=drop\n"
    )
    argv = ("ovs-ofctl", "--protocols=OpenFlow13", "--no-names", "dump-flows", "ovsbr0")
    script.on(*argv, out=printed)
    assert _flows.every("ovsbr0") == {
        "0x0": {Flow(0, 0, frozenset(), "NORMAL")},
        "0x2": {Flow(20, 100, frozenset({"arp", "in_port=LOCAL"}), "output:5")},
    }


def test_installing_replaces_in_one_transaction(
    switch: FakeSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flows of an earlier owner of the port number go with the same transaction."""
    earlier = replace(GUARD, allocation_id=OTHER, ip="10.100.0.11")
    _flows.install(earlier, 5, [])
    calls: list[list[str]] = []
    sent: list[str] = []

    def take(argv: list[str], **more: Any) -> object:
        calls.append(argv)
        sent.extend((more.get("stdin") or "").splitlines())
        return switch.run(argv, **more)

    monkeypatch.setattr(_command, "run", take)
    count = _flows.install(GUARD, 5, [])
    assert calls == [
        [
            "ovs-ofctl",
            "--protocols=OpenFlow13",
            "add-meter",
            "ovsbr0",
            "meter=5,pktps,stats,bands=type=drop,rate=200000",
        ],
        ["ovs-appctl", "--timeout=10", "dpctl/ct-set-limits", "zone=5,limit=16384"],
        ["ovs-ofctl", "--protocols=OpenFlow13", "--bundle", "add-flows", "ovsbr0", "-"],
        ["ovs-appctl", "--timeout=10", "revalidator/purge"],
    ]
    assert sent[:3] == ["delete in_port=5", "delete out_port=5", f"delete {COOKIE}"]
    assert len(sent) == count + 3
    assert all(line.startswith("add cookie=0x23bd713b60734ef7,table=") for line in sent[3:])
    assert set(_flows.every("ovsbr0")) == {GUARD.cookie}


def test_the_protocol_comes_before_the_fields_that_need_it() -> None:
    text = next(f.text() for f in _flows.rules(GUARD, 5, []) if "tp_src=68" in f.match)
    assert text.startswith("table=10,priority=300,udp,")


def test_removing_leaves_the_flows_of_others(switch: FakeSwitch) -> None:
    other = replace(GUARD, allocation_id=OTHER, ip="10.100.0.11", mac="52:54:00:64:00:0b")
    _flows.load("ovsbr0", _flows.BASE_LOAD)
    _flows.install(GUARD, 5, [])
    _flows.install(other, 6, [])
    _flows.remove("ovsbr0", GUARD.cookie)
    assert set(_flows.every("ovsbr0")) == {_flows.BASE_COOKIE, other.cookie}
    assert set(switch.meters) == {"6"}


@pytest.mark.parametrize(
    ("data", "number"), [([[3]], 3), ([[["set", []]]], 0), ([[-1]], 0), ([], None)]
)
def test_port_number(script: Script, data: list[Any], number: int | None) -> None:
    script.on(*NUMBER, out=json.dumps({"data": data}) + "\n")
    assert _flows.port_number("gs1") == number


def test_a_port_that_never_comes_is_refused(script: Script) -> None:
    script.on(*NUMBER, out='{"data": []}\n')
    with pytest.raises(Refusal, match="port_missing"):
        _flows.await_port("gs1", deadline=0.01)


def test_local_addresses_with_the_broadcast_of_each_network(tree: Path) -> None:
    (tree / "proc/net").mkdir(parents=True)
    (tree / "proc/net/fib_trie").write_text(FIB)
    assert _flows.local_addresses() == ["10.0.2.15", "10.0.2.255", "10.100.0.1", "127.0.0.1"]


@pytest.mark.parametrize("ip", ["10.100.0.1", "10.101.0.10", "x", "10.100.0.10,actions=NORMAL"])
def test_a_foreign_address_is_refused(ip: str) -> None:
    with pytest.raises(Refusal, match="spec_invalid"):
        _flows.check(Guard(ALLOCATION, "ovsbr0", "52:54:00:64:00:0a", ip, "10.100.0.1/24"))


def test_the_ports_of_every_bridge(script: Script) -> None:
    argv = ("ovs-vsctl", "--timeout=10", "--format=json", "--columns=name,ofport")
    data = [["gs23bd713b6073", 4], ["ovsbr0", 65534], ["eno1", ["set", []]]]
    text = json.dumps({"data": data, "headings": ["name", "ofport"]}) + "\n"
    script.on(*argv, "list", "Interface", out=text)
    assert _flows.ports() == {"gs23bd713b6073": 4, "ovsbr0": 0, "eno1": 0}


def test_each_kind_of_refusal_fits_the_runs_contract() -> None:
    """A name that does not makes every drift run of a host with a guest fail."""
    kinds = {flow.kind for flow in _flows.rules(GUARD, 1, ["10.0.2.15"]) if flow.kind}
    assert "ipv6" in kinds
    schema = json.loads((ROOT / "contracts" / "runs" / "result.schema.json").read_text())
    (pattern,) = re.findall(r'"propertyNames": \{"pattern": "(\S+)"\}', json.dumps(schema))
    assert [kind for kind in kinds if not re.fullmatch(pattern, kind)] == []
