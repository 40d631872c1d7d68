"""Scope of a comparison on a host with running tenants, and its node."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _check,
    _slice_parity,
    _upkeep,
)
from ansible_collections.gpuaas.slice.plugins.modules import slice_upkeep

from tests.unit.plugins.module_utils.core.test_change import Module

PROFILE = yaml.safe_load((Path(__file__).parents[4] / "profiles/xe9680l-h200.yml").read_text())


@pytest.mark.covers("SLICE-8")
def test_a_broken_part_of_the_baseline_is_found_between_parities(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [
        dataclasses.replace(check, examine=lambda _facts: _check.failed("broken"))
        for check in _slice_parity.CHECKS
    ]
    monkeypatch.setattr(_slice_parity, "CHECKS", broken)
    monkeypatch.setattr(_upkeep, "_is_of_target", lambda _row, _facts: False)
    checks = {row["check"] for row in _upkeep.look({"profile": PROFILE, "slots": []})}
    assert checks == {
        "gpu_services_quiesced", "ovs_bridge", "dnsmasq", "dnsmasq_config", "nat", "ip_forwarding",
        "guest_egress", "guest_tcp", "network_service", "fabric_isolation", "libvirt_directory",
        "image_cache",
    }  # fmt: skip


@pytest.mark.covers("P6")
@pytest.mark.parametrize("named", ["node-a", "node-b"])
def test_the_run_of_another_node_repairs_nothing(
    tree: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    _host.write("/etc/gpuaas/enrolment.env", "GPUAAS_NODE_ID=node-b\n")
    monkeypatch.setenv(_change.RUN_NODE, named)
    repaired: list[Any] = []

    def keep(params: Any, *, check_mode: bool) -> tuple[list[str], list[dict[str, str]]]:
        repaired.append((params, check_mode))
        return [], []

    monkeypatch.setattr(_upkeep, "keep", keep)
    module = Module()
    monkeypatch.setattr(slice_upkeep, "AnsibleModule", lambda **_words: module)
    slice_upkeep.main()
    how, document = module.left
    if named == "node-a":
        assert (how, document["error"]["code"], repaired) == ("fail", "wrong_node", [])
    else:
        assert (how, document["answered_by"], len(repaired)) == ("exit", "node-b", 1)
