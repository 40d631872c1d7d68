"""A machine that is given to one tenant as a whole: its entries in the host's ledger.

The ledger has one entry for the machine and one for each disk that the tenant gets, all under the
fence of the node's claim. The machine's entry is marked dirty last, when everything is ready: from
then on a tenant may be there, and no later run of the same provision may wipe anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils import (
    _block,
    _boot,
    _claims,
    _host,
    _lease,
)
from ansible_collections.gpuaas.slice.plugins.module_utils._errors import Refusal

MACHINE = "machine"

Disk = Mapping[str, Any]


def slot_of(disk: Disk) -> str:
    """The ledger's name for a tenant's disk; refused when it is not named by its identity."""
    slot_id = str(disk.get("slot_id") or "")
    if slot_id != f"disk-{disk.get('nvme_eui')}":
        raise Refusal(
            "disk_misnamed",
            expected=f"slot_id disk-{disk.get('nvme_eui')} for {disk.get('nvme_device')}",
            found=repr(slot_id),
            remedy="name a tenant's disk by its identity, so that no slot's ledger is touched",
        )
    return slot_id


def entries(disks: Iterable[Disk]) -> dict[str, _lease.Entry]:
    """The machine's ledger entry and those of the disks, by slot id."""
    return {name: _lease.load(name) for name in (MACHINE, *map(slot_of, disks))}


def slice_mode() -> list[Refusal]:
    """Why this host takes no bare-metal tenant; [] when it is an ordinary machine.

    A file that cannot be read says that somebody meant this to be a slice host.
    """
    text = _host.read(_boot.SLICE_MODE)
    if text is None:
        return []
    try:
        mode = str(json.loads(text).get("mode", ""))
    except (ValueError, AttributeError):
        mode = "unreadable"
    if mode == "baremetal":
        return []
    return [
        Refusal(
            "node_in_slice_mode",
            expected=f"a machine without {_boot.SLICE_MODE}",
            found=f"mode {mode or 'not named'}",
            remedy="convert the node to bare metal first; its slots go off sale",
        )
    ]


def stale(fence: int, held: Mapping[str, _lease.Entry]) -> list[Refusal]:
    """A fence lower than the highest seen for the machine or one of its disks."""
    found = []
    for name, entry in held.items():
        if fence < entry.fence:
            try:
                _lease.check(name, fence)
            except Refusal as refusal:
                found.append(refusal)
    return found


def unfit(disks: Iterable[Disk], allocation_id: str) -> list[Refusal]:
    """What of this host speaks against giving it away: slots, another tenant, disks in use."""
    found = []
    for entry in _lease.entries():
        if entry.allocation_id and entry.allocation_id != allocation_id:
            found.append(
                Refusal(
                    "slot_leased",
                    expected="a machine on which nothing is leased",
                    found=f"{entry.slot_id} leased by {entry.allocation_id}",
                    remedy="release that allocation first, or repair what it left",
                )
            )
    for disk in disks:
        try:
            there = _block.of_slot(disk)
        except Refusal as refusal:
            found.append(refusal)
            continue
        found += _block.refusals(there, _block.usage(there))
        found += _left(there, allocation_id, slot_of(disk))
    return found


def _left(disk: _block.Disk, allocation_id: str, own: str) -> list[Refusal]:
    """Another tenant's bytes on the disk, in whatever slot it had it."""
    return [
        Refusal(
            "disk_dirty",
            expected=f"{disk.identity} wiped since its last tenant",
            found=f"marked dirty at {entry.dirty_at}",
            remedy="have the node cleaned (`gpuaas nodes clean-machine`), which wipes it",
        )
        if entry.slot_id == own
        else _claims.belongs(disk, f"not wiped in {entry.slot_id} since {entry.dirty_at}")
        for entry in _lease.entries()
        if entry.disk == disk.identity and entry.dirty and entry.allocation_id != allocation_id
    ]
