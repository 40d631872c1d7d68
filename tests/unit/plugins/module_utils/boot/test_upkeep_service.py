"""The service that keeps a slice host between two runs of drift detection; systemd is scripted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _gpu_services,
    _slice_mode,
    _upkeep_service,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_service,
    _boot_units,
    _change,
    _command,
    _host,
    _repairs,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files, _dhcp

pytestmark = pytest.mark.covers("SLICE-8", "HOST-10")

NETWORK = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
GPU = "dcgm.service"
MODE = {"profile": "lab", "gpu_services": [GPU]}
UNIT = _boot_units.UPKEEP


class Systemd:
    """Units by name with their states, and what a person or bootstrap does to them."""

    def __init__(self) -> None:
        self.active = dict.fromkeys((_dhcp.SERVICE, *_GUARDIANS), "active")
        self.files = dict.fromkeys((_dhcp.SERVICE, *_GUARDIANS), "enabled") | {GPU: "masked"}
        self.hangs: set[str] = set()
        self.restarted: list[str] = []

    def run(self, argv: list[str], **_options: Any) -> _command.Result:
        if argv[0] in self.hangs or argv[-1] in self.hangs:
            raise Refusal("command_timeout", expected="an end", found="none", remedy="look")
        if argv[0] == "dnsmasq":
            return _command.Result(0, "", "")
        assert argv[0] == "systemctl", "neither Open vSwitch nor libvirt is asked"
        verb, name = (word for word in (argv[1], argv[-1]))
        if verb == "show":
            blocks = (self._shown(each) for each in argv[argv.index("--") + 1 :])
            return _command.Result(0, "\n".join(blocks), "")
        if argv[1:3] == ["--no-block", "start"] or verb == "restart":
            self.active[name] = "active"
            self.restarted.append(name)
        elif verb == "stop" or argv[1:3] == ["disable", "--now"]:
            self.active[name] = "inactive"
        if verb in ("enable", "disable", "mask"):
            self.files[name] = {"mask": "masked"}.get(verb, f"{verb}d")
        return _command.Result(0, "", "")

    def _shown(self, name: str) -> str:
        active, file = self.active.get(name, "inactive"), self.files.get(name, "")
        return f"ActiveState={active}\nUnitFileState={file}\nActiveEnterTimestamp=@9999999999\n"


_GUARDIANS = [unit.service for unit in _boot_units.GUARDIANS]


@pytest.fixture
def systemd(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    """A slice host after bootstrap."""
    machine = Systemd()
    monkeypatch.setattr(_command, "run", machine.run)
    _host.path(_dhcp.FOLDER).mkdir(parents=True)
    _host.path(_dhcp.RESERVATIONS).mkdir(parents=True)
    _host.write(_dhcp.FILE, _baseline_files.dnsmasq(NETWORK))
    _host.write(_baseline_files.SETTINGS, json.dumps(NETWORK))
    for unit in _boot_units.GUARDIANS:
        _host.write(unit.path, "[Unit]\n")
    _host.write(_boot_units.FABRIC.settings_path, "{}")
    services = {"services": [GPU], "state": "quiesced"}
    assert _change.drive(_gpu_services.SUBJECT, services, check_mode=False).failure is None
    assert mode(**MODE).failure is None
    machine.restarted.clear()
    return machine


def mode(**params: Any) -> _change.Outcome:
    return _change.drive_parts(_slice_mode.parts(params), params, check_mode=False)


class Over(BaseException):
    """The end of the service, which has none by itself."""


def rounds(*events: Callable[[], object]) -> None:
    """The service from its start; each event happens after one more round."""
    left = list(events)

    def sleep(seconds: float) -> None:
        assert seconds * 2 < 60, "a lost part is back within a minute"
        if not left:
            raise Over
        left.pop(0)()

    with pytest.raises(Over):
        _upkeep_service.boot(UNIT.settings_path, sleep=sleep)


def test_a_sound_host_is_left_alone(systemd: Systemd) -> None:
    rounds(lambda: None)
    assert (systemd.restarted, _repairs.read()) == ([], [])


def test_what_is_lost_is_back_after_the_next_round_and_recorded(systemd: Systemd) -> None:
    def lose() -> None:
        _host.write(_dhcp.FILE, "dhcp-range=10.0.0.2,10.0.0.9\n")
        systemd.active[GPU] = "active"
        systemd.files[GPU] = "enabled"
        systemd.active["gpuaas-slice-network-baseline.service"] = "inactive"

    rounds(lose)
    assert _host.read(_dhcp.FILE) == _baseline_files.dnsmasq(NETWORK).strip()
    assert (systemd.active[GPU], systemd.files[GPU]) == ("inactive", "masked")
    assert systemd.restarted == [_dhcp.SERVICE, "gpuaas-slice-network-baseline.service"]
    assert [row["step"].split()[0] for row in _repairs.read()] == [
        "write_configuration", "restart_dnsmasq", "start_service", "disable_service",
        "stop_service", "mask_service",
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_dnsmasq_itself_is_started(systemd: Systemd, state: str) -> None:
    systemd.active[_dhcp.SERVICE] = state
    rounds()
    assert systemd.restarted == [_dhcp.SERVICE]


def test_guardians_that_start_or_are_being_removed_are_left(systemd: Systemd) -> None:
    systemd.active["gpuaas-slice-network-baseline.service"] = "activating"
    systemd.active["gpuaas-slice-fabric.service"] = "inactive"
    systemd.files["gpuaas-slice-fabric.service"] = "disabled"
    rounds()
    assert systemd.restarted == []
    # A run of upkeep, beside which nothing is removed, starts it all the same.
    (unit,) = _boot_service.stopped_guardians(enabled=False)
    assert unit is _boot_units.FABRIC


@pytest.mark.parametrize("hung", [_dhcp.SERVICE, "dnsmasq", GPU])
def test_a_part_that_hangs_stops_no_other(
    systemd: Systemd, capsys: pytest.CaptureFixture[str], hung: str
) -> None:
    def lose() -> None:
        systemd.hangs.add(hung)
        _host.write(_dhcp.FILE, "\n")
        systemd.active[GPU] = systemd.active["gpuaas-slice-telemetry.service"] = "active"
        systemd.active["gpuaas-slice-telemetry.service"] = "inactive"

    rounds(lose, lambda: None)
    assert systemd.active["gpuaas-slice-telemetry.service"] == "active"
    assert hung == GPU or systemd.active[GPU] == "inactive"
    assert hung != GPU or _host.read(_dhcp.FILE)
    # The same problem is logged once.
    assert capsys.readouterr().out.count("cannot restore the baseline: command_timeout") == 1


def test_outside_slice_mode_nothing_is_repaired(systemd: Systemd) -> None:
    """On the way back the marker goes first."""
    _host.remove(_boot_service.SLICE_MODE)
    _host.write(_dhcp.FILE, "theirs\n")
    systemd.active[GPU] = "active"
    systemd.active["gpuaas-slice-fabric.service"] = "inactive"
    rounds()
    assert (_host.read(_dhcp.FILE), systemd.restarted) == ("theirs", [])


def test_the_service_comes_and_goes_with_slice_mode(systemd: Systemd, tree: Path) -> None:
    assert _boot_files.edited(UNIT) == []
    assert not mode(**MODE).changed
    assert mode(**{**MODE, "gpu_services": []}).done == ["install_service"]
    assert mode(state="absent").done == ["remove_file", "remove_service"]
    assert not any(tree.rglob("gpuaas-slice-upkeep*")) and not _boot_service.slice_mode()


def test_a_systemd_that_hangs_keeps_no_host_in_slice_mode(systemd: Systemd) -> None:
    systemd.hangs.add("systemctl")
    outcome = mode(state="absent")
    assert (outcome.failed_part, _boot_service.slice_mode()) == ("keep_host", False)
