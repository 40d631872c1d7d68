"""What a host runs once at its first boot: the firmware preflight, told what its profile asks.

The script is the generated one of MAAS commissioning, so there is no second implementation. It goes
out with the answer to an enrolment: only a machine whose token was good gets it, and the userdata
stays small enough for every way in which MAAS takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconciler.shipped import PROJECT

SCRIPT = PROJECT / "scripts/maas/commissioning/50-gpuaas-slice-firmware-preflight.sh"


def document(profile: Mapping[str, Any]) -> dict[str, Any]:
    """script: its text. environment: the profile as the script's settings; it reads only."""
    return {"script": SCRIPT.read_text(encoding="utf-8"), "environment": environment(profile)}


def environment(profile: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the script for a hardware profile; one that says nothing is left out."""
    gpu = profile["gpu"]
    found = {
        "GPUAAS_SLICE_APPLY_BIOS": "0",
        "GPUAAS_SLICE_GPU_IDS": ",".join(gpu["ids"]),
        "GPUAAS_SLICE_GPU_EXPECTED": str(gpu.get("expected") or ""),
        "GPUAAS_SLICE_FABRIC_IDS": ",".join(profile["fabric"]["pf_ids"]),
        "GPUAAS_SLICE_NVME_EXCLUDE": ",".join(profile["nvme"].get("exclude_models") or []),
        "GPUAAS_SLICE_NOT_APPLICABLE": ",".join(profile.get("not_applicable") or []),
    }
    return {name: value for name, value in found.items() if value}
