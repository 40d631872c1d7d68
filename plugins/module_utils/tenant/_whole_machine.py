"""Whole machine of one tenant: its entries in the host's ledger.

The ledger has one entry for the machine and one for each disk that the tenant gets, all under the
fence of the node's claim. The machine's entry is marked dirty last, when everything is ready: from
then on a tenant may be there, and no later run of the same provision may wipe anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _boot_service, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _proof, _slot_use
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import disk_identity

MACHINE = _ledger.MACHINE

Disk = Mapping[str, Any]


def slot_of(disk: Disk) -> str:
    """The ledger's name for a tenant's disk; refused when it is not named by its identity."""
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
    return {name: _ledger.load(name) for name in (MACHINE, *map(slot_of, disks))}


def slice_mode() -> list[Refusal]:
    """Why this host takes no bare-metal tenant; [] when it is an ordinary machine.

    A file that cannot be read says that somebody meant this to be a slice host.
    """
    try:
        found = _host.document(
            _boot_service.SLICE_MODE, code="mode_unreadable", remedy="convert the node"
        )
        if found is None:
            return []
        mode = str(found.get("mode", ""))
    except Refusal:
        mode = "unreadable"
    if mode == "baremetal":
        return []
    return [
        Refusal(
            "node_in_slice_mode",
            expected=f"a machine without {_boot_service.SLICE_MODE}",
            found=f"mode {mode or 'not named'}",
            remedy="convert the node to bare metal first; its slots go off sale",
        )
    ]


def stale(fence: int, held: Mapping[str, _ledger.Entry]) -> list[Refusal]:
    """A fence lower than the highest seen for the machine or one of its disks."""
    found = []
    for name, entry in held.items():
        if fence < entry.fence:
            try:
                _ledger.check(name, fence)
            except Refusal as refusal:
                found.append(refusal)
    return found


def alive(disks: Iterable[Disk]) -> list[Refusal]:
    """Disks that were given up as dead, and are there: they are to be wiped like all others."""
    found = []
    for disk in disks:
        try:
            _block.of_slot(disk)
        except Refusal as refusal:
            # Whatever else answers under that name may be this disk after all.
            if refusal.code == "device_not_found":
                continue
        found.append(
            Refusal(
                "disk_present",
                expected=f"no {disk.get('nvme_device')}, which was written off as dead",
                found="a device with this name",
                remedy="clean the machine with this disk, or take it out",
            )
        )
    return found


def unfit(disks: Iterable[Disk], allocation_id: str) -> list[Refusal]:
    """What of this host speaks against giving it away: slots, another tenant, disks in use."""
    found = _ledger.others_leased(allocation_id)
    for disk in disks:
        try:
            there = _block.of_slot(disk)
        except Refusal as refusal:
            found.append(refusal)
            continue
        used = _block.usage(there)
        left = _left(there, allocation_id, slot_of(disk))
        found += [*_block.refusals(there, used), *left]
        own = _ledger.load(slot_of(disk))
        # An interrupted wipe of this allocation: what is on the disk came after it was taken.
        if not left and not (own.dirty and own.allocation_id == allocation_id):
            found += [*_written(there, used), *_unproven(there)]
    return found


def remade(disks: Iterable[Disk]) -> list[Refusal]:
    """What was made of clean disks, or is done with them, since they were looked at and wiped."""
    found = []
    for disk in disks:
        # Marked by an earlier run that was about to give the machine away.
        if _ledger.load(slot_of(disk)).dirty:
            continue
        try:
            there = _block.of_slot(disk)
        except Refusal as refusal:
            found.append(refusal)
            continue
        used = _block.usage(there)
        found += [*_block.refusals(there, used), *_written(there, used)]
    return found


def _written(disk: _block.Disk, used: _block.Usage) -> list[Refusal]:
    """Somebody made something of the disk since it was proven raw, and nobody approved its end."""
    there = [f"partition {name}" for name in used.children]
    there += _block.written(used.filesystems)
    if not there:
        return []
    return [
        Refusal(
            "unexpected_filesystem",
            expected=f"nothing on {disk.label}",
            found=", ".join(there),
            remedy="find out whose data it is; discover the node again, which leaves the disk out, "
            "or have the disk taken over under its identity (storage transition)",
        )
    ]


def _unproven(disk: _block.Disk) -> list[Refusal]:
    """A disk without a signature may be full of data; only its approval by identity says not."""
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


def _left(disk: _block.Disk, allocation_id: str, own: str) -> list[Refusal]:
    """Another tenant's bytes on the disk, in whatever slot it had it."""
    return [
        Refusal(
            "disk_dirty",
            expected=f"{disk.disk_identity} wiped since its last tenant",
            found=f"marked dirty at {entry.dirty_at}",
            remedy="have the node cleaned (`gpuaas nodes clean-machine`), which wipes it",
        )
        if entry.slot_id == own
        else _slot_use.belongs(disk, f"not wiped in {entry.slot_id} since {entry.dirty_at}")
        for entry in _ledger.entries()
        if entry.disk_identity == disk.disk_identity
        and entry.dirty
        and entry.allocation_id != allocation_id
    ]
