"""Port guard: the traffic that its rules pass, and the parsing of the switch's output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows
from ansible_collections.gpuaas.slice.plugins.module_utils.network._flows import Guard

from tests.conftest import Script

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
COOKIE = "cookie=0x23bd713b60734ef7/-1"
GUARD = Guard(ALLOCATION, "ovsbr0", "52:54:00:64:00:0a", "10.100.0.10", "10.100.0.1/24")
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


def test_a_guest_sends_only_to_the_bridge_itself() -> None:
    from_guest = [f for f in _flows.rules(GUARD, 5, []) if "in_port=5" in f.match]
    assert {flow.actions for flow in from_guest} == {"LOCAL", "drop"}


def test_whatever_passes_carries_the_guests_own_mac() -> None:
    passing = [f for f in _flows.rules(GUARD, 5, []) if f.actions == "LOCAL"]
    assert passing
    assert all("dl_src=52:54:00:64:00:0a" in flow.match for flow in passing)
    assert all("vlan_tci=0x0000/0x1fff" in flow.match for flow in passing)


def test_the_hosts_other_addresses_and_denied_networks_are_out_of_reach() -> None:
    guard = Guard(
        *[getattr(GUARD, f) for f in ("allocation_id", "bridge", "mac", "ip", "address")],
        denied=("192.168.0.0/16",),
    )
    rules = _flows.rules(guard, 5, ["10.0.2.15", "10.100.0.1", "127.0.0.1"])
    refused = {m for f in rules if f.actions == "drop" for m in f.match if m.startswith("nw_dst")}
    assert refused == {
        "nw_dst=10.0.2.15",
        "nw_dst=10.100.0.0/24",
        "nw_dst=127.0.0.0/8",
        "nw_dst=169.254.0.0/16",
        "nw_dst=192.168.0.0/16",
        "nw_dst=224.0.0.0/4",
        "nw_dst=240.0.0.0/4",
    }


def test_what_the_switch_prints_is_what_was_asked(script: Script) -> None:
    rules = _flows.rules(GUARD, 5, ["10.0.2.15"])
    printed = "".join(
        f" cookie=0x23bd713b60734ef7, {flow.text().replace(',actions', ' actions')}\n"
        for flow in rules
    )
    argv = ("ovs-ofctl", "--no-names", "--no-stats", "dump-flows", "ovsbr0", COOKIE)
    script.on(*argv, out=printed)
    assert _flows.installed("ovsbr0", ALLOCATION) == rules


def test_installing_replaces_in_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def take(argv: list[str], *, stdin: str | None = None, timeout: float = 60) -> object:
        assert argv == ["ovs-ofctl", "--bundle", "add-flows", "ovsbr0", "-"]
        sent.extend((stdin or "").splitlines())
        return _flows._command.Result(0, "", "")

    monkeypatch.setattr(_flows._command, "run", take)
    count = _flows.install(GUARD, 5, [])
    assert sent[:3] == ["delete in_port=5", "delete out_port=5", f"delete {COOKIE}"]
    assert len(sent) == count + 3
    assert all(line.startswith("add cookie=0x23bd713b60734ef7,priority=") for line in sent[3:])


def test_the_protocol_comes_before_the_fields_that_need_it() -> None:
    text = next(f.text() for f in _flows.rules(GUARD, 5, []) if "tcp_flags=+ack" in f.match)
    assert text.startswith("priority=290,tcp,")


@pytest.mark.parametrize(
    ("printed", "number"), [("3\n", 3), ("[]\n", 0), ("-1\n", 0), ("\n", None)]
)
def test_port_number(script: Script, printed: str, number: int | None) -> None:
    argv = ("ovs-vsctl", "--timeout=10", "--if-exists", "get", "Interface", "gs1", "ofport")
    script.on(*argv, out=printed)
    assert _flows.port_number("gs1") == number


def test_a_port_that_never_comes_is_refused(script: Script) -> None:
    argv = ("ovs-vsctl", "--timeout=10", "--if-exists", "get", "Interface", "gs1", "ofport")
    script.on(*argv, out="\n")
    with pytest.raises(Refusal, match="port_missing"):
        _flows.await_port("gs1", deadline=0.01)


def test_host_addresses(tree: Path) -> None:
    (tree / "proc/net").mkdir(parents=True)
    (tree / "proc/net/fib_trie").write_text(FIB)
    assert _flows.host_addresses() == ["10.0.2.15", "10.100.0.1", "127.0.0.1"]


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
