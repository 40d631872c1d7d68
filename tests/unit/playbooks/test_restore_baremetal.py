"""There and back: the generated bootstrap, then the real playbook, on a copy of this machine.

See tests/data/deployed_machine: writes, interfaces and Ansible are real, programs that would act on
the machine are stand-ins that keep state. The first run may not reboot; then a boot is pretended.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml

from scripts import standalone
from tests.deployed_machine import NEEDS_ROOT, ROOT, play
from tests.unit.playbooks.played import result

pytestmark = [pytest.mark.covers("HOST-15", "HOST-4"), NEEDS_ROOT]

BOOTSTRAP = "scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh"
STORY = Path(__file__).with_name("restore_baremetal.sh").read_text()


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The bootstrap as generated, and its profile: GPU services, and no fabric to be found here."""
    lab = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    lab["fabric"]["pf_ids"] = []
    lab["gpu_services"] = ["gpu.service", "idle.service"]
    profile = tmp_path / "lab.yml"
    profile.write_text(yaml.safe_dump(lab))
    (entry,) = (entry for entry in standalone.SCRIPTS if entry.path == BOOTSTRAP)
    file = tmp_path / "bootstrap.sh"
    data = {**entry.data, "profiles/lab.yml": str(profile)}
    file.write_text(standalone.build(dataclasses.replace(entry, data=data)))
    return str(file), str(profile)


def _changed(text: str) -> str:
    match = re.search(r"changed=(\d+)", text)
    assert match, text
    return match[1]


@pytest.mark.long
def test_a_slice_host_becomes_what_it_was(files: tuple[str, str], tmp_path: Path) -> None:
    environment = {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "GPUAAS_SLICE_PROFILE": "lab",
        "ANSIBLE_COLLECTIONS_PATH": f"{ROOT}/build/collections",
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SHOW_CUSTOM_STATS": "1",
        "LC_ALL": "C.UTF-8",
    }
    done = play(STORY, tmp_path / "scratch", *files, environment=environment, limit_s=360)
    assert done.stderr == ""
    quiet, dirty, forecast, given, early, real, again, difference, forth, between = (
        done.stdout.split("---\n")
    )
    assert "gpu.service" not in quiet and "idle.service" not in quiet
    assert quiet.count("/dev/null\n") == 2

    refused = result(dirty)
    assert (refused["ok"], refused["error"]["code"]) == (False, "slices_present")
    assert "changed=0" in dirty and "waits for the wipe of eui.1" in refused["error"]["found"]

    # The forecast changes nothing, which `diff` would show, and reports the pending changes.
    assert forecast.rstrip().endswith("}") and result(forecast)["evidence"]["remnants"] > 10
    # GPU services and compiled code come after the boot; it does not know of the lease, nor of the
    # tuning yet.
    assert _changed(forecast) == _changed(early)

    # A forecast gives up no lease, but continues as after giving it up.
    assert given.rstrip().endswith("}") and result(given)["ok"]
    assert result(given)["evidence"]["written_off"] == []

    # Everything that needs no boot is done; the GPU services wait for the boot.
    first = result(early)
    assert (first["ok"], first["error"]["code"]) == (False, "reboot_required")
    assert first["evidence"]["written_off"] == ["slot-0"]
    second = result(real)
    assert (second["ok"], second["evidence"]["remnants"]) == (True, 0)
    assert second["evidence"]["kept"]["ledger"] == ["slot-0"]
    assert second["evidence"]["kept"]["disks_gone"] == ["eui.1"]
    assert all(row["ok"] for row in second["evidence"]["compared"])
    assert result(again)["ok"] and "changed=0" in again
    # Way back and second conversion each restore the earlier state of the machine.
    assert (difference, forth) == ("", "")
    # The comparison can see differences: as a slice host the machine had many.
    assert int(between) > 20
