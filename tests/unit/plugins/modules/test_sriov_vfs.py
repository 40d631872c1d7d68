"""Fabric functions that are kept over reboots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _sriov_vfs,
    _virtual_functions,
)

pytestmark = pytest.mark.covers("HOST-7")

UNIT = "/etc/systemd/system/gpuaas-slice-fabric.service"


@pytest.fixture(autouse=True)
def settled_cards(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards that are already in the requested state; test_sriov covers the cards."""
    state = _virtual_functions.State((), ())
    monkeypatch.setattr(_virtual_functions, "observe", lambda _params: state)
    done: set[str] = set()

    def run(argv: list[str], **_: Any) -> _command.Result:
        done.add(argv[1])
        active = "active" if "restart" in done else "inactive"
        enabled = "enabled" if "enable" in done else ""
        return _command.Result(0, f"ActiveState={active}\nUnitFileState={enabled}\n", "")

    monkeypatch.setattr(_command, "run", run)


def drive(count: int) -> _change.Outcome:
    params = {"pfs": [], "pf_ids": ["8086:10c9"], "link": "ethernet", "count": count, "macs": {}}
    return _change.drive(_sriov_vfs.SUBJECT, params, check_mode=False)


def test_the_service_makes_them_before_they_are_bound() -> None:
    assert drive(4).done == ["install_service", "start_service"]
    assert "Before=gpuaas-slice-vfio.service" in (_host.read(UNIT) or "")
    assert json.loads(_host.read(_virtual_functions.SETTINGS) or "")["count"] == 4
    assert not drive(4).changed


def test_no_functions_no_service() -> None:
    drive(4)
    assert drive(0).done == ["remove_service"]
    assert not drive(0).changed
