"""Discovery document: devices of this host that could become slots, and their blockers.

It also works on a host that was never bootstrapped, with more blockers. The scheduler uses nothing
of it until a person approves the suggested slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _host_mode, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Blocker, blocker
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _slice_network
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _candidates,
    _firmware_inventory,
    _host_resources,
    _nvme_disks,
    _pci_functions,
)

SCHEMA = 1


def discover(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Scan the host once. profile: the hardware profile, which classifies the devices."""
    identity = _host.identity()
    devices = _pci.devices()
    params = _host_resources.boot_params(profile)
    kernel = _host_resources.kernel(params, _kernel_arguments.observe(params))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "profile": str(profile["name"]),
        "collected_at": _host.now(),
        "identity": identity,
        "machine": _host_resources.machine(),
        "mode": _host_mode.mode(),
        "reboot_required": bool(kernel.reboot_reasons),
        "host": _host_resources.resources(profile),
        "gpu": _pci_functions.gpus(devices, profile["gpu"]["ids"]),
        "nvme": _nvme_disks.disks(profile["nvme"].get("exclude_models", [])),
        "fabric": _pci_functions.fabric(
            devices, profile["fabric"]["pf_ids"], str(profile["fabric"].get("link") or "")
        ),
        "slice_network": _slice_network.observe(profile),
        "bootstrap": _host_resources.observe(kernel),
        "firmware": _firmware_inventory.take(profile),
    }
    document["candidates"] = _candidates.candidates(
        document["gpu"],
        document["nvme"],
        document["fabric"],
        profile["network"],
        identity["machine_id"],
    )
    document["network_suggestions"] = _candidates.suggestions(
        len(document["gpu"]), profile["network"], identity["machine_id"]
    )
    document["candidate_summary"] = summary(document, int(profile["gpu"].get("expected") or 0))
    return document


def summary(document: Mapping[str, Any], expected_gpus: int) -> dict[str, Any]:
    """Counts, and the blocker codes of the whole node; a device's blockers stay with the device."""
    codes = {
        entry["code"]
        for part in ("bootstrap", "slice_network")
        for entry in document[part]["blockers"]
    }
    gpus: Sequence[Any] = document["gpu"]
    if not gpus:
        codes.add("no_gpu")
    elif expected_gpus and len(gpus) > expected_gpus:
        # The profile is wrong about the machine. A GPU that is missing blocks only its own slot.
        codes.add("gpu_count_mismatch")
    free = [
        candidate
        for candidate in document["candidates"]
        if candidate["complete"] and not candidate["blockers"]
    ]
    return {
        "blockers": sorted(codes),
        "degraded": _degraded(gpus, expected_gpus),
        "gpu_devices": len(gpus),
        "fabric_devices": sum(map(_pci_functions.is_of_fabric, document["fabric"])),
        "nvme_devices": len(document["nvme"]),
        "mounted_nvme_devices": sum(bool(disk["mounts"]) for disk in document["nvme"]),
        "candidate_slots": len(free),
    }


def _degraded(gpus: Sequence[Mapping[str, Any]], expected: int) -> list[Blocker]:
    """Faults of single GPUs, which leave the other slots of the node on sale."""
    faults = [
        entry
        for gpu in gpus
        for entry in gpu["blockers"]
        if entry["code"] == _pci_functions.NOT_ANSWERING
    ]
    if 0 < len(gpus) < expected:
        count = f"{len(gpus)} of {expected} GPUs are present"
        faults.append(blocker("gpu_count_mismatch", count))
    return faults
