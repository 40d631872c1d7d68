"""Restart guard: virtual machines and holds that a restart of this machine would end."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _libvirt
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

# Not qemu-img or qemu-nbd, which have no guest.
_MACHINES = ("qemu-system", "qemu-kvm")


def refusals(allocations: Collection[str] = ()) -> list[Refusal]:
    """Reasons against a restart of the machine; [] when it is idle.

    allocations: their slices do not count.

    A held slot counts even without a running machine: it is between two steps of its provision, or
    its guest has shut itself down and will return.
    """
    try:
        in_use = [*_running(allocations), *_leased(allocations)]
    except Refusal as unreadable:
        return [unreadable]
    if not in_use:
        return []
    return [
        Refusal(
            "host_in_use",
            expected="a host on which no virtual machine runs and of which nothing is leased",
            found=", ".join(in_use),
            remedy="drain the node and release its allocations, then run again",
        )
    ]


def other_boot(expected: str, boot_id: str) -> list[Refusal]:
    """The refusal for a boot other than the expected one; [] without an expectation."""
    if expected in ("", boot_id):
        return []
    return [
        Refusal(
            "boot_changed",
            expected=f"the boot {expected}",
            found=f"the boot {boot_id}",
            remedy="the host was restarted since: discover it, then ask again if still wanted",
        )
    ]


def _running(allocations: Collection[str]) -> list[str]:
    """QEMU machines, including those that libvirt has lost or that belong to no slice."""
    programs = sorted(_libvirt.processes("").items())
    names = [_object_names.domain_name(key) for key in allocations]
    expected = {pid for name in names for pid in _libvirt.processes(name)}
    return [
        f"{program} {pid}"
        for pid, program in programs
        if program.startswith(_MACHINES) and pid not in expected and not _probe(pid)
    ]


def _probe(pid: int) -> bool:
    """Whether libvirt started this QEMU only to query its capabilities; it then has no machine."""
    arguments = (_host.read(f"/proc/{pid}/cmdline") or "").split("\0")
    given = [
        value.split(",")[0].removeprefix("type=")
        for option, value in itertools.pairwise(arguments)
        if option in ("-machine", "--machine", "-M")
    ]
    return bool(given) and set(given) == {"none"}


def _leased(allocations: Collection[str]) -> list[str]:
    slots = [entry for entry in _ledger.entries() if entry.slot_id != _ledger.MACHINE]
    return [
        *(f"the whole machine {taken.found}" for taken in _tenancy.refusals()),
        *(
            f"{slot.slot_id} leased by {slot.allocation_id}"
            for slot in slots
            if slot.allocation_id and slot.allocation_id not in allocations
        ),
    ]
