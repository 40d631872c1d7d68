"""Time limit of a run by hand: as many wipes as it has disks, and a slow boot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.runs import byhand
from reconciler.runs.launch import Site
from reconciler.runs.paths import RunPaths, run_directory, write_json
from reconciler.runs.spec import LONGEST_S, RunSpec
from tests.unit.reconciler.cli.conftest import Gpuaas

PROFILES = Path(__file__).resolve().parents[4] / "profiles"
PROFILE = "xe9680l-h200"
DISKS = [f"/dev/disk/by-id/nvme-eui.5e0000000000a0{index:02x}" for index in range(8)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Replaces processes: the specification of each run, which ends at once."""
    specs: list[RunSpec] = []

    def launch(site: Site, spec: RunSpec) -> Path:
        specs.append(spec)
        paths = RunPaths(run_directory(site.state_dir, spec.run_id))
        paths.root.mkdir(parents=True)
        write_json(paths.outcome, _outcome(spec))
        return paths.root

    monkeypatch.setattr(byhand, "launch", launch)
    return specs


@pytest.fixture
def approved(tmp_path: Path) -> Path:
    """An approval file, so that the command asks no question."""
    file = tmp_path / "approved.json"
    file.write_text(json.dumps({path: {"serial": "LABNVME0"} for path in DISKS}))
    return file


@pytest.mark.covers("HOST-9")
def test_a_transition_may_take_as_long_as_all_of_its_wipes(
    gpuaas: Gpuaas, launched: list[RunSpec], approved: Path
) -> None:
    acting = ["--apply", "--yes", "--approved", str(approved), "--profile", PROFILE]
    rows = []
    for disks in (1, 2, 4, 8):
        gpuaas("host", "transition", "--devices", ",".join(DISKS[:disks]), *acting)
        plan, act = launched[-2:]
        assert (plan.variables["slice_apply"], plan.deadline_s) == (False, byhand.DEADLINE_S)
        wipe = act.variables["slice_profile"]["deadlines"]["wipe"]
        assert LONGEST_S > act.deadline_s > disks * wipe
        rows.append(act.deadline_s)
    single, two, four, eight = rows
    assert (single > wipe, two - single, four - two) == (True, wipe, 2 * wipe)
    # Eight disks: all that a machine has.
    assert eight - four == 4 * wipe


@pytest.mark.covers("HOST-4", "HOST-10")
@pytest.mark.parametrize("words", [("bootstrap",), ("parity", "--remediate")])
def test_a_reboot_by_hand_may_be_a_slow_one(
    gpuaas: Gpuaas,
    launched: list[RunSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    """Ansible waits so long for the new boot, and so long again for an answer of it."""
    profile = yaml.safe_load((PROFILES / f"{PROFILE}.yml").read_text())
    reboot = profile["deadlines"]["reboot"] = byhand.DEADLINE_S
    (tmp_path / "slow.yml").write_text(yaml.safe_dump({**profile, "name": "slow"}))
    monkeypatch.setenv("GPUAAS_PROFILES_DIR", str(tmp_path))
    gpuaas("host", *words, "--profile", "slow", "--allow-reboot")
    gpuaas("host", *words, "--profile", "slow")
    rebooting, staying = (spec.deadline_s for spec in launched)
    assert rebooting > 2 * reboot
    assert staying == byhand.DEADLINE_S


def _outcome(spec: RunSpec) -> dict[str, Any]:
    """A plan and its act find no disks; the others end without a result."""
    fine = {"ok": True, "evidence": {"devices": [], "manifest": ""}}
    return {
        "run_id": spec.run_id,
        "status": "successful",
        "rc": 0,
        "result": fine if spec.playbook == "transition_storage" else None,
        "problem": "",
        "started_at": "",
        "finished_at": "",
        "unreachable": False,
    }
