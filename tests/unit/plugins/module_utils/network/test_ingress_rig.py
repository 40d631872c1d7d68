"""Managed ingress, shown by connections: a real switch, a real firewall, clients and guests."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _firewall,
    _guards,
    _ingress,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _traces
from ansible_collections.gpuaas.slice.plugins.modules import slice_ingress as module

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import Attack
from tests.unit.plugins.module_utils.network.rig import A, B, Rig
from tests.unit.plugins.module_utils.network.traffic import violations

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]

PUBLIC, PORT, SERVICE = "11.0.0.50", 8443, 443
# A client in a private network, which no guest may reach by itself.
PRIVATE = rigs.BMC
RULE: dict[str, Any] = {
    "id": "7d9f2a52-6c54-4f8e-9f0a-3f4b5c6d7e8f",
    "protocol": "tcp",
    "public_address": PUBLIC,
    "public_port": PORT,
    "guest_port": SERVICE,
    "sources": [f"{rigs.WORLD}/32", "10.20.0.0/24"],
    # Later than any session of tests ends.
    "expires_at": int(time.time()) + 30 * 86_400,
}
SLOT = {"slot_id": "slot-1", "fence": 3}
PRESENT: dict[str, Any] = {
    "allocation_id": A.guard.allocation_id,
    "rule": RULE,
    "slots": [SLOT],
    "deadline": 0,
    "state": "present",
}
ABSENT = {**PRESENT, "state": "absent"}
ALL_ABSENT = {**ABSENT, "rule": None}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rigs.standing() as (machines, patch):
        patch.setattr(module, "_probe", _probe_inside(machines))
        patch.setattr(module, "_CONNECT_SECONDS", 30.0)
        _host.write(_baseline_files.SETTINGS, json.dumps(_baseline_files.settings(rigs.NETWORK)))
        _ledger.hold("slot-1", fence=3, allocation_id=A.guard.allocation_id, disk_identity="d")
        machines.run(["ip", "address", "add", f"{PUBLIC}/32", "dev", "up0"])
        way = ["ip", "route", "add", PUBLIC, "via", rigs.MANAGEMENT]
        machines.run(way, place=machines.place("mgmt"))
        machines.restore()
        yield machines


def _probe_inside(machines: Rig) -> Any:
    real = module._probe

    def probe(*words: Any) -> float:
        with rigs.inside(machines.host):
            return real(*words)

    return probe


def drive(params: dict[str, Any]) -> _change.Outcome:
    return _change.drive(module.SUBJECT, params, check_mode=False)


def refusal(params: dict[str, Any]) -> str:
    try:
        failure = drive(params).failure
    except Refusal as refused:
        return refused.code
    return failure.code if failure else ""


@pytest.fixture
def service(rig: Rig) -> Iterator[socket.socket]:
    """The guest's service, with the rule in force."""
    with rigs.inside(rig.place(A.place)):
        listener = socket.create_server((A.guard.ip, SERVICE))
    with listener:
        apply(listener, new_rule())
        yield listener
    drive(ALL_ABSENT)


def apply(service: socket.socket, rule: dict[str, Any]) -> None:
    applied = drive({**PRESENT, "rule": rule})
    assert applied.failure is None
    assert rule["id"] in applied.facts["ingress"]["rules"]
    service.accept()[0].close()  # the probe


def new_rule(**fields: Any) -> dict[str, Any]:
    return {**RULE, "id": str(uuid.uuid4()), **fields}


def connect(
    rig: Rig, place: str, source: str, port: int = PORT, *, limit_s: float = 0.3, to: str = PUBLIC
) -> socket.socket | None:
    """A client's connection; None without an answer."""
    with rigs.inside(rig.place(place)):
        try:
            return socket.create_connection((to, port), limit_s, (source, 0))
        except OSError:
            return None


def talk(client: socket.socket, service: socket.socket) -> tuple[socket.socket, str]:
    """Send in both directions; the guest's end, and the client that it sees."""
    server, (peer, _port) = service.accept()
    client.settimeout(30)
    server.settimeout(30)
    client.sendall(b"hello")
    assert server.recv(100) == b"hello"
    server.sendall(b"hello yourself")
    assert client.recv(100) == b"hello yourself"
    return server, str(peer)


@pytest.mark.parametrize(("place", "source"), [("world", rigs.WORLD), ("mgmt", PRIVATE)])
def test_a_named_client_reaches_the_service(
    rig: Rig, service: socket.socket, place: str, source: str
) -> None:
    client = connect(rig, place, source, limit_s=30)
    assert client is not None
    with client:
        server, peer = talk(client, service)
        server.close()
    assert peer == source, "the guest sees who it is"
    assert _guards.plan(rigs.NETWORK, _guards.observe(rigs.NETWORK)) == [], "for parity too"


def test_nothing_else_comes_in(rig: Rig, service: socket.socket) -> None:
    with rigs.inside(rig.place(B.place)):
        neighbour = socket.create_server((B.guard.ip, SERVICE))
    with rigs.inside(rig.place(A.place)):
        other = socket.create_server((A.guard.ip, PORT))
    with neighbour, other:
        assert connect(rig, "world", "11.0.0.1") is None, "no source of the rule"
        assert connect(rig, "world", rigs.WORLD, SERVICE) is None, "another public port"
        assert connect(rig, B.place, B.guard.ip) is None, "a neighbour"
        assert connect(rig, A.place, A.guard.ip) is None, "the guest itself"
        for address, port in ((A.guard.ip, SERVICE), (A.guard.ip, PORT), (B.guard.ip, SERVICE)):
            assert connect(rig, "world", rigs.WORLD, port, to=address) is None, "past the rule"


def test_the_answers_are_no_way_out_of_the_guest(rig: Rig, service: socket.socket) -> None:
    """The client's network is private, and open for answers only."""
    begins = tuple(
        Attack(f"flags {flags}", frames.Sender(A).segment(PRIVATE, SERVICE, 4000, flags))
        for flags in (0x02, 0x10, 0x12, 0x04)
    )
    assert violations(rig, begins) == []
    assert violations(rig) == [], "the table of attacks, with a rule in force"


def test_the_removal_cuts_an_open_connection(rig: Rig, service: socket.socket) -> None:
    rule = new_rule(public_port=PORT + 1)
    apply(service, rule)
    client = connect(rig, "mgmt", PRIVATE, PORT + 1, limit_s=30)
    kept = connect(rig, "world", rigs.WORLD, limit_s=30)
    assert client is not None and kept is not None
    with client, kept:
        server, _peer = talk(client, service)
        with server:
            removed = drive({**ABSENT, "rule": rule})
            assert removed.failure is None
            assert len(removed.facts["ingress"]["rules"]) == 1, "the other one stays"
            client.settimeout(0.5)
            server.settimeout(0.5)
            client.sendall(b"still there?")
            server.sendall(b"still here")
            with pytest.raises(TimeoutError):
                server.recv(100)
            # Without its entry the host takes the client's packet for its own, and resets it.
            with pytest.raises((TimeoutError, ConnectionResetError)):
                client.recv(100)
        talk(kept, service)[0].close()
    assert refusal({**PRESENT, "rule": rule}) == "ingress_rule_ended", "a late run"


def test_it_is_restored_and_ends_at_its_expiry(
    rig: Rig, service: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.run(["nft", "delete", "table", "inet", "gpuaas_slice"])
    rig.run(["ovs-ofctl", "del-flows", "ovsbr0", f"cookie={A.guard.cookie}/-1"])
    assert rig.restore() == [f"guard_port {A.guard.port}", "load_firewall firewall of the guests"]
    client = connect(rig, "world", rigs.WORLD, limit_s=30)
    assert client is not None
    server, _peer = talk(client, service)
    monkeypatch.setattr(_ingress.time, "time", lambda: RULE["expires_at"] + 1)
    assert rig.restore() == [f"guard_port {A.guard.port}", "load_firewall firewall of the guests"]
    assert connect(rig, "mgmt", PRIVATE) is None
    assert _firewall.forwarded() == []
    # The guardian deletes no connection: without the rule, no packet of an open one passes.
    with client, server:
        client.settimeout(0.3)
        server.settimeout(0.3)
        client.sendall(b"still there?")
        server.sendall(b"still here")
        for end in (server, client):
            with pytest.raises(TimeoutError):
                end.recv(100)


def test_a_silent_port_gets_no_rule(rig: Rig) -> None:
    outcome = drive(PRESENT)
    assert outcome.failure and outcome.failure.code == "guest_port_silent"
    assert outcome.done == []
    assert (_firewall.forwarded(), rig.restore()) == ([], [])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"public_address": "11.0.0.51"}, "ingress_address_absent"),
        ({"public_address": rigs.UPLINK}, "ingress_address_reserved"),
        ({"public_address": rigs.MANAGEMENT}, "ingress_address_reserved"),
        ({"public_address": rigs.GATEWAY}, "ingress_address_reserved"),
        ({"public_address": "127.0.0.1"}, "ingress_address_reserved"),
        ({"public_port": PORT + 2}, "ingress_port_in_use"),
        ({"public_port": PORT + 3}, "ingress_port_in_use"),
        ({"expires_at": 1}, "ingress_rule_ended"),
        ({"sources": ["9.9.9.0/24", "9.9.9.9/32"]}, "spec_invalid"),
        ({"sources": ["9.9.9.9/24"]}, "spec_invalid"),
        ({"sources": ["0.0.0.0/0 } accept"]}, "spec_invalid"),
        ({"sources": []}, "spec_invalid"),
        ({"guest_port": 65536}, "spec_invalid"),
        ({"protocol": "udp"}, "spec_invalid"),
        ({"public_address": "eth0"}, "spec_invalid"),
        ({"id": 'x" accept comment "'}, "spec_invalid"),
    ],
)
def test_a_wrong_rule_is_refused_before_anything_changes(
    rig: Rig, service: socket.socket, fields: dict[str, Any], code: str
) -> None:
    process = f"/proc/{os.getpid()}"
    _host.write(f"{process}/status", "Name:\tpython3\nPPid:\t77\n")
    _host.write("/proc/77/environ", f"A=1\0SSH_CONNECTION=10.20.0.1 5 {rigs.MANAGEMENT} 22\0")
    others = _ingress.Kept().with_rule(_ingress.check(new_rule(public_port=PORT + 2)))
    _ingress.save(B.guard.allocation_id, others)
    with rigs.inside(rig.host):
        listener = socket.create_server((PUBLIC, PORT + 3))
    before = (_firewall.forwarded(), _ingress.every())
    try:
        with listener:
            assert refusal({**PRESENT, "rule": {**new_rule(), **fields}}) == code
        assert (_firewall.forwarded(), _ingress.every()) == before
    finally:
        _ingress.forget(B.guard.allocation_id)


@pytest.mark.covers("I10")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"slots": [{**SLOT, "fence": 2}]}, "stale_fence"),
        ({"slots": [{**SLOT, "slot_id": "slot-2"}]}, "lease_missing"),
        ({"slots": []}, "lease_missing"),
        ({"allocation_id": B.guard.allocation_id}, "lease_missing"),
    ],
)
def test_a_late_run_adds_nothing(
    rig: Rig, service: socket.socket, change: dict[str, Any], code: str
) -> None:
    before = _ingress.every()
    assert refusal({**PRESENT, "rule": new_rule(), **change}) == code
    assert _ingress.every() == before


def test_every_address_is_a_source_too(rig: Rig, service: socket.socket) -> None:
    apply(service, new_rule(public_port=PORT + 4, sources=["0.0.0.0/0"]))
    client = connect(rig, "world", "11.0.0.1", PORT + 4, limit_s=30)
    assert client is not None
    with client:
        talk(client, service)[0].close()
    assert rig.restore() == [], "the switch and the kernel print it as it was loaded"


def test_a_broken_file_opens_nothing_until_the_release(rig: Rig, service: socket.socket) -> None:
    """The removed rules are unknown, so a late run must not add a rule that may be removed. A rule
    in the file is not removed: it comes back with the file.
    """
    removed, live = new_rule(public_port=PORT + 1), new_rule(public_port=PORT + 2)
    drive({**ABSENT, "rule": removed})
    apply(service, live)
    file = _host.path(_object_names.ingress_path(A.guard.allocation_id))
    whole = file.read_text()
    text = whole.replace("{", "", 1)
    file.write_text(text)
    rig.restore()
    for rule in (removed, live, new_rule(public_port=PORT + 3)):
        for params in (PRESENT, ABSENT):
            assert refusal({**params, "rule": rule}) == "ingress_file_unreadable"
    assert (file.read_text(), _firewall.forwarded()) == (text, [])
    file.write_text(whole)
    rig.restore()
    assert live["id"] in drive({**ABSENT, "rule": removed}).facts["ingress"]["rules"]
    assert live["id"] not in drive({**ABSENT, "rule": live}).facts["ingress"]["rules"]
    file.write_text(text)
    rig.restore()
    assert connect(rig, "world", rigs.WORLD) is None
    assert drive(ALL_ABSENT).failure is None
    assert not file.exists()


def test_all_rules_of_a_slice_go_before_it_stops(rig: Rig, service: socket.socket) -> None:
    client = connect(rig, "world", rigs.WORLD, limit_s=30)
    assert client is not None
    with client:
        server, _peer = talk(client, service)
        assert drive(ALL_ABSENT).failure is None
        looks = _traces.looks("ovsbr0")
        assert [*looks["ingress"](), *looks["ingress_file"]()] == []
        server.settimeout(0.3)
        client.sendall(b"still there?")
        with server, pytest.raises(TimeoutError):
            server.recv(100)
    assert drive(ALL_ABSENT).done == []
