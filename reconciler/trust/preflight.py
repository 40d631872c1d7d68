"""What a host runs once at its first boot: the firmware preflight, told what its profile asks.

Where the profile names RACADM's repository it is installed, since the settings are read through it.

The script is the generated one of MAAS commissioning, so there is no second implementation. It goes
out with the answer to an enrolment: only a machine whose token was good gets it, and the userdata
stays small enough for every way in which MAAS takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconciler.shipped import SCRIPTS

SCRIPT = SCRIPTS / "maas/commissioning/50-gpuaas-slice-firmware-preflight.sh"


def document(profile: Mapping[str, Any]) -> dict[str, Any]:
    """script: its text. environment: the profile as the script's settings; the firmware is
    only read."""
    return {"script": SCRIPT.read_text(encoding="utf-8"), "environment": environment(profile)}


def environment(profile: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the script for a hardware profile, which is only to read.

    All are there, if need be empty: the script has some by itself, of another profile perhaps.
    """
    found = {"GPUAAS_SLICE_APPLY_BIOS": "0"}
    for part in parts(profile):
        found |= part
    return found


def parts(profile: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the profile says as settings, empty where it says nothing.

    Each part is to be taken as a whole or not at all: some settings mean nothing by themselves.
    """
    gpu = profile["gpu"]
    return [
        {
            "GPUAAS_SLICE_GPU_IDS": ",".join(gpu["ids"]),
            "GPUAAS_SLICE_GPU_EXPECTED": str(gpu.get("expected") or ""),
        },
        _fabric(profile["fabric"]),
        {"GPUAAS_SLICE_NVME_EXCLUDE": ",".join(profile["nvme"].get("exclude_models") or [])},
        {"GPUAAS_SLICE_NOT_APPLICABLE": ",".join(profile.get("not_applicable") or [])},
        _racadm(profile.get("racadm") or {}),
    ]


def _fabric(told: Mapping[str, Any]) -> dict[str, str]:
    """Ids of fabric cards go only with their link: the script refuses them alone, and would not
    look at anything."""
    link = told.get("link") or ""
    return {
        "GPUAAS_SLICE_FABRIC_IDS": ",".join(told["pf_ids"]) if link else "",
        "GPUAAS_SLICE_FABRIC_LINK": link,
    }


def _racadm(told: Mapping[str, Any]) -> dict[str, str]:
    """Where the script has RACADM from."""
    return {
        "GPUAAS_SLICE_RACADM_REPOSITORY": told.get("repository", ""),
        "GPUAAS_SLICE_RACADM_SUITE": told.get("suite", ""),
        "GPUAAS_SLICE_RACADM_COMPONENTS": ",".join(told.get("components") or []),
        "GPUAAS_SLICE_RACADM_KEY_URL": told.get("key_url", ""),
        "GPUAAS_SLICE_RACADM_FINGERPRINT": told.get("fingerprint", ""),
        "GPUAAS_SLICE_RACADM_PACKAGES": ",".join(told.get("packages") or []),
    }
