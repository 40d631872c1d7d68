"""Repairs of upkeep with scripted parts: which are done, and which are said."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _free_space,
    _host,
    _host_mode,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _upkeep

pytestmark = pytest.mark.covers("SLICE-8")

NETWORK = {"bridge": "ovsbr0", "address": "10.100.0.1/24", "subnet": "10.100.0.0/24"}
PARAMS = {"profile": {"network": NETWORK, "vm": {}}, "slots": []}
ROW = {"check": "x", "status": "FAIL", "detail": "d", "remediation": "r", "playbook": ""}


def keep(monkeypatch: pytest.MonkeyPatch, *roles: str) -> tuple[list[str], set[str]]:
    """Repairs of a host whose checks of these roles fail, and the codes of what is left."""
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    monkeypatch.setattr(_upkeep, "look", lambda _p: [{**ROW, "role": role} for role in roles])
    monkeypatch.setattr(_free_space, "full", list)
    done, left = _upkeep.keep(PARAMS, check_mode=False)
    return done, {row["code"] for row in left} - {"x"}


@pytest.mark.parametrize("text", ["null", "[1]", "5"])
def test_a_record_that_is_no_object_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    _host.write(_baseline_files.SETTINGS, text)
    assert keep(monkeypatch, "slice_network") == ([], {"network_settings_differ"})
