"""Slot candidates: pairs of GPU, disk and fabric function from the discovery document.

A pure function. Pairing uses the location of devices and ignores their current use. Unmounting a
share, creating virtual functions or a reboot that renames disks therefore does not change it.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Blocker, blocker

Device = Mapping[str, Any]

# Blockers that exclude a disk from slots for good, whatever is done to it.
_NEVER = {"os_disk", "excluded_model", "identity_missing", "by_id_missing", "duplicate_identity"}
# Blocker that excludes a function, because its card is not part of the profile's fabric.
WRONG_LINK = "wrong_link"


def candidates(
    gpus: Sequence[Device],
    disks: Sequence[Device],
    fabric: Sequence[Device],
    network: Mapping[str, Any],
    machine_id: str,
) -> list[dict[str, Any]]:
    """A suggested bundle per GPU, in the order of PCI addresses.

    network: the profile's. A GPU without a partner gives an incomplete candidate.
    """
    gpus = sorted(gpus, key=lambda gpu: str(gpu["address"]))
    usable = [disk for disk in disks if not _NEVER & {b["code"] for b in disk["blockers"]}]
    every = [vf for pf in fabric for vf in pf["vfs"]]
    functions = [vf for vf in every if WRONG_LINK not in {b["code"] for b in vf["blockers"]}]
    disk_of = _pair(gpus, sorted(usable, key=lambda disk: str(disk["identity"])))
    vf_of = _pair(gpus, sorted(functions, key=lambda vf: str(vf["address"])))
    suggested = suggestions(len(gpus), network, machine_id)
    return [
        _candidate(gpu, disk_of.get(index), vf_of.get(index), suggested[index])
        for index, gpu in enumerate(gpus)
    ]


def suggestions(count: int, network: Mapping[str, Any], machine_id: str) -> list[dict[str, Any]]:
    """MAC, private address and port name per slot index; advisory until approved.

    A prefix shorter than five octets is completed from the machine id. Two hosts in the same layer
    2 network then suggest different MACs.
    """
    subnet = ipaddress.ip_network(network["subnet"])
    gateway = ipaddress.ip_interface(network["address"]).ip
    prefix = str(network["mac_prefix"]).lower().split(":")
    filler = hashlib.sha256(machine_id.encode()).hexdigest()
    prefix += [filler[2 * i : 2 * i + 2] for i in range(5 - len(prefix))]
    suggested: list[dict[str, Any]] = []
    for index in range(count):
        number = int(network["first_host"]) + index
        # The subnet ends with the address of parity's probe guest and the broadcast address. The
        # last octet of the MAC ends at 255.
        fits = number < min(subnet.num_addresses - 2, 256) and subnet[number] != gateway
        suggested.append(
            {
                "slot_index": index,
                "management_mac": ":".join([*prefix, f"{number:02x}"]) if fits else "",
                "private_ip": str(subnet[number]) if fits else "",
                "ovs_port": f"gs-slot{index}",
            }
        )
    return suggested


def _pair(gpus: Sequence[Device], others: Sequence[Device]) -> dict[int, Device]:
    """GPU index to partner: first within the same NUMA node, then the remaining devices, nearest
    first.
    """
    left = list(others)
    partners: dict[int, Device] = {}
    for local in (True, False):
        for index, gpu in enumerate(gpus):
            choice = [other for other in left if not local or _same_node(gpu, other)]
            if index in partners or not choice:
                continue
            # min keeps the first of equals and `others` is sorted, so the choice is deterministic.
            best = min(choice, key=lambda other: -_shared(gpu, other))
            partners[index] = best
            left.remove(best)
    return partners


def _same_node(device: Device, other: Device) -> bool:
    return bool(device["numa_node"] >= 0 and device["numa_node"] == other["numa_node"])


def _shared(device: Device, other: Device) -> int:
    """Number of bridges that the two devices share, counted from the root complex."""
    count = 0
    for left, right in zip(device["pci_path"], other["pci_path"], strict=False):
        if left != right:
            break
        count += 1
    return count


def _candidate(
    gpu: Device, disk: Device | None, vf: Device | None, suggested: Mapping[str, Any]
) -> dict[str, Any]:
    blockers: list[Blocker] = list(gpu["blockers"])
    if disk is None:
        blockers.append(blocker("missing_nvme", f"no disk is left for GPU {gpu['address']}"))
    else:
        blockers += disk["blockers"]
    if vf is None:
        blockers.append(blocker("missing_fabric_vf", f"no function left for GPU {gpu['address']}"))
    else:
        blockers += vf["blockers"]
    if not suggested["private_ip"]:
        blockers.append(blocker("address_space_exhausted", "the subnet has no address left"))
    bundle = {
        "slot_index": suggested["slot_index"],
        "gpu_pci_address": gpu["address"],
        "nvme_device": disk["by_id"] if disk else "",
        "nvme_serial": disk["serial"] if disk else "",
        "nvme_eui": (disk["eui"] or disk["nguid"]) if disk else "",
        "nvme_size_bytes": disk["size_bytes"] if disk else 0,
        "management_mac": suggested["management_mac"],
        "private_ip": suggested["private_ip"],
        "fabric_vf_pci_address": vf["address"] if vf else "",
        "numa_node": gpu["numa_node"],
    }
    return {
        "slot_index": suggested["slot_index"],
        "complete": bool(disk and vf and suggested["private_ip"]),
        "bundle": bundle,
        "ovs_port": suggested["ovs_port"],
        "numa_matched": {
            "nvme": bool(disk and _same_node(gpu, disk)),
            "fabric": bool(vf and _same_node(gpu, vf)),
        },
        "blockers": blockers,
    }
