"""DHCP probe: a request for an address, against a real dnsmasq with the rendered configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _dhcp_probe
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _dnsmasq

pytestmark = pytest.mark.covers("HOST-6", "HOST-10")

NETWORK = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
MAC = _baseline_files.PROBE_MAC
OTHER = "52:54:00:64:00:0a"

# A user other than root is root of a namespace.
ALONE = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
# A pair of interfaces stands for bridge and port. The port is in a network namespace of its own,
# with the probe's address, because the server answers to that address and the asked hardware
# address only.
STORY = """
import json, os, subprocess, sys, time
sys.path.insert(0, sys.argv[2])
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _dhcp_probe, _namespace

def ip(*words):
    subprocess.run(["ip", *words], check=True)

def bridge():
    ip("link", "add", "ovsbr0", "type", "veth", "peer", "name", "port")
    ip("address", "add", "10.100.0.1/24", "dev", "ovsbr0")
    ip("link", "set", "ovsbr0", "up")
    ip("link", "set", "port", "netns", str(guest.pid))

def ask(mac, tries):
    _namespace.enter(there)
    try:
        ip("link", "set", "port", "down", "address", mac)
        ip("address", "replace", "10.100.0.254/24", "dev", "port")
        ip("link", "set", "port", "up")
        with _dhcp_probe.open_socket("port") as handle:
            return _dhcp_probe.offered(handle, mac, tries=tries, wait_s=0.5)
    finally:
        _namespace.enter(here)

guest = subprocess.Popen(["unshare", "--net", "sleep", "300"])
while os.readlink(f"/proc/{guest.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
    time.sleep(0.05)
here, there = (os.open(f"/proc/{who}/ns/net", os.O_RDONLY) for who in ("self", guest.pid))
bridge()
server = subprocess.Popen(["dnsmasq", "--keep-in-foreground", "--user=root", "--port=0",
    "--conf-file=" + sys.argv[1], "--pid-file=", "--log-facility=" + sys.argv[1] + ".log"])
try:
    found = {"reserved": ask(sys.argv[3], 60), "foreign": ""}
    # Until the server has seen the request and says so.
    said = sys.argv[4] + " ignored"
    while not found["foreign"] and said not in open(sys.argv[1] + ".log").read():
        found["foreign"] = ask(sys.argv[4], 1)
    ip("link", "delete", "ovsbr0")
    bridge()
    found["made_anew"] = ask(sys.argv[3], 60)
finally:
    server.terminate()
    server.wait()
    guest.kill()
    guest.wait()
print(json.dumps(found))
"""


def test_who_has_a_reservation_is_offered_its_address_and_nobody_else(tmp_path: Path) -> None:
    """This also holds for a bridge that was made anew below the server."""
    (tmp_path / "hosts.d").mkdir()
    leases, conf = tmp_path / "leases", tmp_path / "dnsmasq.conf"
    text = _baseline_files.dnsmasq(NETWORK).replace(
        _baseline_files.RESERVATIONS, str(tmp_path / "hosts.d")
    )
    conf.write_text(text.replace(_baseline_files.LEASES, str(leases)))
    collections = next(path for path in sys.path if path.endswith("build/collections"))
    done = subprocess.run(
        [*ALONE, sys.executable, "-c", STORY, str(conf), collections, MAC, OTHER],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "reserved": "10.100.0.254",
        "foreign": "",
        "made_anew": "10.100.0.254",
    }
    # The server itself makes no other offer, whether or not it would arrive.
    log = Path(f"{conf}.log").read_text()
    assert f"DHCPDISCOVER(ovsbr0) {OTHER} ignored" in log
    assert f"DHCPOFFER(ovsbr0) 10.100.0.254 {MAC}" in log
    assert not [line for line in log.splitlines() if "OFFER" in line and OTHER in line]
    # The probe took no DHCP lease.
    assert leases.read_text() == ""


def test_only_an_offer_to_this_request_counts() -> None:
    request = _dhcp_probe.discover(b"abcd", MAC)
    assert len(request) == 300
    address = bytes((10, 100, 0, 254))
    head = bytes((2,)) + request[1:16] + address + request[20:236]
    answer = head + b"\x63\x82\x53\x63" + b"\x35\x01\x02" + b"\xff"
    assert _dhcp_probe.offer(b"abcd", answer) == "10.100.0.254"
    acknowledged = head + b"\x63\x82\x53\x63" + b"\x35\x01\x05" + b"\xff"
    for packet in (acknowledged, request, answer[:200], b""):
        assert _dhcp_probe.offer(b"abcd", packet) == ""
    assert _dhcp_probe.offer(b"efgh", answer) == ""


def test_a_slot_cannot_reserve_the_address_that_is_parity_s(tree: Path) -> None:
    """Checked with the real dnsmasq, which reports nothing about it while it runs."""
    conf = tree / _baseline_files.DNSMASQ.lstrip("/")
    conf.parent.mkdir(parents=True)
    conf.write_text(_baseline_files.dnsmasq(NETWORK))
    free = _dnsmasq.Reservation("a", OTHER, "10.100.0.10")
    _dnsmasq.test([free])
    with pytest.raises(Refusal, match=r"10\.100\.0\.254"):
        _dnsmasq.test([free, _dnsmasq.Reservation("b", "52:54:00:64:00:fe", "10.100.0.254")])
