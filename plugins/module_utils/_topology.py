"""The discovery document: what of this host could become slots, and what speaks against it.

Works on a host that was never bootstrapped, where it simply reports more blockers. Nothing in it is
schedulable: it suggests, a person approves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _grub,
    _host,
    _pci,
    _topology_candidates,
    _topology_disks,
    _topology_host,
    _topology_network,
    _topology_pci,
)

SCHEMA = 1


def discover(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Look at the host once. profile: the hardware profile, which says what counts as what."""
    identity = _host.identity()
    devices = _pci.devices()
    params = _topology_host.boot_params(profile)
    kernel = _topology_host.kernel(params, _grub.observe(params))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "profile": str(profile["name"]),
        "collected_at": _host.now(),
        "identity": identity,
        "mode": _topology_host.mode(),
        "reboot_required": bool(kernel.reboot_reasons),
        "host": _topology_host.resources(profile),
        "gpu": _topology_pci.gpus(devices, profile["gpu"]["ids"]),
        "nvme": _topology_disks.disks(profile["nvme"].get("exclude_models", [])),
        "fabric": _topology_pci.fabric(
            devices, profile["fabric"]["pf_ids"], str(profile["fabric"].get("link") or "")
        ),
        "slice_network": _topology_network.observe(profile),
        "bootstrap": _topology_host.observe(kernel),
    }
    document["candidates"] = _topology_candidates.candidates(
        document["gpu"],
        document["nvme"],
        document["fabric"],
        profile["network"],
        identity["machine_id"],
    )
    document["network_suggestions"] = _topology_candidates.suggestions(
        len(document["gpu"]), profile["network"], identity["machine_id"]
    )
    document["candidate_summary"] = summary(document, int(profile["gpu"].get("expected") or 0))
    return document


def summary(document: Mapping[str, Any], expected_gpus: int) -> dict[str, Any]:
    """Counts, and the codes that concern the whole node; a device's own stay with the device."""
    codes = {
        found["code"]
        for part in ("bootstrap", "slice_network")
        for found in document[part]["blockers"]
    }
    gpus: Sequence[Any] = document["gpu"]
    if not gpus:
        codes.add("no_gpu")
    elif expected_gpus and len(gpus) != expected_gpus:
        codes.add("gpu_count_mismatch")
    free = [one for one in document["candidates"] if one["complete"] and not one["blockers"]]
    return {
        "blockers": sorted(codes),
        "gpu_devices": len(gpus),
        "fabric_devices": sum(map(_topology_pci.is_of_fabric, document["fabric"])),
        "nvme_devices": len(document["nvme"]),
        "mounted_nvme_devices": sum(bool(disk["mounts"]) for disk in document["nvme"]),
        "candidate_slots": len(free),
    }
