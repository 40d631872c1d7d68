"""Approval of a bundle as a slot, by the latest discovery. The database refuses duplicates."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reconciler.model import discovery
from reconciler.model.bundle import Bundle
from reconciler.model.discovery import Document
from reconciler.model.errors import Problem

_TRANSITION = "run the storage transition for this disk, discover again, then approve"
REMEDIES = {
    "os_disk": "choose another disk: the one the host runs from can never be a slot's",
    "excluded_model": "choose another disk: the hardware profile excludes this model",
    "swap_in_use": "take the swap out of use on the host, then " + _TRANSITION,
    "md_member": "take the disk out of its RAID set on the host, then " + _TRANSITION,
    "lvm_member": "take the disk out of its volume group on the host, then " + _TRANSITION,
    "dm_member": "remove the device-mapper table on the host, then " + _TRANSITION,
    "mounted": _TRANSITION,
    "mounted_child": _TRANSITION,
    "holder_present": "end what holds the disk on the host, then discover again",
    "unexpected_filesystem": _TRANSITION,
    "partitions_present": _TRANSITION,
    "qemu_in_use": "remove the virtual machine that has the disk open, then discover again",
    "identity_missing": "choose a namespace with an EUI64 or NGUID",
    "by_id_missing": "make udev create the by-id name, then discover again",
    "duplicate_identity": "load nvme_core with multipath=Y if these are paths to one namespace, or"
    " take the other disk out, then discover again",
    "device_unreadable": "look at the disk on the host, then discover again",
    "group_not_viable": "bind or unbind the other devices of the IOMMU group, then discover again",
    "group_shared": "split the IOMMU group (ACS in the firmware, another place for the card) and"
    " discover again, or withdraw the slot that has its other device",
    "iommu_group_missing": "run the bootstrap (kernel arguments, reboot), then discover again",
    "device_not_answering": "reset or reboot the host and discover again; the GPU may be dead",
    "boot_vga": "choose another GPU: this one drives the host's console",
    "wrong_link": "choose a function of a card with the fabric's link, or correct fabric.link of"
    " the hardware profile, then discover again",
}
# Several blockers may hold at once. A refusal names the first in this order: causes before effects.
GRAVITY = tuple(REMEDIES)

# Partition tables, and the file shares of a bare-metal host. Other types must be named.
PLAIN_TYPES = frozenset({"gpt", "dos", "ext2", "ext3", "ext4", "xfs", "vfat"})


def approval_of(disk: Document, types: Iterable[str] = ()) -> dict[str, Any]:
    """The approval of a discovered disk; filesystem types beyond PLAIN_TYPES only if named."""
    named = PLAIN_TYPES.union(types)
    discovered = sorted((disk.get("filesystems") or {}).values())
    return {
        "serial": disk["serial"],
        "eui": disk["eui"] or disk["nguid"],
        "mounts": sorted(disk.get("mounts") or []),
        "filesystems": [kind for kind in discovered if kind in named],
    }


def refuse(bundle: Bundle, document: Document, others: Iterable[Bundle] = ()) -> None:
    """Raise the first reason against the bundle; return without any reason.

    others: bundles of the slots that the node has already.
    """
    if bundle.nvme_device:
        _refuse_use(bundle.nvme_device, document)
    missing = bundle.missing()
    if missing:
        raise Problem(
            "bundle_incomplete",
            422,
            expected="every field of the bundle",
            found=f"nothing for {', '.join(missing)}",
            remedy="fill the fields in; the latest discovery suggests values",
            detail={"missing": list(missing)},
        )
    _refuse_identity(bundle, document)
    _refuse_gpu(bundle, document)
    _refuse_fabric(bundle, document)
    for shared in discovery.group_blockers(document, bundle, others):
        raise _blocked(shared.code, bundle.gpu_pci_address, shared.detail)
    _refuse_address(bundle, document)


def refuse_room(
    bundle: Bundle, document: Document, others: Iterable[Bundle], profile: Mapping[str, Any]
) -> None:
    """Refuse a slot for which the CPUs or the memory of its NUMA node do not suffice.

    Every slot may be in use at once, beside what the profile keeps for the host. A bundle without a
    NUMA node is judged by the whole host. The host and each slice have cores of their own.
    """
    vm, node = profile["vm"], bundle.numa_node
    slots = 1 + sum(node in (-1, other.numa_node) for other in others)
    rows = [
        row for row in discovery.section(document, "host", "numa") if node in (-1, row.get("node"))
    ]
    cpus = sum(discovery.cpu_count(str(row.get("cpus") or "")) for row in rows)
    memory = sum(int(row.get("memory_mib") or 0) for row in rows)
    threads = max((int(row.get("threads_per_core") or 1) for row in rows), default=1)

    def of_cores(cpus: object) -> int:
        """CPUs of all cores that this many CPUs occupy."""
        return -(-int(str(cpus)) // threads) * threads

    kept = (
        len(rows) * of_cores(vm.get("host_cpus") or 0),
        len(rows) * int(vm.get("host_memory_mib") or 0),
    )
    needed = slots * of_cores(vm["vcpus_per_gpu"]), slots * int(vm["memory_mib_per_gpu"])
    where = f"on NUMA node {node}" if node >= 0 else "on the host"
    cores = f", in whole cores of {threads} CPUs" if threads > 1 else ""
    for code, unit, need, keep, have in (
        ("numa_cpus_exceeded", "CPUs", needed[0], kept[0], cpus),
        ("numa_memory_exceeded", "MiB of memory", needed[1], kept[1], memory),
    ):
        if need + keep > have:
            raise Problem(
                code,
                422,
                expected=f"{need} {unit} for {slots} slots {where}, and {keep} for the host"
                f"{cores if unit == 'CPUs' else ''}",
                found=f"{have} {unit}",
                remedy="approve fewer slots of this NUMA node, or a profile with smaller slices",
            )
    pages = sum(int(row.get("hugepages_1g", row.get("hugepages_1g_free")) or 0) for row in rows)
    if vm.get("hugepages") and needed[1] > 1024 * pages:
        raise Problem(
            "numa_hugepages_exceeded",
            422,
            expected=f"{-(-needed[1] // 1024)} pages of 1 GiB for {slots} slots {where}",
            found=f"{pages} pages",
            remedy="take the pages by the tuning hugepages-1g, restart the host, discover again",
        )


def _refuse_use(name: str, document: Document) -> None:
    # This check comes first and accepts any alias, so that the refusal names the OS disk as such.
    disk = discovery.disk(document, name)
    if disk is None:
        raise _unknown("disk", name)
    if disk.get("os_disk"):
        raise _blocked("os_disk", name, "the host runs from it")
    _refuse_blockers(name, disk)


def _refuse_identity(bundle: Bundle, document: Document) -> None:
    disk = discovery.disk(document, bundle.nvme_device) or {}
    if bundle.nvme_device in disk.get("partition_aliases", ()):
        raise Problem(
            "disk_is_partition",
            422,
            expected="a whole disk",
            found=f"{bundle.nvme_device}, a partition of {disk.get('by_id')}",
            remedy=f"use {disk.get('by_id')}",
        )
    if bundle.nvme_device != disk.get("by_id"):
        raise Problem(
            "disk_not_by_identity",
            422,
            expected=str(disk.get("by_id")),
            found=f"{bundle.nvme_device}, a name that can change at the next boot",
            remedy="name the disk by its by-id path",
        )
    approved = (bundle.identity, bundle.nvme_serial, bundle.nvme_size_bytes)
    seen = (disk.get("identity"), disk.get("serial"), disk.get("size_bytes"))
    if approved != seen:
        raise Problem(
            "identity_mismatch",
            422,
            expected="identity {}, serial {}, {} bytes".format(*seen),
            found="identity {}, serial {}, {} bytes".format(*approved),
            remedy="compare with the discovery: another disk may have taken this name",
        )


def _refuse_gpu(bundle: Bundle, document: Document) -> None:
    gpu = discovery.gpu(document, bundle.gpu_pci_address)
    if gpu is None:
        raise _unknown("gpu", bundle.gpu_pci_address)
    _refuse_blockers(bundle.gpu_pci_address, gpu)
    if bundle.numa_node != gpu.get("numa_node", -1):
        raise Problem(
            "numa_mismatch",
            422,
            expected=f"NUMA node {gpu.get('numa_node', -1)}, where the GPU is",
            found=f"NUMA node {bundle.numa_node}",
            remedy="use the GPU's NUMA node",
        )


def _refuse_fabric(bundle: Bundle, document: Document) -> None:
    address = bundle.fabric_vf_pci_address
    if discovery.is_physical(document, address):
        raise Problem(
            "fabric_not_vf",
            422,
            expected="a virtual function of its own for each slot",
            found=f"{address}, a whole fabric card",
            remedy="use one of its virtual functions",
        )
    function = discovery.function(document, address)
    if function is None:
        raise _unknown("fabric_vf", address)
    _refuse_blockers(address, function)


def _refuse_address(bundle: Bundle, document: Document) -> None:
    mac = bundle.management_mac
    if not re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", mac) or int(mac[:2], 16) & 1:
        raise Problem(
            "mac_invalid",
            422,
            expected="a unicast MAC address such as 52:54:00:64:00:0a",
            found=repr(mac),
            remedy="use the address that the discovery suggests",
        )
    bridge = document.get("slice_network", {}).get("bridge", {}).get("addresses", [])
    if not any(_usable(bundle.private_ip, text) for text in bridge):
        raise Problem(
            "ip_invalid",
            422,
            expected=f"a free address in the bridge's network {', '.join(bridge) or '(none yet)'}",
            found=repr(bundle.private_ip),
            remedy="use the address that the discovery suggests",
        )


def _usable(text: str, bridge: str) -> bool:
    try:
        address, interface = ipaddress.ip_address(text), ipaddress.ip_interface(bridge)
    except ValueError:
        return False
    network = interface.network
    # The last usable address is reserved for the host: parity uses it to act as a guest.
    ends = (network.network_address, network.broadcast_address - 1, network.broadcast_address)
    reserved = (interface.ip, *ends)
    return address in network and address not in reserved


def _refuse_blockers(name: str, device: Document) -> None:
    details = {blocker.code: blocker.detail for blocker in discovery.blockers_of(device)}
    if details:
        ranked = [code for code in GRAVITY if code in details]
        code = ranked[0] if ranked else sorted(details)[0]
        raise _blocked(code, name, details[code])


def _blocked(code: str, name: str, detail: str) -> Problem:
    return Problem(
        code,
        422,
        expected=f"{name} free for a slot",
        found=detail or code,
        remedy=REMEDIES.get(code, "remove the cause on the host, then discover again"),
    )


def _unknown(kind: str, name: str) -> Problem:
    return Problem(
        f"{kind}_not_found",
        422,
        expected=f"a {kind.replace('_', ' ')} in the node's latest discovery",
        found=repr(name),
        remedy="discover again, or use a name that the discovery shows",
    )
