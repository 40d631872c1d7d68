"""Answer of the holdings module: the holdings, and the boot id under which they were read."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _qos, _slice_holdings
from ansible_collections.gpuaas.slice.plugins.modules import slice_holdings as module

pytestmark = pytest.mark.covers("SLICE-8")

SLOT = {
    "slot_id": "slot-3",
    "nvme_device": "/dev/disk/by-id/nvme-eui.5e0000000000a003",
    "gpu_pci_address": "0000:43:00.0",
}


def test_what_was_found_and_under_which_boot(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = tree / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("b1\n")
    monkeypatch.setattr(_slice_holdings, "look", lambda *given: {"of": given})
    limit = {"rate_kbps": 1000, "burst_kb": 100}
    facts = module.look({"slots": [SLOT], "bridge": "br7", "mgmt_qos": limit})
    assert facts["holdings"] == {"of": ([SLOT], "br7", _qos.Limit(1000, 100))}
    assert facts["identity"]["boot_id"] == "b1"
    assert facts["collected_at"].endswith("+00:00")


def test_a_bundle_without_its_disk_is_refused(tree: Path) -> None:
    with pytest.raises(Refusal, match="bundle_incomplete"):
        module.look({"slots": [{**SLOT, "nvme_device": ""}], "bridge": "ovsbr0", "mgmt_qos": None})
