"""A small Debian in a folder, made by mmdebstrap from the mirror of this machine's apt."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from lab.distro import KEYRINGS, this_distro


def make(suite: str, root: Path, *packages: str, variant: str = "minbase") -> None:
    """Make the release with these packages in the new folder `root`; its services do not run.

    variant: mmdebstrap's. `extract` only unpacks the packages with their dependencies.
    Fails with mmdebstrap's own words where the mirror does not answer.
    """
    here = this_distro()
    # On Ubuntu apt names no mirror of Debian: mmdebstrap then takes its own.
    sources = replace(here, suite=suite).sources if here.id == "debian" else []
    words = [f"--variant={variant}", f"--include={','.join(packages)}"]
    words += ["--dpkgopt=force-unsafe-io", f"--keyring={KEYRINGS / 'debian-archive-keyring.gpg'}"]
    line = ["mmdebstrap", *words, suite, str(root), *sources]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"no Debian {suite} from the mirror: {done.stderr[-2000:]}"
