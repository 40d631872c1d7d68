"""GPUs and fabric functions in the discovery document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Blocker, blocker
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _virtual_functions
from ansible_collections.gpuaas.slice.plugins.module_utils.topology._candidates import WRONG_LINK

# Blocker of a GPU whose configuration space cannot be read; only its own slot is blocked.
NOT_ANSWERING = "device_not_answering"

_NAME = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}((:[0-9a-f]{2}){2})?")


def gpus(devices: Sequence[_pci.Device], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Every function whose `vendor:device` is a GPU in the profile."""
    matching = [device for device in devices if device.id in ids]
    return [_gpu(device, devices, matching) for device in matching]


def fabric(devices: Sequence[_pci.Device], ids: Sequence[str], link: str) -> list[dict[str, Any]]:
    """Physical functions with the profile's device ids, each with its virtual functions.

    A function whose link is not the fabric's gets the blocker `wrong_link`, as do its virtual
    functions, because vendors use the same id for InfiniBand and Ethernet ports.
    """
    rdma = _rdma_names()
    cards = [_physical(device, devices, rdma, link) for device in devices if device.id in ids]
    for card in cards:
        why = _pci.unlike_link(card["address"], link)
        for function in [card, *card["vfs"]] if why else []:
            function["blockers"].append(blocker(WRONG_LINK, why))
    return cards


def is_of_fabric(card: Mapping[str, Any]) -> bool:
    """Whether a card of `fabric` has the fabric's link."""
    return all(entry["code"] != WRONG_LINK for entry in card["blockers"])


def group_blockers(device: _pci.Device, devices: Sequence[_pci.Device]) -> list[Blocker]:
    """Reasons why the function's IOMMU group cannot go to one guest.

    The function's own driver is no blocker, because binding replaces it. An active neighbour blocks
    it.
    """
    if device.iommu_group is None:
        return [blocker("iommu_group_missing", f"{device.address} is in no IOMMU group")]
    return [
        blocker(
            "group_not_viable",
            f"{other.address} ({other.id}) shares IOMMU group {other.iommu_group}"
            f" and is driven by {other.driver}",
        )
        for other in _members(device, devices)
        if other.address != device.address
        and not other.is_bridge
        and other.driver not in ("", _pci.VFIO)
    ]


def _members(device: _pci.Device, devices: Sequence[_pci.Device]) -> list[_pci.Device]:
    if device.iommu_group is None:
        return []
    return [other for other in devices if other.iommu_group == device.iommu_group]


def _gpu(
    device: _pci.Device, devices: Sequence[_pci.Device], gpus: Sequence[_pci.Device]
) -> dict[str, Any]:
    blockers = group_blockers(device, devices)
    # A GPU without a driver looks free, and would still go to the same guest.
    blockers += [
        blocker("group_shared", f"GPU {other.address} shares IOMMU group {other.iommu_group}")
        for other in _members(device, gpus)
        if other.address != device.address
    ]
    link = _pci.pcie_link(device.address) if (answers := _pci.answers(device.address)) else {}
    if not answers:
        text = f"the configuration of {device.address} cannot be read"
        blockers.append(blocker(NOT_ANSWERING, text))
    # The host's console runs on it, and the firmware's framebuffer holds its memory.
    if _host.read(f"{_pci.DEVICES}/{device.address}/boot_vga") == "1":
        blockers.append(blocker("boot_vga", f"{device.address} is the host's own display"))
    placed = _place(device, devices, blockers)
    return {**_common(device), "class": device.class_code, "link": link, **placed}


def _physical(
    device: _pci.Device, devices: Sequence[_pci.Device], rdma: Mapping[str, list[str]], link: str
) -> dict[str, Any]:
    by_address = {other.address: other for other in devices}
    addresses = _pci.functions(device.address)
    # Functions of a card of another network are never given to a guest.
    named = bool(addresses) and not _pci.unlike_link(device.address, link)
    identities = _virtual_functions.card_at(device.address).identities if named else ()
    functions = [
        {
            **_virtual(by_address[address], index, devices),
            "identity": _identity(identities[index]) if index < len(identities) else "",
        }
        for index, address in enumerate(addresses)
        if address in by_address
    ]
    blockers: list[Blocker] = []
    if not device.sriov_totalvfs:
        blockers.append(blocker("sriov_unsupported", f"{device.address} offers no functions"))
    elif not functions:
        blockers.append(blocker("vfs_missing", f"{device.address} has no virtual function yet"))
    return {
        **_common(device),
        "link": _pci.link(device.address),
        "netdev": next(iter(_pci.interfaces(device.address)), ""),
        "rdma": rdma.get(device.address, []),
        "iommu_group": _group(device),
        "numa_node": device.numa_node,
        "sriov_totalvfs": device.sriov_totalvfs,
        "sriov_numvfs": device.sriov_numvfs,
        "blockers": blockers,
        "vfs": functions,
    }


def _identity(shown: str) -> str:
    """The MAC or GUID of a function; "" for two different GUIDs, or for an unset GUID."""
    return shown if _NAME.fullmatch(shown) and set(shown) - set("0:") else ""


def _virtual(device: _pci.Device, index: int, devices: Sequence[_pci.Device]) -> dict[str, Any]:
    placed = _place(device, devices, group_blockers(device, devices))
    return {**_common(device), "index": index, **placed}


def _common(device: _pci.Device) -> dict[str, Any]:
    return {"address": device.address, "id": device.id, "driver": device.driver}


def _place(
    device: _pci.Device, devices: Sequence[_pci.Device], blockers: Sequence[Blocker]
) -> dict[str, Any]:
    return {
        "driver_override": device.driver_override,
        "iommu_group": _group(device),
        "group_members": [other.address for other in _members(device, devices)],
        "numa_node": device.numa_node,
        "pci_path": _pci.path(device.address),
        "blockers": list(blockers),
    }


def _group(device: _pci.Device) -> str:
    return "" if device.iommu_group is None else str(device.iommu_group)


def _rdma_names() -> dict[str, list[str]]:
    """PCI address to RDMA device names."""
    folder = _host.path("/sys/class/infiniband")
    names: dict[str, list[str]] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        device = entry / "device"
        if device.exists():
            names.setdefault(device.resolve().name, []).append(entry.name)
    return names
