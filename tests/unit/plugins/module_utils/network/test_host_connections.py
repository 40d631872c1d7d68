"""Limit on each guest's connections in the host's own table, and their end with the slice."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _bridge,
    _flows,
    _guards,
    _host_connections,
    _ingress,
    _nat,
    _nft,
    _refusals,
)

from tests.conftest import Script
from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.rig import A, B, Rig

pytestmark = pytest.mark.covers("SLICE-9")

on_rig = pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing())
LIMIT, REAL = 50, _flows.CONNECTIONS
IP = "10.100.0.10"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rigs.standing() as (machines, patch):
        patch.setattr(_flows, "CONNECTIONS", LIMIT)
        _nft.forget()
        machines.restore()
        yield machines


def entries(rig: Rig, guest: rigs.Guest = A) -> int:
    """Connections that the guest has opened, in the host's own table."""
    table = rig.run(["cat", "/proc/thread-self/net/nf_conntrack"]).stdout
    return table.count(f" src={guest.guard.ip} ")


def send(
    rig: Rig, number: int, *, guest: rigs.Guest = A, first: int = 10000, last: int = 0
) -> None:
    """Open connections of the guest, a datagram each, directly followed by one from port `last`.

    Returns when the host answers a later ARP request: by then it has received all datagrams.
    """
    gateway, guard = rigs.hardware_address(rig.host, "ovsbr0"), guest.guard
    nobody = "00:00:00:00:00:00"
    question = frames.arp(guard.mac, 1, (guard.mac, guard.ip), (nobody, rigs.GATEWAY), b"")
    with rigs.packet_socket(rig.place(guest.place), "eth0") as handle:
        for n, sport in enumerate([*range(first, first + number), *([last] if last else [])]):
            build = frames.Sender(guest).datagram(rigs.WORLD, sport=sport)
            handle.send(build(gateway, b"<000000>"))
            # The switch in user space loses frames that come faster than it reads.
            time.sleep(0.01 if n % 25 == 24 else 0)

        def answered() -> bool:
            handle.send(question)
            time.sleep(0.02)
            with contextlib.suppress(BlockingIOError):
                while not (frame := handle.recv(2048)).startswith(frames.mac(guard.mac)):
                    pass
                return frame[12:14] == b"\x08\x06" and frame[21] == 2
            return False

        rigs._until(answered)


def refused(rig: Rig, guest: rigs.Guest) -> int:
    rows = {row["allocation_id"]: row["refused"] for row in _refusals.rows(rigs.NETWORK)}
    return int(rows[guest.guard.allocation_id].get(_host_connections.KIND, 0))


@pytest.fixture
def empty(rig: Rig) -> Iterator[None]:
    yield
    for guest in (A, B):
        _flows.forget_connections(rig.number(guest))
        _host_connections.install("ovsbr0")
        rig.run(["conntrack", "-F"])


@on_rig
@pytest.mark.usefixtures("empty")
def test_a_guest_that_empties_its_zone_keeps_its_limit(rig: Rig) -> None:
    """Its entries in the switch end without those of the host."""
    for turn in range(4):
        send(rig, LIMIT - 10, first=10000 + 1000 * turn)
        _flows.forget_connections(rig.number(A))
        # The count is kept while slices start and end, each of which loads the firewall.
        _guards.reload_firewall()
    assert LIMIT - 10 < entries(rig) <= LIMIT
    assert refused(rig, A) > 0
    send(rig, 20, guest=B)
    assert (entries(rig, B), refused(rig, B)) == (20, 0), "the neighbour has its own"
    assert rig.restore() == [], "counts are no difference"


@on_rig
@pytest.mark.usefixtures("empty")
def test_an_open_connection_goes_on_at_the_limit(rig: Rig) -> None:
    send(rig, 1, first=9000)
    for turn in range(2):
        send(rig, LIMIT, first=10000 + 1000 * turn)
        _flows.forget_connections(rig.number(A))
    before = refused(rig, A)
    with rigs.packet_socket(rig.place("world"), "eth0") as world:
        send(rig, 3, first=12000, last=9000)
        received = []
        with contextlib.suppress(BlockingIOError):
            while True:
                received.append(world.recv(2048))
    # Without an answer, its packets are new for the kernel.
    assert sum(frame[23] == 17 and b"<000000>" in frame for frame in received) == 1
    assert refused(rig, A) == before + 3


@on_rig
@pytest.mark.usefixtures("empty")
def test_clients_of_managed_ingress_have_the_same_limit(rig: Rig) -> None:
    """A guest that answers them can end their entries in the switch alone as well."""
    rule = _ingress.Rule(str(uuid.uuid4()), "tcp", rigs.UPLINK, 8443, 443, ("9.9.9.0/24",), 2**40)
    silent = "chain c {\ntype filter hook input priority 0\ntcp dport 443 drop\n}\n"
    rig.run(["nft", "-f", "-"], place=rig.place(A.place), input=f"table ip silent {{\n{silent}}}\n")
    _ingress.save(A.guard.allocation_id, _ingress.Kept({rule.id: rule}))
    try:
        rig.restore()
        send(rig, LIMIT - 10)
        _flows.forget_connections(rig.number(A))
        source, here = rigs.WORLD, rigs.UPLINK
        macs = (
            rigs.hardware_address(rig.place("world"), "eth0"),
            rigs.hardware_address(rig.host, "up0"),
        )
        with rigs.packet_socket(rig.place("world"), "eth0") as world:
            for n in range(30):
                segment = frames.tcp(source, here, 20000 + n, 8443, 2)
                world.send(frames.ether(*macs, 0x0800, frames.ipv4(source, here, 6, segment)))
        time.sleep(0.1)
        table = rig.run(["cat", "/proc/thread-self/net/nf_conntrack"]).stdout
        assert sum(" dport=8443 " in line for line in table.splitlines()) == 10
        assert refused(rig, A) == 20
    finally:
        _ingress.forget(A.guard.allocation_id)
        rig.run(["nft", "delete", "table", "ip", "silent"], place=rig.place(A.place))
        rig.restore()


@on_rig
@pytest.mark.usefixtures("empty")
def test_ended_connections_make_room(rig: Rig) -> None:
    send(rig, LIMIT + 20)
    _flows.forget_connections(rig.number(A))
    send(rig, LIMIT, first=12000)
    assert entries(rig) == LIMIT
    _host_connections.forget(A.guard.ip)
    _flows.forget_connections(rig.number(A))
    assert (entries(rig), refused(rig, A)) == (0, 0)
    # With each new connection the kernel forgets a few ended connections.
    for turn in range(40):
        send(rig, 1, first=13000 + turn)
        if entries(rig) > 5:
            break
    assert entries(rig) > 5


def test_all_guests_together_leave_half_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flows, "CONNECTIONS", REAL)
    assert 8 * (_flows.CONNECTIONS + limit()) * 2 == _bridge.LEAST_ENTRIES
    first, last = _nat.PORTS
    assert limit() * 2 <= last - first + 1, "half of the ports toward a destination"


def limit() -> int:
    text = _host_connections.rules("ovsbr0")
    limits = {int(words.split()[0]) for words in text.split("ct count over ")[1:]}
    assert len(limits) == 1 and text.count("@connections") == 2, "one count for both directions"
    return limits.pop()


@on_rig
@pytest.mark.covers("I17")
@pytest.mark.skipif(not rigs.is_installed("conntrack"), reason="needs conntrack")
def test_a_stopped_slice_leaves_no_connection_of_the_host(rig: Rig) -> None:
    send(rig, 10)
    send(rig, 10, guest=B)
    assert (entries(rig), entries(rig, B)) == (10, 10)
    rig.run(["ovs-vsctl", f"--db=unix:{rig.folder}/db.sock", "del-port", A.guard.port])
    try:
        assert f"remove_flows flows {A.guard.cookie}" in rig.restore()
        assert (entries(rig), entries(rig, B)) == (0, 10), "the neighbour keeps its connections"
    finally:
        rig.plug(A)
        rig.numbers.clear()
        _flows.await_port(A.guard.port)
        rig.restore()


def test_connections_are_counted_and_dropped(script: Script) -> None:
    script.on("conntrack", "-L", "--orig-src", IP, out="tcp 6 …\nudp 17 …\n")
    script.on("conntrack", "-L", "--reply-src", IP)
    script.on("ss", "--kill", "--tcp", "--", "state", "connected", "dst", IP)
    script.on("conntrack", "-D", "--orig-src", IP)
    script.on("conntrack", "-D", "--reply-src", IP, rc=1)
    script.on("nft", "-f", "-", rc=1, err="No such file or directory")
    assert _host_connections.number(IP) == 2
    _host_connections.forget(IP)


@pytest.mark.covers("I13")
def test_connections_that_cannot_be_listed_are_not_none(script: Script) -> None:
    script.on("conntrack", "-L", "--orig-src", IP, rc=1, err="Operation failed")
    with pytest.raises(Refusal, match="Operation failed"):
        _host_connections.number(IP)


def test_a_kernel_that_cannot_count_connections_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str], **_options: object) -> None:
        raise Refusal("command_failed", expected="0", found="Could not process rule", remedy="")

    monkeypatch.setattr(_command, "run", run)
    _nft.forget()
    with pytest.raises(Refusal, match=r"connection_limit_missing.*Could not process rule"):
        _host_connections.normalized("ovsbr0")


def test_a_kernel_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guardian's watchdog waits for less than two limits of a program."""

    def run(argv: list[str], **_options: object) -> None:
        raise Refusal("command_timeout", expected="an end", found="it hangs", remedy="")

    monkeypatch.setattr(_command, "run", run)
    _nft.forget()
    with pytest.raises(Refusal, match="it hangs"):
        _nft.prepare([_host_connections.table("ovsbr0"), ("table inet x {}", "nft", "list")])
