"""Firmware preflight of a host: the script that runs once at first boot, and its settings.

It is the script of MAAS commissioning, so there is no second implementation. It is part of the
answer to an enrolment: only a machine with a valid token gets it, and the userdata stays within the
size limits of MAAS. Where the profile names a repository of RACADM, the script installs RACADM,
because it reads the firmware settings through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconciler.shipped import SCRIPTS

SCRIPT = SCRIPTS / "maas/commissioning/50-gpuaas-slice-firmware-preflight.sh"


def document(profile: Mapping[str, Any]) -> dict[str, Any]:
    """script: its text. environment: the profile as settings of the script, which only reads the
    firmware.
    """
    return {"script": SCRIPT.read_text(encoding="utf-8"), "environment": environment(profile)}


def environment(profile: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the script for a hardware profile, without permission to change the firmware.

    Every setting is present, empty if the profile has none, because the script has defaults that
    may belong to another profile.
    """
    variables = {"GPUAAS_SLICE_APPLY_BIOS": "0"}
    for part in parts(profile):
        variables |= part
    return variables


def parts(profile: Mapping[str, Any]) -> list[dict[str, str]]:
    """Settings from the profile, empty where the profile has no value.

    Use each part as a whole or not at all: its settings depend on each other.
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


def _fabric(fabric: Mapping[str, Any]) -> dict[str, str]:
    """Ids of fabric cards need a link: with ids alone the script ends without any check."""
    link = fabric.get("link") or ""
    return {
        "GPUAAS_SLICE_FABRIC_IDS": ",".join(fabric["pf_ids"]) if link else "",
        "GPUAAS_SLICE_FABRIC_LINK": link,
    }


def _racadm(racadm: Mapping[str, Any]) -> dict[str, str]:
    """Package repository of RACADM."""
    return {
        "GPUAAS_SLICE_RACADM_REPOSITORY": racadm.get("repository", ""),
        "GPUAAS_SLICE_RACADM_SUITE": racadm.get("suite", ""),
        "GPUAAS_SLICE_RACADM_COMPONENTS": ",".join(racadm.get("components") or []),
        "GPUAAS_SLICE_RACADM_KEY_URL": racadm.get("key_url", ""),
        "GPUAAS_SLICE_RACADM_FINGERPRINT": racadm.get("fingerprint", ""),
        "GPUAAS_SLICE_RACADM_PACKAGES": ",".join(racadm.get("packages") or []),
    }
