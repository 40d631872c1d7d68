"""Files and services of the network baseline."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _object_names,
    _source_closure,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _bridge,
    _guards,
    _ovs_nat,
    _start_hook,
)

from tests.unit.plugins.fake_switch import PROGRAMS, FakeSwitch

pytestmark = pytest.mark.covers("HOST-6")

PARAMS = {
    "bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24", "tmfifo": False,
}  # fmt: skip
OLD = "gpuaas-slice-host-net-baseline"
PLAN = _bridge.plan
UNIT = "gpuaas-slice-network-baseline.service"
LATER = 4_000_000_000


class Systemd:
    """systemctl and dnsmasq of a host; other tests cover the live network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active: dict[str, int] = {"openvswitch-switch.service": 1}
        self.enabled = {"openvswitch-switch.service"}
        self.calls: list[list[str]] = []
        self.accepts = True
        # Later than any file that the test writes.
        self.clock = LATER
        live = _bridge.State((), {}, forwarding=True, nat=True, uplink="eno1")
        monkeypatch.setattr(_bridge, "observe", lambda _params: live)
        monkeypatch.setattr(_bridge, "plan", lambda *_: _change.Plan())
        monkeypatch.setattr(_command, "run", self.run)

    def run(
        self, argv: list[str], *, stdin: str | None = None, ok: Any = (0,), timeout: float = 60
    ) -> _command.Result:
        if argv[:2] == ["systemctl", "show"]:
            names = argv[argv.index("--") + 1 :]
            return _command.Result(0, "\n".join(self._shown(name) for name in names), "")
        self.calls.append(argv)
        if argv[:2] == ["systemctl", "disable"]:
            self.enabled.discard(argv[-1])
            self.active.pop(argv[-1], None)
            return _command.Result(0, "", "")
        if argv == ["dnsmasq", "--test", "--conf-file=-"] and not self.accepts:
            raise _change.Refusal("command_failed", expected="", found=stdin or "", remedy="")
        if argv[:2] == ["systemctl", "enable"]:
            self.enabled.add(argv[-1])
        if argv[:2] == ["systemctl", "restart"]:
            self.clock += 10
        if argv[:2] == ["systemctl", "try-restart"]:
            _host.write(f"/run/{argv[2].removesuffix('.service')}.pid", "7")
        if argv[:2] == ["systemctl", "restart"] or "--now" in argv:
            self.active[argv[-1]] = self.clock
        if argv == ["systemctl", "restart", UNIT]:
            # As its ExecStartPost does, without waiting.
            self.active.pop(_ovs_nat.DHCP, None)
        return _command.Result(0, "", "")

    def _shown(self, name: str) -> str:
        state = "active" if name in self.active else "inactive"
        enabled = "enabled" if name in self.enabled else ""
        since = f"@{self.active.get(name, '')}"
        return f"ActiveState={state}\nUnitFileState={enabled}\nActiveEnterTimestamp={since}\n"


@pytest.fixture
def systemd(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    (tree / "etc/dnsmasq.d").mkdir(parents=True)
    return Systemd(monkeypatch)


def drive(**more: Any) -> _change.Outcome:
    subject = _change.Subject(_ovs_nat.observe, _ovs_nat.plan, _ovs_nat.apply, _ovs_nat.facts)
    return _change.drive(subject, {**PARAMS, **more}, check_mode=False)


@pytest.fixture(autouse=True)
def folder_time(tree: Path, monkeypatch: pytest.MonkeyPatch, systemd: Systemd) -> None:
    """Let files change on the scripted clock, which is far ahead of the machine's."""
    real = _ovs_nat.observe

    def observe(params: Any) -> _ovs_nat.State:
        folder = tree / "etc/dnsmasq.d"
        if folder.stat().st_mtime < LATER:
            os.utime(folder, (systemd.clock, systemd.clock))
        return real(params)

    monkeypatch.setattr(_ovs_nat, "observe", observe)
    monkeypatch.setattr(
        _ovs_nat, "time", SimpleNamespace(**{**vars(time), "time": lambda: systemd.clock})
    )


def test_installs_everything_once(systemd: Systemd) -> None:
    outcome = drive()
    assert outcome.failure is None
    assert outcome.done == [
        "remember_before", "make_folder", "write_file", "write_file", "install_service",
        "start_service", "enable_dnsmasq", "restart_dnsmasq",
    ]  # fmt: skip
    settings = (_host.read(_ovs_nat.SYSCTL) or "").splitlines()
    assert "net.ipv4.ip_forward = 1" in settings
    assert "net.ipv4.neigh.default.gc_thresh3 = 65536" in settings
    assert outcome.facts["network"]["dnsmasq"]
    assert drive().plan.steps == ()


def test_the_baseline_brings_the_code_of_its_service_and_of_the_start_hook() -> None:
    """Ansible and the standalone script send a module with the files that it imports."""
    unit = _ovs_nat.unit(PARAMS)
    sent = _source_closure.closure("network._ovs_nat", _source_closure.source)
    assert {unit.module, unit.start_hook} <= set(sent)


@pytest.mark.parametrize("daemon", ["libvirtd", "virtqemud"])
def test_a_libvirt_that_has_not_seen_the_start_hook_is_restarted(
    systemd: Systemd, tree: Path, daemon: str
) -> None:
    _host.write(f"/run/{daemon}.pid", "7")
    os.utime(tree / f"run/{daemon}.pid", (1, 1))
    outcome = drive()
    assert outcome.failure is None and "restart_libvirt" in outcome.done
    assert outcome.done.index("install_service") < outcome.done.index("restart_libvirt")
    assert systemd.calls.count(["systemctl", "try-restart", f"{daemon}.service"]) == 1
    assert drive().plan.steps == ()
    # It is compared like the rest of the service, and goes with it.
    hook = tree / _object_names.START_HOOK[1:]
    assert hook.stat().st_mode & 0o777 == 0o755
    hook.write_text("#!/bin/sh\n")
    assert _object_names.START_HOOK in drive().plan.steps[0].before["differing"]
    hook.unlink()
    assert _start_hook.unnoticed() == [daemon]
    drive()
    assert os.access(hook, os.X_OK)
    # A time before the clock was set back: no start would be later.
    os.utime(hook, (LATER, LATER))
    assert _start_hook.unnoticed() == []


def test_a_configuration_that_dnsmasq_refuses_is_not_installed(systemd: Systemd) -> None:
    systemd.accepts = False
    outcome = drive()
    assert outcome.failed_step == "write_file"
    assert _host.read(_ovs_nat.DNSMASQ) is None


def test_dnsmasq_serves_reservations_on_the_bridge_only() -> None:
    lines = _baseline_files.dnsmasq(PARAMS).splitlines()
    assert "interface=ovsbr0" in lines and "except-interface=lo" in lines
    assert "dhcp-range=10.100.0.0,static,255.255.255.0,12h" in lines
    assert "dhcp-hostsdir=/var/lib/gpuaas/dnsmasq/hosts.d" in lines


def test_ubuntus_libvirt_decides_how_dnsmasq_binds(systemd: Systemd) -> None:
    """Its file returns with every upgrade; dnsmasq does not start with both settings."""
    drive()
    assert "bind-dynamic" in (_host.read(_ovs_nat.DNSMASQ) or "").splitlines()
    _host.write("/etc/dnsmasq.d/libvirt-daemon", "bind-interfaces\nexcept-interface=virbr0\n")
    assert drive().changed
    lines = (_host.read(_ovs_nat.DNSMASQ) or "").splitlines()
    assert "bind-interfaces" in lines and "bind-dynamic" not in lines
    assert not drive().changed
    _host.write("/etc/dnsmasq.d/libvirt-daemon", "# bind-interfaces\n")
    _host.write("/etc/dnsmasq.d/site.conf.dpkg-old", "bind-interfaces\n")
    drive()
    assert "bind-dynamic" in (_host.read(_ovs_nat.DNSMASQ) or "").splitlines()


@pytest.mark.covers("P5")
def test_the_profiles_name_servers_replace_those_of_the_host(systemd: Systemd) -> None:
    _host.write("/etc/resolv.conf", "nameserver 127.0.0.53\n")
    text = _baseline_files.dnsmasq({**PARAMS, "name_servers": ["9.9.9.9", "1.1.1.1"]})
    lines = text.splitlines()
    assert {"no-resolv", "server=9.9.9.9", "server=1.1.1.1"} <= set(lines)
    assert not any(line.startswith("resolv-file") for line in lines)


@pytest.mark.parametrize("server", ["127.0.0.1", "127.0.0.53", "192.0.2.53"])
def test_a_host_that_asks_its_own_dnsmasq_is_refused(systemd: Systemd, server: str) -> None:
    """It would lose its names, because dnsmasq serves the guests from then on."""
    systemd.active[_ovs_nat.DHCP] = systemd.clock
    _host.write("/etc/resolv.conf", f"# own\nnameserver {server}\n")
    failure = drive().failure
    assert (failure and failure.code) == ("resolver_in_use" if server == "127.0.0.1" else None)
    # A network that is set up already is not refused.
    _host.write("/etc/resolv.conf", "nameserver 127.0.0.1\n")
    assert server == "127.0.0.1" or drive().failure is None


def test_names_of_the_hosts_file_are_not_served_through_its_resolver(systemd: Systemd) -> None:
    """Ubuntu's systemd-resolved answers every client from /etc/hosts."""
    line = "resolv-file=/run/systemd/resolve/resolv.conf"
    _host.write("/etc/resolv.conf", "#nameserver 127.0.0.53\nnameserver 192.0.2.53\n")
    drive()
    assert line not in (_host.read(_ovs_nat.DNSMASQ) or "").splitlines()
    _host.write("/run/systemd/resolve/stub-resolv.conf", "# stub\nnameserver 127.0.0.53\n")
    _host.path("/etc/resolv.conf").unlink()
    _host.path("/etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    assert "restart_dnsmasq" in drive().done
    assert line in (_host.read(_ovs_nat.DNSMASQ) or "").splitlines()
    assert not drive().changed


def test_the_service_restarts_dnsmasq_after_itself_and_never_waits_for_it() -> None:
    unit = _ovs_nat.unit(PARAMS)
    assert unit.after == "/usr/bin/systemctl --no-block restart dnsmasq.service"
    assert "Before=dnsmasq.service" in unit.order
    texts = dict(_boot_service.sources("network._bridge"))
    # The watch starts it again, without waiting.
    assert '["systemctl", "--no-block", "start", DHCP]' in texts.pop("network._bridge")
    assert all("dnsmasq.service" not in text for text in texts.values())


def test_nothing_that_guests_need_waits_for_rshim(systemd: Systemd) -> None:
    """systemd learns that guests have their network; only then is the card's link awaited."""
    drive(tmfifo=True)
    text = _host.read(f"/etc/systemd/system/{_ovs_nat.unit(PARAMS).service}") or ""
    assert "Type=notify\n" in text and "rshim" not in text


def test_stale_reservations_go_and_dnsmasq_forgets_them(systemd: Systemd) -> None:
    drive()
    _host.write("/etc/dnsmasq.d/gpuaas-gpuaas-slice-1.conf", "dhcp-host=x\n")
    _host.write("/etc/dnsmasq.d/site.conf", "\n")
    assert drive().done == ["remove_stale_reservation", "restart_dnsmasq"]
    assert _host.read("/etc/dnsmasq.d/site.conf") == ""


def test_dnsmasq_older_than_its_files_is_restarted(systemd: Systemd) -> None:
    drive()
    systemd.clock += 100
    _host.write("/etc/dnsmasq.d/site.conf", "\n")
    assert drive().done == ["restart_dnsmasq"]


def test_a_change_in_the_future_restarts_nothing_for_ever(
    systemd: Systemd, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are from before the clock was set back, so no start would be later."""
    drive()
    later = systemd.clock + 86_400
    os.utime(tree / "etc/dnsmasq.d", (later, later))
    assert drive().plan.steps == ()


def test_folders_that_dnsmasq_cannot_read_are_opened(tree: Path) -> None:
    """A host with a narrow umask made them so."""
    drive()
    folder = tree / _ovs_nat.RESERVATIONS.lstrip("/")
    for closed in (folder, folder.parent, folder.parent.parent):
        closed.chmod(0o700)
    assert drive().done == ["make_folder"]
    modes = {oct(each.stat().st_mode & 0o777) for each in (folder, *folder.parents[:2])}
    assert modes == {"0o755"}


def test_a_start_of_the_boot_service_waits_for_dnsmasq_which_it_restarts(systemd: Systemd) -> None:
    drive()
    del systemd.active[UNIT]
    outcome = drive()
    assert (outcome.failure, outcome.done) == (None, ["start_service", "restart_dnsmasq"])


def test_open_vswitch_runs_before_its_bridge_is_made(systemd: Systemd) -> None:
    systemd.active.clear()
    done = drive().done
    assert done.index("start_switch") < done.index("install_service")


def test_the_older_service_is_migrated_away(systemd: Systemd) -> None:
    _host.write(f"/etc/systemd/system/{OLD}.service", "[Service]\n")
    _host.write(f"/usr/local/sbin/{OLD}", "#!/bin/sh\n")
    # `enable` of an earlier version, into a target that is no longer used.
    link = _host.path(f"/etc/systemd/system/network-online.target.wants/{OLD}.service")
    link.parent.mkdir(parents=True)
    link.symlink_to("/nowhere")
    _host.write(f"/etc/systemd/system/{OLD}.service.d/10-site.conf", "[Unit]\n")
    assert drive().done[1] == "remove_old_service"
    assert not link.is_symlink() and not link.exists()
    assert not _host.path(f"/etc/systemd/system/{OLD}.service.d").exists()
    assert not drive().changed
    assert ["systemctl", "disable", "--now", f"{OLD}.service"] in systemd.calls
    assert _host.read(f"/etc/systemd/system/{OLD}.service") is None


@pytest.mark.parametrize("name", ["ovsbr0\nconf-script=/bin/sh", "-x", "a" * 16, "../x"])
def test_a_bridge_name_cannot_add_lines(systemd: Systemd, name: str) -> None:
    outcome = drive(bridge=name)
    assert outcome.failure is not None and outcome.failure.code == "network_invalid"
    assert systemd.calls == []


@pytest.mark.parametrize(
    ("networks", "named"),
    [
        ({"allowed_networks": ["10.20.0.0/16"]}, "10.20.0.0/16, which contains 10.20.0.7"),
        ({"allowed_networks": ["10.0.0.0/8"]}, "10.0.0.0/8, which contains 10.20.0.7"),
        ({"allowed_networks": ["10.100.0.128/25"]}, "the slice subnet 10.100.0.0/24"),
        ({"denied_networks": ["8.8.8.8/24"]}, "has host bits set"),
        ({"packets_per_second": 999}, "999"),
        ({"name_servers": ["dns.example.org"]}, "dns.example.org"),
        ({"name_servers": ["9.9.9.9", "10.100.0.1"]}, "10.100.0.1"),
    ],
)
def test_a_rule_that_lets_guests_reach_the_host_is_refused(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, networks: dict[str, Any], named: str
) -> None:
    live = replace(_bridge.observe(PARAMS), local=("10.20.0.7",))
    monkeypatch.setattr(_bridge, "observe", lambda _params: live)
    failure = drive(**networks).failure
    assert failure is not None and failure.code == "network_invalid"
    assert named in failure.found and next(iter(networks)) in failure.remedy
    assert systemd.calls == []


def test_rshim_is_started_for_its_interface(
    tree: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tree / "sys/class/net/tmfifo_net0"
    card(tree, monkeypatch)
    monkeypatch.setattr(_ovs_nat.time, "sleep", lambda _: there.mkdir(parents=True))
    outcome = drive(tmfifo=True)
    assert (outcome.failure, outcome.doubts) == (None, [])
    assert outcome.done[-3:] == ["restart_dnsmasq", "start_rshim", "address_interface"]
    assert outcome.facts["network"]["tmfifo"] == "192.168.100.1/30"
    assert not drive(tmfifo=True).changed


def test_an_rshim_that_runs_without_being_enabled_is_enabled(
    tree: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NVIDIA's documentation page for the host; the next boot would have no link."""
    card(tree, monkeypatch)
    (tree / "sys/class/net/tmfifo_net0").mkdir(parents=True)
    systemd.active["rshim.service"] = 1
    assert "start_rshim" in drive(tmfifo=True).done
    assert "rshim.service" in systemd.enabled
    assert not drive(tmfifo=True).changed


def test_an_rshim_that_does_not_start_keeps_no_guest_from_its_network(
    tree: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(tree, monkeypatch)
    act = _command.run

    def run(argv: list[str], **more: Any) -> _command.Result:
        if argv == ["systemctl", "enable", "--now", "rshim.service"]:
            raise _change.Refusal("command_failed", expected="", found="masked", remedy="")
        return act(argv, **more)

    monkeypatch.setattr(_command, "run", run)
    outcome = drive(tmfifo=True)
    assert outcome.failure is None and outcome.done[-1] == "restart_dnsmasq"
    assert [doubt.code for doubt in outcome.doubts] == ["command_failed", "tmfifo_missing"]
    assert outcome.facts["network"]["tmfifo"] == "missing"


def test_where_nothing_can_make_the_link_nothing_is_tried(
    tree: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rshim is not installed; or it runs, and the card's BMC owns the device."""
    card(tree, monkeypatch)
    (tree / "usr/lib/systemd/system/rshim.service").unlink()
    outcome = drive(tmfifo=True)
    assert (outcome.failure, outcome.done[-1]) == (None, "restart_dnsmasq")
    for _ in range(2):
        outcome = drive(tmfifo=True)
        assert (outcome.changed, [doubt.code for doubt in outcome.doubts]) == (
            False, ["tmfifo_missing"],
        )  # fmt: skip
        (tree / "usr/lib/systemd/system/rshim.service").touch()
        systemd.active["rshim.service"] = 1
        systemd.enabled.add("rshim.service")


def card(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rshim is installed; the settings of its link are recorded, and the rest of the network is
    ready."""
    switch = FakeSwitch()
    switch.add_bridge()
    unit = tree / "usr/lib/systemd/system/rshim.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    given: list[str] = []

    def observe(_params: Any) -> _bridge.State:
        links = {"ovsbr0": _bridge.Interface(up=True, addresses=("10.100.0.1/24",))}
        if (tree / "sys/class/net/tmfifo_net0").exists():
            links[_bridge.TMFIFO] = _bridge.Interface(up=bool(given), addresses=tuple(given))
        isolation = _guards.observe(PARAMS)
        return _bridge.State(
            ("ovsbr0",), links, forwarding=True, nat=True, uplink="eno1", isolation=isolation
        )

    act = _command.run

    def run(argv: list[str], **more: Any) -> _command.Result:
        if argv[0] in PROGRAMS:
            return switch.run(argv, **more)
        if argv[:3] == ["ip", "address", "replace"]:
            given.append(argv[3])
        return act(argv, **more)

    monkeypatch.setattr(_command, "run", run)
    for step in _guards.plan(PARAMS, _guards.observe(PARAMS)):
        _guards.apply(PARAMS, step)
    monkeypatch.setattr(_bridge, "observe", observe)
    monkeypatch.setattr(_bridge, "plan", PLAN)
    monkeypatch.setattr(_ovs_nat.time, "sleep", lambda _: None)
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(_ovs_nat.time, "monotonic", lambda: next(clock))


@pytest.mark.covers("HOST-6")
def test_a_link_without_its_unit_is_migrated_away_too(systemd: Systemd) -> None:
    drive()
    link = _host.path(f"/etc/systemd/system/multi-user.target.wants/{OLD}.service")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"/etc/systemd/system/{OLD}.service")
    assert drive().done == ["remove_old_service"]
    assert not link.is_symlink()
    # systemctl no longer knows this unit, so no command disables it.
    assert ["systemctl", "disable", "--now", f"{OLD}.service"] not in systemd.calls
