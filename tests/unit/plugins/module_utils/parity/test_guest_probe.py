"""Guest probe: the packets that it sends, and its complete removal."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _dhcp_probe, _guest_probe

pytestmark = pytest.mark.covers("HOST-10")

PROBE = _guest_probe.Probe("ovsbr0", "10.100.0.1", "10.100.0.0/24", "10.0.2.2")
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
OUTSIDE = ("ip", "-batch", "-")
INSIDE = ("ip", "-n", "gsparity", "-batch", "-")


def test_the_test_address_is_the_last_of_the_subnet() -> None:
    assert PROBE.address == "10.100.0.254"


def test_an_echo_request_has_a_sound_checksum() -> None:
    packet = _guest_probe.echo_request(0x1234, 7)
    total = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF


def test_a_version_query_is_one_question_in_class_chaos() -> None:
    packet = _guest_probe.version_query(b"ab")
    assert packet[:2] == b"ab"
    assert struct.unpack("!5H", packet[2:12]) == (0x0100, 1, 0, 0, 0)
    assert packet[12:] == b"\x07version\x04bind\x00\x00\x10\x00\x03"


@contextmanager
def nowhere(_name: str) -> Iterator[None]:
    yield


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch, tree: Path) -> Path:
    """The probe without a kernel: no namespace is entered, sockets are ordinary sockets."""
    (tree / "run").mkdir()

    def plain(_what: str) -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    monkeypatch.setattr(_guest_probe, "_inside", nowhere)
    monkeypatch.setattr(_guest_probe, "_egress_socket", plain)
    monkeypatch.setattr(_guest_probe, "_watch", plain)
    monkeypatch.setattr(_guest_probe, "_sources", lambda _leaving: ("192.0.2.1",))
    monkeypatch.setattr(_dhcp_probe, "open_socket", plain)
    monkeypatch.setattr(_dhcp_probe, "offered", lambda *_a, **_k: PROBE.address)
    monkeypatch.setattr(_guest_probe, "name_server_answers", lambda *_a: True)
    monkeypatch.setattr(_guest_probe, "reach", lambda *_a: 1.5)
    return tree


def test_a_look_builds_uses_and_removes_the_guest(sockets: Path, script: Any) -> None:
    script.on(*ADD).on(*DELETE).on(*OUTSIDE).on(*INSIDE)
    assert _guest_probe.look(PROBE) == _guest_probe.Finding(
        1.5, True, "10.100.0.254", ("192.0.2.1",)
    )
    assert script.calls == [ADD, OUTSIDE, INSIDE, DELETE]


def test_what_was_built_is_removed_when_a_step_fails(sockets: Path, script: Any) -> None:
    netns = sockets / "run/netns/gsparity"
    netns.parent.mkdir()
    netns.touch()
    remove = ("ip", "netns", "delete", "gsparity")
    script.on(*DELETE).on(*ADD).on(*OUTSIDE, rc=1).on(*remove)
    with pytest.raises(Refusal):
        _guest_probe.look(PROBE)
    assert script.calls[-2:] == [DELETE, remove]


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
    """Packet socket with these frames in it: source, destination, protocol, direction."""

    def __init__(self, *frames: tuple[str, int, int]) -> None:
        self.frames = list(frames)

    def recvfrom(self, _size: int) -> tuple[bytes, tuple[str, int, int, int, bytes]]:
        if not self.frames:
            raise BlockingIOError
        source, protocol, direction = self.frames.pop(0)
        packet = bytes(12) + socket.inet_aton(source) + socket.inet_aton("10.0.2.2")
        return packet, ("mgmt0", protocol, direction, 1, b"")


def test_only_what_leaves_counts_and_by_its_source() -> None:
    outgoing, host = socket.PACKET_OUTGOING, socket.PACKET_HOST
    leaving: Any = Leaving(
        ("10.100.0.254", 0x0800, host),
        ("10.0.2.15", 0x0800, outgoing),
        ("10.0.2.15", 0x0800, outgoing),
        ("192.0.2.9", 0x0806, outgoing),
    )
    assert _guest_probe._sources(leaving) == ("10.0.2.15",)


def test_a_tcp_target_is_reached_or_not() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    port = server.getsockname()[1]
    with server, socket.socket() as client:
        assert _guest_probe.reach(client, f"127.0.0.1:{port}") is not None
    with socket.socket() as client:
        assert _guest_probe.reach(client, f"127.0.0.1:{port}") is None
