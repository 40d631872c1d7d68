"""Whole machine of a tenant: its entries in the host's ledger.

The ledger has an entry for the machine and an entry for each of the tenant's disks, all under the
fence of the node's claim. The machine's entry is marked dirty last, when everything is ready. From
then on a tenant may use the machine, and no later run of the same provision may wipe a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _proof, _slot_use
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import disk_identity

Disk = Mapping[str, Any]


def slot_of(disk: Disk) -> str:
    """The ledger's name for a tenant's disk; refused unless the name contains the disk's
    identity.
    """
    slot_id = str(disk.get("slot_id") or "")
    identifier = disk_identity(str(disk.get("nvme_eui") or "")).removeprefix("eui.")
    if not identifier or slot_id != f"disk-{identifier}":
        raise Refusal(
            "disk_misnamed",
            expected=f"slot_id disk-{identifier} for {disk.get('nvme_device')}",
            found=repr(slot_id),
            remedy="name a tenant's disk by its identity, so that no slot's ledger is touched",
        )
    return slot_id


def entries(disks: Iterable[Disk]) -> dict[str, _ledger.Entry]:
    """The machine's ledger entry and those of the disks, by slot id."""
    return {name: _ledger.load(name) for name in (_ledger.MACHINE, *map(slot_of, disks))}


def stale(fence: int, held: Mapping[str, _ledger.Entry]) -> list[Refusal]:
    """The refusal of a fence lower than the highest seen for the machine or any of its disks."""
    return [refusal for entry in held.values() for refusal in entry.stale(fence)]


def alive(disks: Iterable[Disk]) -> list[Refusal]:
    """Disks that were written off as dead but are present; they must be wiped like all others."""
    blockers = []
    for disk in disks:
        try:
            _block.of_slot(disk)
        except Refusal as refusal:
            # Another device that answers under that name may still be this disk.
            if refusal.code == "device_not_found":
                continue
        blockers.append(
            Refusal(
                "disk_present",
                expected=f"no {disk.get('nvme_device')}, which was written off as dead",
                found="a device with this name",
                remedy="clean the machine with this disk, or take it out",
            )
        )
    return blockers


def unfit(disks: Iterable[Disk], allocation_id: str) -> list[Refusal]:
    """Reasons against giving the machine to the tenant: slots, another tenant, disks in use."""
    disks = list(disks)
    blockers = [*_ledger.others_leased(allocation_id), *_dirty_beside(disks, allocation_id)]
    for disk in disks:
        try:
            there = _block.of_slot(disk)
        except Refusal as refusal:
            blockers.append(refusal)
            continue
        used = _block.usage(there)
        left = _left(there, allocation_id, slot_of(disk))
        blockers += [*_block.refusals(there, used), *left]
        entry = _ledger.load(slot_of(disk))
        # A disk that this allocation's own interrupted wipe left dirty is not judged by content.
        if not left and not (entry.dirty and entry.allocation_id == allocation_id):
            blockers += [*_written(there, used), *_unproven(there)]
    return blockers


def _dirty_beside(disks: Iterable[Disk], allocation_id: str) -> list[Refusal]:
    """Disks beside the tenant's that hold another tenant's bytes, such as one that was written off
    and is back. The tenant will be root and can read every disk of the machine.
    """
    claimed = {disk_identity(str(disk.get("nvme_eui") or "")) for disk in disks}
    dirty = [
        entry
        for entry in _ledger.entries()
        if entry.dirty and entry.disk_identity and entry.allocation_id != allocation_id
    ]
    there = _block.disks() if dirty else []
    return [
        Refusal(
            "disk_dirty",
            expected=f"{entry.disk_identity} wiped since its last tenant, or not in the machine",
            found=f"not wiped in {entry.slot_id} since {entry.dirty_at}",
            remedy="take the disk out; or install the machine anew and have the disk taken over"
            " under its identity (storage transition), which wipes it",
        )
        for entry in dirty
        if entry.disk_identity not in claimed
        and any(disk.is_known_as(entry.disk_identity) for disk in there)
    ]


def remade(disks: Iterable[Disk]) -> list[Refusal]:
    """Changes to and uses of clean disks since they were checked and wiped."""
    blockers = []
    for disk in disks:
        # Marked dirty by an earlier run that was about to give the machine to the tenant.
        if _ledger.load(slot_of(disk)).dirty:
            continue
        try:
            there = _block.of_slot(disk)
        except Refusal as refusal:
            blockers.append(refusal)
            continue
        used = _block.usage(there)
        blockers += [*_block.refusals(there, used), *_written(there, used)]
    return blockers


def _written(disk: _block.Disk, used: _block.Usage) -> list[Refusal]:
    """Content created on the disk after its proof; its loss was not approved."""
    there = [f"partition {name}" for name in used.children]
    there += _block.written(used.filesystems)
    if not there:
        return []
    return [
        Refusal(
            "unexpected_filesystem",
            expected=f"nothing on {disk.label}",
            found=", ".join(there),
            remedy="find the owner of the data; discover the node again, which leaves the disk out,"
            " or have the disk taken over under its identity (storage transition)",
        )
    ]


def _unproven(disk: _block.Disk) -> list[Refusal]:
    """A disk without a signature may still be full of data; only an approval by identity excludes
    that.
    """
    if _proof.standing(disk.disk_identity) is not None:
        return []
    return [
        Refusal(
            "not_clean",
            expected=f"a wipe proof of {disk.disk_identity} that still stands",
            found="no proof on this host, or a disk marked dirty since",
            remedy="have the disk taken over under its identity (storage transition) first",
        )
    ]


def _left(disk: _block.Disk, allocation_id: str, slot_id: str) -> list[Refusal]:
    """Another tenant's bytes on the disk, under any slot."""
    return [
        Refusal(
            "disk_dirty",
            expected=f"{disk.disk_identity} wiped since its last tenant",
            found=f"marked dirty at {entry.dirty_at}",
            remedy="have the node cleaned (`gpuaas nodes clean-machine`), which wipes it",
        )
        if entry.slot_id == slot_id
        else _slot_use.belongs(disk, f"not wiped in {entry.slot_id} since {entry.dirty_at}")
        for entry in _ledger.entries()
        if entry.disk_identity == disk.disk_identity
        and entry.dirty
        and entry.allocation_id != allocation_id
    ]
