"""Repairs of upkeep with scripted parts: done repairs and reported differences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _boot_units,
    _command,
    _free_space,
    _host,
    _host_mode,
    _repairs,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _virtual_functions
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _upkeep

pytestmark = pytest.mark.covers("SLICE-8")

NETWORK = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
PARAMS = {"profile": {"network": NETWORK, "vm": {}}, "slots": []}
RECORDED = json.dumps(_baseline_files.settings(NETWORK))
ROW = {"check": "x", "status": "FAIL", "detail": "d", "remediation": "r", "playbook": ""}


def keep(
    monkeypatch: pytest.MonkeyPatch, *roles: str, check_mode: bool = False
) -> tuple[list[str], set[str]]:
    """Repairs of a host whose checks of these roles fail, and codes of remaining differences."""
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    monkeypatch.setattr(_upkeep, "look", lambda _p: [{**ROW, "role": role} for role in roles])
    monkeypatch.setattr(_free_space, "full", list)
    done, left = _upkeep.keep(PARAMS, check_mode=check_mode)
    return done, {row["code"] for row in left} - {"x"}


@pytest.mark.parametrize("text", ["null", "[1]", "5"])
def test_a_record_that_is_no_object_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    _host.write(_baseline_files.SETTINGS, text)
    assert keep(monkeypatch, "slice_network") == ([], {"network_settings_differ"})


class Systemd:
    """Services that are all stopped; those of `broken` do not start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *broken: str) -> None:
        self.started: list[str] = []
        self.broken = broken
        monkeypatch.setattr(_command, "run", self.run)

    def run(self, argv: list[str], **_options: Any) -> _command.Result:
        name = argv[-1]
        if argv[1] == "show":
            return _command.Result(0, "ActiveState=failed\nUnitFileState=enabled\n", "")
        assert argv[:2] == ["systemctl", "restart"]
        if name in self.broken:
            raise Refusal("command_failed", expected="a", found="Job failed", remedy="c")
        self.started.append(name)
        return _command.Result(0, "", "")


def install(*units: _boot_service.Unit) -> list[str]:
    for unit in units:
        _host.write(unit.path, "x")
        _host.write(unit.settings_path, RECORDED)
    return [unit.service for unit in units]


def test_a_guardian_that_does_not_start_keeps_no_other(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = install(_boot_units.NETWORK, _boot_units.FABRIC, _boot_units.TELEMETRY)
    systemd = Systemd(monkeypatch, names[0])
    done, left = keep(monkeypatch)
    assert systemd.started == names[1:] and left == {"command_failed"}
    assert done == [f"start_service {name}" for name in names[1:]]


@pytest.mark.parametrize("text", [None, "null"])
def test_a_guardian_without_settings_is_named_and_not_started(
    tree: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    (name, *_others) = install(_boot_units.NETWORK, _boot_units.FABRIC)
    _host.remove(_boot_units.FABRIC.settings_path)
    if text is not None:
        _host.write(_boot_units.FABRIC.settings_path, text)
    systemd = Systemd(monkeypatch)
    foretold = keep(monkeypatch, check_mode=True)
    assert foretold == ([], {"guardian_stopped", "settings_unreadable"})
    assert systemd.started == []
    done, left = keep(monkeypatch)
    assert (done, left) == ([f"start_service {name}"], {"settings_unreadable"})
    assert systemd.started == [name]


def test_what_was_repaired_is_said_also_if_the_run_ends(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's time is over in the second repair."""
    names = install(_boot_units.NETWORK, _boot_units.FABRIC)
    systemd = Systemd(monkeypatch)

    def run(argv: list[str], **options: Any) -> _command.Result:
        if argv == ["systemctl", "restart", names[1]]:
            raise KeyboardInterrupt
        return systemd.run(argv, **options)

    monkeypatch.setattr(_command, "run", run)
    with pytest.raises(KeyboardInterrupt):
        keep(monkeypatch)
    assert [row["step"] for row in _repairs.read()] == [f"start_service {names[0]}"]


def test_the_guards_of_a_card_are_said_also_if_the_next_card_fails(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restoring(_settings: object) -> Iterator[str]:
        yield "a guard"
        raise Refusal("command_failed", expected="a", found="no such device", remedy="c")

    _host.write(_baseline_files.SETTINGS, RECORDED)
    monkeypatch.setattr(_virtual_functions, "recorded", dict)
    monkeypatch.setattr(_virtual_functions, "restore_guards", restoring)
    assert keep(monkeypatch, "fabric_functions") == (["a guard"], {"command_failed"})
