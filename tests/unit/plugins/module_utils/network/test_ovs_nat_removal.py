"""Removal of the network baseline: it leaves no trace, the rest is as before."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _bridge,
    _flows,
    _guards,
    _host_filter,
    _nat,
    _ovs_nat,
    _ovs_nat_removal,
)

from tests.unit.plugins.fake_switch import PROGRAMS, FakeSwitch

pytestmark = pytest.mark.covers("HOST-15", "HOST-6")

PARAMS = {
    "bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24", "tmfifo": False,
}  # fmt: skip
SWITCH, DHCP = _ovs_nat.SWITCH, _ovs_nat.DHCP
RULES = _nat.rules(PARAMS)


class Host:
    """systemctl, Open vSwitch, nft, iptables and sysctl of a host; each command has its effect."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.active: set[str] = set()
        self.enabled: set[str] = set()
        self.switch = FakeSwitch()
        self.calls: list[list[str]] = []
        # Time of a start of a service; the default is after all files.
        self.starts = "9999999999"
        self.write("proc/sys/net/ipv4/ip_forward", "0\n")
        (tree / "etc/dnsmasq.d").mkdir(parents=True)
        monkeypatch.setattr(_command, "run", self.run)

    def write(self, path: str, text: str) -> None:
        (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / path).write_text(text)

    def runs(self, *services: str) -> None:
        self.active |= set(services)
        self.enabled |= set(services)
        self.write("run/openvswitch/db.sock", "")

    @property
    def bridges(self) -> dict[str, dict[str, int]]:
        return self.switch.bridges

    def run(self, argv: list[str], **more: Any) -> _command.Result:
        if argv[0] == "ip" and "show" in argv:
            return _command.Result(0, self._interfaces(), "")
        if argv[:2] == ["systemctl", "show"]:
            shown = [self._shown(name) for name in argv[argv.index("--") + 1 :]]
            return _command.Result(0, "\n".join(shown), "")
        if argv[0] in (*PROGRAMS, "iptables"):
            return self._switched(argv, **more)
        self.calls.append(argv)
        self._act(argv)
        return _command.Result(0, "", "")

    def _switched(self, argv: list[str], **more: Any) -> _command.Result:
        before = asdict(self.switch)
        result = self.switch.run(argv, **more)
        if asdict(self.switch) != before:
            self.calls.append(argv)
        for name in set(before["bridges"]) - set(self.bridges):
            shutil.rmtree(self.tree / "sys/class/net" / name)
        return result

    def _act(self, argv: list[str]) -> None:
        if argv[0] == "systemctl" and argv[1] in ("enable", "disable", "restart"):
            if argv[1] != "restart":
                change = self.enabled.add if argv[1] == "enable" else self.enabled.discard
                change(argv[-1])
            if argv[1] == "disable" and "--now" in argv:
                self.active.discard(argv[-1])
            elif "--now" in argv or argv[1] == "restart":
                self.active.add(argv[-1])
            if argv[1:] == ["restart", "gpuaas-slice-network-baseline.service"]:
                _change.drive(_bridge.LIVE, PARAMS, check_mode=False)
            if argv[-1] == SWITCH and argv[1] == "enable":
                self.write("run/openvswitch/db.sock", "")
        elif argv[:2] == ["systemctl", "stop"]:
            self.active.discard(argv[-1])
        elif argv[0] == "sysctl":
            key, _, value = argv[-1].partition("=")
            self.write(f"proc/sys/{key.replace('.', '/')}", f"{value}\n")
        else:
            assert argv[0] in ("ip", "systemctl", "dnsmasq"), argv

    def _shown(self, name: str) -> str:
        state = "active" if name in self.active else "inactive"
        file = "enabled" if name in self.enabled else ""
        return f"ActiveState={state}\nUnitFileState={file}\nActiveEnterTimestamp=@{self.starts}\n"

    def _interfaces(self) -> str:
        rows = []
        for name in self.bridges:
            self.write(f"sys/class/net/{name}/flags", "0x1003\n")
            info = [{"local": "10.100.0.1", "prefixlen": 24, "scope": "global"}]
            rows.append({"ifname": name, "addr_info": info})
        return json.dumps(rows)


@pytest.fixture
def host(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tree, monkeypatch)


def establish(**more: Any) -> _change.Outcome:
    subject = _change.Subject(_ovs_nat.observe, _ovs_nat.plan, _ovs_nat.apply, _ovs_nat.facts)
    return _change.drive(subject, PARAMS | more, check_mode=False)


def remove(*, check: bool = False, **more: Any) -> _change.Outcome:
    return _change.drive(_ovs_nat_removal.SUBJECT, PARAMS | more, check_mode=check)


def remaining_files(tree: Path) -> list[str]:
    """Return every file below the folders that the baseline writes to."""
    folders = [tree / name for name in ("etc", "usr", "var")]
    files = [file for folder in folders for file in folder.rglob("*") if not file.is_dir()]
    return sorted(str(file.relative_to(tree)) for file in files)


def test_a_plain_host_is_plain_again(host: Host, tree: Path) -> None:
    assert establish().failure is None
    assert (host.active >= {SWITCH, DHCP}, host.switch.nat) == (True, RULES)
    assert list(host.switch.tables) == ["inet gpuaas_slice", "inet gpuaas_connections"]
    assert host.switch.filter == _host_filter.rules("ovsbr0")
    forecast = remove(check=True)
    host.switch.nat.append(RULES[-1])  # a script of the site has added it once more
    outcome = remove()
    assert outcome.failure is None
    assert [step.name for step in forecast.plan.steps] == outcome.done == [
        "remove_service", "remove_file", "remove_file", "remove_folder", "remove_nat",
        "remove_bridge", "remove_admission", "remove_firewall", "stop_forwarding", "stop_service",
        "stop_service", "forget_before",
    ]  # fmt: skip
    assert host.switch == FakeSwitch()
    assert host.active == host.enabled == set()
    assert _host.read("/proc/sys/net/ipv4/ip_forward") == "0"
    assert remaining_files(tree) == []
    assert not remove().changed


GUARD = _flows.Guard(
    "23bd713b-6073-4ef7-8a51-2897e902365d", "ovsbr0", "52:54:00:64:00:0a", "10.100.0.10",
    "10.100.0.1/24",
)  # fmt: skip


def stop_switch(host: Host) -> None:
    """`systemctl stop openvswitch-switch`: the bridge stays in the kernel, its flows are lost."""
    host.active.discard(SWITCH)
    (host.tree / "run/openvswitch/db.sock").unlink()
    host.switch.flows = {bridge: [] for bridge in host.bridges}
    host.calls.clear()


def test_a_stopped_switch_is_started_before_its_bridge_is_observed(host: Host, tree: Path) -> None:
    establish()
    _guards.save(GUARD)
    host.bridges["ovsbr0"][GUARD.port] = 4
    stop_switch(host)
    forecast = _change.drive(_ovs_nat.SUBJECT, PARAMS, check_mode=True)
    assert (forecast.failure, host.calls) == (None, [])
    assert [step.name for step in forecast.plan.steps][:2] == ["start_switch", "add_bridge"]
    outcome = establish()
    assert (outcome.failure, outcome.done[0]) == (None, "start_switch")
    assert host.calls[0] == ["systemctl", "enable", "--now", SWITCH]
    assert _flows.installed("ovsbr0", GUARD.cookie) == _flows.rules(GUARD, 4, [])
    assert not establish().changed


def test_an_interface_of_a_host_without_baseline_waits_for_the_switch(host: Host) -> None:
    """It may be another program's, and only the switch knows."""
    host.write("sys/class/net/ovsbr0/flags", "0x1003")
    failure = establish().failure
    assert failure is not None and failure.code == "switch_stopped"
    assert host.calls == []
    host.runs(SWITCH)
    failure = establish().failure
    assert failure is not None and failure.code == "bridge_name_taken"


@pytest.mark.parametrize("booted", [False, True])
def test_the_removal_leaves_no_bridge_behind_a_stopped_switch(
    host: Host, tree: Path, booted: bool
) -> None:
    """After a boot without the switch its bridge is in the database only."""
    establish()
    stop_switch(host)
    if booted:
        shutil.rmtree(tree / "sys/class/net/ovsbr0")
    failure = remove().failure
    assert failure is not None and failure.code == "switch_stopped"
    assert host.calls == []
    host.runs(SWITCH)
    assert (remove().failure, host.bridges) == (None, {})


def test_the_port_of_a_parity_run_that_was_killed_keeps_no_bridge(host: Host) -> None:
    """The switch's database keeps it over a restart of the host."""
    establish()
    host.bridges["ovsbr0"]["gsparity"] = 3
    assert (remove().failure, host.bridges) == (None, {})


def test_a_reservation_that_a_loss_of_power_cut_off_keeps_no_folder(host: Host, tree: Path) -> None:
    establish()
    host.write(f"{_ovs_nat.RESERVATIONS[1:]}/.23bd713b.x", "52:54:00:64:00:0a,")
    assert (remove().failure, remaining_files(tree)) == (None, [])


def test_what_ran_before_keeps_running_without_our_settings(host: Host, tree: Path) -> None:
    host.runs(DHCP, SWITCH)
    host.write("proc/sys/net/ipv4/ip_forward", "1\n")
    host.write("etc/dnsmasq.d/site.conf", "port=5353\n")
    neighbours = "proc/sys/net/ipv4/neigh/default/gc_thresh3"
    host.write(neighbours, "2048\n")
    establish()
    assert _host.read(f"/{neighbours}") == "65536"
    host.calls.clear()
    assert remove().failure is None
    assert ["systemctl", "restart", DHCP] in host.calls
    assert host.active == {DHCP, SWITCH}
    assert _host.read("/proc/sys/net/ipv4/ip_forward") == "1"
    assert _host.read(f"/{neighbours}") == "2048"
    assert remaining_files(tree) == ["etc/dnsmasq.d/site.conf"]
    # Again, and killed between the removal of the files and the restart.
    establish()
    for file in (_ovs_nat.DNSMASQ, _ovs_nat.SYSCTL):
        _host.remove(file)
    host.starts = "1000"
    host.calls.clear()
    assert _change.drive(_ovs_nat_removal.SUBJECT, PARAMS, check_mode=True).plan.steps[-2] == (
        _change.Step("restart_service", DHCP, "our settings", "without them")
    )


def test_a_service_becomes_what_it_was_for_each_of_now_and_the_next_boot(host: Host) -> None:
    """rshim as on NVIDIA's documentation page: started by hand, not enabled."""
    rshim = _ovs_nat.RSHIM
    host.write(f"usr/lib/systemd/system/{rshim}", "")
    host.write("sys/class/net/tmfifo_net0/flags", "0x1003")
    host.active |= {rshim, DHCP}
    host.enabled.add(SWITCH)
    assert establish(tmfifo=True).failure is None
    assert host.active >= {rshim, DHCP, SWITCH} and host.enabled >= {rshim, DHCP, SWITCH}
    assert remove(tmfifo=True).failure is None
    assert (host.active, host.enabled) == ({rshim, DHCP}, {SWITCH})
    assert ["systemctl", "disable", rshim] in host.calls


def test_a_service_that_came_with_our_packages_was_not_there(host: Host, tree: Path) -> None:
    """Debian starts and enables dnsmasq as it is installed."""
    _host.write(_host_snapshot.file_of("packages"), json.dumps({"dnsmasq": "installed"}))
    host.runs(DHCP, SWITCH)
    establish()
    assert remove().failure is None
    assert host.active == {SWITCH}


def test_without_a_record_our_host_counts_as_freshly_deployed(host: Host, tree: Path) -> None:
    """The host was converted by an earlier release."""
    establish()
    _host.remove(_host_snapshot.file_of(_ovs_nat.RECORD))
    assert establish().changed is False
    outcome = remove()
    assert outcome.failure is None and host.active == set()
    # It is unknown whether the host forwarded; the next boot has no setting of the product.
    assert "stop_forwarding" not in outcome.done


def test_a_host_that_never_had_a_baseline_keeps_its_services(host: Host, tree: Path) -> None:
    host.runs(DHCP, SWITCH)
    host.bridges["br-site"] = {"eth1": 1}
    assert not remove().changed
    assert host.calls == []


def test_nothing_goes_while_a_slice_is_on_the_bridge(host: Host, tree: Path) -> None:
    establish()
    host.bridges["ovsbr0"] = {"gs0f8fad5bd9cb": 1}
    host.write(f"{_ovs_nat.RESERVATIONS}/0f8f".lstrip("/"), "52:54:00:00:00:01,10.100.0.10\n")
    host.calls.clear()
    failure = remove().failure
    assert failure is not None and failure.code == "network_in_use"
    assert failure.found == "port gs0f8fad5bd9cb, reservation 0f8f"
    assert host.calls == []


def test_another_name_leads_to_no_second_bridge(host: Host, tree: Path) -> None:
    """The guests stay on the first bridge, and the removal would leave it behind."""
    establish()
    before = remaining_files(tree)
    for act in (establish, remove):
        failure = act(bridge="ovsbr1").failure
        assert failure is not None and failure.code == "bridge_renamed"
        assert "ovsbr0" in failure.remedy
    assert list(host.switch.bridges) == ["ovsbr0"]
    assert remaining_files(tree) == before
    assert remove().failure is None
    renamed = PARAMS | {"bridge": "ovsbr1"}
    assert _change.drive(_ovs_nat.SUBJECT, renamed, check_mode=True).failure is None


def test_it_goes_on_where_it_was_killed(host: Host, tree: Path) -> None:
    """The run ends after each step in turn; the next run completes the removal."""
    for stop in range(1, 11):
        assert establish().failure is None
        done = 0

        def apply(params: Any, step: _change.Step, stop: int = stop) -> Any:
            nonlocal done
            done += 1
            if done > stop:
                raise KeyboardInterrupt
            return _ovs_nat_removal.apply(params, step)

        with pytest.raises(KeyboardInterrupt):
            killed = replace(_ovs_nat_removal.SUBJECT, apply=apply)
            _change.drive(killed, PARAMS, check_mode=False)
        assert remove().failure is None
        assert (host.bridges, host.active, remaining_files(tree)) == ({}, set(), []), stop
        assert host.switch.tables == {}, stop


def test_the_cards_link_loses_our_address_only(
    host: Host, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    establish()
    real = _bridge.observe
    card = {"192.168.100.1/30", "192.168.7.7/24"}

    def observe(params: Any) -> _bridge.State:
        interface = _bridge.Interface(up=True, addresses=tuple(sorted(card)))
        state = real(params)
        return replace(state, interfaces={**state.interfaces, _bridge.TMFIFO: interface})

    monkeypatch.setattr(_bridge, "observe", observe)
    act = host._act
    monkeypatch.setattr(
        host, "_act", lambda a: card.discard(a[3]) if a[:2] == ["ip", "address"] else act(a)
    )
    assert remove(tmfifo=True).failure is None
    assert card == {"192.168.7.7/24"}
