"""Slot bundles of a run, and their PCI functions compared with this host.

Every finding is a refusal, never a warning. A failed read is a finding too. Nearly every module
loads this file, so it imports little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

Slot = Mapping[str, Any]

_NEEDED = ("slot_id", "fence", "gpu_pci_address", "nvme_device", "nvme_serial")


def checked(slots: Collection[Slot], *, needed: Collection[str] = _NEEDED) -> list[Slot]:
    """The slots in the given order, in which the boot slot is first; refused when a bundle is
    incomplete.
    """
    for slot in slots:
        missing = [key for key in needed if slot.get(key) in (None, "")]
        if missing:
            raise Refusal(
                "bundle_incomplete",
                expected=f"slot bundles with {', '.join(needed)}",
                found=f"slot {slot.get('slot_id', '?')} without {', '.join(missing)}",
                remedy="approve the slot with a complete bundle",
            )
    # The order is the reconciler's: image, reservation and readiness use the first slot too.
    return list(slots)


def require_boot(proven: str) -> None:
    """Refuse another boot than that of the parity proof (I16)."""
    boot_id = _host.identity()["boot_id"]
    if not boot_id or boot_id != proven:
        raise Refusal(
            "boot_changed",
            expected=f"the boot under which parity passed, {proven or 'not named'}",
            found=f"boot {boot_id or 'unknown'}",
            remedy="discover the node and run its parity again; the host has been restarted since",
        )


def addresses(slot: Slot) -> list[str]:
    """PCI addresses that a guest gets with the slot."""
    values = (slot.get("gpu_pci_address"), slot.get("fabric_vf_pci_address"))
    return [str(address) for address in values if address]


def passthrough(functions: Collection[str], *, own_pids: Collection[int] = ()) -> list[Refusal]:
    """Reasons why PCI functions cannot be given to a guest now; [] when they can.

    own_pids: the QEMU of the allocation that already has them, whose use is no obstacle.
    """
    holders = _vfio_holders()
    return [refusal for address in functions for refusal in _function(address, holders, own_pids)]


def _function(
    address: str, holders: Mapping[str, Collection[int]], own_pids: Collection[int]
) -> list[Refusal]:
    try:
        device = _pci.read(address)
        strangers = _pci.group_blockers(address)
    except Refusal as refusal:
        return [refusal]
    power = _host.read(f"{_pci.DEVICES}/{address}/power_state") or ""
    blockers = []
    if device.driver != _pci.VFIO:
        text = device.driver or "no driver"
        blockers.append(unfit("not_bound", address, "bound to vfio-pci", text))
    if not _pci.answers(address) or power == "D3cold":
        text = f"no answer, power state {power or 'unknown'}"
        blockers.append(unfit("device_not_answering", address, "a readable configuration", text))
    if strangers:
        text = "; ".join(strangers)
        blockers.append(unfit("group_not_viable", address, "an IOMMU group of its own", text))
    users = set(holders.get(str(device.iommu_group), ())) - set(own_pids)
    if users:
        text = f"process {', '.join(map(str, sorted(users)))} has IOMMU group {device.iommu_group}"
        blockers.append(unfit("device_in_use", address, "free", text))
    return blockers


def _vfio_holders() -> dict[str, set[int]]:
    """Processes with an open IOMMU group, by group, including those that libvirt does not know."""
    holders: dict[str, set[int]] = {}
    for pid, name in _host.open_files():
        if name.startswith("/dev/vfio/"):
            holders.setdefault(name.rpartition("/")[2], set()).add(pid)
    return holders


def unfit(code: str, subject: str, expected: str, found: str) -> Refusal:
    remedies = {
        "not_bound": "run the bind_topology playbook for this node",
        "device_not_answering": "reset or reboot the host and run parity; the device may be dead",
        "group_not_viable": "bind or remove the other functions of the group",
        "device_in_use": "verify the absence of the allocation that has it first",
    }
    return Refusal(code, expected=f"{subject} {expected}", found=found, remedy=remedies[code])
