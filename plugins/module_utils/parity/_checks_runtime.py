"""Parity checks of the slice VM runtime: libvirt, firmware, tools, disks, images, memory."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _confinement,
    _host_tuning,
    _hugepages,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _slice_disks
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _nvlink
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._check import (
    Verdict,
    failed,
    passed,
    verdict,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._host_facts import Facts
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt

IMAGES = f"{_host.STATE_DIRECTORY}/images"
# Debian and Ubuntu use the same names. Domains are defined with the 4 MiB build.
FIRMWARE = ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd")
_SEED_MAKERS = ("genisoimage", "xorriso", "cloud-localds")
_RDMA_TOOLS = ("rdma", "ibv_devinfo", "ib_write_bw")
_PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# With less, an image cannot be unpacked, and the host's root file system is almost full.
_LEAST_FREE_BYTES = 2 << 30


def libvirt(facts: Facts) -> Verdict:
    """The libvirt daemon answers and offers a hypervisor."""
    rows = dict(row.partition(":")[::2] for row in facts.libvirt_version.splitlines())
    running = str(rows.get("Running hypervisor", "")).strip()
    return passed(running) if running else failed("libvirt answers without a hypervisor")


def libvirt_directory(_facts: Facts) -> Verdict:
    """QEMU runs as a different user and must be able to traverse the directory."""
    mode = stat.S_IMODE(_host.path("/var/lib/libvirt").stat().st_mode)
    return verdict([] if mode & 0o001 else [f"/var/lib/libvirt is {mode:04o}"], f"{mode:04o}")


def vm_confined(facts: Facts) -> Verdict:
    """Every QEMU of a slice is confined by the kernel's security module, filtered by seccomp and
    not root, and libvirt starts no other. With pages of 1 GiB it may read what it needs for them.
    """
    problems = _confinement.problems(facts.qemu_pids)
    if facts.profile["vm"].get("hugepages"):
        problems += _confinement.numa_problems()
    return verdict(problems, _confinement.security_module())


def console_limit(facts: Facts) -> Verdict:
    """A guest that writes to its console without end does not fill the host's disk."""
    return verdict(_confinement.console_problems(facts.qemu_pids), "virtlogd")


def ovmf(_facts: Facts) -> Verdict:
    problems = [
        f"{name} is missing or empty"
        for name in FIRMWARE
        if not _host.path(name).is_file() or not _host.path(name).stat().st_size
    ]
    return verdict(problems, FIRMWARE[0])


def cloud_init_tools(_facts: Facts) -> Verdict:
    installed = [name for name in _SEED_MAKERS if _installed(name)]
    return passed(installed[0]) if installed else failed(f"none of {', '.join(_SEED_MAKERS)}")


def rdma_tools(_facts: Facts) -> Verdict:
    missing = [name for name in _RDMA_TOOLS if not _installed(name)]
    return verdict([f"missing {', '.join(missing)}"] if missing else [], ", ".join(_RDMA_TOOLS))


def nvme_ownership(facts: Facts) -> Verdict:
    """Approved disks are present by identity, unused by the host, and raw unless a tenant has
    them. A lost disk blocks its own slot.
    """
    by_path = {disk.by_id: disk for disk in facts.disks}
    problems: list[str] = []
    doubts: list[str] = []
    for slot in facts.slots:
        path = slot["nvme_device"]
        disk = by_path.get(path)
        if disk is None and path in facts.spared:
            doubts.append(f"{path} is not there: its slot is blocked")
            continue
        if disk is None:
            problems.append(f"{path} is not there")
            continue
        try:
            problems += _disk_problems(slot, disk, facts.usage(disk))
        except Refusal as refusal:
            problems.append(f"{disk.disk_identity}: {refusal.code}: {refusal.found}")
    return verdict(problems, f"{len(facts.slots)} approved disks of {len(facts.disks)}", doubts)


def slice_disks(facts: Facts) -> Verdict:
    """udev, LVM and mdadm leave the approved disks alone, whatever a tenant wrote on them."""
    # A run by hand without slots does not know the approved disks.
    problems = _slice_disks.problems(facts.slots) if facts.slots else []
    return verdict(problems, f"{len(facts.slots)} disks")


def image_cache(_facts: Facts) -> Verdict:
    folder = _host.path(IMAGES)
    cached = _host.matching(IMAGES, "*.raw")
    empty = [f"{name} is empty" for name in cached if not (folder / name).stat().st_size]
    where = folder if folder.is_dir() else _host.path("/var/lib")
    free = shutil.disk_usage(where).free
    if not cached and free < _LEAST_FREE_BYTES:
        empty.append(f"{free >> 20} MiB free for images")
    return verdict(empty, f"{len(cached)} images, {free >> 20} MiB free")


def hugepages(facts: Facts) -> Verdict:
    """Pages of 1 GiB per node, in use or free: as many as tuned, and enough for all approved
    slots.
    """
    pages = _hugepages.request(
        _host_tuning.requested_profiles(facts.profile), facts.profile.get("hugepages_1g")
    )
    problems = _hugepages.problems(pages) if pages else []
    virtual = facts.profile["vm"]
    if not virtual.get("hugepages"):
        tuned = f"{pages.pages} pages of 1 GiB" if pages else "not_requested"
        return verdict(problems, tuned)
    memory = int(virtual["memory_mib_per_gpu"])
    if memory % 1024:
        problems.append(f"memory_mib_per_gpu is {memory}, not in whole pages of 1 GiB")
    each = -(-memory // 1024)
    for node in sorted({int(slot["numa_node"]) for slot in facts.slots}):
        needed = each * sum(int(slot["numa_node"]) == node for slot in facts.slots)
        have = _hugepages.have(node)
        if have < needed:
            problems.append(f"node {node} has {have} pages of 1 GiB, its slots need {needed}")
    return verdict(problems, f"{each} pages of 1 GiB per slot")


def nvlink_partitions(facts: Facts) -> Verdict:
    """The Fabric Manager has every partition that is sold, and only those of slices are active.

    A guest without its partition is a doubt: the Fabric Manager was restarted beneath it, and a
    restart of the guest activates it again.
    """
    gpu = facts.profile["gpu"]
    if gpu.get("nvlink") != "partitions":
        return passed("not_requested")
    board = sorted(gpu["module_ids"].values())
    rows = _nvlink.listed(_nvlink.partition({"modules": board, **gpu["fabric_manager"]}))
    listed = {row.modules: row.active for row in rows}
    problems = [
        f"no partition of {_nvlink.names(modules)}"
        for modules in (*gpu["nvlink_sets"], *([module] for module in board))
        if frozenset(modules) not in listed
    ]
    holders = {entry.allocation_id for entry in _ledger.entries()}
    slices = {
        owner: frozenset(kept.modules) for owner, kept in _nvlink.load().items() if owner in holders
    }
    problems += [
        f"{row.text} is active, and of no slice in the ledger"
        for row in rows
        if row.active and row.modules not in slices.values()
    ]
    states = _libvirt.states()
    doubts = [
        f"slice {owner} runs, and its partition of {_nvlink.names(modules)} is inactive"
        for owner, modules in slices.items()
        if (state := states.get(_object_names.domain_name(owner))) is not None
        and state.active
        and not listed.get(modules)
    ]
    return verdict(problems, f"{len(rows)} partitions", doubts)


def tuning(facts: Facts) -> Verdict:
    """The tuned profiles are in force in the running kernel and at a login, and stay so at boot."""
    differing = _host_tuning.problems(facts.profile)
    # Huge pages have a check of their own.
    differing.pop(_hugepages.PROFILE, None)
    problems = [f"{name}: {problem}" for name, left in differing.items() for problem in left]
    problems += _host_tuning.edited(facts.profile)
    return verdict(problems, ", ".join(differing) or "not_requested")


def _disk_problems(slot: Mapping[str, Any], disk: _block.Disk, usage: _block.Usage) -> list[str]:
    problems = []
    if disk.serial != slot["nvme_serial"] or disk.size_bytes != slot["nvme_size_bytes"]:
        problems.append(
            f"serial {disk.serial!r} and size {disk.size_bytes} are not the approved ones"
        )
    if usage.os_disk:
        problems.append("is the OS disk")
    for word, names in (
        ("mounted", usage.mounts),
        ("swap", usage.swap),
        ("RAID", usage.md),
        ("LVM", usage.lvm),
        ("device mapper", usage.dm),
    ):
        if names:
            problems.append(f"{word}: {', '.join(map(str, names))}")
    entry = _ledger.load(str(slot["slot_id"]))
    # A tenant's disk has partitions, and a disk that waits for its wipe may have them. Neither is
    # drift.
    if not entry.allocation_id and not entry.dirty:
        left = [*usage.children, *usage.filesystems]
        if left:
            problems.append(f"not raw: {', '.join(left)}")
        if usage.qemu_pids:
            problems.append(f"held by QEMU {usage.qemu_pids} without a hold")
    return [f"{disk.disk_identity}: {problem}" for problem in problems]


def _installed(program: str) -> bool:
    return any(os.access(_host.path(f"{folder}/{program}"), os.X_OK) for folder in _PROGRAMS)
