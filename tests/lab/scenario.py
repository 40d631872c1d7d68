"""Molecule scenarios on the lab host of a stage, played as by `molecule test -s NAME`."""

from __future__ import annotations

import subprocess
import sys
import time

from lab.demo.stage import Stage
from lab.paths import REPOSITORY
from scripts import scenarios

# Longer than the slowest scenario takes under emulation on an idle machine: a bootstrap, three
# times.
_LIMIT_S = 1500


def play(stage: Stage, name: str) -> None:
    """Play converge, idempotence, drift, repair, verify, restore; show a failure's output."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "molecule", "test", "-s", name],
        cwd=REPOSITORY,
        env={
            **stage.ansible_environment(),
            "GPUAAS_LAB_DIR": str(stage.folder / "lab"),
            "MOLECULE_COMMAND_BORDERS": "false",
        },
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    # The failed task stands far above the end of the output, which reports the clean-up.
    errors = [line[:3000] for line in done.stdout.splitlines() if "fatal: " in line]
    assert done.returncode == 0, "\n".join([*errors, done.stdout[-3000:], done.stderr[-3000:]])
    scenarios.SCENARIOS.record(name, str(round(time.monotonic() - began)))
