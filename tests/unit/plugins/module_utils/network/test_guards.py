"""Guards of slices on a real switch: compared, mended, and in force before a domain starts."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _bridge,
    _firewall,
    _flows,
    _guards,
    _host_connections,
    _nft,
    _nvlink,
    _packet_limit,
    _port_filter,
    _start_hook,
    _switch,
)

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import Attack
from tests.unit.plugins.module_utils.network.rig import A, B, Rig
from tests.unit.plugins.module_utils.network.traffic import lease, violations

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]


def test_an_address_that_comes_later_is_refused_too(rig: Rig) -> None:
    rig.run(["ip", "address", "add", "12.0.0.1/24", "dev", "up0"])
    late = Attack("reach a late address", frames.datagram("12.0.0.1"), frozenset({"host"}))
    broadcast = Attack("its broadcast", frames.datagram("12.0.0.255"), frozenset({"host"}))
    try:
        assert violations(rig, (late, broadcast)) == [], "the firewall knows it before the switch"
        assert rig.restore() == [f"guard_port {A.guard.port}", f"guard_port {B.guard.port}"]
        seen_by_nobody = tuple(Attack(each.name, each.build) for each in (late, broadcast))
        assert violations(rig, seen_by_nobody) == []
    finally:
        rig.run(["ip", "address", "del", "12.0.0.1/24", "dev", "up0"])
        rig.restore()


def test_a_host_that_lost_the_way_out_gets_it_back(rig: Rig) -> None:
    rig.run(["iptables", "-t", "nat", "-F"])
    rig.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=0"])
    rig.run(["ip", "address", "flush", "dev", "ovsbr0"])
    rig.read_kernel()
    done = [text.split()[0] for text in _bridge.restore_live(rigs.NETWORK)]
    # The guards name the host's addresses, so they follow the bridge's.
    assert [name for name in done if name != "guard_port"] == [
        "address_interface", "forward_ipv4", "add_nat",
    ]  # fmt: skip
    rig.restore()
    assert violations(rig) == []


@pytest.mark.covers("I17")
def test_what_a_slice_had_in_the_switch_goes_with_its_guard(rig: Rig) -> None:
    def connections(guest: rigs.Guest) -> str:
        return _switch.appctl("dpctl/dump-conntrack", f"zone={rig.number(guest)}")

    opened = (
        Attack("A", frames.datagram(rigs.WORLD, sport=23456), frozenset({"host", "world"})),
        Attack("B", frames.Sender(B).datagram(rigs.WORLD, sport=23456),
               frozenset({"host", "world"}), place=B.place),
    )  # fmt: skip
    assert violations(rig, opened) == []
    assert "sport=23456" in connections(A) and "sport=23456" in connections(B)
    _flows.remove("ovsbr0", A.guard.cookie)
    try:
        assert connections(A) == ""
        assert set(_packet_limit.installed("ovsbr0")) == {rig.number(B)}
        assert A.guard.cookie not in _flows.every("ovsbr0")
        assert "sport=23456" in connections(B), "the neighbour keeps its connections"
    finally:
        rig.restore()


def test_parity_names_every_difference(rig: Rig) -> None:
    state = _guards.observe(rigs.NETWORK)
    assert _guards.plan(rigs.NETWORK, state) == []
    changes: dict[str, tuple[list[str], str]] = {
        "fail mode": (["ovs-vsctl", "set-fail-mode", "ovsbr0", "standalone"], "secure_bridge"),
        "rule that allows all": (["ovs-ofctl", "add-flow", "ovsbr0", "priority=999,actions=NORMAL"],
                                 "remove_flows"),
        "rule of the neighbour": (
            ["ovs-ofctl", "add-flow", "ovsbr0",
             f"cookie={A.guard.cookie},table=10,priority=400,actions=NORMAL"], "guard_port"),
        "lost rule": (["ovs-ofctl", "del-flows", "ovsbr0", f"cookie={B.guard.cookie}/-1,table=10"],
                      "guard_port"),
        "base": (["ovs-ofctl", "del-flows", "ovsbr0", "table=11"], "guard_bridge"),
        "foreign rule": (["ovs-ofctl", "add-flow", "ovsbr0", "cookie=0x77,actions=LOCAL"],
                            "remove_flows"),
        "limit": (["ovs-ofctl", "-OOpenFlow13", "mod-meter", "ovsbr0",
                   f"meter={rig.number(A)},pktps,stats,bands=type=drop,rate=999999"],
                  "guard_port"),
        "connections": (["ovs-appctl", "dpctl/ct-set-limits", f"zone={rig.number(A)},limit=0"],
                        "guard_port"),
        "no limit of connections": (["ovs-appctl", "dpctl/ct-del-limits", f"zone={rig.number(B)}"],
                                    "guard_port"),
        "firewall": (["nft", "flush", "chain", "inet", "gpuaas_slice", "guest_to_world"],
                     "load_firewall"),
        "firewall gone": (["nft", "delete", "table", "inet", "gpuaas_slice"], "load_firewall"),
        "host's limit gone": (["nft", "delete", "table", "inet", "gpuaas_connections"],
                              "limit_connections"),
        "host's limit open": (["nft", "insert", "rule", "inet", "gpuaas_connections",
                               "from_guest", "accept"], "limit_connections"),
        "filter gone": (["nft", "delete", "table", "netdev", f"gpuaas_{A.guard.port}"],
                        "guard_port"),
        "filter open": (["nft", "insert", "rule", "netdev", f"gpuaas_{A.guard.port}",
                         "from_guest", "accept"], "guard_port"),
        "foreign filter": (["nft", "add", "table", "netdev", "gpuaas_gsffffffffffff"],
                           "remove_filter"),
    }  # fmt: skip
    for name, (command, step) in changes.items():
        words = list(command)
        if words[0] == "ovs-vsctl":
            words.insert(1, f"--db=unix:{rig.folder}/db.sock")
        rig.run(words)
        done = [each.split()[0] for each in rig.restore()]
        # No other step, so leftovers of an earlier round would show here. A change of the fail
        # mode removes the flows of the bridge and of the ports, too.
        more = ["remove_flows", "guard_bridge"] if name == "fail mode" else []
        assert done == [step, *more], (name, done)
    assert rig.restore() == []
    assert violations(rig) == []


def test_the_daemons_answer_as_their_programs_do(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Any]:
        queries = [("Bridge", "fail_mode", "ovsbr0"), ("Interface", "name,ofport", "")]
        tables = _switch.rows(*queries, ("Port", "name,qos", A.guard.port), ("QoS", "_uuid", ""))
        questions = (["dpctl/ct-get-limits"], ["dpif/show-dp-features", "ovsbr0"])
        return [*map(sorted, tables), *(_switch.appctl(*words) for words in questions)]

    with monkeypatch.context() as patch:
        patch.setattr(_command, "run", None)
        direct = answers()
    monkeypatch.setattr(_switch, "_ask", lambda *_question: None)
    assert direct == answers()
    with pytest.raises(Refusal, match="command_failed"):
        _switch.appctl("dpctl/ct-set-limits", "zone=1")
    monkeypatch.undo()
    with pytest.raises(Refusal, match="command_failed"):
        _switch.appctl("dpctl/ct-set-limits", "zone=1")
    with pytest.raises(Refusal, match="command_failed"):
        _switch.rows(("Interface", "nonsense", ""))


def test_one_start_of_nft_prints_all_tables(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, starts = _command.run, []

    def run(argv: Any, **options: Any) -> Any:
        starts.extend(word for word in argv[:1] if word == "unshare")
        return real(argv, **options)

    def compared() -> int:
        """Starts that a comparison takes."""
        _nft.forget()
        starts.clear()
        assert _guards.plan(rigs.NETWORK, _guards.observe(rigs.NETWORK)) == []
        return len(starts)

    monkeypatch.setattr(_command, "run", run)
    assert compared() == 1
    # Each by itself is printed in the same way: firewall, connections, and the filters of A and B.
    with monkeypatch.context() as patch:
        patch.setattr(_nft, "prepare", lambda _tables: None)
        assert compared() == 4
    wrong = _host_connections._TEXT.replace("set full", "set full nonsense")
    with monkeypatch.context() as patch:
        patch.setattr(_host_connections, "_TEXT", wrong)
        _nft.forget()
        with pytest.raises(Refusal, match="connection_limit_missing"):
            _guards.observe(rigs.NETWORK)


def lose_flows(rig: Rig) -> None:
    """Remove flows, as in a switch that has just started."""
    rig.run(["ovs-ofctl", "del-flows", "ovsbr0"])


def test_a_switch_that_starts_gets_all_flows_in_one_transaction(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_flows(rig)
    real, loads = _command.run, []

    def run(argv: Any, **options: Any) -> Any:
        if "add-flows" in argv:
            loads.append(list(argv))
        return real(argv, **options)

    monkeypatch.setattr(_command, "run", run)
    assert rig.restore() == ["guard_bridge ovsbr0 flows"]
    assert [("--bundle" in argv) for argv in loads] == [True], loads
    monkeypatch.undo()
    rig.restore()
    assert violations(rig) == []


def test_a_lost_flow_of_the_bridge_resets_no_counter_of_a_guest(rig: Rig) -> None:
    def refused() -> int:
        # The switch adds the packets of its datapath to the flows.
        _switch.appctl("revalidator/purge")
        return sum(
            packets
            for cookie, flow, packets in _flows.counted("ovsbr0")
            if (cookie, flow.actions) == (A.guard.cookie, "drop")
        )

    assert violations(rig) == []
    before = refused()
    assert before
    lost = ["ovs-ofctl", "del-flows", "ovsbr0", f"cookie={_flows.BASE_COOKIE}/-1,table=11"]
    rig.run(lost)
    assert rig.restore() == ["guard_bridge ovsbr0 flows"]
    assert refused() == before
    # Something of a port was lost at the same time.
    limit = f"meter={rig.number(A)},pktps,stats,bands=type=drop,rate=999999"
    for words in (
        ["del-flows", "ovsbr0", f"cookie={A.guard.cookie}/-1,table=20"],
        ["-OOpenFlow13", "mod-meter", "ovsbr0", limit],
    ):
        rig.run(lost)
        rig.run(["ovs-ofctl", *words])
        done = rig.restore()
        assert done[0] == "guard_bridge ovsbr0 flows" and rig.restore() == []
        assert done[1:] == ([f"guard_port {A.guard.port}"] if limit in words else [])
    assert violations(rig) == []


def test_a_flow_that_the_switch_refuses_shuts_its_own_port_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _flows.rules
    wrong = _flows.Flow(_flows.FROM_GUEST, 999, frozenset({"nonsense=1"}), "drop")

    def rules(guard: _flows.Guard, *words: Any) -> frozenset[_flows.Flow]:
        return real(guard, *words) | ({wrong} if guard == A.guard else set())

    lose_flows(rig)
    with monkeypatch.context() as patch:
        patch.setattr(_flows, "rules", rules)
        with pytest.raises(Refusal, match="nonsense"):
            rig.restore()
    assert set(_flows.every("ovsbr0")) == {_flows.BASE_COOKIE, B.guard.cookie}
    assert rig.restore() == [f"guard_port {A.guard.port}"]
    assert violations(rig) == []


@pytest.mark.parametrize("failing", ["filter", "flows"])
def test_a_port_that_fails_keeps_no_flow_that_its_guard_does_not_have(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """While slices run and a flow of the bridge is lost. The neighbour fails too."""
    bridge, right = "ovsbr0", _flows.guards("ovsbr0")[B.guard.cookie]
    stranger = f"cookie={A.guard.cookie},table=10,priority=400,actions=NORMAL"
    rig.run(["ovs-ofctl", "add-flow", bridge, stranger])
    rig.run(["ovs-ofctl", "del-flows", bridge, f"cookie={_flows.BASE_COOKIE}/-1,table=11"])
    real = _command.run

    def run(argv: Any, **options: Any) -> Any:
        text = str(options.get("stdin"))
        of_guests = f"gpuaas_{A.guard.port}" in text or f"gpuaas_{B.guard.port}" in text
        if failing == "filter" and "nft" in argv and of_guests:
            raise Refusal("command_failed", expected="rc 0", found="nft fails", remedy="")
        if failing == "flows" and f"add cookie={A.guard.cookie}" in text:
            raise Refusal("command_failed", expected="rc 0", found="flow refused", remedy="")
        return real(argv, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_command, "run", run)
        with pytest.raises(Refusal, match=r"nft fails|flow refused"):
            rig.restore()
    assert _flows.guards(bridge) == {B.guard.cookie: right}, "its flows are as they must be"
    assert _flows.every(bridge)[_flows.BASE_COOKIE] == _flows.BASE
    rig.restore()
    assert violations(rig) == []


@pytest.mark.parametrize("hanging", ["nft", "add-meter", "add-flows"])
def test_a_program_that_hangs_is_waited_for_once_and_not_for_each_port(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    """More waits would trip the guardian's watchdog, and other runs wait for its lock meanwhile."""
    real, waits = _command.run, []

    def run(argv: Any, **options: Any) -> Any:
        if hanging in argv:
            waits.append(argv)
            raise Refusal("command_timeout", expected="an end", found="it hangs", remedy="")
        return real(argv, **options)

    lose_flows(rig)
    state = _guards.observe(rigs.NETWORK)
    (load,) = [s for s in _guards.plan(rigs.NETWORK, state) if s.name == "guard_bridge"]
    with monkeypatch.context() as patch:
        patch.setattr(_command, "run", run)
        with pytest.raises(Refusal, match="it hangs"):
            _guards.apply(rigs.NETWORK, load)
    assert len(waits) == 1, waits
    rig.restore()
    assert violations(rig) == []


def test_a_guard_file_that_cannot_be_read_shuts_its_own_port_only(rig: Rig) -> None:
    kept = _host.path(_object_names.guard_path(A.guard.allocation_id))
    text = kept.read_text()
    lose_flows(rig)
    kept.write_text(text[: len(text) // 2])
    try:
        assert rig.restore()[:2] == ["guard_bridge ovsbr0 flows", f"remove_filter {A.guard.port}"]
        assert set(_flows.every("ovsbr0")) == {_flows.BASE_COOKIE, B.guard.cookie}
    finally:
        kept.write_text(text)
        rig.restore()
    assert violations(rig) == []


DOMAIN = f"gpuaas-slice-{A.guard.allocation_id.replace('-', '')}"
INTERFACE = (
    f"<interface type='bridge'><mac address='{A.guard.mac}'/><source bridge='ovsbr0'/>"
    f"<virtualport type='openvswitch'/><target dev='{A.guard.port}'/></interface>"
)


def defined(*interfaces: str) -> str:
    return f"<domain type='kvm'><devices>{''.join(interfaces)}</devices></domain>"


def test_a_domain_starts_with_its_guard_in_force(rig: Rig) -> None:
    """As after a power loss: the switch has the bridge and nothing else."""
    rig.kill_switch()
    rig.start_switch()
    rig.run(["ovs-vsctl", f"--db=unix:{rig.folder}/db.sock", "set-fail-mode", "ovsbr0",
             "standalone"])  # fmt: skip
    rig.run(["nft", "delete", "table", "inet", "gpuaas_slice"])
    # Kernels before 6.16 delete the chain together with its tap.
    rig.run(["nft", "delete", "chain", "netdev", f"gpuaas_{A.guard.port}", "from_guest"])
    assert _start_hook.start(DOMAIN, defined(INTERFACE)) == 0
    assert "hook ingress" in _port_filter.installed()[A.guard.port][0]
    assert rig.restore() == []
    rig.establish()
    assert violations(rig) == []


def test_a_neighbour_whose_guard_fails_keeps_no_domain_from_its_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_start_hook, "_DEADLINE_S", 0.3)
    real = _guards.install
    failing = B

    def install(params: Any, guard: _flows.Guard, number: int) -> int:
        if guard == failing.guard:
            raise Refusal("command_failed", expected="rc 0", found="flow refused", remedy="")
        return real(params, guard, number)

    monkeypatch.setattr(_guards, "install", install)
    for guest in (A, B):
        rig.run(["ovs-ofctl", "del-flows", "ovsbr0", f"cookie={guest.guard.cookie}/-1"])
    assert _start_hook.start(DOMAIN, defined(INTERFACE)) == 0
    assert set(_flows.guards("ovsbr0")) == {A.guard.cookie}
    failing = A
    rig.run(["ovs-ofctl", "del-flows", "ovsbr0", f"cookie={A.guard.cookie}/-1"])
    assert _start_hook.start(DOMAIN, defined(INTERFACE)) == 1
    assert "flow refused" in capsys.readouterr().err
    monkeypatch.undo()
    rig.restore()
    assert violations(rig) == []


@pytest.mark.covers("I17")
def test_a_domain_starts_without_the_connections_of_one_before(rig: Rig) -> None:
    """An earlier guest may have had its port number and its address."""
    opened = Attack("A", frames.datagram(rigs.WORLD, sport=23456), frozenset({"host", "world"}))
    assert violations(rig, (opened,)) == []
    zone = f"zone={rig.number(A)}"
    assert "sport=23456" in _switch.appctl("dpctl/dump-conntrack", zone)
    assert _host_connections.number(A.guard.ip)
    assert _start_hook.start(DOMAIN, defined(INTERFACE)) == 0
    assert _switch.appctl("dpctl/dump-conntrack", zone) == ""
    assert _host_connections.number(A.guard.ip) == 0


def test_a_domain_does_not_start_without_its_guard(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_start_hook, "_DEADLINE_S", 0.3)

    def refusal(*interfaces: str, domain: str = DOMAIN) -> str:
        assert _start_hook.start(domain, defined(*interfaces)) == 1
        return capsys.readouterr().err

    for interfaces in (
        (),
        (INTERFACE, INTERFACE),
        (INTERFACE.replace(A.guard.mac, B.guard.mac),),
        (INTERFACE.replace("ovsbr0", "virbr0"),),
        (INTERFACE.replace(A.guard.port, B.guard.port),),
    ):
        assert "domain_differs" in refusal(*interfaces)
    assert "guard_missing" in refusal(INTERFACE, domain=DOMAIN.replace("23bd", "23be"))
    assert "guard_missing" in refusal(INTERFACE, domain=f"{DOMAIN}-copy")
    _nvlink.save(A.guard.allocation_id, _nvlink.Partition((1, 2), socket="/run/none"))
    assert "fabric_manager_unreachable" in refusal(INTERFACE)
    _nvlink.forget(A.guard.allocation_id)
    kept = _host.path(_object_names.guard_path(A.guard.allocation_id))
    text = kept.read_text()
    kept.write_text(text.replace(A.guard.ip, "10.100.0.1"))
    assert "guard_missing" in refusal(INTERFACE)
    kept.write_text(text)
    # The guard does not come into force.
    for name in ("apply", "install"):
        monkeypatch.setattr(_guards, name, lambda *_words: None)
    _flows.remove("ovsbr0", A.guard.cookie)
    assert "guard_not_in_force" in refusal(INTERFACE)
    monkeypatch.setattr(_flows, "port_number", lambda _port: None)
    assert "port_missing" in refusal(INTERFACE)
    monkeypatch.undo()
    rig.restore()


def test_a_guard_that_an_earlier_slice_left_stands_in_nobodys_way(rig: Rig) -> None:
    """The next slice of the slot has the same addresses, which are keys of the firewall's sets."""
    old = replace(A.guard, allocation_id=str(uuid.uuid4()))
    _guards.save(old)
    try:
        assert rig.restore() == ["load_firewall firewall of the guests"]
        assert lease(rig, A) == A.guard.ip
    finally:
        _guards.forget(old.allocation_id)
        rig.restore()


def test_the_firewall_text_is_what_the_kernel_holds(rig: Rig) -> None:
    text = _guards._rules(rigs.NETWORK, _guards._with_probe(rigs.NETWORK))
    assert _firewall.normalized(text) == _firewall.installed()
