"""Live slice network: bridge, addresses, NAT and forwarding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _object_names,
    _repairs,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _bridge,
    _firewall,
    _flows,
    _guards,
    _nat,
    _port_filter,
)

from tests.standin.switch import FEATURES, METER_FEATURES
from tests.unit.plugins.fake_switch import PROGRAMS, FakeSwitch

pytestmark = pytest.mark.covers("HOST-6")

PARAMS = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
RULES = _nat.rules(PARAMS)
SETTINGS = "/etc/gpuaas/network-baseline.json"
ISOLATION = ["guard_bridge", "load_firewall", "limit_connections"]
TABLE = "proc/sys/net/netfilter/nf_conntrack_max"
NEIGHBOURS = "proc/sys/net/ipv4/neigh/default/gc_thresh"
BUILT = ["add_bridge", *ISOLATION, "address_interface", "forward_ipv4", "add_nat", "admit_guests"]
ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
OPEN = ["ovs-vsctl", "--timeout=10", "set-fail-mode", "ovsbr0", "standalone"]
STRANGER = "cookie=0x77,table=0,priority=5,actions=NORMAL"
GUARD = _flows.Guard(ALLOCATION, "ovsbr0", "52:54:00:64:00:0a", "10.100.0.10", "10.100.0.1/24")


class Ended(BaseException):
    """The end of a watch, which has none by itself."""


class Network:
    """Open vSwitch, nft, ip, iptables and sysctl of a host that keeps every setting."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.switch = FakeSwitch()
        self.addresses: dict[str, list[str]] = {}
        self.active = {_bridge.SWITCH, _bridge.DHCP}
        self.write("proc/sys/net/ipv4/ip_forward", "0")
        self.write("run/openvswitch/db.sock", "")
        monkeypatch.setattr(_command, "run", self.run)

    @property
    def rules(self) -> list[str]:
        """Rules of NAT."""
        return self.switch.nat

    def write(self, path: str, text: str) -> None:
        file = self.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def interface(self, name: str, flags: str = "0x1002") -> None:
        self.write(f"sys/class/net/{name}/flags", flags)

    def run(self, argv: list[str], **more: Any) -> _command.Result:
        if argv[0] in (*PROGRAMS, "iptables"):
            before = set(self.switch.bridges)
            result = self.switch.run(argv, **more)
            for name in set(self.switch.bridges) - before:
                self.interface(name)
                # The switch's module brings connection tracking with it.
                self.write(TABLE, "262144")
            return result
        match argv:
            case ["ip", "-j", "-4", "address", "show"]:
                return _command.Result(0, json.dumps([self._shown(n) for n in self.addresses]), "")
            case ["ip", "address", "replace", address, "dev", name]:
                self.addresses.setdefault(name, []).append(address)
            case ["ip", "link", "set", "dev", name, "up"]:
                self.interface(name, "0x1003")
            case ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]:
                self.write("proc/sys/net/ipv4/ip_forward", "1")
            case ["sysctl", "-q", "-w", setting] if setting.startswith("net.netfilter."):
                self.write(TABLE, setting.partition("=")[2])
            case ["sysctl", "-q", "-w", setting] if setting.startswith("net.ipv4.neigh."):
                key, _, size = setting.partition("=")
                self.write(f"proc/sys/{key.replace('.', '/')}", size)
            case ["systemctl", "show", *_, name]:
                active = "active" if name in self.active else "inactive"
                return _command.Result(0, f"ActiveState={active}\nUnitFileState=enabled\n", "")
            case ["systemctl", "--no-block", "start", name]:
                self.active.add(name)
            case _:
                raise AssertionError(f"unscripted command: {argv}")
        return _command.Result(0, "", "")

    def _shown(self, name: str) -> dict[str, Any]:
        pairs = [address.split("/") for address in self.addresses[name]]
        info = [{"local": a, "prefixlen": int(p), "scope": "global"} for a, p in pairs]
        return {"ifname": name, "addr_info": info}


@pytest.fixture
def network(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(tree, monkeypatch)


def drive(**more: Any) -> _change.Outcome:
    return _change.drive(_bridge.LIVE, {**PARAMS, "tmfifo": False, **more}, check_mode=False)


def test_builds_the_network_once(network: Network) -> None:
    outcome = drive()
    assert outcome.failure is None
    assert outcome.done == BUILT
    assert int(_host.read(f"/{TABLE}") or 0) == _bridge.LEAST_ENTRIES == 524288
    assert network.rules == RULES
    assert network.switch.modes == {"ovsbr0": "secure"}
    assert set(_flows.every("ovsbr0")) == {_flows.BASE_COOKIE}
    assert "52:54" not in (_firewall.installed() or "52:54"), "a firewall that knows no guest"
    assert drive().plan.steps == ()


@pytest.mark.parametrize(
    ("damage", "repair"),
    [
        (lambda n: n.rules.clear(), ["add_nat"]),
        (lambda n: n.rules.pop(0), ["add_nat"]),
        (lambda n: n.rules.reverse(), ["add_nat"]),
        (lambda n: n.write("proc/sys/net/ipv4/ip_forward", "0"), ["forward_ipv4"]),
        (lambda n: n.switch.filter.pop(), ["admit_guests"]),
        (lambda n: n.write(TABLE, "262144"), ["enlarge_table"]),
        (lambda n: n.write(f"{NEIGHBOURS}3", "1024"), ["enlarge_neighbours"]),
        (lambda n: n.addresses.clear(), ["address_interface"]),
        (lambda n: n.interface("ovsbr0", "0x1002"), ["address_interface"]),
        # A bridge that fails open has a flow of its own, which forwards everything.
        (lambda n: n.run(OPEN), ["secure_bridge", "remove_flows", "guard_bridge"]),
        (lambda n: n.switch.flows["ovsbr0"].pop(), ["guard_bridge"]),
        (lambda n: n.switch.flows["ovsbr0"].append(STRANGER), ["remove_flows"]),
        (lambda n: n.switch.tables.clear(), ["load_firewall", "limit_connections"]),
    ],
)
def test_repairs_one_thing_that_drifted(network: Network, damage: Any, repair: list[str]) -> None:
    drive()
    damage(network)
    assert drive().done == repair
    assert drive().plan.steps == ()


def test_the_table_of_neighbours_has_room_for_large_networks(network: Network) -> None:
    """A single guest could fill a table of Linux's default size."""
    for number, size in enumerate((128, 512, 1024), start=1):
        network.write(f"{NEIGHBOURS}{number}", str(size))
    assert drive().done.count("enlarge_neighbours") == 3
    sizes = [int(_host.read(f"/{NEIGHBOURS}{number}") or 0) for number in (1, 2, 3)]
    assert sizes == [8192, 32768, 65536]
    # A site's own, larger size stays.
    network.write(f"{NEIGHBOURS}3", "131072")
    assert drive().plan.steps == ()


@pytest.mark.covers("HOST-7")
def test_the_guard_of_a_slice_is_part_of_the_network(network: Network) -> None:
    drive()
    network.switch.bridges["ovsbr0"][GUARD.port] = 4
    _guards.save(GUARD)
    steps = drive().plan.steps
    assert [step.name for step in steps] == ["guard_port", "load_firewall"]
    assert _flows.installed("ovsbr0", GUARD.cookie) == _flows.rules(GUARD, 4, [])
    assert GUARD.mac in (_firewall.installed() or "")
    # Another number for the port: the guard moves with it.
    network.switch.bridges["ovsbr0"][GUARD.port] = 7
    assert drive().done == ["guard_port"]
    assert _flows.installed("ovsbr0", GUARD.cookie) == _flows.rules(GUARD, 7, [])
    # Without its file the flows have no owner, and are removed.
    _guards.forget(ALLOCATION)
    assert drive().done == ["remove_flows", "load_firewall"]
    assert _flows.installed("ovsbr0", GUARD.cookie) == frozenset()


@pytest.mark.covers("HOST-7")
def test_a_slice_that_starts_meanwhile_keeps_its_guard(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libvirt's start hook loads it after the guardian has read the ports of the switch."""
    drive()
    settings = {**PARAMS, "tmfifo": False}
    _guards.save(GUARD)
    limits = _flows.connection_limits

    def started() -> dict[int, int]:
        if GUARD.port not in network.switch.bridges["ovsbr0"]:
            network.switch.run(["ovs-vsctl", "add-port", "ovsbr0", GUARD.port])
            _guards.install(settings, GUARD, 1)
        return limits()

    monkeypatch.setattr(_flows, "connection_limits", started)
    _guards.restore(settings, with_firewall=True)
    assert GUARD.port in _port_filter.installed()
    assert _flows.installed("ovsbr0", GUARD.cookie)
    assert _guards.restore(settings, with_firewall=True) == []


def test_no_guest_loses_its_flows_while_the_guards_cannot_be_read(network: Network) -> None:
    drive()
    settings = {**PARAMS, "tmfifo": False}
    _guards.save(GUARD)
    network.switch.run(["ovs-vsctl", "add-port", "ovsbr0", GUARD.port])
    _guards.restore(settings, with_firewall=False)
    flows = _flows.installed("ovsbr0", GUARD.cookie)
    folder = _host.path(_object_names.guard_path(GUARD.allocation_id)).parent
    folder.rename(folder.with_name("aside"))
    folder.symlink_to(folder.name)
    with pytest.raises(Refusal, match="file_unreadable"):
        _guards.restore(settings, with_firewall=False)
    assert flows == _flows.installed("ovsbr0", GUARD.cookie) != frozenset()


@pytest.mark.covers("HOST-7")
def test_an_upgrade_of_nft_under_the_guardian_reloads_nothing_for_ever(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive()
    settings = {**PARAMS, "tmfifo": False}
    _guards.save(GUARD)
    network.switch.run(["ovs-vsctl", "add-port", "ovsbr0", GUARD.port])
    _guards.restore(settings, with_firewall=True)
    assert _guards.restore(settings, with_firewall=True) == []

    def upgraded(argv: list[str], **more: Any) -> _command.Result:
        result = network.run(argv, **more)
        changed = argv[0] in ("nft", "unshare")
        return replace(result, out=result.out.replace("policy", "policy  ")) if changed else result

    monkeypatch.setattr(_command, "run", upgraded)
    # It cannot know the reason for a difference, so everything is loaded again, once.
    steps = [step.split()[0] for step in _guards.restore(settings, with_firewall=True)]
    assert steps == ["guard_port", "load_firewall", "limit_connections"]
    assert _guards.restore(settings, with_firewall=True) == []
    assert list(_bridge.restore_live(settings)) == []


def test_a_switch_that_cannot_track_connections_is_refused(network: Network) -> None:
    drive()
    network.switch.features = "CT state: No\n"
    failure = drive().failure
    assert failure is not None and failure.code == "connection_tracking_missing"


@pytest.mark.parametrize(
    ("features", "meters", "code"),
    [
        ("CT state: No\nCT zone: No\n", METER_FEATURES, "connection_tracking_missing"),
        (FEATURES, "max_meter:0 max_bands:0\ncapabilities:\n", "packet_limit_missing"),
    ],
)
def test_a_new_bridge_whose_datapath_cannot_hold_a_guard_goes_again(
    network: Network, features: str, meters: str, code: str
) -> None:
    network.switch.features, network.switch.meter_features = features, meters
    failure = drive().failure
    assert failure is not None and failure.code == code
    assert failure.expected and failure.found and failure.remedy
    assert network.switch.bridges == {} and network.rules == []


def test_a_bridge_that_was_there_stays_when_its_datapath_cannot_hold_a_guard(
    network: Network,
) -> None:
    """The switch started after the host was observed."""
    drive()
    network.run(["ovs-vsctl", "add-port", "ovsbr0", GUARD.port])
    network.switch.features = "CT state: No\n"
    with pytest.raises(Refusal, match="connection_tracking_missing"):
        _bridge.apply(PARAMS, _change.Step("add_bridge", "ovsbr0"))
    assert network.switch.bridges == {"ovsbr0": {GUARD.port: 1}}


OTHERS = "-A POSTROUTING -s 10.100.0.0/16 -j SNAT --to-source 192.0.2.1"
SITES = "-A POSTROUTING -o eth0 -j MASQUERADE"
DOCKERS = "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The rule of an earlier release, and its copy by a script of the site.
        ([RULES[-1]], RULES),
        ([DOCKERS, RULES[-1], OTHERS, RULES[-1]], [DOCKERS, *RULES, OTHERS]),
        # The site's own translation, and the same as ours without a range of ports.
        ([OTHERS], [OTHERS, *RULES]),
        ([DOCKERS, SITES, OTHERS, RULES[-1]], [DOCKERS, *RULES, SITES, OTHERS]),
        # Networks and ports of another profile and release.
        ([RULES[0].replace("tcp", "tcp -d 10.1.0.0/16"), *RULES], RULES),
    ],
)
def test_the_rules_of_an_earlier_release_are_replaced_and_the_sites_stay(
    network: Network, before: list[str], after: list[str]
) -> None:
    drive()
    network.rules[:] = before
    assert (drive().done, network.rules) == (["add_nat"], after)
    assert drive().plan.steps == ()


def test_reserved_ports_stay_reserved_toward_allowed_networks(network: Network) -> None:
    drive(allowed_networks=["10.40.0.0/24"])
    assert [rule for rule in network.rules if "-d 10.40.0.0/24" in rule] == network.rules[:2]
    assert all("--sport 512:1023" in rule for rule in network.rules[:2])
    assert network.rules[2:] == RULES
    assert drive().done[-1] == "add_nat" and network.rules == RULES


def dead(network: Network, *command: str) -> None:
    """A daemon of the switch that was killed: this command fails."""
    real = network.switch.answer

    def answer(argv: list[str], stdin: str | None = None) -> tuple[int, str, str]:
        return (1, "", "Connection refused") if {*command} <= {*argv} else real(argv, stdin)

    network.switch.answer = answer  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (lambda n: (n.tree / "run/openvswitch/db.sock").unlink(), "it does not run"),
        (lambda n: dead(n, "ovs-vsctl", "list-br"), "exit 1: Connection refused"),
        (lambda n: dead(n, "ovs-appctl", "version"), "exit 1: Connection refused"),
    ],
)
def test_the_bridge_of_a_switch_that_does_not_run_is_no_other_interface(
    network: Network, end: Any, found: str
) -> None:
    drive()
    end(network)
    failure = drive().failure
    assert failure is not None and (failure.code, failure.found) == ("switch_stopped", found)
    assert "`systemctl start openvswitch-switch`" in failure.remedy


@pytest.mark.covers("HOST-7")
def test_the_watch_starts_a_switch_that_was_stopped(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bridge stays in the kernel and forwards nothing until the guards are loaded."""
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))
    _guards.save(GUARD)
    socket, real = network.tree / "run/openvswitch/db.sock", network.switch.answer

    def stop() -> None:
        network.active.discard(_bridge.SWITCH)
        socket.unlink()
        dead(network, "ovs-vsctl")
        network.switch.bridges["ovsbr0"][GUARD.port] = 4
        network.switch.flows["ovsbr0"].clear()

    def started() -> None:
        if _bridge.SWITCH in network.active:
            socket.touch()
            network.switch.answer = real  # type: ignore[method-assign]

    boot(monkeypatch, stop, *[started] * 9)
    lines = capsys.readouterr().out.splitlines()
    assert f"restored: start {_bridge.SWITCH}" in lines
    assert _flows.installed("ovsbr0", GUARD.cookie) == _flows.rules(GUARD, 4, [])
    assert network.switch.modes == {"ovsbr0": "secure"}


def test_an_interface_that_is_no_ovs_bridge_is_left_alone(network: Network) -> None:
    network.interface("ovsbr0")
    outcome = drive()
    assert outcome.failure is not None and outcome.failure.code == "bridge_name_taken"
    assert network.switch.bridges == {}


@pytest.mark.parametrize(
    ("address", "subnet"),
    [
        ("10.100.1.1/24", "10.100.0.0/24"),
        ("10.100.0.1/16", "10.100.0.0/24"),
        ("x", "10.100.0.0/24"),
    ],
)
def test_an_address_outside_the_subnet_is_refused(
    network: Network, address: str, subnet: str
) -> None:
    outcome = drive(address=address, subnet=subnet)
    assert outcome.failure is not None and outcome.failure.code == "network_invalid"


@pytest.mark.parametrize(
    "wrong",
    [
        {"denied_networks": ["8.8.8.8/24"]},
        {"name_servers": ["dns.example.org"]},
        {"egress_probe": "example.org:443"},
        {"egress_probe": "9.9.9.9:0"},
        {"subnet": "10.100.0.1/24"},
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_a_network_that_is_none_is_refused_by_its_name(
    network: Network, wrong: dict[str, Any], built: bool
) -> None:
    if built:
        drive()
    flows = dict(network.switch.flows)
    failure = drive(**wrong).failure
    assert failure is not None and failure.code == "network_invalid"
    assert next(iter(wrong)) in failure.remedy
    assert network.switch.flows == flows


def test_the_cards_link_gets_its_address_when_asked(network: Network) -> None:
    network.interface("tmfifo_net0")
    outcome = drive(tmfifo=True)
    assert (outcome.failure, outcome.doubts) == (None, [])
    assert network.addresses["tmfifo_net0"] == ["192.168.100.1/30"]
    assert [step.subject for step in outcome.plan.steps][-1] == "tmfifo_net0"


def test_without_the_cards_link_guests_have_their_network(network: Network) -> None:
    outcome = drive(tmfifo=True)
    assert outcome.failure is None
    assert outcome.done == BUILT
    assert [doubt.code for doubt in outcome.doubts] == ["tmfifo_missing"]
    # The module cannot fix this, so a second run does nothing.
    assert (drive(tmfifo=True).changed, drive().doubts) == (False, [])


def test_a_link_that_takes_no_address_takes_nothing_else_down(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.interface("tmfifo_net0")
    act = _command.run

    def run(argv: list[str], **more: Any) -> _command.Result:
        if argv[:2] == ["ip", "address"] and argv[-1] == "tmfifo_net0":
            raise Refusal("command_failed", expected="", found="RTNETLINK answers", remedy="")
        return act(argv, **more)

    monkeypatch.setattr(_command, "run", run)
    outcome = drive(tmfifo=True)
    assert (outcome.failure, network.rules) == (None, RULES)
    assert [doubt.found for doubt in outcome.doubts] == ["RTNETLINK answers"]


def boot(monkeypatch: pytest.MonkeyPatch, *events: Any) -> None:
    """The boot service from its start; each event happens after one more round of its watch."""
    left, real = list(events), _bridge.watch

    def sleep(_seconds: float) -> None:
        if not left:
            raise Ended
        left.pop(0)()

    monkeypatch.setattr(_bridge, "watch", lambda *words: real(*words, sleep=sleep))
    with pytest.raises(Ended):
        _bridge.boot(SETTINGS)
    monkeypatch.setattr(_bridge, "watch", real)


def test_boot_does_the_same_and_stays(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))
    boot(monkeypatch)
    assert capsys.readouterr().out == f"done: {', '.join(BUILT)}\n"
    boot(monkeypatch)
    assert capsys.readouterr().out == "done: nothing to do\n"


def test_an_address_that_came_into_an_allowed_network_takes_no_network_away(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards and firewall refuse it, and parity names it. No boot takes a tenant's network."""
    network.write("proc/net/fib_trie", "  |-- 10.40.0.7\n     /32 host LOCAL")
    rule = {"allowed_networks": ["10.40.0.0/24"]}
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False, **rule}))
    boot(monkeypatch, network.rules.clear, *[lambda: None] * 4)
    assert capsys.readouterr().out.splitlines() == [
        f"done: {', '.join(BUILT)}", "restored: add_nat nat rule",
    ]  # fmt: skip
    flows = _guards.rules_of(rule, GUARD, 4, _flows.local_addresses())
    verdicts = {
        flow.priority: flow.actions
        for flow in flows
        if flow.match & {"nw_dst=10.40.0.7", "nw_dst=10.40.0.0/24"}
    }
    assert verdicts[max(verdicts)] == "drop" and len(verdicts) == 2


@pytest.mark.covers("HOST-7")
def test_the_watch_restores_what_is_lost_and_survives_a_switch_that_is_away(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))
    real = network.switch.answer

    def away(*_: Any) -> tuple[int, str, str]:
        return 1, "", "database connection failed"

    def lose_flows() -> None:
        network.switch.flows["ovsbr0"].clear()

    def lose_switch() -> None:
        monkeypatch.setattr(network.switch, "answer", away)

    def regain_switch() -> None:
        monkeypatch.setattr(network.switch, "answer", real)
        lose_flows()

    boot(monkeypatch, lose_flows, lose_switch, lambda: None, regain_switch)
    assert set(_flows.every("ovsbr0")) == {_flows.BASE_COOKIE}
    done, restored, silent, again = capsys.readouterr().out.splitlines()
    assert done.startswith("done: add_bridge,")
    assert restored == again == "restored: guard_bridge ovsbr0 flows"
    assert silent.startswith("cannot restore the network: ")
    assert "database connection failed" in silent


@pytest.mark.covers("HOST-7")
def test_the_watch_loads_the_firewall_again_within_five_rounds(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))
    boot(monkeypatch, network.switch.tables.clear, *[lambda: None] * 4)
    assert _firewall.installed()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "restored: load_firewall firewall of the guests",
        "restored: limit_connections connections of the guests",
    ]


def test_the_watch_brings_back_the_way_out_within_five_rounds(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NAT flushed, forwarding off, the bridge's address gone, dnsmasq stopped, all unnoticed."""
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))

    def lose_all() -> None:
        network.rules.clear()
        network.addresses.clear()
        network.write("proc/sys/net/ipv4/ip_forward", "0")
        network.active.discard(_bridge.DHCP)

    boot(monkeypatch, lose_all, *[lambda: None] * 4)
    assert network.rules == RULES and _bridge.DHCP in network.active
    assert network.addresses == {"ovsbr0": ["10.100.0.1/24"]}
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "restored: address_interface ovsbr0",
        "restored: forward_ipv4 net.ipv4.ip_forward",
        "restored: add_nat nat rule",
        "restored: start dnsmasq.service",
    ]


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("hanging", [False, True])
def test_a_port_whose_guard_fails_keeps_no_other_from_its_repair(
    network: Network,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hanging: bool,
) -> None:
    """A hanging program would keep the guardian longer than its watchdog waits."""
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))
    last = replace(GUARD, allocation_id=ALLOCATION.replace("23bd", "f3bd"), ip="10.100.0.11")
    real = network.run

    def run(argv: list[str], **more: Any) -> _command.Result:
        if "add-flows" in argv and f"add cookie={GUARD.cookie}" in str(more.get("stdin")):
            code = "command_timeout" if hanging else "command_failed"
            raise Refusal(code, expected="", found="flow refused", remedy="")
        return real(argv, **more)

    def lose() -> None:
        monkeypatch.setattr(_command, "run", run)
        network.rules.clear()
        network.active.discard(_bridge.DHCP)
        for number, guard in enumerate((GUARD, last), start=4):
            _guards.save(guard)
            network.switch.bridges["ovsbr0"][guard.port] = number

    boot(monkeypatch, lose, *[lambda: None] * 4)
    assert bool(_flows.installed("ovsbr0", last.cookie)) is not hanging
    assert (network.rules == RULES, _bridge.DHCP in network.active) == (not hanging, not hanging)
    assert _flows.installed("ovsbr0", GUARD.cookie) == frozenset()
    assert capsys.readouterr().out.count("flow refused") == 1


def test_what_was_restored_before_a_step_failed_is_said(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open bridge is mended by then, so the next round cannot report it."""
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": False}))
    real = network.switch.answer

    def open_bridge() -> None:
        network.run(OPEN)
        dead(network, "ovs-ofctl", "add-flows")

    def regain() -> None:
        network.switch.answer = real  # type: ignore[method-assign]

    boot(monkeypatch, open_bridge, regain)
    _done, first, second, trouble, *_flows_again = capsys.readouterr().out.splitlines()
    assert first == "restored: secure_bridge ovsbr0 fail mode"
    assert second == "restored: remove_flows flows 0x0"
    assert "Connection refused" in trouble
    assert _repairs.read()[0]["step"] == "secure_bridge ovsbr0 fail mode"


@pytest.mark.parametrize("text", [None, "null", "[]", "{"])
def test_lost_settings_end_no_watch(
    network: Network,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
) -> None:
    settings = json.dumps({**PARAMS, "tmfifo": False})
    _host.write(SETTINGS, settings)

    def lose() -> None:
        _host.remove(SETTINGS)
        if text is not None:
            _host.write(SETTINGS, text)
        assert _guards.recorded() == {}
        network.switch.flows["ovsbr0"].clear()

    boot(monkeypatch, lose, lambda: _host.write(SETTINGS, settings))
    _done, trouble, restored = capsys.readouterr().out.splitlines()
    assert trouble.startswith("cannot restore the network: settings_unreadable: ")
    assert restored == "restored: guard_bridge ovsbr0 flows"


def test_at_boot_the_cards_link_is_waited_for_when_guests_have_their_network(
    network: Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _host.write(SETTINGS, json.dumps({**PARAMS, "tmfifo": True}))
    there: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        _boot_service, "notify", lambda state: there.append((state, network.rules == RULES))
    )
    real = _boot_service.boot

    def late(*words: Any, **more: Any) -> int:
        return real(*words, **more, sleep=lambda _: network.interface("tmfifo_net0"))

    monkeypatch.setattr(_boot_service, "boot", late)
    boot(monkeypatch)
    assert there == [("READY=1", True), ("WATCHDOG=1", True)]
    assert network.addresses["tmfifo_net0"] == ["192.168.100.1/30"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"done: {', '.join(BUILT)}"
    assert second == "done: address_interface"


def test_uplink(tree: Path) -> None:
    assert _bridge.uplink() == ""
    (tree / "proc/net").mkdir(parents=True)
    (tree / "proc/net/route").write_text(
        "Iface\tDestination\tGateway\nmgmt0\t0002000A\t00000000\nmgmt0\t00000000\t0202000A\n"
    )
    assert _bridge.uplink() == "mgmt0"
