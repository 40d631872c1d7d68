"""Shell stories on a private deployed machine: a copy of this machine, with stand-ins."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MACHINE = ROOT / "tests" / "data" / "deployed_machine"
# Processes too: a virtual machine that runs here does not belong to the deployed machine.
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def play(
    story: str, scratch: Path, *words: str, environment: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run the shell story with `words` as its arguments; `scratch` holds its changes."""
    scratch.mkdir()
    inside = [str(MACHINE / "enter.sh"), str(scratch), str(MACHINE / "program")]
    done = subprocess.run(
        [*ALONE, "--net", *inside, "sh", "-c", story, "sh", *words],
        env=dict(environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    if "mount:" in done.stderr:
        pytest.skip(f"no overlay mounts here: {done.stderr.strip()}")
    return done
