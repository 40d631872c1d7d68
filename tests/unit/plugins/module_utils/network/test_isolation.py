"""Isolation of slices, shown by packets: a real switch, a real firewall, guests with root."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _firewall,
    _flows,
    _guards,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import ATTACKS, Attack
from tests.unit.plugins.module_utils.network.rig import A, B, Rig

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]

SETTLE_S = 0.1
NUMBERS = itertools.count()
Rules = Callable[..., frozenset[_flows.Flow]]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    # Paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="rig"))
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(_host, "ROOT", folder / "root")
        rigs.commands_on(folder, f"rig{rigs.os.getpid()}-host", patch)
        with rigs.machines(folder) as machines:
            yield machines
    finally:
        patch.undo()
        shutil.rmtree(folder)


class Places:
    """Raw sockets at every place that could see a frame. seen: names of places by token."""

    def __init__(self, rig: Rig) -> None:
        inside = {
            A.place: (rig.place(A.place), "eth0"),
            B.place: (rig.place(B.place), "eth0"),
            "host": (rig.host, "ovsbr0"),
            "world": (rig.place("world"), "eth0"),
            "mgmt": (rig.place("mgmt"), "eth0"),
        }
        self.sockets = {name: rigs.packet_socket(*place) for name, place in inside.items()}
        self.macs = {
            place: rig.run(["cat", f"/sys/class/net/{interface}/address"]).stdout.strip()
            for place, interface in ((A.place, "ovsbr0"), ("world", "up0"), ("mgmt", "mgmt0"))
        }
        with rigs.inside(rig.host):
            self.service = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.service.bind(("0.0.0.0", frames.PORT))
        self.service.setblocking(False)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in (*self.sockets.values(), self.service):
            handle.close()

    def send(self, attack: Attack, token: bytes) -> None:
        self.sockets[attack.place].send(attack.build(self.macs[attack.place], token))

    def seen(
        self, expected: dict[bytes, frozenset[str]] | None = None, limit_s: float = 10
    ) -> dict[bytes, set[str]]:
        """Places by token, of all frames since the last call.

        Waits until every expected frame was seen, and some time longer for the others.
        """
        tokens: dict[bytes, set[str]] = {}
        deadline = time.monotonic() + limit_s
        while any(places - tokens.get(t, set()) for t, places in (expected or {}).items()):
            self._take(tokens)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        time.sleep(SETTLE_S)
        self._take(tokens)
        return tokens

    def _take(self, tokens: dict[bytes, set[str]]) -> None:
        for name, handle in (*self.sockets.items(), ("service", self.service)):
            while True:
                try:
                    data, sender = handle.recvfrom(4096)
                except BlockingIOError:
                    break
                if name != "service" and sender[2] == socket.PACKET_OUTGOING:
                    continue
                for token in re.findall(rb"<[0-9]{6}>", data):
                    tokens.setdefault(token, set()).add(name)


def violations(rig: Rig, attacks: tuple[Attack, ...] = ATTACKS, limit_s: float = 10) -> list[str]:
    """Every frame that was seen elsewhere than it should be, or not where it should."""
    with Places(rig) as places:
        tokens = {}
        for attack in attacks:
            token = b"<%06d>" % next(NUMBERS)
            tokens[token] = attack
            places.send(attack, token)
        expected = {token: attack.seen for token, attack in tokens.items()}
        seen = places.seen(expected, limit_s)
    return [
        f"{attack.name}: {sorted(seen.get(token, set()))}, expected {sorted(attack.seen)}"
        for token, attack in tokens.items()
        if seen.get(token, set()) - {attack.place} != attack.seen
    ]


def test_every_frame_is_seen_only_where_it_should_be(rig: Rig) -> None:
    assert violations(rig) == []


def test_the_host_reaches_the_guest_and_only_answers_come_back(rig: Rig) -> None:
    with rigs.inside(rig.place(A.place)):
        listener = socket.create_server((A.guard.ip, 22))
    with listener:
        with rigs.inside(rig.host):
            client = socket.create_connection((A.guard.ip, 22), timeout=3)
        server, (peer, _port) = listener.accept()
        server.sendall(b"SSH-2.0-guest\r\n")
        assert client.recv(100) == b"SSH-2.0-guest\r\n"
        assert peer == rigs.GATEWAY
        server.close()
        client.close()


def connection(
    rig: Rig, place: str, address: str, port: int
) -> tuple[socket.socket, socket.socket]:
    """A TCP connection from a guest to a server in another place: both ends."""
    with rigs.inside(rig.place(place)):
        listener = socket.create_server((address, port))
    with listener:
        with rigs.inside(rig.place(A.place)):
            client = socket.create_connection((address, port), timeout=3)
        server, _peer = listener.accept()
    return client, server


def test_rules_are_replaced_under_an_open_connection(rig: Rig) -> None:
    client, server = connection(rig, "world", rigs.WORLD, 7000)
    received: list[bytes] = []

    def read() -> None:
        while data := server.recv(65536):
            received.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with client:
        for number in range(20):
            client.sendall(b"%04d" % number)
            rig.admit(A)
    reader.join(5)
    server.close()
    assert b"".join(received) == b"".join(b"%04d" % number for number in range(20))


def test_a_guest_without_its_guard_is_cut_off(rig: Rig) -> None:
    client, server = connection(rig, "world", rigs.WORLD, 7001)
    with client, server:
        server.settimeout(1)
        _flows.remove("ovsbr0", A.guard.cookie)
        try:
            client.sendall(b"still there?")
            with pytest.raises(TimeoutError):
                server.recv(100)
        finally:
            restored = rig.restore()
        assert restored == [f"guard_port {A.guard.port}"]
        assert server.recv(100) == b"still there?", "the guest sends it again"


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


def test_random_hardware_addresses_reach_nobody(rig: Rig) -> None:
    flood = tuple(
        Attack(
            "flood", frames.datagram(rigs.WORLD, hardware=f"02:00:00:00:{n >> 8:02x}:{n & 255:02x}")
        )
        for n in range(2000)
    )
    assert violations(rig, flood) == []
    assert violations(rig) == []


# Connections of a guest are counted in its own zone of the switch.
def test_a_guest_cannot_fill_the_connection_table(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_flows, "CONNECTIONS", 50)
    rig.admit(A)
    try:
        flood = tuple(
            Attack("connect", frames.datagram(rigs.WORLD, sport=10000 + n)) for n in range(200)
        )
        passed = len(violations(rig, flood))
        shown = rig.run(["ovs-appctl", "dpctl/ct-get-limits"]).stdout
        assert "limit=50" in shown
        assert 0 < passed <= 50
    finally:
        monkeypatch.undo()
        _flows.forget_connections(_flows.port_number(A.guard.port) or 0)
        rig.admit(A)


def client_message(rig: Rig, data: bytes, *, source: str = "0.0.0.0") -> None:
    """Send a DHCP message from A's port, from A's MAC."""
    body = frames.udp(source, "255.255.255.255", 68, 67, data)
    packet = frames.ipv4(source, "255.255.255.255", 17, body)
    with rigs.packet_socket(rig.place(A.place), "eth0") as handle:
        handle.send(frames.ether(A.guard.mac, frames.EVERYONE, 0x0800, packet))


def lease(rig: Rig, guest: rigs.Guest) -> str:
    """The address that dnsmasq offers and leases to a guest; "" without an offer."""
    with rigs.packet_socket(rig.place(guest.place), "eth0") as handle:
        for kind in (1, 3):
            data = frames.dhcp(
                kind, guest.guard.mac, b"", requested=guest.guard.ip if kind == 3 else ""
            )
            body = frames.udp("0.0.0.0", "255.255.255.255", 68, 67, data)
            packet = frames.ipv4("0.0.0.0", "255.255.255.255", 17, body)
            handle.send(frames.ether(guest.guard.mac, frames.EVERYONE, 0x0800, packet))
            answer = _dhcp_answer(handle)
            if not answer:
                return ""
    return answer


def _dhcp_answer(handle: socket.socket) -> str:
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            frame = handle.recv(4096)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        if frame[12:14] == b"\x08\x00" and frame[23] == 17 and frame[34:38] == b"\x00\x43\x00\x44":
            return socket.inet_ntoa(frame[42 + 16 : 42 + 20])
    return ""


def test_a_guest_cannot_speak_dhcp_for_its_neighbour(rig: Rig) -> None:
    assert lease(rig, B) == B.guard.ip
    assert lease(rig, A) == A.guard.ip, "its own address it gets"
    clid = b"\x01" + frames.mac(B.guard.mac)
    probe = _baseline_files.probe_address(rigs.NETWORK["subnet"])
    forged = [
        frames.dhcp(7, B.guard.mac, b"", ciaddr=B.guard.ip, server=rigs.GATEWAY),
        frames.dhcp(4, B.guard.mac, b"", requested=B.guard.ip, server=rigs.GATEWAY),
        frames.dhcp(4, A.guard.mac, b"", requested=B.guard.ip, server=rigs.GATEWAY),
        frames.dhcp(4, A.guard.mac, b"", requested=B.guard.ip, server=rigs.GATEWAY, client_id=clid),
        frames.dhcp(7, A.guard.mac, b"", ciaddr=B.guard.ip, server=rigs.GATEWAY, client_id=clid),
        frames.dhcp(4, _baseline_files.PROBE_MAC, b"", requested=probe, server=rigs.GATEWAY),
        frames.dhcp(1, B.guard.mac, b"", giaddr=rigs.BMC),
        frames.dhcp(1, A.guard.mac, b"", giaddr=rigs.BMC),
    ]
    for data in forged:
        client_message(rig, data)
        client_message(rig, data, source=A.guard.ip)
    time.sleep(SETTLE_S)
    assert f"{B.guard.mac} {B.guard.ip}" in rig.leases.read_text()
    assert lease(rig, B) == B.guard.ip, "the neighbour still gets its address"
    assert lease(rig, A) == A.guard.ip
    counted = rig.run(["nft", "list", "counter", "inet", "gpuaas_slice", "dhcp_forged"]).stdout
    assert int(re.findall(r"packets ([0-9]+)", counted)[0]) >= 8


def test_names_of_neighbours_and_of_the_host_are_not_served(rig: Rig) -> None:
    with rigs.inside(rig.place(A.place)):
        handle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with handle:
        handle.settimeout(2)
        for name, kind, group in (
            (f"{'.'.join(reversed(B.guard.ip.split('.')))}.in-addr.arpa", 12, 1),
            ("version.bind", 16, 3),
            ("localhost.localdomain", 1, 1),
        ):
            labels = b"".join(bytes([len(p)]) + p for p in name.encode().split(b"."))
            question = b"\x12\x34\x01\x00\x00\x01" + bytes(6) + labels + b"\0"
            handle.sendto(
                question + kind.to_bytes(2, "big") + group.to_bytes(2, "big"), (rigs.GATEWAY, 53)
            )
            try:
                answer = handle.recv(2048)
            except TimeoutError:
                continue  # forwarded to a server that is not there
            assert int.from_bytes(answer[6:8], "big") == 0, f"{name} was answered"


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
        "firewall": (["nft", "flush", "chain", "inet", "gpuaas_slice", "guest_to_world"],
                     "load_firewall"),
        "firewall gone": (["nft", "delete", "table", "inet", "gpuaas_slice"], "load_firewall"),
    }  # fmt: skip
    for name, (command, step) in changes.items():
        words = list(command)
        if words[0] == "ovs-vsctl":
            words.insert(1, f"--db=unix:{rig.folder}/db.sock")
        rig.run(words)
        done = rig.restore()
        assert [each.split()[0] for each in done][:1] == [step], name
        assert rig.restore() == [], name
    assert violations(rig) == []


# A mutant of the rules must be seen by the table of attacks.
def _without(field: str, *, table: int = _flows.FROM_GUEST) -> Rules:
    def change(flow: _flows.Flow) -> _flows.Flow:
        passes = flow.table == table and flow.actions != "drop"
        match = frozenset(m for m in flow.match if not (passes and m.split("=")[0] == field))
        return _flows.Flow(flow.table, flow.priority, match, flow.actions)

    return lambda flows: frozenset(map(change, flows))


def _drop(unwanted: Callable[[_flows.Flow], bool]) -> Rules:
    return lambda flows: frozenset(flow for flow in flows if not unwanted(flow))


def _acts(actions: str, chosen: Callable[[_flows.Flow], bool]) -> Rules:
    return lambda flows: frozenset(
        _flows.Flow(f.table, f.priority, f.match, actions) if chosen(f) else f for f in flows
    )


MUTANTS: dict[str, Rules] = {
    "any source address": _without("nw_src"),
    "any source MAC": _without("dl_src"),
    "any ARP address": _without("arp_spa"),
    "any ARP hardware": _without("arp_sha"),
    "any ARP target": _without("arp_tpa"),
    "tags pass": _without("vlan_tci"),
    "a guest may serve DHCP": _drop(lambda flow: flow.priority == 310),
    "the rest is switched": _acts(
        "NORMAL", lambda flow: (flow.table, flow.priority) == (_flows.FROM_GUEST, 10)
    ),
    "guests send to guests": _acts(
        f"resubmit(,{_flows.TO_GUEST})", lambda flow: flow.table == _flows.CLASSIFY
    ),
    "the gateway is open": _acts("LOCAL", lambda flow: flow.priority == 295),
    "the host is open": _drop(lambda flow: flow.priority == 290),
    "private space is open": _drop(lambda flow: flow.priority == 280),
    "no way out": _drop(lambda flow: flow.priority == 270),
    "no allowed network": _drop(lambda flow: flow.priority == 285),
    "no name server": _drop(lambda flow: flow.priority == 295),
    "no DHCP": _drop(lambda flow: flow.priority == 300),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_guard_is_seen(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = _flows.rules
    monkeypatch.setattr(_flows, "rules", lambda *words: MUTANTS[name](real(*words)))
    try:
        rig.admit(A)
        assert violations(rig, limit_s=0.5), f"not noticed: {name}"
    finally:
        monkeypatch.undo()
        rig.admit(A)


def test_without_the_firewall_outsiders_reach_guests(rig: Rig) -> None:
    """The attack from outside is held by the firewall alone, so the test can fail."""
    rig.run(["nft", "delete", "table", "inet", "gpuaas_slice"])
    try:
        assert any("from the uplink" in text for text in violations(rig))
    finally:
        rig.restore()
    assert violations(rig) == []


def test_nothing_passes_during_and_after_a_crash_of_the_switch(rig: Rig) -> None:
    silent = tuple(Attack(each.name, each.build, place=each.place) for each in ATTACKS)
    rig.kill_switch()
    rig.start_switch()
    # The switch is back without flows, and fails closed.
    rig.run(["ip", "link", "set", "ovsbr0", "up"])
    assert violations(rig, silent) == []
    restored = rig.restore()
    assert {text.split()[0] for text in restored} == {"guard_bridge", "guard_port"}
    rig.establish()
    assert violations(rig) == []


def test_a_port_without_a_guard_carries_nothing(rig: Rig) -> None:
    _guards.forget(B.guard.allocation_id)
    try:
        assert rig.restore()[0] == f"remove_flows flows {B.guard.cookie}"
        mine = Attack("send", lambda gateway, token: frames.ether(
            B.guard.mac, gateway, 0x0800,
            frames.ipv4(B.guard.ip, rigs.WORLD, 17,
                        frames.udp(B.guard.ip, rigs.WORLD, 1, 5000, token))))  # fmt: skip
        with Places(rig) as places:
            places.sockets[B.place].send(mine.build(places.macs[A.place], b"<123456>"))
            assert places.seen() == {}
    finally:
        rig.admit(B)


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from([A.guard.mac, B.guard.mac, "02:00:00:00:00:01"]),
    target=st.sampled_from(["gateway", B.guard.mac, frames.EVERYONE, "01:00:5e:00:00:fb"]),
    sender=st.one_of(st.just(A.guard.ip), st.ip_addresses(v=4).map(str)),
    destination=st.one_of(
        st.ip_addresses(v=4).map(str),
        st.sampled_from([B.guard.ip, rigs.GATEWAY, rigs.BMC, rigs.WORLD, rigs.UPLINK, rigs.CLOSED]),
    ),
    protocol=st.sampled_from(["tcp", "udp", "icmp", "arp", "ip,nw_proto=47", "ipv6"]),
    ports=st.tuples(st.integers(0, 65535), st.sampled_from([22, 53, 67, 68, 443])),
)
def test_any_frame_of_a_guest_goes_to_the_host_or_nowhere(
    rig: Rig, source: str, target: str, sender: str, destination: str, protocol: str,
    ports: tuple[int, int],
) -> None:  # fmt: skip
    """The switch's own tracer says where a frame goes."""
    number = _flows.port_number(A.guard.port)
    gateway = "02:00:00:00:00:fe" if target == "gateway" else target
    fields = [f"in_port={number}", f"dl_src={source}", f"dl_dst={gateway}", protocol]
    if protocol == "arp":
        fields += [f"arp_spa={sender}", f"arp_tpa={destination}", f"arp_sha={source}"]
    elif protocol != "ipv6":
        fields += [f"nw_src={sender}", f"nw_dst={destination}"]
    if protocol in ("tcp", "udp"):
        fields += [f"{protocol}_src={ports[0]}", f"{protocol}_dst={ports[1]}"]
    argv = ["ovs-appctl", "ofproto/trace", "--names", "ovsbr0", ",".join(fields)]
    shown = rig.run(argv).stdout
    acts = re.findall(r"Datapath actions: (.*)", shown)
    assert acts
    for text in acts:
        assert A.guard.port not in text and B.guard.port not in text, shown
    reached = any("ovsbr0" in text for text in acts)
    if reached:
        assert source == A.guard.mac
        assert sender == A.guard.ip or (sender, destination) == ("0.0.0.0", "255.255.255.255")
        assert destination not in (B.guard.ip, rigs.BMC, rigs.UPLINK, rigs.CLOSED)
        assert protocol != "ipv6"


def test_the_firewall_text_is_what_the_kernel_holds(rig: Rig) -> None:
    text = _guards._rules(rigs.NETWORK, _guards._with_probe(rigs.NETWORK))
    assert _firewall.normalized(text) == _firewall.installed()


def test_bad_networks_are_refused_by_name() -> None:
    def codes(**networks: Any) -> list[str]:
        return [str(p) for p in _guards.problems({**rigs.NETWORK, **networks}, [rigs.UPLINK])]

    assert codes() == []
    assert "which contains 11.0.0.2" in codes(allowed_networks=["11.0.0.0/8"])[0]
    assert "slice subnet" in codes(allowed_networks=["10.100.0.0/16"])[0]
    assert "network_invalid" in codes(denied_networks=["8.8.8.8/24"])[0]
