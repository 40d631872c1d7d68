"""Slots in the ledger that use a disk, so that no action for a slot reaches another's disk."""

from __future__ import annotations

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk._disk import Disk


def in_use(disk_identity: str) -> list[str]:
    """Slots with a hold on the disk, or whose tenant's bytes may still be on it."""
    entries = [entry for entry in _ledger.entries() if entry.disk_identity == disk_identity]
    return [entry.slot_id for entry in entries if entry.used]


def refusals(disk: Disk, slot_id: str) -> list[Refusal]:
    """Reasons why a slot must not write to the disk: another slot has a hold on it."""
    others = [
        f"{entry.slot_id} for {entry.allocation_id}"
        for entry in _ledger.entries()
        if entry.disk_identity == disk.disk_identity
        and entry.allocation_id
        and entry.slot_id != slot_id
    ]
    return [belongs(disk, f"leased in {', '.join(others)}")] if others else []


def belongs(disk: Disk, found: str) -> Refusal:
    return Refusal(
        "disk_belongs_to_slot",
        expected=f"{disk.label} in no other slot's use",
        found=found,
        remedy="release and wipe that slot first (`gpuaas recover`)",
    )
