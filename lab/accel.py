"""Choice between KVM and emulation for the lab host.

The choice follows the loaded kernel modules, never the presence of /dev/kvm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lab.command import LabError

VARIABLE = "GPUAAS_LAB_ACCEL"
CHOICES = ("kvm", "tcg")


def choose(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Return `kvm` if its vendor module is loaded, usable and allows nesting, else `tcg`.

    The file /dev/kvm proves nothing: some machines have it and cannot run a stock kernel.
    """
    wanted = environment.get(VARIABLE, "")
    if wanted:
        if wanted not in CHOICES:
            raise LabError(f"{VARIABLE} is one of {', '.join(CHOICES)}; it is {wanted!r}")
        return wanted
    for vendor in ("kvm_intel", "kvm_amd"):
        nested = root / "sys/module" / vendor / "parameters/nested"
        # Slice VMs are nested guests. Without nesting only emulation can run them.
        if nested.is_file() and nested.read_text().strip() in ("Y", "1"):
            device = root / "dev/kvm"
            return "kvm" if os.access(device, os.R_OK | os.W_OK) else "tcg"
    return "tcg"
