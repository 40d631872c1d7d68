"""Guest probe: the packets that it sends, and its complete removal."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows, _guards
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _guest_probe, _tcp_probe

from tests.unit.plugins.fake_switch import PROGRAMS, FakeSwitch

pytestmark = pytest.mark.covers("HOST-10")

NETWORK = {
    "bridge": "ovsbr0",
    "address": "10.100.0.1/24",
    "subnet": "10.100.0.0/24",
    "egress_probe": "10.0.2.2",
}
PROBE = _guest_probe.Probe(NETWORK, "10.0.2.2")
ADD = (
    "ovs-vsctl",
    "--timeout=10",
    "--if-exists",
    "del-port",
    "gsparity",
    "--",
    "add-port",
    "ovsbr0",
    "gsparity",
    "--",
    "set",
    "interface",
    "gsparity",
    "type=internal",
    'mac="02:67:73:70:72:62"',
)
DELETE = ("ovs-vsctl", "--timeout=10", "--if-exists", "del-port", "gsparity")
NUMBER = (
    *("ovs-vsctl", "--timeout=10", "--format=json", "--columns=ofport"),
    *("find", "Interface", "name=gsparity"),
)
_OFCTL = ("ovs-ofctl", "--protocols=OpenFlow13")
METER = (*_OFCTL, "add-meter", "ovsbr0", "meter=1,pktps,stats,bands=type=drop,rate=200000")
LOAD = (*_OFCTL, "--bundle", "add-flows", "ovsbr0", "-")
PURGE = ("ovs-appctl", "--timeout=10", "revalidator/purge")
LIMIT = ("ovs-appctl", "--timeout=10", "dpctl/ct-set-limits", "zone=1,limit=16384")
LOADED = (*_OFCTL, "--no-names", "dump-flows", "ovsbr0", "cookie=0x1/-1")
OUTSIDE = ("ip", "-batch", "-")
INSIDE = ("ip", "-n", "gsparity", "-batch", "-")


def test_the_test_address_is_the_last_of_the_subnet() -> None:
    assert PROBE.address == "10.100.0.254"


def test_an_echo_request_has_a_sound_checksum() -> None:
    packet = _guest_probe.echo_request(0x1234, 7)
    total = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF


def test_a_name_query_is_one_question_for_an_address() -> None:
    packet = _guest_probe.name_query(b"ab")
    assert packet[:2] == b"ab"
    assert struct.unpack("!5H", packet[2:12]) == (0x0100, 1, 0, 0, 0)
    assert packet[12:] == b"\x0dgpuaas-parity\x07invalid\x00\x00\x01\x00\x01"


class Host:
    """A switch with the slice bridge, and an `ip` that accepts everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.switch = FakeSwitch()
        self.switch.add_bridge()
        self.calls: list[tuple[str, ...]] = []
        self.guarded: frozenset[_flows.Flow] | None = None
        self.fails: tuple[str, ...] = ()
        monkeypatch.setattr(_command, "run", self.run)

    def run(self, argv: list[str], **more: Any) -> _command.Result:
        self.calls.append(tuple(argv))
        if tuple(argv) == self.fails:
            raise Refusal("command_failed", expected="", found=argv[0], remedy="")
        if argv[0] in PROGRAMS:
            return self.switch.run(argv, **more)
        assert argv[0] == "ip", argv
        if tuple(argv) == INSIDE:
            calls = list(self.calls)
            self.guarded = _flows.installed("ovsbr0", _flows.PROBE_COOKIE)
            self.calls = calls
        return _command.Result(0, "", "")


@pytest.fixture
def host(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_a_look_builds_guards_uses_and_removes_the_guest(host: Host) -> None:
    assert _guest_probe.look(PROBE) == _guest_probe.Finding(
        1.5, True, "10.100.0.254", ("192.0.2.1",), tcp="stops"
    )
    build = [ADD, OUTSIDE, NUMBER, METER, LIMIT, LOAD, PURGE, INSIDE]
    assert host.calls[:8] == build
    # Both ends of the link to the TCP probe's service.
    assert host.calls[8:11] == [OUTSIDE, OUTSIDE, ("ip", "link", "delete", _tcp_probe.LINK)]
    remove = host.calls[11:]
    assert remove[0] == DELETE
    forget = [call[2] for call in remove[1:]]
    assert forget == ["dpctl/flush-conntrack", "del-meter", "del-flows"], "in one transaction"
    assert host.switch.meters == {}
    # It had a guest's guard, and permission to reach its targets, before it had an address.
    guard = _guards.probe_guard(NETWORK)
    allowed = ("10.0.2.2", _tcp_probe.SERVICE)
    assert host.guarded == _flows.rules(guard, 1, [], _flows.Egress(allowed=allowed))
    assert host.switch.bridges == {"ovsbr0": {}} and host.switch.flows == {"ovsbr0": []}


@pytest.mark.parametrize("step", [OUTSIDE, LOAD, LIMIT, INSIDE])
def test_what_was_built_is_removed_when_a_step_fails(
    sockets: Path, host: Host, step: tuple[str, ...]
) -> None:
    netns = sockets / "run/netns/gsparity"
    netns.parent.mkdir()
    netns.touch()
    host.fails = step
    with pytest.raises(Refusal):
        _guest_probe.look(PROBE)
    after = host.calls[host.calls.index(step) + 1 :]
    assert after[:2] == [DELETE, ("ip", "netns", "delete", "gsparity")]
    # Before its own flows are loaded, a killed run may have left some for another port.
    assert (LOADED in after) == (step != INSIDE)
    assert host.switch.bridges == {"ovsbr0": {}} and host.switch.flows == {"ovsbr0": []}


def test_a_server_that_answers_is_heard() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.bind(("127.0.0.1", 0))

    class Redirect:
        """Socket that sends to the test server instead of port 53."""

        def settimeout(self, seconds: float) -> None:
            client.settimeout(seconds)

        def sendto(self, data: bytes, _address: object) -> None:
            client.sendto(data, server.getsockname())

        def recv(self, size: int) -> bytes:
            return client.recv(size)

    def answer() -> None:
        request, sender = server.recvfrom(2048)
        server.sendto(request[:2] + b"\x81\x80" + request[4:], sender)

    with server, client:
        thread = threading.Thread(target=answer)
        thread.start()
        handle: Any = Redirect()
        assert _guest_probe.name_server_answers(handle, "127.0.0.1")
        thread.join()


class Leaving:
    """Packet socket with these frames in it: source, protocol of the link, direction, and the
    packet's own protocol and content."""

    def __init__(self, *frames: tuple[str, int, int, int, bytes]) -> None:
        self.frames = list(frames)

    def recvfrom(self, _size: int) -> tuple[bytes, tuple[str, int, int, int, bytes]]:
        if not self.frames:
            raise BlockingIOError
        source, protocol, direction, inside, content = self.frames.pop(0)
        addresses = socket.inet_aton(source) + socket.inet_aton("10.0.2.2")
        packet = b"\x45" + bytes(8) + bytes([inside]) + bytes(2) + addresses + content
        return packet, ("mgmt0", protocol, direction, 1, b"")


def test_only_the_probes_own_that_leaves_counts_and_by_its_source() -> None:
    """A host that is administered from its gateway sends it packets all the time."""
    ipv4, outgoing = 0x0800, socket.PACKET_OUTGOING
    echo, tcp = _guest_probe.echo_request(1, 0), struct.pack("!2H", 40000, 443) + bytes(16)
    frames = (
        ("10.100.0.254", ipv4, socket.PACKET_HOST, socket.IPPROTO_ICMP, echo),
        ("10.0.2.15", ipv4, outgoing, socket.IPPROTO_ICMP, echo),
        ("10.0.2.15", ipv4, outgoing, socket.IPPROTO_ICMP, echo),
        ("192.0.2.9", 0x0806, outgoing, socket.IPPROTO_ICMP, echo),
        ("10.0.2.16", ipv4, outgoing, socket.IPPROTO_TCP, tcp),
        ("10.0.2.17", ipv4, outgoing, socket.IPPROTO_TCP, struct.pack("!2H", 22, 40000)),
        ("10.0.2.18", ipv4, outgoing, socket.IPPROTO_ICMP, echo[:8] + b"another program"),
    )
    leaving: Any = Leaving(*frames)
    assert _guest_probe._sources(leaving, "10.0.2.2") == ("10.0.2.15",)
    leaving = Leaving(*frames)
    assert _guest_probe._sources(leaving, "10.0.2.2:443") == ("10.0.2.16",)


def test_a_tcp_target_is_reached_or_not() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    with server, socket.socket() as client:
        assert _guest_probe.reach(client, f"127.0.0.1:{port}") is not None
    with socket.socket() as client:
        assert _guest_probe.reach(client, f"127.0.0.1:{port}") is None
