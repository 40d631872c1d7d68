"""NVMe disks in the discovery document, each with its blockers.

Kernel names and mounts are reported, but identity decides, because names change between boots.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import (
    Blocker,
    Refusal,
    blocker,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _disk, _signature

# Most paths to partitions, as in the contract. A tenant may create hundreds of partitions.
_MOST_ALIASES = 512


def disks(exclude_models: Sequence[str]) -> list[dict[str, Any]]:
    """Every whole NVMe namespace, by identity; namespaces that cannot identify themselves come
    first.
    """
    present = _block.disks()
    names = _aliases()
    usages = _usages(present)
    copies = Counter(disk.disk_identity for disk in present)
    entries = []
    for disk in present:
        entry = _entry(disk, usages.get(disk.kernel_name), names)
        entry["blockers"] += _identity_blockers(disk, copies[disk.disk_identity], exclude_models)
        entries.append(entry)
    named = {disk.kernel_name for disk in present}
    unknown = (name for name in _namespaces() if name not in named)
    entries += [_nameless(name, names, exclude_models) for name in unknown]
    return sorted(entries, key=lambda entry: (str(entry["identity"]), str(entry["kernel_name"])))


def _usages(present: Sequence[_block.Disk]) -> dict[str, _block.Usage]:
    """The use of every disk from a scan of the host; a disk that cannot be read is omitted."""
    try:
        return _block.usages(present)
    except OSError:
        by_name = {}
        for disk in present:
            with contextlib.suppress(OSError, Refusal):
                by_name[disk.kernel_name] = _block.usage(disk)
        return by_name


def _names(disk: _block.Disk) -> dict[str, Any]:
    fields = asdict(disk)
    return {"identity": fields.pop("disk_identity"), **fields}


def _entry(
    disk: _block.Disk, usage: _block.Usage | None, names: Mapping[str, list[str]]
) -> dict[str, Any]:
    address = next(iter(_block.pci_addresses(disk)), "")
    entry: dict[str, Any] = {
        **_names(disk),
        **_whereabouts(address),
        "aliases": names.get(disk.kernel_name, []),
    }
    if usage is not None:
        return {**entry, **_use(usage, names)}
    unread = [blocker("device_unreadable", f"{disk.kernel_name} cannot be read")]
    return {**entry, **_use(_block.Usage(), names), "blockers": unread}


def _use(usage: _block.Usage, names: Mapping[str, list[str]]) -> dict[str, Any]:
    aliases = [alias for child in usage.children for alias in names.get(child, [])]
    return {
        "os_disk": usage.os_disk,
        "mounts": usage.mounts,
        "children": usage.children,
        "filesystems": usage.filesystems,
        "swap": usage.swap,
        "md": usage.md,
        "lvm": usage.lvm,
        "dm": usage.dm,
        "holders": [*usage.holders, *usage.openers],
        "qemu_pids": usage.qemu_pids,
        "partition_aliases": aliases[:_MOST_ALIASES],
        "blockers": use_blockers(usage),
    }


def use_blockers(usage: _block.Usage) -> list[Blocker]:
    """Blockers from the disk's current use."""
    blockers = []
    if usage.os_disk:
        blockers.append(blocker("os_disk", "the operating system runs from it"))
    if usage.mounts:
        code = "mounted_child" if usage.children else "mounted"
        blockers.append(blocker(code, ", ".join(usage.mounts)))
    for code, subjects in (
        ("swap_in_use", usage.swap),
        ("md_member", usage.md),
        ("lvm_member", usage.lvm),
        ("dm_member", usage.dm),
        ("holder_present", [*usage.btrfs, *usage.zfs, *usage.holders, *usage.openers]),
        ("qemu_in_use", [f"process {pid}" for pid in usage.qemu_pids]),
    ):
        if subjects:
            blockers.append(blocker(code, ", ".join(subjects)))
    written: dict[str, list[str]] = {}
    for name, kind in usage.filesystems.items():
        code = "partitions_present" if kind in _signature.TABLES else "unexpected_filesystem"
        # An unassembled member has no holder, so the signature on the disk identifies it.
        evidence = _signature.MEMBERS.get(kind, code)
        written.setdefault(evidence, []).append(f"{kind} on {name}")
    if usage.children and "partitions_present" not in written:
        written["partitions_present"] = usage.children
    seen = {entry["code"] for entry in blockers}
    blockers += [blocker(code, ", ".join(s)) for code, s in written.items() if code not in seen]
    return blockers


def _identity_blockers(disk: _block.Disk, copies: int, exclude: Sequence[str]) -> list[Blocker]:
    blockers = []
    if not disk.by_id:
        blockers.append(
            blocker("by_id_missing", f"no /dev/disk/by-id link for {disk.disk_identity}")
        )
    if copies > 1:
        blockers.append(blocker("duplicate_identity", f"{copies} disks say {disk.disk_identity}"))
    return blockers + _excluded(disk, exclude)


def _excluded(disk: _block.Disk, exclude: Sequence[str]) -> list[Blocker]:
    return [blocker("excluded_model", disk.model) for _why in _disk.excluded(disk, exclude)]


def _nameless(name: str, names: Mapping[str, list[str]], exclude: Sequence[str]) -> dict[str, Any]:
    """A namespace that did not identify itself: listed so that it is visible, but never usable.

    Its model comes from the kernel. The model can only exclude it, because a disk without an
    identity cannot be a slot's disk.
    """
    folder = f"/sys/class/block/{name}"
    why = _disk.why_unknown(name)
    disk = _block.Disk(
        disk_identity="",
        by_id="",
        kernel_name=name,
        serial=_host.read(f"{folder}/device/serial") or "",
        eui="",
        nguid="",
        size_bytes=int(_host.read(f"{folder}/size") or 0) * 512,
        model=_host.read(f"{folder}/device/model") or "",
        devt=_host.read(f"{folder}/dev") or "",
    )
    return {
        **_names(disk),
        **_whereabouts(_host.read(f"{folder}/device/address") or ""),
        "aliases": names.get(name, []),
        **_use(_block.Usage(), names),
        "blockers": [
            blocker("identity_missing", why or f"{name} identified itself since"),
            *_excluded(disk, exclude),
        ],
    }


def _whereabouts(address: str) -> dict[str, Any]:
    named = _pci.is_address(address)
    here = named and _pci.present(address)
    return {
        "pci_address": address if named else "",
        "numa_node": _pci.read(address).numa_node if here else -1,
        "pci_path": _pci.path(address) if here else [],
    }


def _namespaces() -> list[str]:
    folder = _host.path("/sys/block")
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if _disk.WHOLE.fullmatch(name))


def _aliases() -> dict[str, list[str]]:
    """All paths under /dev that lead to a disk or partition, by its kernel name."""
    by_name: dict[str, list[str]] = {}
    for name in _host.matching("/dev", "nvme*"):
        by_name[name] = [f"/dev/{name}"]
    folders = [f"/dev/disk/{name}" for name in _host.matching("/dev/disk", "by-*")]
    for path in (f"{folder}/{name}" for folder in folders for name in _host.listed(folder)):
        link = _host.path(path)
        if link.is_symlink():
            by_name.setdefault(link.readlink().name, []).append(path)
    return by_name
