"""Check that neither the firmware nor the boot loader can take a tenant's disk for the host's."""

from __future__ import annotations

from collections.abc import Iterable

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._check import (
    Verdict,
    passed,
    verdict,
    warned,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._host_facts import Facts
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _efi_variables,
    _firmware_inventory,
)


def boot_order(facts: Facts) -> Verdict:
    """No entry of UEFI starts an approved disk before the host's own.

    An entry after it is only a warning. So are copies of the identifiers by which the firmware and
    GRUB find the host's partitions: a tenant can write them on its disk, and must not be able to
    take the other slots off sale. A network entry before it is a warning, because only the site
    knows its boot program. That of MAAS starts the first disk with a boot loader, of any owner.
    """
    if not facts.slots:
        return passed("no approved disk")
    approved = [disk for disk in facts.disks if _is_approved(facts, disk)]
    copies = _copies(facts, approved)
    try:
        data, _unreadable = _efi_variables.variables()
    except Refusal as refusal:
        return warned("; ".join([refusal.found, *copies]))
    esp = _firmware_inventory.own_partition()
    others = {disk.eui for disk in facts.disks if facts.usage(disk).os_disk}
    guids = {guid: disk for disk in approved for _number, guid in _guids(disk)}
    problems: list[str] = []
    later: list[str] = []
    networks: list[str] = []
    reached = False
    for name, entry in _efi_variables.boot_order(data):
        reached = reached or (bool(esp) and entry.partition == esp) or entry.namespace in others
        if entry.network and not reached:
            networks.append(f"{name} ({entry.description!a}) starts from the network first")
        for disk in approved:
            if entry.namespace and entry.namespace == disk.eui:
                where = later if reached else problems
                where.append(f"{name} ({entry.description!a}) starts {disk.disk_identity}")
        if entry.partition in guids:
            copy = f"a partition of {guids[entry.partition].disk_identity} has the GUID of {name}"
            copies.append(copy)
    return verdict(problems, "the host's own entry is first", [*networks, *later, *copies])


def _is_approved(facts: Facts, disk: _block.Disk) -> bool:
    return any(slot["nvme_device"] == disk.by_id for slot in facts.slots)


def _guids(disk: _block.Disk) -> set[tuple[int, str]]:
    try:
        return _firmware_inventory.partition_guids(disk.kernel_name, disk.size_bytes)
    except OSError:
        return set()


def _copies(facts: Facts, approved: Iterable[_block.Disk]) -> list[str]:
    """Filesystems and tables on approved disks that have the identifier of a host's one."""
    host = {
        mark: disk.kernel_name
        for disk in facts.disks
        if facts.usage(disk).os_disk
        for mark in _identifiers(facts, disk)
    }
    return [
        f"{kind} on {disk.disk_identity} has the identifier of one of {host[kind, identifier]}"
        for disk in approved
        for kind, identifier in sorted(_identifiers(facts, disk))
        if (kind, identifier) in host
    ]


def _identifiers(facts: Facts, disk: _block.Disk) -> set[tuple[str, str]]:
    """Type and identifier of each signature that has one."""
    try:
        marks = facts.usage(disk).signatures
    except Refusal:
        # nvme_ownership names the disk that cannot be read.
        return set()
    pairs = (mark.partition("#") for mark in marks)
    return {(kind.split("@")[0], text) for kind, _mark, text in pairs if text.strip("0")}
