"""Docker and ufw beside the slice network, on the rig: guests, containers, and each other's rules.

ufw is real. Docker's rules are recorded (tests/data/docker-*.rules); its network is the rig's
management network, and its container the BMC.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _bridge,
    _firewall,
    _host_connections,
    _host_filter,
    _ingress,
    _nat,
    _ovs_nat_removal,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _guest_probe

from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import ATTACKS
from tests.unit.plugins.module_utils.network.rig import NETWORK, A, Rig
from tests.unit.plugins.module_utils.network.traffic import lease, violations

UFW = Path(sys.prefix) / "ufw"

pytestmark = [
    pytest.mark.covers("SLICE-9"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]
needs_ufw = pytest.mark.skipif(
    not UFW.is_dir(), reason="needs ufw, unpacked by `scripts/setup --tests`"
)
OURS = _host_filter.rules(NETWORK["bridge"])
INGRESS = _ingress.check(
    {
        "id": "7d9f2a52-6c54-4f8e-9f0a-3f4b5c6d7e8f",
        "protocol": "tcp",
        "public_address": "11.0.0.50",
        "public_port": 8443,
        "guest_port": 443,
        "sources": [f"{rigs.WORLD}/32"],
        # Later than any session of tests ends.
        "expires_at": int(time.time()) + 30 * 86_400,
    }
)


# Limit for a permitted connection, and wait for a forbidden connection.
PATIENCE_S, SILENCE_S = 30.0, 0.4
# docker 28 lets nothing else into its bridge, behind which the rig's allowed network is.
ELSEWHERE = tuple(attack for attack in ATTACKS if "mgmt" not in attack.seen)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rigs.standing() as (machines, _patch):
        route = ["ip", "route", "add", rigs.WORLD, "via", rigs.MANAGEMENT]
        machines.run(route, place=machines.place("mgmt"))
        machines.run(["ip", "address", "add", f"{INGRESS.public_address}/32", "dev", "up0"])
        _ingress.save(A.guard.allocation_id, _ingress.Kept().with_rule(INGRESS))
        machines.restore()
        yield machines


def docker(rig: Rig, version: str) -> None:
    """Load the rules that dockerd loads at its start."""
    text = (Path(__file__).parents[4] / "data" / f"docker-{version}.rules").read_text()
    for recorded, here in (
        ("bridge1", "mgmt0"),
        ("192.0.2.0/24", "10.20.0.0/24"),
        ("192.0.2.2", rigs.BMC),
    ):
        text = text.replace(recorded, here)
    rig.run(["iptables-restore", "--noflush"], input=text)


def forget_docker(rig: Rig) -> None:
    for table in ("raw", "nat", "filter"):
        rig.run(["iptables", "-t", table, "-F"])
        rig.run(["iptables", "-t", table, "-X"])
    rig.run(["iptables", "-P", "FORWARD", "ACCEPT"])


class Ufw:
    """The program, with all its files in a folder of its own."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.root = rig, rig.folder / "ufw"
        shutil.copytree(UFW, self.root)
        for file in (self.root / "usr/share/ufw").glob("*.rules"):
            shutil.copy(file, self.root / "etc/ufw")
        shutil.copy(self.root / "usr/share/ufw/ufw.conf", self.root / "etc/ufw")
        defaults = self.root / "etc/default/ufw"
        defaults.write_text(defaults.read_text().replace("IPV6=yes", "IPV6=no"))

    def __call__(self, *words: str) -> None:
        folders = [f"--rootdir={self.root}", f"--datadir={self.root}"]
        modules = f"PYTHONPATH={self.root}/usr/lib/python3/dist-packages"
        program = [sys.executable, str(self.root / "usr/sbin/ufw")]
        self.rig.run(["env", modules, *program, *folders, "--force", *words])

    def init(self, verb: str) -> None:
        """Load the rules as its service does."""
        folders = ["--rootdir", str(self.root), "--datadir", str(self.root)]
        self.rig.run([str(self.root / "lib/ufw/ufw-init"), *folders, verb])


def rules(rig: Rig) -> list[str]:
    """All rules and policies, without counters."""
    rows = rig.run(["iptables-save"]).stdout.splitlines()
    return [re.sub(r" \[.*", "", row) for row in rows if not row.startswith("#")]


def theirs(rig: Rig) -> list[str]:
    ours = {*OURS, *_nat.rules(NETWORK)}
    return [row for row in rules(rig) if row not in ours]


def guardian(rig: Rig) -> list[str]:
    """Steps of the guardian's round that restores the network."""
    rig.read_kernel()
    return [step.split()[0] for step in _bridge.restore_live(NETWORK)]


def reaches(
    rig: Rig,
    place: str,
    server: tuple[str, str, int],
    address: tuple[str, int],
    limit_s: float = PATIENCE_S,
) -> bool:
    """Whether a connection from a place to the address gets to the server."""
    server_place, *listen = server
    with rigs.inside(rig.place(server_place)):
        listener = socket.create_server(tuple(listen))
    with rigs.inside(rig.place(place)):
        client = socket.socket()
    with listener, client:
        client.settimeout(limit_s)
        if place == "world":
            client.bind((rigs.WORLD, 0))
        error = client.connect_ex(address)
    if error and limit_s == PATIENCE_S:
        print(f"error {error} from {place} to {address}", rig.report(), sep="\n")
    return error == 0


def guest_reaches_the_world(rig: Rig, limit_s: float = PATIENCE_S) -> bool:
    return reaches(rig, A.place, ("world", rigs.WORLD, 7000), (rigs.WORLD, 7000), limit_s)


def guest_reaches_names(rig: Rig, limit_s: float = PATIENCE_S) -> bool:
    with rigs.inside(rig.place(A.place)), socket.socket() as client:
        client.settimeout(limit_s)
        return client.connect_ex((rigs.GATEWAY, 53)) == 0


def world_reaches_the_guest(rig: Rig, limit_s: float = PATIENCE_S) -> bool:
    """Whether a client reaches the guest by the rule of managed ingress."""
    public = (INGRESS.public_address, INGRESS.public_port)
    return reaches(rig, "world", (A.place, A.guard.ip, INGRESS.guest_port), public, limit_s)


def container_serves(rig: Rig) -> bool:
    return reaches(rig, "world", ("mgmt", rigs.BMC, 80), (rigs.UPLINK, 8080))


def container_is_open(rig: Rig) -> bool:
    """Whether a client with a route reaches a port that docker does not publish."""
    route = ["ip", "route", "replace", rigs.BMC, "via", rigs.UPLINK]
    rig.run(route, place=rig.place("world"))
    return reaches(rig, "world", ("mgmt", rigs.BMC, 81), (rigs.BMC, 81), SILENCE_S)


def container_reaches_the_world(rig: Rig) -> bool:
    return reaches(rig, "mgmt", ("world", rigs.WORLD, 7001), (rigs.WORLD, 7001))


def all_pass(rig: Rig) -> bool:
    return (
        guest_reaches_the_world(rig)
        and guest_reaches_names(rig)
        and world_reaches_the_guest(rig)
        and container_serves(rig)
        and container_reaches_the_world(rig)
    )


@pytest.mark.covers("SLICE-6", "I17")
def test_what_the_host_still_sends_ends_with_its_guest(rig: Rig) -> None:
    """The host would repeat an answer that the guest has not acknowledged for minutes, and track it
    anew: no release of the guest could prove its end.
    """
    guest, name = rig.place(A.place), _guest_probe.name_query(b"ab")
    chain = "chain {0} {{ type filter hook {0} priority -300; {1}drop; }}"
    deaf = f"table ip deaf {{ {chain.format('input', 'tcp sport 53 ')}; }}"
    mute = f"table ip mute {{ {chain.format('output', '')}; }}"
    with rigs.inside(guest), socket.socket() as client:
        client.settimeout(PATIENCE_S)
        client.connect((rigs.GATEWAY, 53))
        rig.run(["nft", deaf], place=guest)
        client.sendall(len(name).to_bytes(2, "big") + name)
        time.sleep(0.5)
        rig.run(["nft", mute], place=guest)
    try:
        assert _host_connections.number(A.guard.ip)
        _host_connections.forget(A.guard.ip)
        # The next pause between two attempts of the kernel is shorter than that.
        time.sleep(3)
        assert not _host_connections.number(A.guard.ip)
    finally:
        rig.run(["nft", "delete table ip deaf; delete table ip mute"], place=guest)


@pytest.mark.parametrize("version", ["20.10", "28"])
def test_guests_and_containers_pass_side_by_side(rig: Rig, version: str) -> None:
    _host_filter.establish("")
    docker(rig, version)
    try:
        assert not guest_reaches_the_world(rig, SILENCE_S), "docker's policy"
        assert not world_reaches_the_guest(rig, SILENCE_S)
        before = theirs(rig)
        assert ":FORWARD DROP" in before
        assert guardian(rig) == ["admit_guests"]
        for damage in (None, _firewall.remove, lambda: _nat.remove(NETWORK)):
            if damage:
                damage()
                rig.establish()
            assert all_pass(rig) and theirs(rig) == before
        assert not container_is_open(rig)
        assert violations(rig, ELSEWHERE) == []
        # A restart of docker, beside our rules.
        docker(rig, version)
        assert guest_reaches_the_world(rig) and guardian(rig) == []
        rig.run(["iptables", "-F", "FORWARD"])
        assert guardian(rig) == ["admit_guests"] and guest_reaches_the_world(rig)
    finally:
        forget_docker(rig)
        guardian(rig)


@needs_ufw
def test_ufw_and_docker_keep_their_rules_and_guests_their_way(rig: Rig) -> None:
    ufw = Ufw(rig)
    assert guardian(rig) == []
    ufw("enable")
    try:
        # Our rules stood there before, so nothing is interrupted.
        assert guest_reaches_the_world(rig) and lease(rig, A) == A.guard.ip
        assert guardian(rig) == ["admit_guests"], "behind ufw's rules"
        docker(rig, "28")
        before = theirs(rig)
        assert {":INPUT DROP", ":FORWARD DROP"} <= {*before}
        assert all_pass(rig) and lease(rig, A) == A.guard.ip
        ssh = (rigs.UPLINK, 22)
        assert not reaches(rig, "world", ("host", *ssh), ssh, SILENCE_S), "ufw's own"
        assert violations(rig, ELSEWHERE) == []
        ufw("reload")
        assert guardian(rig) == [] and theirs(rig) == before and all_pass(rig)
        # A rule of the site decides before ours.
        ufw("route", "deny", "to", rigs.WORLD)
        assert not guest_reaches_the_world(rig, SILENCE_S) and guardian(rig) == []
        ufw("route", "delete", "deny", "to", rigs.WORLD)
        ufw("default", "reject", "routed")
        assert guest_reaches_the_world(rig) and guardian(rig) == []
        before = theirs(rig)
        step = _change.Step("remove_admission", "host's filter", OURS, [])
        _ovs_nat_removal.apply(NETWORK, step)
        assert _host_filter.installed() == [] and theirs(rig) == before
        assert not guest_reaches_the_world(rig, SILENCE_S)
        assert not guest_reaches_names(rig, SILENCE_S)
        ufw.init("flush-all")
        assert guardian(rig) == ["add_nat", "admit_guests"] and guest_reaches_the_world(rig)
    finally:
        ufw("disable")
        forget_docker(rig)
        guardian(rig)


def test_rules_are_moved_in_front_of_a_policy_and_no_other_rule(rig: Rig) -> None:
    """Rules that came later, our rules twice and of another bridge, and a refusal of everything."""
    foreign = "-A FORWARD -s 192.0.2.7/32 -j DROP"
    other = _host_filter.rules("ovsbr9")[1]
    rules = [OURS[1], other, OURS[1], foreign, "-A FORWARD -j REJECT"]
    try:
        rig.run(["iptables", "-F", "FORWARD"])
        for rule in rules:
            rig.run(["iptables", *rule.split()])
        assert guardian(rig) == ["admit_guests"] and guardian(rig) == []
        listed = rig.run(["iptables", "-S", "FORWARD"]).stdout.splitlines()
        assert listed[1:4] == [foreign, *OURS[1:]] and listed[4].startswith("-A FORWARD -j REJECT")
        assert guest_reaches_the_world(rig)
    finally:
        forget_docker(rig)
        guardian(rig)


def test_the_rule_of_an_earlier_release_is_replaced_in_place(rig: Rig) -> None:
    ours = _nat.rules(NETWORK)
    foreign = "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"
    sites = "-A POSTROUTING -o up0 -j MASQUERADE"
    try:
        rig.run(["iptables", "-t", "nat", "-F"])
        for rule in (foreign, ours[-1], sites, ours[-1]):
            rig.run(["iptables", "-t", "nat", *rule.split()])
        assert guardian(rig) == ["add_nat"] and guardian(rig) == []
        listed = rig.run(["iptables", "-t", "nat", "-S", "POSTROUTING"]).stdout.splitlines()
        assert listed[1:] == [foreign, *ours, sites]
        _nat.remove(NETWORK)
        listed = rig.run(["iptables", "-t", "nat", "-S", "POSTROUTING"]).stdout.splitlines()
        assert listed[1:] == [foreign, sites]
    finally:
        forget_docker(rig)
        guardian(rig)
