"""Reservations and DHCP leases of dnsmasq."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq
from ansible_collections.gpuaas.slice.plugins.module_utils.slice._dnsmasq import Lease, Reservation
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Script

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
RESERVATION = Reservation(ALLOCATION, "52:54:00:64:00:0a", "10.100.0.10")
LEASE = Lease(1700000000, "52:54:00:64:00:0a", "10.100.0.10", "trainer")
LEASES = """1700000000 52:54:00:64:00:0a 10.100.0.10 trainer *
1700000000 52:54:00:64:00:0B 10.100.0.11 * 01:02
duid 00:01:00:01
1700000000 123 fd00::1 x *
"""


def write_file(tree: Path, path: str, text: str) -> Path:
    file = tree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.covers("P2")
@given(st.text(max_size=20), st.text(max_size=20))
def test_what_passes_the_check_is_one_line_that_reads_back(mac: str, ip: str) -> None:
    reservation = Reservation(ALLOCATION, mac, ip)
    try:
        _dnsmasq.check(reservation)
    except Refusal as refusal:
        assert refusal.code == "spec_invalid"
    else:
        assert "\n" not in reservation.line()
        assert _dnsmasq.parse(ALLOCATION, reservation.line()) == reservation


def test_reservations_are_the_files_of_the_directory(tree: Path) -> None:
    write_file(tree, f"{_dnsmasq.DIRECTORY}/{ALLOCATION}".lstrip("/"), RESERVATION.line() + "\n")
    write_file(tree, f"{_dnsmasq.DIRECTORY}/.half-written".lstrip("/"), "x")
    assert _dnsmasq.reservations() == [RESERVATION]


def test_leases_pass_over_what_is_not_ipv4(tree: Path) -> None:
    write_file(tree, "var/lib/misc/dnsmasq.leases", LEASES)
    assert [lease.mac for lease in _dnsmasq.leases()] == ["52:54:00:64:00:0a", "52:54:00:64:00:0b"]


def test_release_as_the_client_would(tree: Path, script: Script) -> None:
    write_file(tree, "var/lib/misc/dnsmasq.leases", "")
    script.on("dhcp_release", "ovsbr0", LEASE.ip, LEASE.mac)
    assert _dnsmasq.release("ovsbr0", LEASE) == "released"


def test_release_that_nobody_heard_is_done_while_stopped(tree: Path, script: Script) -> None:
    file = write_file(tree, "var/lib/misc/dnsmasq.leases", LEASES)
    script.on("dhcp_release", "ovsbr0", LEASE.ip, LEASE.mac)
    script.on("systemctl", "stop", "dnsmasq.service")
    script.on("systemctl", "start", "dnsmasq.service")
    assert _dnsmasq.release("ovsbr0", LEASE, deadline=0) == "removed while stopped"
    assert LEASE.ip not in file.read_text()
    assert "10.100.0.11" in file.read_text()


def test_two_releases_at_once_lose_neither(
    tree: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock each would restore the other's lease, which would block that slot."""
    file = write_file(tree, "var/lib/misc/dnsmasq.leases", LEASES)
    other = Lease(0, "52:54:00:64:00:0b", "10.100.0.11", "*")
    for lease in (LEASE, other):
        script.on("dhcp_release", "ovsbr0", lease.ip, lease.mac)
    script.on("systemctl", "stop", "dnsmasq.service")
    script.on("systemctl", "start", "dnsmasq.service")
    second = threading.Thread(
        target=_dnsmasq.release, args=("ovsbr0", other), kwargs={"deadline": 0}
    )
    write = _host.write

    def meanwhile(path: str, text: str, mode: int = 0o644) -> None:
        if not second.ident:
            second.start()
            second.join(0.3)
        write(path, text, mode)

    monkeypatch.setattr(_host, "write", meanwhile)
    _dnsmasq.release("ovsbr0", LEASE, deadline=0)
    second.join(30)
    assert [lease.ip for lease in _dnsmasq.leases()] == []
    assert "duid 00:01" in file.read_text()


@pytest.mark.parametrize(("flags", "state"), [("0x2", "52:54:00:64:00:0a"), ("0x0", "")])
def test_neighbour(tree: Path, flags: str, state: str) -> None:
    head = "IP address HW type Flags HW address Mask Device\n"
    write_file(tree, "proc/net/arp", f"{head}10.100.0.10 0x1 {flags} 52:54:00:64:00:0A * ovsbr0\n")
    assert _dnsmasq.neighbour("ovsbr0", "10.100.0.10") == state
    assert _dnsmasq.neighbour("eth0", "10.100.0.10") == ""


def test_the_configuration_is_tested_with_all_reservations(script: Script) -> None:
    script.on("dnsmasq", "--test", "--conf-file=-", rc=1, err="duplicate dhcp-host IP address")
    with pytest.raises(Refusal, match="duplicate"):
        _dnsmasq.test([RESERVATION, RESERVATION])
