"""A slice host over time: drift is repaired, a second run changes nothing, a reboot is survived.

Plays on the host that test_main_path.py left: two slots, bound and available.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from lab.demo import slice_steps
from lab.demo.stage import NODE, Stage
from lab.paths import REPOSITORY
from tests.lab import scenario
from tests.lab.conftest import Chapter
from tests.lab.proof import prove_again

REBOOT = ["-m", "ansible.builtin.reboot", "-a", "reboot_timeout=900"]


@pytest.mark.covers("HOST-4", "HOST-6")
def test_a_second_bootstrap_changes_nothing_and_drift_is_repaired(
    stage: Stage, story: Chapter
) -> None:
    """The Molecule scenario: converge, idempotence, drift with repair by the same run, verify."""
    story.needs("recover")
    scenario.play(stage, "slice_host")


@pytest.mark.covers("HOST-4", "HOST-6", "HOST-7", "HOST-8", "I16")
def test_a_reboot_closes_the_gate_until_the_host_is_proven_again(
    stage: Stage, story: Chapter
) -> None:
    """Boot services bring the slice host back; nothing is sold before parity (I16)."""
    story.needs("recover")
    _reboot(stage)
    allocation = slice_steps.launch(stage)
    ended = slice_steps.wait_for(stage, allocation["id"], {"active", "failed"})
    assert ended["state"] == "failed"
    assert ended["error"]["code"] == "boot_changed"
    # Nothing was written, so there is nothing to clean; but nothing may be sold either.
    assert slice_steps.slot_of(stage, ended)["status"] == "disabled"
    prove_again(stage)


def _reboot(stage: Stage) -> None:
    words = [
        sys.executable,
        "-m",
        "ansible",
        "adhoc",
        "all",
        "-i",
        str(REPOSITORY / "inventory/lab"),
    ]
    done = subprocess.run(
        [*words, *REBOOT],
        env=stage.ansible_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, f"{NODE}: {done.stdout[-2000:]}{done.stderr[-1000:]}"
