"""Verdict of the absence module over its checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _slice_absence
from ansible_collections.gpuaas.slice.plugins.modules import slice_absence as module

pytestmark = pytest.mark.covers("SLICE-7")

SLOT = {
    "slot_id": "slot-3",
    "nvme_device": "/dev/disk/by-id/nvme-eui.5e0000000000a003",
    "gpu_pci_address": "0000:43:00.0",
    "management_mac": "52:54:00:64:00:0d",
    "private_ip": "10.100.0.13",
}
PARAMS: dict[str, Any] = {
    "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d",
    "slots": [SLOT],
    "bridge": "ovsbr0",
    "require_absent": False,
}


def checks(**absent: bool) -> dict[str, Any]:
    return {name: {"absent": value, "known": True, "detail": ""} for name, value in absent.items()}


@pytest.fixture(autouse=True)
def nothing_left(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slice_absence, "look", lambda *_: checks(domain=True, seed=True))


def test_absent_and_clean() -> None:
    facts = module.look(PARAMS)
    assert (facts["absent"], facts["disk_dirty"]) == (True, False)


def test_one_trace_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slice_absence, "look", lambda *_: checks(domain=True, seed=False))
    assert not module.look(PARAMS)["absent"]
    with pytest.raises(Refusal, match=r"not_absent.*seed"):
        module.look({**PARAMS, "require_absent": True})


def test_without_slots_nothing_is_proven() -> None:
    assert not module.look({**PARAMS, "slots": []})["absent"]


def test_the_ledger_says_whether_bytes_were_written() -> None:
    _ledger.mark_dirty("slot-3", fence=1, disk_identity="d")
    assert module.look(PARAMS)["disk_dirty"]


def test_a_bundle_without_its_disk_is_refused() -> None:
    with pytest.raises(Refusal, match="bundle_incomplete"):
        module.look({**PARAMS, "slots": [{**SLOT, "nvme_device": ""}]})
