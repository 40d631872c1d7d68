"""A slice host mends its own baseline: a real switch, firewall and dnsmasq; systemd is scripted."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_service,
    _boot_units,
    _command,
    _free_space,
    _host,
    _host_mode,
    _object_names,
    _repairs,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _bridge,
    _flows,
    _guards,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _checks_network,
    _guest_probe,
    _tcp_probe,
    _upkeep,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _libvirt,
    _qos,
    _relay,
    _telemetry,
)

from tests.unit.plugins.module_utils.network import frames
from tests.unit.plugins.module_utils.network import rig as rigs
from tests.unit.plugins.module_utils.network.frames import ATTACKS
from tests.unit.plugins.module_utils.network.rig import NETWORK, Rig

pytestmark = [
    pytest.mark.covers("SLICE-8", "HOST-10"),
    pytest.mark.skipif(bool(rigs.missing()), reason=rigs.missing()),
]

PROFILE = {"name": "rig", "network": NETWORK, "gpu_services": ["dcgm.service"], "vm": {}}
PARAMS = {"profile": PROFILE, "slots": []}
CHECKS = (
    *("ovs_bridge", "dnsmasq", "nat", "ip_forwarding", "guest_egress", "guest_tcp"),
    "gpu_services_quiesced",
)


class Systemd:
    """Services by name, each active or not; masked services have that state."""

    def __init__(self) -> None:
        self.active = {"gpuaas-slice-network-baseline.service", *_NAMES}
        self.masked = {"dcgm.service"}

    def run(self, argv: list[str]) -> _command.Result:
        verb, name = argv[1], argv[-1]
        if verb == "show":
            blocks = (self._shown(each) for each in argv[argv.index("--") + 1 :])
            return _command.Result(0, "\n".join(blocks), "")
        if verb in ("start", "restart", "enable"):
            self.active.add(name)
        elif verb == "stop":
            self.active.discard(name)
        elif verb == "mask":
            self.masked.add(name)
        return _command.Result(0, "", "")

    def _shown(self, name: str) -> str:
        active = "active" if name in self.active else "inactive"
        file = "masked" if name in self.masked else "enabled"
        return (
            f"Id={name}\nLoadState=loaded\nActiveState={active}\nSubState=x\nUnitFileState={file}\n"
            "Result=success\nActiveEnterTimestamp=@9999999999\n"
        )


_NAMES = ("dnsmasq.service", "openvswitch-switch.service", "libvirtd.service")
SYSTEMD = Systemd()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with rigs.standing() as (machines, patch):
        # The product reads the machine's kernel by files, which the rig copies.
        _follow(machines, patch)
        _host.path("/run/netns").symlink_to("/run/netns")
        _host.write(_host_mode.MARKER, '{"mode": "slice"}')
        assert machines.dhcp is not None
        _host.write("/run/dnsmasq/dnsmasq.pid", str(machines.dhcp.pid))
        _host.write(f"/proc/{machines.dhcp.pid}/comm", "dnsmasq")
        real = _command.run

        def run(argv: list[str], **options: Any) -> _command.Result:
            if argv[0] == "systemctl":
                return SYSTEMD.run(list(argv))
            if argv[0] == "sshd":
                return _command.Result(0, "", "")
            return real(argv, **options)

        patch.setattr(_command, "run", run)
        patch.setattr(_upkeep, "CHECKS", CHECKS)
        patch.setattr(_guards, "ROUND_S", 0)
        patch.setattr(_guest_probe, "_WAIT_S", 0.6)
        # A first packet that is lost is sent again after a second.
        patch.setattr(_tcp_probe, "_WAIT_S", 2.5)
        with rigs.inside(machines.host):
            _upkeep.keep(PARAMS, check_mode=False)
            yield machines


def _follow(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    for module, name in ((_bridge, "observe"), (_upkeep, "look"), (_guards, "observe")):
        patch.setattr(module, name, _after(rig.read_kernel, getattr(module, name)))


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **options: Any) -> Any:
        first()
        return then(*args, **options)

    return both


def test_a_sound_host_is_left_alone(rig: Rig) -> None:
    assert _upkeep.keep(PARAMS, check_mode=False) == ([], [])


def test_everything_that_was_lost_comes_back_and_is_recorded(rig: Rig) -> None:
    rig.run(["iptables", "-t", "nat", "-F"])
    for rule in (["-P", "FORWARD", "DROP"], ["-F", "FORWARD"], ["-F", "INPUT"]):
        rig.run(["iptables", *rule])
    rig.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=0"])
    rig.run(["ip", "address", "flush", "dev", "ovsbr0"])
    rig.run(["ovs-ofctl", "add-flow", "ovsbr0", "priority=999,actions=NORMAL"])
    rig.run(["nft", "delete", "table", "inet", "gpuaas_slice"])
    SYSTEMD.active.add("dcgm.service")
    SYSTEMD.active.discard("gpuaas-slice-network-baseline.service")
    # It is installed, and a person has stopped it.
    _host.write(_boot_units.TELEMETRY.path, "[Service]\n")
    done, left = _upkeep.keep(PARAMS, check_mode=False)
    assert left == []
    names = {step.split()[0] for step in done}
    assert names >= {
        "add_nat", "forward_ipv4", "address_interface", "remove_flows", "load_firewall",
        "admit_guests", "stop_service", "start_service",
    }  # fmt: skip
    assert "start_service gpuaas-slice-telemetry.service" in done
    assert {row["step"] for row in _repairs.read()} >= set(done)
    assert _upkeep.keep(PARAMS, check_mode=False) == ([], [])


@pytest.mark.covers("HOST-7")
def test_a_rate_limit_that_a_running_slice_has_lost_comes_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, port = rigs.A.guard.allocation_id, rigs.A.guard.port
    # A paused machine is being started, and gets its limit before it runs.
    lives = {
        _object_names.domain_name(mine): _libvirt.State("running"),
        _object_names.domain_name(rigs.B.guard.allocation_id): _libvirt.State("paused", 1),
        "of-the-site": _libvirt.State("running"),
    }
    monkeypatch.setattr(_libvirt, "states", lambda: lives)
    monkeypatch.setattr(_libvirt, "state", lives.get)

    def keep(rate_kbps: int) -> tuple[list[str], list[dict[str, str]]]:
        vm = {"mgmt_qos": {"rate_kbps": rate_kbps, "burst_kb": 100}}
        return _upkeep.keep({**PARAMS, "profile": {**PROFILE, "vm": vm}}, check_mode=False)

    limit = _qos.Limit(1000, 100)
    for loss in (
        [],
        ["clear", "Port", port, "qos"],
        ["set", "Interface", port, "ingress_policing_rate=0"],
    ):
        if loss:
            rig.run(["ovs-vsctl", *loss])
        assert _telemetry._ports([mine])[mine]["limited"] is False
        assert keep(1000) == ([f"limit_port {port}"], [])
        assert _qos.observe(mine).holds(limit)
        assert _telemetry._ports([mine])[mine]["limited"] is True
        # A new rate of the profile holds from the next start.
        assert keep(2000) == ([], [])
    # It ends between the list of machines and its repair, and its port with it.
    _qos.install(mine, None)
    gone = "33bd713b-6073-4ef7-8a51-2897e902365d"
    lives.clear()
    ending = {_object_names.domain_name(gone): _libvirt.State("running")}
    monkeypatch.setattr(_libvirt, "states", lambda: ending)
    assert keep(1000) == ([], [])
    lives.update(ending)
    _, left = keep(1000)
    assert [row["code"] for row in left] == ["command_failed"]


@pytest.mark.parametrize("edited", [False, True])
def test_a_network_that_bootstrap_does_not_know_is_named_and_not_applied(
    rig: Rig, edited: bool
) -> None:
    """Repairs restore the network of the last bootstrap, if its record is not edited."""
    settings = _baseline_files.settings(NETWORK)
    _boot_service.install(replace(_boot_units.NETWORK, settings=settings))
    if edited:
        _host.write(_baseline_files.SETTINGS, json.dumps(settings))
    rig.run(["iptables", "-t", "nat", "-F"])
    network = {**NETWORK, "denied_networks": []}
    try:
        done, left = _upkeep.keep(
            {**PARAMS, "profile": {**PROFILE, "network": network}}, check_mode=False
        )
        codes = {row["code"] for row in left}
        if edited:
            assert done == [] and {"nat", "network_settings_differ"} <= codes
        else:
            assert "add_nat nat rule" in done and codes == {"network_settings_differ"}
            assert (rig.restore(), _guards.recorded()) == ([], settings)
        assert all(row["remedy"] for row in left)
    finally:
        _upkeep.keep(PARAMS, check_mode=False)


def test_a_record_of_a_release_without_name_servers_is_repaired() -> None:
    """A field that is new in the profile is no operator's change as long as it has its default."""
    settings = _baseline_files.settings(NETWORK)
    recorded = {key: value for key, value in settings.items() if key != "name_servers"}
    assert _upkeep._unlike(NETWORK, recorded) == []
    (refusal,) = _upkeep._unlike({**NETWORK, "name_servers": ["9.9.9.9"]}, recorded)
    assert refusal.found == "other values of name_servers"


def test_a_host_is_compared_with_its_last_bootstrap_until_the_next(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots stay on sale when only the profile has changed, and not when its file has. Repairs
    are by the same network, if it is the one of the last bootstrap.
    """
    looked: list[Any] = []
    mended: list[Any] = []

    def look(params: Any) -> list[dict[str, str]]:
        looked.append(params["profile"]["network"])
        return [{"role": "slice_network", "check": "nat", "detail": "", "remediation": ""}]

    def mend(params: Any, roles: set[str]) -> tuple[list[str], list[Refusal]]:
        mended.append(params["profile"]["network"] if roles else None)
        return [], []

    monkeypatch.setattr(_upkeep, "look", look)
    monkeypatch.setattr(_upkeep, "_mend", mend)
    monkeypatch.setattr(_free_space, "full", list)
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    old = _baseline_files.settings(NETWORK)
    _boot_service.install(replace(_boot_units.NETWORK, settings=old))
    new = {**NETWORK, "egress_probe": "8.8.8.8", "subnet": "10.9.0.0/24"}
    given = {**PARAMS, "profile": {**PROFILE, "network": new}}

    def differs(*, check_mode: bool = False) -> list[str]:
        left = _upkeep.keep(given, check_mode=check_mode)[1]
        return [row["found"] for row in left if row["code"] == "network_settings_differ"]

    expected = ["other values of egress_probe, subnet"]
    assert differs() == differs(check_mode=True) == expected
    # Launches use the profile's own subnet, so a host with another one must not be sold.
    assert looked[-1] == {**old, "subnet": "10.9.0.0/24"}
    assert mended == [None]
    given["profile"]["network"] = {**new, "subnet": old["subnet"]}
    assert differs() == ["other values of egress_probe"]
    assert looked[-1] == mended[-1] == old
    given["profile"]["network"] = new
    _host.write(_baseline_files.SETTINGS, json.dumps({**old, "allowed_networks": ["10.0.0.0/8"]}))
    assert differs() == ["other values of allowed_networks, egress_probe, subnet"]
    assert (looked[-1], mended[-1]) == (new, None)
    # The record of an earlier release does not have the settings.
    _boot_service.install(replace(_boot_units.NETWORK, settings=old))
    _boot_files.remember(_boot_units.NETWORK, {"/a": "b"})
    assert (differs(), looked[-1]) == (expected, new)


def filtered(rig: Rig, place: str, hook: str) -> contextlib.AbstractContextManager[None]:
    """Packets to the target of the egress probe are dropped in a place."""

    @contextlib.contextmanager
    def filtering() -> Iterator[None]:
        chain = f"chain c {{ type filter hook {hook} priority 0; ip daddr {rigs.WORLD} drop; }}"
        rig.run(["nft", "-f", "-"], place=place, input=f"table inet silence {{\n{chain}\n}}\n")
        try:
            yield
        finally:
            rig.run(["nft", "delete", "table", "inet", "silence"], place=place)

    return filtering()


def test_a_silent_target_of_the_egress_probe_is_not_the_hosts_fault(rig: Rig) -> None:
    with filtered(rig, rig.place("world"), "input"):
        done, left = _upkeep.keep(PARAMS, check_mode=False)
    assert (done, [row["code"] for row in left]) == ([], ["egress_target_silent"])
    assert "leave the host" in left[0]["found"] and "egress_probe" in left[0]["remedy"]
    # Such as the policy of a container runtime.
    with filtered(rig, rig.host, "forward"):
        done, left = _upkeep.keep(PARAMS, check_mode=False)
    assert [row["code"] for row in left] == ["guest_egress"]


def test_a_probe_that_cannot_be_made_blames_no_target(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_probe: _guest_probe.Probe) -> _guest_probe.Finding:
        raise Refusal("namespace_refused", expected="a", found="b", remedy="c")

    monkeypatch.setattr(_guest_probe, "look", refuse)
    assert "guest_egress" in {row["check"] for row in _upkeep.look(PARAMS)}


def test_check_mode_names_and_repairs_nothing(rig: Rig) -> None:
    rig.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=0"])
    done, left = _upkeep.keep(PARAMS, check_mode=True)
    assert (done, "ip_forwarding" in {row["code"] for row in left}) == ([], True)
    assert _upkeep.keep(PARAMS, check_mode=False)[1] == []


Rules = Callable[[frozenset[_flows.Flow]], frozenset[_flows.Flow]]


def _open(field: str) -> Rules:
    """The rules without this field of their matches, where they let something pass."""
    return lambda flows: frozenset(
        _flows.Flow(
            flow.table,
            flow.priority,
            flow.match
            if flow.actions == "drop"
            else frozenset(part for part in flow.match if part.split("=")[0] != field),
            flow.actions,
        )
        for flow in flows
    )


@pytest.mark.covers("SLICE-9")
@pytest.mark.parametrize(
    ("field", "kind"), [("dl_src", "mac_spoofed"), ("nw_src", "ip_spoofed"), ("arp_spa", "arp")]
)
def test_the_probe_fails_behind_a_guard_that_is_wrong(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, field: str, kind: str
) -> None:
    probe = _guest_probe.Probe(NETWORK, "9.9.9.9")
    assert _guest_probe.look(probe).forged == ()
    real, mutant = _flows.rules, _open(field)
    monkeypatch.setattr(_flows, "rules", lambda *args: mutant(real(*args)))
    assert kind in (_guest_probe.look(probe).forged or ())


@pytest.mark.covers("HOST-6")
@pytest.mark.parametrize(
    ("table", "done"), [(_flows.FROM_GUEST, 0), (_flows.TO_GUEST, 1)], ids=["sent", "received"]
)
def test_the_probe_names_tcp_that_does_not_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, table: int, done: int
) -> None:
    """In either direction, a guard passes only the first packet of a connection. A kernel would do
    so if its guard tracked a single direction; the switch of this rig would not.
    """
    real = _flows.rules

    def rules(guard: _flows.Guard, port: int, *args: Any) -> frozenset[_flows.Flow]:
        source = port if table == _flows.FROM_GUEST else "LOCAL"
        later = _flows._flow(table, 400, f"tcp,in_port={source},tcp_flags=-syn", "drop")
        return real(guard, port, *args) | {later}

    monkeypatch.setattr(_flows, "rules", rules)
    finding = _guest_probe.look(_guest_probe.Probe(NETWORK, "9.9.9.9"))
    assert (finding.egress_ms is None, finding.forged) == (False, ())
    assert f"begins, and stops after {done} of 8 messages" in finding.tcp


@pytest.mark.covers("HOST-6")
def test_a_site_may_translate_guests_to_an_address_of_its_own(rig: Rig) -> None:
    """Its rule is about every interface, and so about the link of the probe's service as well."""
    target = f"{rigs.UPLINK}:40000-50000"
    rule = f"POSTROUTING -s {NETWORK['subnet']} -p tcp -j SNAT --to-source {target}"
    rig.run(["iptables", "-t", "nat", "-I", *rule.split()])
    try:
        assert _guest_probe.look(_guest_probe.Probe(NETWORK, "9.9.9.9")).tcp == ""
    finally:
        rig.run(["iptables", "-t", "nat", "-D", *rule.split()])


@pytest.mark.covers("HOST-6")
def test_a_host_may_answer_arp_of_its_own_networks_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new namespace inherits the settings of the machine."""
    connect = _tcp_probe._connect

    def strict(place: int) -> None:
        setting = "net.ipv4.conf.all.arp_ignore=2"
        namespace = f"--net=/proc/{os.getpid()}/fd/{place}"
        rig.run(["nsenter", namespace, "sysctl", "-q", "-w", setting])
        connect(place)

    monkeypatch.setattr(_tcp_probe, "_connect", strict)
    assert _guest_probe.look(_guest_probe.Probe(NETWORK, "9.9.9.9")).tcp == ""


@pytest.mark.covers("SLICE-9")
def test_the_probe_alone_reaches_its_service(rig: Rig) -> None:
    world = rig.place("world")
    rig.run(["ip", "route", "replace", _tcp_probe.SERVICE, "via", rigs.UPLINK], place=world)
    with _tcp_probe._service() as server:
        for place in (rig.place(rigs.A.place), world):
            with rigs.inside(place):
                client = socket.socket()
            with client, pytest.raises(TimeoutError):
                client.settimeout(0.5)
                client.connect(server.getsockname())
        # The host's end of the link changes no guard.
        assert rig.restore() == []
    assert _tcp_probe.LINK not in rig.run(["ip", "link"]).stdout


def test_a_killed_probe_leaves_no_service(rig: Rig) -> None:
    child = os.fork()
    if not child:
        with _tcp_probe._service():
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    # Also before the kernel has removed the link.
    assert _guest_probe.look(_guest_probe.Probe(NETWORK, "9.9.9.9")).tcp == ""
    rigs._until(lambda: _tcp_probe.LINK not in rig.run(["ip", "link"]).stdout)


@pytest.mark.covers("SLICE-9")
def test_no_guest_changes_what_the_probe_finds(rig: Rig) -> None:
    """A guest sends all its attacks, and frames in the probe's name, while the probe works."""
    over = threading.Event()
    gateway = rigs.hardware_address(rig.host, "ovsbr0")
    mine = [attack for attack in ATTACKS if attack.place == rigs.A.place]
    forged = [attack.build(gateway, b"probe-00") for attack in mine]
    for kind, hardware in itertools.product((1, 3, 4, 7), (_guest_probe.MAC, rigs.A.guard.mac)):
        data = frames.dhcp(kind, hardware, b"", requested="10.100.0.254", server=rigs.GATEWAY)
        body = frames.udp("0.0.0.0", "255.255.255.255", 68, 67, data)
        packet = frames.ipv4("0.0.0.0", "255.255.255.255", 17, body)
        for source in (_guest_probe.MAC, rigs.A.guard.mac):
            forged.append(frames.ether(source, frames.EVERYONE, 0x0800, packet))
    guest = rigs.packet_socket(rig.place(rigs.A.place), "eth0")

    def flood() -> None:
        for frame in itertools.cycle(forged):
            with contextlib.suppress(OSError):
                guest.send(frame)
            if over.wait(0.0005):
                return

    with guest:
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            finding = _guest_probe.look(_guest_probe.Probe(NETWORK, "9.9.9.9"))
        finally:
            over.set()
            thread.join()
    assert finding.egress_ms is not None
    assert (finding.named, finding.offered, finding.forged) == (True, "10.100.0.254", ())
    assert (finding.sources, finding.tcp) == ((rigs.UPLINK,), "")


@pytest.mark.parametrize(
    ("forged", "text"),
    [((), ""), (None, "its guard is not proven"), (("arp", "vlan"), "frames pass: arp, vlan")],
)
def test_parity_names_a_guard_that_does_not_work(forged: tuple[str, ...] | None, text: str) -> None:
    assert text in "".join(_checks_network._guard(forged))
    assert bool(_checks_network._guard(forged)) == bool(text)


def test_a_full_file_system_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tree)
    assert real.f_frsize == 4096
    full = os.statvfs_result((*real[:4], 1000, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    (row,) = _free_space.full()
    assert (row.code, row.found) == ("host_disk_full", "3 MiB free in the file system of /")


def test_a_read_only_file_system_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("run", "var/lib/gpuaas"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    real = os.statvfs(tree)
    flags = {tree / "var/lib/gpuaas": os.ST_RDONLY}
    # All of /run is small on some hosts.
    blocks = {tree / "run": 2000}

    def shown(path: Path) -> os.statvfs_result:
        room, flag = blocks.get(path, 1_000_000), flags.get(path, 0)
        return os.statvfs_result((4096, 4096, *real[2:4], room, *real[5:8], flag, 255))

    monkeypatch.setattr(os, "statvfs", shown)
    (row,) = _free_space.full()
    assert (row.code, row.found) == ("host_read_only", "it is mounted read-only")
    assert "remount,rw" in row.remedy and "/var/lib/gpuaas" in row.remedy
    flags.clear()
    assert _free_space.full() == []
    blocks[tree / "run"] = 1000
    (row,) = _free_space.full()
    assert row.found == "3 MiB free in the file system of /run"


@pytest.mark.covers("SLICE-10")
def test_a_host_of_an_earlier_version_takes_the_gateways_authority(rig: Rig) -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKlD7mHAmvLJF1Eb8RvzpO3kcJHk1bkNQMeIKMxZk0V3"
    given = {**PARAMS, "gateway_authority": key}
    assert _upkeep.keep(given, check_mode=False) == ([], [])
    _host.write(_relay.SETTINGS, f"Match User {_relay.ACCOUNT}\n")
    assert _upkeep.keep(given, check_mode=True) == ([], [])
    done, left = _upkeep.keep(given, check_mode=False)
    assert [step.split()[0] for step in done] == ["write_authority", "write_settings"]
    assert left == [] and _host.read(_relay.AUTHORITY) == key
    assert _host.read(_relay.SETTINGS) == _relay.settings().strip()
    assert _upkeep.keep(given, check_mode=False) == ([], [])
