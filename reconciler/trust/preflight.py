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
    gpu, fabric, racadm = profile["gpu"], profile["fabric"], profile.get("racadm") or {}
    link = fabric.get("link") or ""
    settings = [
        {"GPU_IDS": ",".join(gpu["ids"]), "GPU_EXPECTED": str(gpu.get("expected") or "")},
        # Ids of fabric cards need a link: with ids alone the script ends without any check.
        {"FABRIC_IDS": ",".join(fabric["pf_ids"]) if link else "", "FABRIC_LINK": link},
        {"NVME_EXCLUDE": ",".join(profile["nvme"].get("exclude_models") or [])},
        {"NOT_APPLICABLE": ",".join(profile.get("not_applicable") or [])},
        {
            "RACADM_REPOSITORY": racadm.get("repository", ""),
            "RACADM_SUITE": racadm.get("suite", ""),
            "RACADM_COMPONENTS": ",".join(racadm.get("components") or []),
            "RACADM_KEY_URL": racadm.get("key_url", ""),
            "RACADM_FINGERPRINT": racadm.get("fingerprint", ""),
            "RACADM_PACKAGES": ",".join(racadm.get("packages") or []),
        },
    ]
    return [{f"GPUAAS_SLICE_{name}": text for name, text in part.items()} for part in settings]
